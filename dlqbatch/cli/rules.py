"""`dlqbatch rules`: show and edit which strategy the lifecycle gives a failure."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from dlqbatch.cli.options import ROW_ID, Actor, AsJson, Commands, DryRun, JournalReason, Settings
from dlqbatch.cli.printing import NOTHING, print_json, print_lines, print_table, remark
from dlqbatch.logs import plain
from dlqbatch.store.states import On, Strategy

app = Commands(
    help="""The rules: which strategy the lifecycle gives a failure.

    dlqbatch rules list
    dlqbatch rules test --type TimeoutError
    """,
)

Name: TypeAlias = Annotated[str, typer.Argument(help="The rule's name.")]
LookOn: TypeAlias = Annotated[
    On | None,
    typer.Option("--on", metavar="WHERE", help="Look at the type of the error, at its text, or at any of both."),
]
Chosen: TypeAlias = Annotated[Strategy | None, typer.Option("--strategy", help="What becomes of what it finds.")]

_LONGEST_PATTERN = 100
_COLUMNS = ("position", "name", "on", "pattern", "strategy")


@app.command("list")
def list_rules(settings: Settings, *, as_json: AsJson = False) -> None:
    """List the rules in the order they are asked; the first that matches decides, and without one it is manual.

    dlqbatch rules list
    """
    from dlqbatch.lifecycle.job import rule_store

    rules, broken = rule_store(settings).read()
    if as_json:
        print_json(
            [{**{column: getattr(rule, column) for column in _COLUMNS}, "problem": None} for rule in rules]
            + [{**dict.fromkeys(_COLUMNS), "name": rule.name, "problem": rule.problem} for rule in broken]
        )
        return
    columns = ("position", "name", "on", "strategy")
    rows = [
        {column: getattr(rule, column) for column in columns} | {"pattern": plain(rule.pattern, _LONGEST_PATTERN)}
        for rule in rules
    ]
    if rows:
        print_table(rows)
    else:
        remark("there is no rule, so every failure is manual")
    for each in broken:
        remark(f"the rule '{each.name}' is left out: {each.problem}")


@app.command("set")
def set_rule(
    name: Name,
    *,
    settings: Settings,
    on: LookOn = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern", metavar="REGEX", help="A regular expression, found anywhere, in small or capital letters."
        ),
    ] = None,
    strategy: Chosen = None,
    position: Annotated[
        int | None, typer.Option("--position", help="The lowest is asked first. Without it, a new rule is the first.")
    ] = None,
    reason: JournalReason = "set",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Add a rule, or change one: of a rule that is there, what is not given stays as it is.

    A pattern that is no regular expression, or that could take too long, is refused. A new rule needs a pattern and a
    strategy; it looks at type and text, and goes to the front, unless told otherwise.

    dlqbatch rules set limited --pattern "rate limit|429" --strategy scheduled
    """
    from dlqbatch.lifecycle.job import rule_store
    from dlqbatch.store.action_log import By

    rules, by = rule_store(settings), By(actor, reason)
    done = rules.set(name, on=on, pattern=pattern, strategy=strategy, position=position, dry_run=dry_run, by=by)
    word = "added" if done.is_new else "changed"
    shown = {column: getattr(done.rule, column) for column in _COLUMNS}
    shown |= {"done": f"would be {word}" if dry_run else word, "action": done.action}
    print_table([shown], as_json=as_json)


@app.command("remove")
def remove_rule(
    name: Name,
    settings: Settings,
    *,
    reason: JournalReason = "removed",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove a rule; what only it knew is manual then.

    dlqbatch rules remove limited
    """
    from dlqbatch.lifecycle.job import rule_store
    from dlqbatch.store.action_log import By

    rules = rule_store(settings)
    removed = rules.remove(name, dry_run=dry_run, by=By(actor, reason))
    if removed is None:
        similar = rules.like(name)
        if as_json:
            print_json([{"name": name, "done": "there is no such rule", "similar": similar}])
        hint = f"did you mean {' or '.join(similar)}?" if similar else "`dlqbatch rules list` shows what there is"
        remark(f"there is no rule '{name}'; {hint}")
        raise typer.Exit(NOTHING)
    shown = {"name": name, "done": "would be removed" if dry_run else "removed", "action": removed.action}
    print_table([shown], as_json=as_json)


@app.command("test")
def explain_failure(
    *,
    settings: Settings,
    error_type: Annotated[str | None, typer.Option("--type", metavar="TYPE", help="The type of an error.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="The text of an error.")] = None,
    row_id: Annotated[
        int | None,
        typer.Option("--message", metavar="ID", min=ROW_ID.min, max=ROW_ID.max, help="The error of this message."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell which rule decides about an error, and which others would without it; nothing is changed.

    dlqbatch rules test --type TimeoutError --text "timed out after 3000 ms"
    dlqbatch rules test --message 4711
    """
    if (row_id is None) == (error_type is None and text is None):
        raise typer.BadParameter("give an error with --type and --text, or a message with --message")
    from dlqbatch.lifecycle.job import rule_store

    rules = rule_store(settings)
    answer = rules.test(error_type, text) if row_id is None else rules.test_message(row_id)
    if as_json:
        print_json(
            {
                "type": answer.error_type,
                "text": answer.message,
                "strategy": answer.strategy,
                "rule": answer.rule,
                "matches": [
                    {"rule": each.rule.name, "strategy": each.rule.strategy, "on": each.on, "found": each.found}
                    for each in answer.matches
                ],
                "warnings": answer.warnings,
            }
        )
    elif answer.matches:
        first, *others = answer.matches
        print_lines(
            [f"{answer.strategy}, by the rule '{plain(answer.rule)}': its {first.on} has '{plain(first.found)}'"]
        )
        print_lines(
            f"  without it: {each.rule.strategy}, by '{plain(each.rule.name)}': its {each.on} has '{plain(each.found)}'"
            for each in others
        )
    else:
        print_lines([f"{answer.strategy}, because no rule knows it"])
    for warning in answer.warnings:
        remark(warning)
    raise typer.Exit(0 if answer.matches else NOTHING)
