"""`dlqbatch messages`: list, show, edit, replay, discard and restore dead messages."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

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
    Expect,
    FilterOptions,
    Full,
    JournalReason,
    Limit,
    Revealing,
    RowId,
    ScopedReach,
)
from dlqbatch.cli.printing import NOTHING, PARTIAL, print_changes, print_json, print_lines, print_table, remark
from dlqbatch.cli.replay import replay_messages
from dlqbatch.cli.split import print_split, say_what_is_missing, say_what_is_near, split_shown
from dlqbatch.store.access import store_for
from dlqbatch.store.text import json_ready

if TYPE_CHECKING:  # it needs SQLAlchemy, which a help page does not
    from dlqbatch.messages.queries import Record

app = Commands(
    help="""Dead messages in the dead store: look at them, edit, replay, discard and restore them.

    dlqbatch messages groups
    dlqbatch messages list --status manual
    dlqbatch messages show 4711
    """,
)


_LONGEST_SAMPLE: Final = 200


@app.command("list")
def list_messages(
    *,
    reach: ScopedReach,
    filters: FilterOptions,
    limit: Limit = 50,
    after: After = None,
    by: Revealing = None,
    as_json: AsJson = False,
) -> None:
    """List dead messages, the newest first.

    dlqbatch messages list --status manual --status failed
    dlqbatch messages list --origin "orders.#" --not event=orders.test --since 2h
    """
    from dlqbatch.messages.actions import MessageActions

    page = reach.messages(MessageActions.page, filters, limit, after, by)
    if as_json:
        print_json(json_ready(page))
    elif page.messages:
        print_table(_rows(page.messages), below=("error", "event", "origin"))
    else:
        say_what_is_near(reach, filters)
    say_what_is_missing(reach, filters)
    if page.next is not None:
        remark(f"there may be more: --after {page.next}")
    raise typer.Exit(0 if page.messages else NOTHING)


@app.command()
def search(
    words: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="Somewhere in the failure, the reason or an id, or in a body."),
    ],
    *,
    reach: ScopedReach,
    filters: FilterOptions,
    body: Annotated[bool, typer.Option("--body", help="Look at bodies and headers, the newest first.")] = False,
    seconds: Annotated[
        float, typer.Option("--max-seconds", metavar="SECONDS", min=0, help="How long --body may go on.")
    ] = 30.0,
    limit: Limit = 50,
    after: After = None,
    by: Revealing = None,
    as_json: AsJson = False,
) -> None:
    """List the messages that a text is found in; it says what it has looked at.

    One call looks at the newest 50,000 messages that the filters leave, and names where to go on. With --body what is
    masked is not found.

    dlqbatch messages search "timed out"
    dlqbatch messages search P-000087 --body --since 2h
    """
    from dlqbatch.messages.search import fields_with, search_bodies
    from dlqbatch.store.filters import Filters

    if filters.texts:
        raise typer.BadParameter("the text to look for is named already", param_hint="--text")
    (sought,) = Filters.parse(text=words).texts
    for field in reach.store(fields_with, sought):
        remark(f"it is the value of a field: dlqbatch messages list --field {shlex.quote(field)}")
    if not body:
        remark("looked at errors, reasons and ids, and not at bodies and headers: --body does")
        meant = replace(filters, texts=(sought,))
        list_messages(reach=reach, filters=meant, limit=limit, after=after, by=by, as_json=as_json)
        return
    if by is not None:
        raise typer.BadParameter("what is masked is not searched; show reveals one message", param_hint="--reveal")
    from dlqbatch.cli.run import Progress, on_signal

    progress = Progress()
    found = reach.store(
        search_bodies,
        sought,
        filters,
        limit=limit,
        after=after,
        seconds=seconds,
        stopped=on_signal(),
        progress=progress,
    )
    progress.end()
    if as_json:
        print_json(json_ready(found))
    elif found.messages:
        print_table(_rows(found.messages), below=("error", "event", "origin"))
    else:
        remark("nothing found")
    remark(f"looked at the bodies and headers of {found.looked_at:,} messages, back to {timeline.time(found.back_to)}")
    if found.next is not None:
        remark(f"there are more, and they were not looked at: --after {found.next}")
    raise typer.Exit(0 if found.messages else NOTHING)


@app.command()
def groups(*, reach: ScopedReach, filters: FilterOptions, limit: Limit = 50, as_json: AsJson = False) -> None:
    """Count equal failures together, the largest group first; without --status, those that are not over yet.

    The queue and the error are those of the group's newest message.

    dlqbatch messages groups
    dlqbatch messages groups --event orders.created --limit 10
    """
    from dlqbatch.messages.actions import MessageActions

    largest = reach.messages(MessageActions.groups, filters, limit)
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
                "error": timeline.error(each.sample, _LONGEST_SAMPLE),
            }
            for each in largest.groups
        ]
        print_table(rows, below=("error",), dropped=("first",))
    else:
        say_what_is_near(reach, filters)
    say_what_is_missing(reach, filters)
    if largest.total > len(largest.groups):
        remark(f"the {len(largest.groups):,} largest of {largest.total:,} groups; --limit shows more")
    if not largest.is_complete:
        remark("only the newest messages were counted; a filter by --status alone counts them all")
    raise typer.Exit(0 if largest.groups else NOTHING)


@app.command()
def show(
    row_id: RowId, *, reach: ScopedReach, full: Full = False, by: Revealing = None, as_json: AsJson = False
) -> None:
    """Show one message: what is known, what happened to it, its headers and its body.

    Secrets are masked. With --json it is complete, the body as base64.

    dlqbatch messages show 4711
    dlqbatch messages show 4711 --reveal --reason "ticket 12"
    """
    from dlqbatch.messages.actions import MessageActions

    shown = reach.messages(MessageActions.show, row_id, by)
    if as_json:
        print_json(shown.as_dict())
        return
    print_lines(timeline.message(shown, full=full))


@app.command()
def journal(
    row_id: Annotated[int | None, ROW_ID] = None,
    *,
    reach: ScopedReach,
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
    from dlqbatch.messages.actions import MessageActions
    from dlqbatch.store.filters import parse_time

    page = reach.messages(
        MessageActions.journal, row_id, actor=actor, since=parse_time(since) if since is not None else None, limit=limit
    )
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
    reach: ScopedReach,
    filters: FilterOptions,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is not over yet.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; a filter and --all need this.")] = False,
    expect: Expect = None,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put messages into the archive, by their numbers or by a filter; restore and undo take them out again.

    What a filter matches is shown by group, queue and event. More than 100 are discarded only with --expect.

    dlqbatch messages discard 4711 4712 --reason "sent twice"
    dlqbatch messages discard --group dba6 --reason fixed --dry-run
    dlqbatch messages discard --group dba6 --reason fixed --yes --expect 2980
    """
    from dlqbatch.messages.actions import MessageActions

    if not row_ids and not (yes or dry_run):
        raise typer.BadParameter("to discard by a filter, or --all, takes --yes too; --dry-run shows what it would be")
    with split_shown(as_json=as_json):
        done = reach.messages(
            MessageActions.discard,
            row_ids or (),
            filters,
            actor=actor,
            reason=reason,
            everything=everything,
            expect=expect,
            dry_run=dry_run,
        )
    if done.split is not None and not as_json:
        print_split(done.split)
    if not done.changes:
        say_what_is_near(reach, filters)
    say_what_is_missing(reach, filters)
    raise typer.Exit(print_changes(done, "discarded", as_json=as_json))


