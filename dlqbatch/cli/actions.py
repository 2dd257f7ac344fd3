"""`dlqbatch actions` and `dlqbatch undo`: what people did, with all the messages of it, and how to take it back."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

from dlqbatch.cli import timeline
from dlqbatch.cli.options import Actor, AsJson, Commands, DryRun, JournalReason, Limit, Reached
from dlqbatch.cli.printing import NOTHING, print_changes, print_json, print_lines, print_table, remark
from dlqbatch.logs import plain
from dlqbatch.store.text import json_ready

app = Commands(
    help="""What people did: discards, restores, edits, replays, and the undo of these.

    dlqbatch actions list
    dlqbatch actions show A-17
    """,
)

Name: TypeAlias = Annotated[str, typer.Argument(metavar="A-n", help="The action, as list shows it.")]
_LONGEST: Final = 100


@app.command("list")
def list_actions(
    *,
    reach: Reached,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Only what this person did.")] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="Only actions of this kind, such as discard.")
    ] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List the actions, the newest first.

    dlqbatch actions list
    dlqbatch actions list --by ann --kind discard
    """
    from dlqbatch.actions.queries import recent

    found = reach.store(recent, limit, actor=by, kind=kind)
    if as_json:
        print_json([each.as_dict() for each in found])
    elif found:
        rows = [
            {
                "action": each.name,
                "at": timeline.time(each.at),
                "kind": each.kind,
                "messages": _counts(each.counts),
                "actor": each.actor,
                "reason": plain(each.reason, _LONGEST),
                "state": _state(each.undone_by, is_cut=each.ended_at is None),
            }
            for each in found
        ]
        print_table(rows, below=("reason", "state"))
    else:
        remark("nobody has done anything yet")
    raise typer.Exit(0 if found else NOTHING)


@app.command()
def show(
    name: Name,
    *,
    reach: Reached,
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="STATE", help="Only messages that are done, refused, skipped or undone in it."),
    ] = None,
    limit: Limit = 50,
    after: Annotated[int, typer.Option("--after", metavar="ID", help="The next page: messages after this one.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show one action: who did what and why, and what became of each of its messages.

    dlqbatch actions show A-17
    dlqbatch actions show A-17 --state refused
    """
    from dlqbatch.actions.queries import show as show_action

    shown = reach.store(show_action, name, limit, after, state=state)
    if as_json:
        print_json(shown.as_dict())
        return
    action = shown.action
    facts = {
        "what": f"{action.kind} {action.undoes}" if action.undoes else action.kind,
        "who": f"{action.actor} ({'verified' if action.verified else 'not verified'})",
        "why": action.reason,
        "when": timeline.time(action.at),
        "which": ", ".join(f"{name}={value}" for name, value in action.filters.items()),
        "details": ", ".join(f"{name}={value}" for name, value in action.details.items()),
        "messages": _counts(action.counts),
        "state": _state(action.undone_by, is_cut=action.ended_at is None),
    }
    print_lines([action.name, *(f"  {word:<9} {plain(text)}" for word, text in facts.items() if text)])
    rows = [
        {"id": each.id, "state": each.state, "before": each.before, "after": each.after, "why": each.why}
        for each in shown.messages
    ]
    if rows:
        print_table(rows, below=("why",))
    if shown.next is not None:
        remark(f"there are more: --after {shown.next}")


def undo(
    name: Name,
    *,
    reach: Reached,
    reason: JournalReason = "undone",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Undo an action: each of its messages goes back to the state that it had.

    What has changed since is left alone and listed. An undo is an action too, and can be undone.

    dlqbatch undo A-17 --dry-run
    dlqbatch undo A-17 --reason "the wrong group"
    """
    from dlqbatch.actions.undo import undo as undo_action

    done = reach.store(undo_action, name, actor=actor, reason=reason, dry_run=dry_run)
    if done.action is not None and not done.changes:
        print_table([{"action": done.action, "undoes": name}], as_json=as_json)
        raise typer.Exit
    if not done.changes:
        remark(f"{name} has no message that could be put back; `dlqbatch actions show {name}` shows what became of it")
    raise typer.Exit(print_changes(done, "undone", as_json=as_json))


def _counts(counts: object) -> str:
    numbers = json_ready(counts)
    return " ".join(f"{state}={number}" for state, number in numbers.items()) if isinstance(numbers, dict) else ""


def _state(undone_by: str | None, *, is_cut: bool) -> str:
    parts = [f"undone by {undone_by}"] if undone_by else []
    return ", ".join([*parts, *(["under way, or cut off"] if is_cut else [])])
