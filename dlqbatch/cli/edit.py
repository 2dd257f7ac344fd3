"""`dlqbatch messages edit`: put a message with changes in the place of a dead one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from dlqbatch.amqp.fields import Fields
from dlqbatch.amqp.readable import BodyForm
from dlqbatch.cli.options import (
    ROW_ID,
    Actor,
    AsJson,
    ConfigFile,
    DryRun,
    Expect,
    FilterOptions,
    JournalReason,
    MadeBy,
    Remote,
    ScopeName,
    load_settings,
)
from dlqbatch.cli.printing import NOTHING, PARTIAL, print_json, print_lines, remark
from dlqbatch.cli.reach import Reach
from dlqbatch.cli.split import print_split, say_what_is_near, split_shown
from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import plain

if TYPE_CHECKING:  # it needs SQLAlchemy, which a help page does not
    from dlqbatch.messages.edit_many import ManyEdited
    from dlqbatch.store.filters import Filters

_LONGEST_VALUE: Final = 200
_SUFFIXES: Final = {"json": ".json", "text": ".txt", "hex": ".bin"}


class EditorFailed(DlqbatchError):
    """The editor failed, so that nothing was changed."""


class _Set(NamedTuple):
    reach: Reach
    values: list[str]
    """What is to stand in the body."""


def _set(
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="body.PATH=VALUE",
            help="JSON for the body; or OPTION=VALUE. Repeatable.",
        ),
    ] = None,
    config: ConfigFile = None,
    scope: ScopeName = None,
    remote: Remote = None,
) -> _Set:
    values = [pair for pair in settings or () if pair.startswith(("body.", "body["))]
    own = [pair for pair in settings or () if pair not in values]
    loaded = load_settings(own, config, {"scope": scope, "remote": remote}, may_be_remote=True)
    return _Set(Reach(loaded), values)


def edit(
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    *,
    wanted: Annotated[_Set, MadeBy(_set)],
    filters: FilterOptions,
    body_file: Annotated[
        str | None, typer.Option("--body-file", metavar="FILE", help="The new body; - reads it from stdin.")
    ] = None,
    merge_patch: Annotated[
        str | None,
        typer.Option("--merge-patch", metavar="FILE", help="A JSON merge patch for each body; - reads it from stdin."),
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
    yes: Annotated[bool, typer.Option("--yes", help="Do it; a filter needs this.")] = False,
    expect: Expect = None,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Edit messages: a new one with the changes takes the place of each, and the original is archived.

    Nothing is sent: `replay plan --action A-17` selects what an edit made. --set, --merge-patch and headers change many
    at once, and all else stays byte for byte; --dry-run shows every difference. Of one message, without any of these
    and without --body-file, $VISUAL or $EDITOR opens with the body, unmasked: that takes the right to --reveal, and is
    journalled.

    dlqbatch messages edit 4711 --set-header tenant=blue --reason "wrong tenant"
    dlqbatch messages edit --group dba6 --set 'body.currency="EUR"' --dry-run
    """
    from dlqbatch.messages.edit import as_meant, header_edits
    from dlqbatch.messages.edit_many import edits
    from dlqbatch.messages.edit_written import edit_one, edit_written, original
    from dlqbatch.messages.shown import Reveal
    from dlqbatch.store.filters import Filters

    reach, fields = wanted.reach, Fields(wanted.reach.settings.fields)
    headers, removed = _pairs(set_headers or ()), remove_headers or ()
    edited_headers = header_edits(headers, removed)
    row_ids = row_ids or []
    if wanted.values or merge_patch is not None or len(row_ids) != 1 or filters != Filters():
        if body_file is not None:
            raise typer.BadParameter("it is the body of one message, named by its number", param_hint="--body-file")
        if not row_ids and not (yes or dry_run):
            raise typer.BadParameter("to edit by a filter takes --yes too; --dry-run shows what it would be")
        patch = None if merge_patch is None else _read(merge_patch, "--merge-patch")
        edits(wanted.values, patch, edited_headers)  # a mistake is found before anything is connected to
        with split_shown(as_json=as_json):
            many = reach.store(
                edit_written,
                wanted.values,
                patch,
                headers,
                removed,
                row_ids,
                filters,
                actor=actor,
                reason=reason,
                expect=expect,
                force=force,
                dry_run=dry_run,
                fields=fields,
            )
        raise typer.Exit(_print_many(many, reach, filters, as_json=as_json))

    (row_id,) = row_ids
    body = typed = None
    if body_file is not None:
        body = _read(body_file, "--body-file")
    elif not edited_headers.wanted:
        before = reach.store(original, row_id, Reveal(actor, reason), fields=fields, force=force)
        typed = _in_editor(before.body, before.form)
        body = as_meant(before.body, typed)
    try:
        done = reach.store(
            edit_one,
            row_id,
            body,
            headers,
            removed,
            fields=fields,
            actor=actor,
            reason=reason,
            force=force,
            dry_run=dry_run,
        )
    except DlqbatchError:
        if typed is not None and body != before.body:
            _keep(typed)
        raise
    if as_json:
        print_json(asdict(done))
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


def _print_many(done: ManyEdited, reach: Reach, filters: Filters, *, as_json: bool) -> int:
    """Print every difference, and what was refused; return the exit code."""
    if not done.messages:
        say_what_is_near(reach, filters)
    if as_json:
        print_json(done.as_dict())
    else:
        if done.split is not None:
            print_split(done.split)
        for each in done.messages:
            new = f" -> {each.new}" if each.new is not None else ""
            print_lines([f"{each.id}{new}" if each.is_done else f"{each.id}  refused: {plain(each.why)}"])
            print_lines(
                f"  {plain(difference.path)}: {_value(difference.before)} -> {_value(difference.after)}"
                for difference in each.differences
            )
        word = "would be edited" if done.dry_run else "edited"
        undo = f"; `dlqbatch undo {done.action}` takes it back" if done.action is not None else ""
        remark(f"{done.done} {word}, {done.not_done} refused{undo}")
        if done.action is not None:
            remark(f"nothing was sent: `dlqbatch replay plan --action {done.action}` selects the edits")
    return NOTHING if not done.done else PARTIAL if done.not_done else 0


def _value(text: str | None) -> str:
    return "nothing" if text is None else plain(text, _LONGEST_VALUE)


def _pairs(options: list[str] | tuple[()]) -> list[tuple[str, str]]:
    pairs = []
    for each in options:
        name, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter("it takes NAME=VALUE, such as --set-header tenant=blue", param_hint="--set-header")
        pairs.append((name, value))
    return pairs


def _read(file: str, option: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}", param_hint=option) from error


def _keep(typed: bytes) -> None:
    """Keep a body that was typed and then refused, or whose message has changed meanwhile."""
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
    # A folder that only this user can read, because many editors leave copies beside the file.
    with TemporaryDirectory(prefix="dlqbatch-edit-") as folder:
        file = Path(folder) / f"body{_SUFFIXES[form]}"
        file.touch(mode=0o600)
        file.write_bytes(body)
        try:
            # In a pipe, what the editor draws must not get between the data.
            screen = None if sys.stdout.isatty() else sys.stderr
            code = subprocess.run([*shlex.split(editor), str(file)], stdout=screen, check=False).returncode  # noqa: S603
            if code:
                raise EditorFailed(f"the editor ({plain(editor)}) ended with {code}. Nothing was changed.")
            return file.read_bytes()
        except (OSError, ValueError) as error:
            raise EditorFailed(f"the editor ({plain(editor)}) failed: {error}. Nothing was changed.") from error