@app.command()
def restore(
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    *,
    reach: ScopedReach,
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
    from dlqbatch.messages.actions import MessageActions

    if not row_ids and not (yes or dry_run):
        raise typer.BadParameter("to restore by a filter takes --yes too; --dry-run shows what it would be")
    done = reach.messages(MessageActions.restore, row_ids or (), filters, actor=actor, reason=reason, dry_run=dry_run)
    if not done.changes:
        say_what_is_near(reach, filters)
    say_what_is_missing(reach, filters)
    raise typer.Exit(print_changes(done, "restored", as_json=as_json))


@app.command()
def erase(
    reason: JournalReason,
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    *,
    reach: ScopedReach,
    filters: FilterOptions,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; nothing brings the content back.")] = False,
    expect: Expect = None,
    no_cold: Annotated[bool, typer.Option("--no-cold", help="Leave cold copies as they are, and name them.")] = False,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Erase what messages hold, for good: body, properties, headers, error texts and fields.

    Their journal, times and states stay. They are archived, and can never be replayed. The files of cold storage that
    hold them are written anew without them; --dry-run names those.

    dlqbatch messages erase --field customer=4711 --reason "request 12" --dry-run
    dlqbatch messages erase 4711 --reason "request 12" --yes
    """
    from dlqbatch.retain.archive import cold_storage
    from dlqbatch.retain.erase import erase as erase_with_copies

    if not (yes or dry_run):
        raise typer.BadParameter("nothing brings back what is erased: it takes --yes; --dry-run shows what it would be")
    settings = reach.here("Cold storage is reached where the job `retain` runs. ")
    cold = None if no_cold else cold_storage(settings)
    with split_shown(as_json=as_json):
        erase_chosen = partial(erase_with_copies, store_for(settings), cold, row_ids or (), filters)
        done = erase_chosen(actor=actor, reason=reason, expect=expect, dry_run=dry_run)
    if not done.changes:
        say_what_is_near(reach, filters)
    say_what_is_missing(reach, filters)
    for sentence in done.left:
        remark(sentence)
    code = print_changes(done, "erased", as_json=as_json)
    raise typer.Exit(PARTIAL if done.left and not code else code)


app.command()(edit)
app.command("replay")(replay_messages)


def _rows(records: Iterable[Record]) -> list[dict[str, object]]:
    return [
        {
            "id": each.id,
            "status": each.status,
            "ingested": timeline.time(each.created_at),
            "origin": each.origin_queue or each.origin_exchange,
            "event": each.event,
            "error": timeline.error(each, _LONGEST_SAMPLE),
            "retries": f"{each.retry_count}+{each.dlq_retry_count}",
            "group": each.fingerprint,
        }
        for each in records
    ]
