"""`dlqbatch messages`: list, show, edit, replay, discard and restore dead messages."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from dlqbatch.amqp.readable import BodyForm
from dlqbatch.cli import timeline
from dlqbatch.cli.options import (
    ROW_ID,
    Actor,
    After,
    AsJson,
    Commands,
    DryRun,
    FilterOptions,
    Full,
    JournalReason,
    Limit,
    MadeBy,
    RowId,
    Settings,
)
from dlqbatch.cli.printing import NOTHING, print_changes, print_json, print_lines, print_table, remark
from dlqbatch.cli.replay import replay_messages
from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import plain
from dlqbatch.store.access import store_for
from dlqbatch.store.text import json_ready

if TYPE_CHECKING:  # it needs SQLAlchemy, which a help page does not
    from dlqbatch.messages.actions import MessageActions
    from dlqbatch.store.filters import Filters

app = Commands(
    help="""Dead messages in the dead store: look at them, edit, replay, discard and restore them.

    dlqbatch messages groups
    dlqbatch messages list --status manual
    dlqbatch messages show 4711
    """,
)

_LONGEST_SAMPLE: Final = 200
_SUFFIXES: Final = {"json": ".json", "text": ".txt", "hex": ".bin"}


class EditorFailed(DlqbatchError):
    """The editor failed, so that nothing was changed."""


def _store(settings: Settings) -> MessageActions:
    from dlqbatch.messages.actions import MessageActions

    return MessageActions(store_for(settings))


Store: TypeAlias = Annotated["MessageActions", MadeBy(_store)]


def _say_what_is_near(store: MessageActions, filters: Filters) -> None:
    remark("nothing found")
    for sentence in store.near(filters):
        remark(sentence)


@app.command("list")
def list_messages(
    *, store: Store, filters: FilterOptions, limit: Limit = 50, after: After = None, as_json: AsJson = False
) -> None:
    """List dead messages, the newest first.

    dlqbatch messages list --status manual --status failed
    dlqbatch messages list --origin "orders.#" --not event=orders.test --since 2h
    """
    page = store.page(filters, limit, after)
    if as_json:
        print_json(json_ready(page))
    elif page.messages:
        rows = [
            {
                "id": each.id,
                "status": each.status,
                "ingested": timeline.time(each.created_at),
                "origin": each.origin_queue or each.origin_exchange,
                "event": each.event,
                "error": _sample(each.error_type, each.error_message),
                "retries": f"{each.retry_count}+{each.dlq_retry_count}",
                "group": each.fingerprint,
            }
            for each in page.messages
        ]
        print_table(rows, below=("error", "event", "origin"))
    else:
        _say_what_is_near(store, filters)
    if page.next is not None:
        remark(f"there may be more: --after {page.next}")
    raise typer.Exit(0 if page.messages else NOTHING)


@app.command()
def search(
    text: Annotated[str, typer.Argument(help="Somewhere in the failure, the reason or an id.")],
    *,
    store: Store,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List the messages that a text is found in; the same as list --text.

    One call looks at the newest 50,000 messages and names where to go on.

    dlqbatch messages search "timed out"
    """
    from dlqbatch.store.filters import Filters

    list_messages(store=store, filters=Filters.parse(text=text), limit=limit, after=after, as_json=as_json)


@app.command()
def groups(*, store: Store, filters: FilterOptions, limit: Limit = 50, as_json: AsJson = False) -> None:
    """Count equal failures together, the largest group first; without --status, those that are not over yet.

    The queue and the error are those of the group's newest message.

    dlqbatch messages groups
    dlqbatch messages groups --event orders.created --limit 10
    """
    largest = store.groups(filters, limit)
    if as_json:
        print_json(json_ready(largest))
    elif largest.groups:
        rows = [
            {
                "group": each.fingerprint,
                "messages": each.size,
                "states": " ".join(f"{status}={number}" for status, number in sorted(each.counts.items())),
                "first": timeline.time(each.first),
                "last": timeline.time(each.last),
                "newest": each.sample.id,
                "queue": each.sample.origin_queue or each.sample.origin_exchange,
                "error": _sample(each.sample.error_type, each.sample.error_message),
            }
            for each in largest.groups
        ]
        print_table(rows, below=("error",), dropped=("first",))
    else:
        _say_what_is_near(store, filters)
    if largest.total > len(largest.groups):
        remark(f"the {len(largest.groups):,} largest of {largest.total:,} groups; --limit shows more")
    if not largest.is_complete:
        remark("only the newest messages were counted; a filter by --status alone counts them all")
    raise typer.Exit(0 if largest.groups else NOTHING)


