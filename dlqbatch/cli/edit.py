"""`dlqbatch messages edit`: a message changed by hand, in an editor or from files and options."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Annotated, Final

import typer

from dlqbatch.amqp.readable import BodyForm
from dlqbatch.cli.options import Actor, AsJson, DryRun, JournalReason, RowId, Settings
from dlqbatch.cli.printing import print_json, print_lines, remark
from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import plain
from dlqbatch.messages.edit import Editing, as_meant, header_edits
from dlqbatch.store.access import store_for

_SUFFIXES: Final = {"json": ".json", "text": ".txt", "hex": ".bin"}


class EditorFailed(DlqbatchError):
    """Nothing came out of the editor that could be taken."""


def edit(
    row_id: RowId,
    *,
    settings: Settings,
    body_file: Annotated[
        str | None, typer.Option("--body-file", metavar="FILE", help="The new body; - reads it from stdin.")
    ] = None,
    set_headers: Annotated[
        list[str] | None,
        typer.Option("--set-header", metavar="NAME=VALUE", help="Give a header this text. Repeatable."),
    ] = None,
    remove_headers: Annotated[
        list[str] | None, typer.Option("--remove-header", metavar="NAME", help="Take a header away. Repeatable.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Take a body that should be JSON and is not, and a message that is resolved."),
    ] = False,
    reason: JournalReason = "edited",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Edit a message: a new one with the changes takes its place, waits for a replay, and the original is archived.

    Without --body-file, --set-header and --remove-header, $VISUAL or $EDITOR opens with the body. Nothing is sent.

    dlqbatch messages edit 4711 --set-header tenant=blue --reason "wrong tenant"
    """
    editing = Editing(store_for(settings))
    headers = header_edits(_pairs(set_headers or ()), remove_headers or ())
    who = actor
    body = typed = None
    if body_file is not None:
        body = _read(body_file)
    elif not headers.wanted:
        original = editing.original(row_id, force=force)
        typed = _in_editor(original.body, original.form)
        body = as_meant(original.body, typed)
    try:
        done = editing.edit(
            row_id,
            actor=who,
            reason=reason,
            body=body,
            headers=headers,
            force=force,
            dry_run=dry_run,
        )
    except DlqbatchError:
        if typed is not None and body != original.body:
            _keep(typed)
        raise
    if as_json:
        print_json(
            {
                "original": done.original,
                "before": done.before,
                "id": done.id,
                "identity": done.identity,
                "parent": done.parent,
                "changed": done.changed,
                "dry_run": done.dry_run,
            }
        )
        return
    what = plain(", ".join(done.changed))
    if done.dry_run:
        print_lines([f"message {row_id} ({done.before}) would be archived, and a new one take its place: {what}"])
        return
    print_lines(
        [
            f"message {done.id} has taken the place of message {row_id}, which is archived now: {what}",
            f"it is manual; `dlqbatch messages replay {done.id}` sends it",
        ]
    )


def _pairs(given: list[str] | tuple[()]) -> list[tuple[str, str]]:
    pairs = []
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise typer.BadParameter("it takes NAME=VALUE, such as --set-header tenant=blue", param_hint="--set-header")
        pairs.append((name, value))
    return pairs


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}", param_hint="--body-file") from error


def _keep(typed: bytes) -> None:
    """What somebody has typed is not thrown away because it is refused, or the message has moved on meanwhile."""
    number, path = mkstemp(prefix="dlqbatch-edit-")
    with os.fdopen(number, "wb") as file:
        file.write(typed)
    remark(f"what was typed is kept in {path}: take it again with --body-file {path}")


def _in_editor(body: bytes, form: BodyForm) -> bytes:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        raise typer.BadParameter(
            "neither VISUAL nor EDITOR names an editor; set one, or give --body-file, --set-header or --remove-header"
        )
    # A folder of our own, closed to others: many editors leave copies beside the file.
    with TemporaryDirectory(prefix="dlqbatch-edit-") as folder:
        file = Path(folder) / f"body{_SUFFIXES[form]}"
        file.touch(mode=0o600)
        file.write_bytes(body)
        try:
            # What an editor draws must not stand among data that goes into a pipe.
            screen = None if sys.stdout.isatty() else sys.stderr
            code = subprocess.run([*shlex.split(editor), str(file)], stdout=screen, check=False).returncode  # noqa: S603
            if code:
                raise EditorFailed(f"the editor ({plain(editor)}) ended with {code}. Nothing was changed.")
            return file.read_bytes()
        except (OSError, ValueError) as error:
            raise EditorFailed(f"the editor ({plain(editor)}) failed: {error}. Nothing was changed.") from error
