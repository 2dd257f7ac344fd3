"""`dlqbatch groups`: equal failures as an inbox, with holds, notes and acknowledgements."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from dlqbatch.cli import timeline
from dlqbatch.cli.options import Actor, AsJson, Commands, FilterOptions, JournalReason, Limit, Reached
from dlqbatch.cli.printing import NOTHING, print_json, print_lines, print_table, remark
from dlqbatch.cli.split import say_what_is_near
from dlqbatch.logs import plain
from dlqbatch.store.text import json_ready

app = Commands(
    help="""Equal failures as an inbox: what each is doing, and what somebody decided about it.

    dlqbatch groups list
    dlqbatch groups hold dba6 --reason "for the developers"
    """,
)

Group: TypeAlias = Annotated[str, typer.Argument(metavar="GROUP", help="The group, or how it begins.")]
InQueue: TypeAlias = Annotated[
    str, typer.Option("--queue", metavar="QUEUE", help="Only what failed in this queue; without it, in any.")
]
_LONGEST = 200


@app.command("list")
def list_groups(*, reach: Reached, filters: FilterOptions, limit: Limit = 50, as_json: AsJson = False) -> None:
    """List failures by group and queue, the largest first; without --status, those that are not over yet.

    A group is acknowledged, quiet, regressed, new, growing or ongoing. What two programs describe in two ways is one
    line, with the other group below it; what is decided about one of them holds for both.

    dlqbatch groups list
    dlqbatch groups list --origin "orders.#" --since 1d
    """
    from dlqbatch.groups.inbox import inbox

    found = reach.store(inbox, filters, limit)
    if as_json:
        print_json(found.as_dict())
    elif found.lines:
        rows = [
            {
                "group": each.group,
                "state": f"{each.state}{' HELD' if each.decisions.held_at else ''}",
                "messages": each.size,
                "last hour": f"{each.recent} {each.trend}",
                "last": timeline.time(each.last),
                "queue": each.queue or each.sample.origin_exchange,
                "error": timeline.error(each.sample, _LONGEST),
                "note": plain(": ".join(filter(None, (each.decisions.owner, each.decisions.note))), _LONGEST),
                "also": " ".join(each.also),
            }
            for each in found.lines
        ]
        print_table(rows, below=("error", "note", "also"))
    else:
        say_what_is_near(reach, filters)
    if found.total > len(found.lines):
        remark(f"the {len(found.lines):,} largest of {found.total:,}; --limit shows more")
    if not found.is_complete:
        remark("only the newest messages were counted; a filter by --status alone counts them all")
    raise typer.Exit(0 if found.lines else NOTHING)


@app.command()
def show(group: Group, *, reach: Reached, as_json: AsJson = False) -> None:
    """Show one group: its queues, what its messages are doing, and what somebody decided about it.

    dlqbatch groups show dba6
    """
    from dlqbatch.groups.inbox import of_group

    found = reach.store(of_group, group)
    if as_json:
        print_json(found.as_dict())
        return
    for each in found.lines:
        decided = each.decisions
        held = decided.held_at and f"since {timeline.time(decided.held_at)} by {decided.held_by}: {decided.held_why}"
        facts = {
            "queue": each.queue or each.sample.origin_exchange,
            "state": each.state,
            "messages": " ".join(f"{status}={number}" for status, number in sorted(each.counts.items())),
            "arrived": f"{each.recent} in the last hour, {each.before} in the 24 hours before ({each.trend})",
            "first": timeline.time(each.first),
            "last": timeline.time(each.last),
            "newest": each.sample.id,
            "error": timeline.error(each.sample, _LONGEST),
            "on hold": held,
            "owner": decided.owner,
            "note": decided.note,
            "tags": " ".join(decided.tags),
            "known to": decided.acknowledged_by,
            "also": " ".join(each.also),
        }
        print_lines([each.group, *(f"  {word:<9} {plain(str(text))}" for word, text in facts.items() if text)])


@app.command()
def hold(
    group: Group,
    *,
    reach: Reached,
    queue: InQueue = "",
    reason: Annotated[str, typer.Option("--reason", help="Why; everybody who looks at the group sees it.")],
    actor: Actor,
    as_json: AsJson = False,
) -> None:
    """Put a group on hold: the lifecycle and replays leave its messages alone, newcomers too, until unhold.

    dlqbatch groups hold dba6 --queue orders --reason "for the developers"
    """
    from dlqbatch.groups.decisions import hold as hold_group

    _print(reach.store(hold_group, group, queue=queue, actor=actor, reason=reason), "on hold", as_json)


@app.command()
def unhold(
    group: Group,
    *,
    reach: Reached,
    queue: InQueue = "",
    reason: JournalReason = "lifted",
    actor: Actor,
    as_json: AsJson = False,
) -> None:
    """Lift a hold: what came due meanwhile is due now.

    dlqbatch groups unhold dba6 --queue orders
    """
    from dlqbatch.groups.decisions import unhold as lift

    _print(reach.store(lift, group, queue=queue, actor=actor, reason=reason), "no longer on hold", as_json)


@app.command()
def ack(
    group: Group,
    *,
    reach: Reached,
    queue: InQueue = "",
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Until then: a date or a time in UTC.")
    ] = None,
    more: Annotated[
        int | None, typer.Option("--more", metavar="N", min=1, help="Until so many more have arrived.")
    ] = None,
    reason: JournalReason = "known",
    actor: Actor,
    as_json: AsJson = False,
) -> None:
    """Acknowledge a group: somebody knows of it. Without --until and --more, until it grows.

    dlqbatch groups ack dba6 --more 100 --reason "ticket 4711"
    """
    from dlqbatch.groups.decisions import acknowledge
    from dlqbatch.store.filters import parse_time

    end = None if until is None else parse_time(until)
    decided = reach.store(acknowledge, group, queue=queue, until=end, more=more, actor=actor, reason=reason)
    _print(decided, "acknowledged", as_json)


@app.command()
def note(
    group: Group,
    text: Annotated[str | None, typer.Argument(help="The note; an empty one takes it away.")] = None,
    *,
    reach: Reached,
    queue: InQueue = "",
    owner: Annotated[str | None, typer.Option("--owner", metavar="NAME", help="Who takes care of it.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="Repeatable.")] = None,
    actor: Actor,
    as_json: AsJson = False,
) -> None:
    """Write a note to a group, its owner, or its tags.

    dlqbatch groups note dba6 "the tenant is gone" --owner ann
    """
    from dlqbatch.groups.decisions import note as write_note

    decided = reach.store(write_note, group, queue=queue, text=text, owner=owner, tags=tags, actor=actor)
    _print(decided, "noted", as_json)


def _print(decided: object, done: str, as_json: bool) -> None:
    found = json_ready(decided)
    assert isinstance(found, dict)  # noqa: S101  (of a dataclass)
    also = found["also"]
    print_table([found | {"also": also if as_json else " ".join(also), "done": done}], as_json=as_json)
    if not as_json:
        remark(f"`dlqbatch undo {found['action']}` takes it back")
