"""`dlqbatch messages`: the dead store, looked at and tidied up by people."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from dlqbatch import wiring
from dlqbatch.cli import table, timeline
from dlqbatch.cli.choices import AsJson, Config, DryRun, Settings, configured
from dlqbatch.cli.edit import edit
from dlqbatch.cli.filters import (
    ROW_ID,
    Actor,
    After,
    ErrorType,
    Event,
    Group,
    Ids,
    Limit,
    Origin,
    Since,
    Statuses,
    Text,
    Until,
    person,
)
from dlqbatch.cli.printing import NOTHING, print_json, print_lines, remark, show_changes
from dlqbatch.cli.replay import replay_messages
from dlqbatch.logs import plain

app = typer.Typer(
    help="Dead messages in the dead store: look at them, edit, replay, discard and restore them.", no_args_is_help=True
)

_LONGEST_SAMPLE: Final = 60


@app.command("list")
def list_messages(
    settings: Settings = None,
    config: Config = None,
    *,
    statuses: Statuses = None,
    error_type: ErrorType = None,
    group: Group = None,
    event: Event = None,
    origin: Origin = None,
    since: Since = None,
    until: Until = None,
    text: Text = None,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List dead messages, the newest first.

    The exit code is 1 if there are none.
    """
    store = wiring.dead_store(configured(settings, config))
    filters = store.asked(
        statuses=statuses or (),
        error_type=error_type,
        group=group,
        event=event,
        origin=origin,
        since=since,
        until=until,
        text=text,
    )
    page = store.page(filters, limit, after)
    if as_json:
        print_json(store.as_json(page))
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
        table.show(rows, tuple(rows[0]), as_json=False)
    else:
        remark("nothing found")
    if page.next is not None:
        remark(f"there may be more: --after {page.next}")
    raise typer.Exit(0 if page.messages else NOTHING)


@app.command()
def search(
    text: Annotated[str, typer.Argument(help="Somewhere in the failure, the reason or an id.")],
    settings: Settings = None,
    config: Config = None,
    *,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List the messages that a text is found in; the same as list --text.

    One call looks at the newest 50,000 messages and names where to go on. The exit code is 1 if nothing is found.
    """
    list_messages(settings, config, text=text, limit=limit, after=after, as_json=as_json)


@app.command()
def groups(
    settings: Settings = None,
    config: Config = None,
    *,
    statuses: Statuses = None,
    error_type: ErrorType = None,
    group: Group = None,
    event: Event = None,
    origin: Origin = None,
    since: Since = None,
    until: Until = None,
    text: Text = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Count equal failures together, the largest group first; without --status, those that are not over yet.

    The exit code is 1 if there are none.
    """
    store = wiring.dead_store(configured(settings, config))
    filters = store.asked(
        statuses=statuses or (),
        error_type=error_type,
        group=group,
        event=event,
        origin=origin,
        since=since,
        until=until,
        text=text,
    )
    found = store.groups(filters, limit)
    if as_json:
        print_json(store.as_json(found))
    elif found.groups:
        rows = [
            {
                "group": one.fingerprint,
                "messages": one.size,
                "states": " ".join(f"{status}={number}" for status, number in sorted(one.counts.items())),
                "first": timeline.time(one.first),
                "last": timeline.time(one.last),
                "newest": one.sample.id,
                "error": _sample(one.sample.error_type, one.sample.error_message),
            }
            for one in found.groups
        ]
        table.show(rows, tuple(rows[0]), as_json=False)
    else:
        remark("nothing found")
    if not found.is_complete:
        remark("only the newest messages were counted; a filter by --status alone counts them all")
    raise typer.Exit(0 if found.groups else NOTHING)


@app.command()
def show(
    row_id: Annotated[int, ROW_ID],
    settings: Settings = None,
    config: Config = None,
    *,
    full: Annotated[bool, typer.Option("--full", help="The whole body, stack and headers, however long.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one message: what is known, what happened to it, its headers and its body.

    With --json it is complete, the body as base64. The exit code is 1 if there is no such message.
    """
    found = wiring.dead_store(configured(settings, config)).show(row_id)
    if as_json:
        print_json(found.as_dict())
        return
    print_lines(timeline.message(found, full=full))


@app.command()
def journal(
    row_id: Annotated[int | None, ROW_ID] = None,
    settings: Settings = None,
    config: Config = None,
    *,
    actor: Annotated[
        str | None, typer.Option("--actor", help="Only what this person or program did: ingest, lifecycle, retain.")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help="Only from then on.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Show who changed what, when and why, the newest first; of one message or of all.

    The exit code is 1 if there is nothing.
    """
    store = wiring.dead_store(configured(settings, config))
    found = store.journal(row_id, actor=actor, since=store.moment(since) if since is not None else None, limit=limit)
    if as_json:
        print_json(store.as_json(found))
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
        table.show(rows, tuple(rows[0]), as_json=False)
    else:
        remark("nothing found")
    if not found.is_complete:
        remark("only the newest lines of the journal were looked through; name a message to see all of its own")
    raise typer.Exit(0 if found.entries else NOTHING)


@app.command()
def discard(
    reason: Annotated[str, typer.Option("--reason", help="Why; it goes into the journal.")],
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    settings: Settings = None,
    config: Config = None,
    *,
    statuses: Statuses = None,
    error_type: ErrorType = None,
    group: Group = None,
    event: Event = None,
    origin: Origin = None,
    since: Since = None,
    until: Until = None,
    text: Text = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is not over yet.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; a filter and --all need this.")] = False,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put messages into the archive, by their numbers or by a filter; restore takes them out again.

    The exit code is 1 if none was changed, 3 if some were and some were not.
    """
    if not row_ids and not (yes or dry_run):
        raise typer.BadParameter("to discard by a filter, or --all, takes --yes too; --dry-run shows what it would be")
    store = wiring.dead_store(configured(settings, config))
    filters = store.asked(
        statuses=statuses or (),
        error_type=error_type,
        group=group,
        event=event,
        origin=origin,
        since=since,
        until=until,
        text=text,
    )
    done = store.discard(
        row_ids or (),
        filters,
        actor=person(actor),
        reason=reason,
        everything=everything,
        dry_run=dry_run,
    )
    show_changes(done, "discarded", as_json=as_json)


@app.command()
def restore(
    row_ids: Ids,
    settings: Settings = None,
    config: Config = None,
    *,
    reason: Annotated[str, typer.Option("--reason", help="Why; it goes into the journal.")] = "restored",
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take messages out of the archive: they are manual then, and wait for a person.

    The exit code is 1 if none was changed, 3 if some were and some were not.
    """
    store = wiring.dead_store(configured(settings, config))
    done = store.restore(row_ids, actor=person(actor), reason=reason, dry_run=dry_run)
    show_changes(done, "restored", as_json=as_json)


app.command()(edit)
app.command("replay")(replay_messages)


def _sample(error_type: str | None, message: str | None) -> str:
    said = ": ".join(part for part in (error_type, message) if part)
    return plain(said.partition("\n")[0], _LONGEST_SAMPLE)