@app.command()
def show(row_id: RowId, *, store: Store, full: Full = False, as_json: AsJson = False) -> None:
    """Show one message: what is known, what happened to it, its headers and its body.

    With --json it is complete, the body as base64.

    dlqbatch messages show 4711
    """
    shown = store.show(row_id)
    if as_json:
        print_json(shown.as_dict())
        return
    print_lines(timeline.message(shown, full=full))


@app.command()
def journal(
    row_id: Annotated[int | None, ROW_ID] = None,
    *,
    store: Store,
    actor: Annotated[
        str | None,
        typer.Option(
            "--actor", metavar="NAME", help="Only what this person or program did: ingest, lifecycle, retain."
        ),
    ] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help="Only from then on.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Show who changed what, when and why, the newest first; of one message or of all.

    dlqbatch messages journal 4711
    dlqbatch messages journal --actor lifecycle --since 2030-06-01
    """
    from dlqbatch.store.filters import parse_time

    page = store.journal(row_id, actor=actor, since=parse_time(since) if since is not None else None, limit=limit)
    if as_json:
        print_json(json_ready(page))
    elif page.entries:
        rows = [
            {
                "at": timeline.time(each.at),
                "message": each.message_id,
                "from": each.from_status,
                "to": each.to_status,
                "actor": each.actor,
                "reason": each.reason,
            }
            for each in page.entries
        ]
        print_table(rows, below=("reason",))
    else:
        remark("nothing found")
    if not page.is_complete:
        remark("only the newest lines of the journal were looked through; name a message to see all of its own")
    raise typer.Exit(0 if page.entries else NOTHING)


@app.command()
def discard(
    reason: JournalReason,
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    *,
    settings: Settings,
    filters: FilterOptions,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is not over yet.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; a filter and --all need this.")] = False,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put messages into the archive, by their numbers or by a filter; restore takes them out again.

    dlqbatch messages discard 4711 4712 --reason "sent twice"
    dlqbatch messages discard --group dba642681715e5f0 --reason fixed --dry-run
    """
    if not row_ids and not (yes or dry_run):
        raise typer.BadParameter("to discard by a filter, or --all, takes --yes too; --dry-run shows what it would be")
    store = _store(settings)
    done = store.discard(row_ids or (), filters, actor=actor, reason=reason, everything=everything, dry_run=dry_run)
    if not done.changes:
        _say_what_is_near(store, filters)
    raise typer.Exit(print_changes(done, "discarded", as_json=as_json))


@app.command()
def restore(
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    *,
    settings: Settings,
    filters: FilterOptions,
    reason: JournalReason = "restored",
    yes: Annotated[bool, typer.Option("--yes", help="Do it; a filter needs this.")] = False,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take messages out of the archive: they are manual then, and wait for a person.

    dlqbatch messages restore 4711 --reason "wrong group"
    dlqbatch messages restore --group dba642681715e5f0 --since 1h --yes
    """
    if not row_ids and not (yes or dry_run):
        raise typer.BadParameter("to restore by a filter takes --yes too; --dry-run shows what it would be")
    store = _store(settings)
    done = store.restore(row_ids or (), filters, actor=actor, reason=reason, dry_run=dry_run)
    if not done.changes:
        _say_what_is_near(store, filters)
    raise typer.Exit(print_changes(done, "restored", as_json=as_json))


@app.command()
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
    from dlqbatch.messages.edit import Editing, as_meant, header_edits

    editing = Editing(store_for(settings))
    headers = header_edits(_pairs(set_headers or ()), remove_headers or ())

    body = typed = None
    if body_file is not None:
        body = _read(body_file)
    elif not headers.wanted:
        original = editing.original(row_id, force=force)
        typed = _in_editor(original.body, original.form)
        body = as_meant(original.body, typed)
    try:
        done = editing.edit(
            row_id, actor=actor, reason=reason, body=body, headers=headers, force=force, dry_run=dry_run
        )
    except DlqbatchError:
        if typed is not None and body != original.body:
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


app.command("replay")(replay_messages)


def _sample(error_type: str | None, message: str | None) -> str:
    said = ": ".join(part for part in (error_type, message) if part)
    return plain(said.partition("\n")[0], _LONGEST_SAMPLE)


def _pairs(options: list[str] | tuple[()]) -> list[tuple[str, str]]:
    pairs = []
    for each in options:
        name, equals, value = each.partition("=")
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
