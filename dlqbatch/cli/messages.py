"""`dlqbatch messages`: the dead store, looked at and tidied up by people."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from dlqbatch.cli import timeline
from dlqbatch.cli.edit import edit
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
    RowId,
    RowIds,
    Settings,
)
from dlqbatch.cli.printing import NOTHING, print_json, print_lines, print_table, remark, show_changes
from dlqbatch.cli.replay import replay_messages
from dlqbatch.logs import plain
from dlqbatch.messages.actions import MessageActions
from dlqbatch.store.access import store_for
from dlqbatch.store.filters import Filters, parse_time
from dlqbatch.store.text import json_ready

app = Commands(
    help="""Dead messages in the dead store: look at them, edit, replay, discard and restore them.

    dlqbatch messages groups
    dlqbatch messages list --status manual
    dlqbatch messages show 4711
    """,
    no_args_is_help=True,
)

_LONGEST_SAMPLE: Final = 200


@app.command("list")
def list_messages(
    *,
    settings: Settings,
    filters: FilterOptions,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List dead messages, the newest first.

    dlqbatch messages list --status manual --status failed
    dlqbatch messages list --origin orders --since 2030-06-01 --limit 200
    """
    store = MessageActions(store_for(settings))
    page = store.page(filters, limit, after)
    if as_json:
        print_json(json_ready(page))
    elif page.messages:
        rows = [
            {
                "id": one.id,
                "status": one.status,
                "ingested": timeline.time(one.created_at),
                "origin": one.origin_queue or one.origin_exchange,
                "event": one.event,
                "error": _sample(one.error_type, one.error_message),
                "retries": f"{one.retry_count}+{one.dlq_retry_count}",
                "group": one.fingerprint,
            }
            for one in page.messages
        ]
        print_table(rows, tuple(rows[0]), as_json=False, below=("error", "event", "origin"))
    else:
        remark("nothing found")
    if page.next is not None:
        remark(f"there may be more: --after {page.next}")
    raise typer.Exit(0 if page.messages else NOTHING)


@app.command()
def search(
    text: Annotated[str, typer.Argument(help="Somewhere in the failure, the reason or an id.")],
    *,
    settings: Settings,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List the messages that a text is found in; the same as list --text.

    One call looks at the newest 50,000 messages and names where to go on.

    dlqbatch messages search "timed out"
    """
    list_messages(settings=settings, filters=Filters.parse(text=text), limit=limit, after=after, as_json=as_json)


@app.command()
def groups(
    *,
    settings: Settings,
    filters: FilterOptions,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Count equal failures together, the largest group first; without --status, those that are not over yet.

    The queue and the error are those of the group's newest message.

    dlqbatch messages groups
    dlqbatch messages groups --event orders.created --limit 10
    """
    store = MessageActions(store_for(settings))
    found = store.groups(filters, limit)
    if as_json:
        print_json(json_ready(found))
    elif found.groups:
        rows = [
            {
                "group": one.fingerprint,
                "messages": one.size,
                "states": " ".join(f"{status}={number}" for status, number in sorted(one.counts.items())),
                "first": timeline.time(one.first),
                "last": timeline.time(one.last),
                "newest": one.sample.id,
                "queue": one.sample.origin_queue or one.sample.origin_exchange,
                "error": _sample(one.sample.error_type, one.sample.error_message),
            }
            for one in found.groups
        ]
        print_table(rows, tuple(rows[0]), as_json=False, below=("error",), dropped=("first",))
    else:
        remark("nothing found")
    if found.total > len(found.groups):
        remark(f"the {len(found.groups):,} largest of {found.total:,} groups; --limit shows more")
    if not found.is_complete:
        remark("only the newest messages were counted; a filter by --status alone counts them all")
    raise typer.Exit(0 if found.groups else NOTHING)


@app.command()
def show(
    row_id: RowId,
    *,
    settings: Settings,
    full: Full = False,
    as_json: AsJson = False,
) -> None:
    """Show one message: what is known, what happened to it, its headers and its body.

    With --json it is complete, the body as base64.

    dlqbatch messages show 4711
    """
    found = MessageActions(store_for(settings)).show(row_id)
    if as_json:
        print_json(found.as_dict())
        return
    print_lines(timeline.message(found, full=full))


@app.command()
def journal(
    row_id: Annotated[int | None, ROW_ID] = None,
    *,
    settings: Settings,
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
    store = MessageActions(store_for(settings))
    found = store.journal(row_id, actor=actor, since=parse_time(since) if since is not None else None, limit=limit)
    if as_json:
        print_json(json_ready(found))
    elif found.entries:
        rows = [
            {
                "at": timeline.time(one.at),
                "message": one.message_id,
                "from": one.from_status,
                "to": one.to_status,
                "actor": one.actor,
                "reason": one.reason,
            }
            for one in found.entries
        ]
        print_table(rows, tuple(rows[0]), as_json=False, below=("reason",))
    else:
        remark("nothing found")
    if not found.is_complete:
        remark("only the newest lines of the journal were looked through; name a message to see all of its own")
    raise typer.Exit(0 if found.entries else NOTHING)


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
    store = MessageActions(store_for(settings))
    done = store.discard(
        row_ids or (),
        filters,
        actor=actor,
        reason=reason,
        everything=everything,
        dry_run=dry_run,
    )
    show_changes(done, "discarded", as_json=as_json)


@app.command()
def restore(
    row_ids: RowIds,
    *,
    settings: Settings,
    reason: JournalReason = "restored",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take messages out of the archive: they are manual then, and wait for a person.

    dlqbatch messages restore 4711 --reason "wrong group"
    """
    store = MessageActions(store_for(settings))
    done = store.restore(row_ids, actor=actor, reason=reason, dry_run=dry_run)
    show_changes(done, "restored", as_json=as_json)


app.command()(edit)
app.command("replay")(replay_messages)


def _sample(error_type: str | None, message: str | None) -> str:
    said = ": ".join(part for part in (error_type, message) if part)
    return plain(said.partition("\n")[0], _LONGEST_SAMPLE)
