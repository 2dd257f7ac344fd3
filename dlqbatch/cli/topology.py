"""`dlqbatch topology`: compare, declare, export and delete exchanges, queues and bindings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from dlqbatch import settings as configuration
from dlqbatch.cli.options import AsJson, Commands, DryRun, MadeBy, Settings
from dlqbatch.cli.printing import PARTIAL, USAGE, print_json, print_table, remark
from dlqbatch.logs import plain
from dlqbatch.settings.options import Entry
from dlqbatch.settings.topologies import default_ladder as ladder_of
from dlqbatch.settings.topologies import from_options
from dlqbatch.topology.kinds import Kind, whole
from dlqbatch.topology.kinds import demonstration as test_queues
from dlqbatch.topology.plan import NOT_KNOWN, REFUSED, SAME, TO_CREATE, Plan

if TYPE_CHECKING:  # it needs the broker, which a help page does not
    from dlqbatch.topology.job import Applied

app = Commands(
    help="""Exchanges, queues and bindings on the broker.

    dlqbatch topology plan
    dlqbatch topology apply
    """,
)

_SIGNS: Final = {"to create": "+", "the same": " ", "different": "!", "not known": "?", "refused": "x"}
_CHANGED: Final = "changed"
_DECLARED: Final = "declared"
"""The word for a part that may have been there before. AMQP cannot ask for a binding, and not every login may ask."""
_DONE: Final = {TO_CREATE: "created", SAME: "the same", NOT_KNOWN: _DECLARED}
_REFUSED: Final = 1
_NEEDED: Final = {"per-queue": ("queue", "exchange"), "pipeline": ("exchange",), "native": ("queue",)}
"""What a topology needs that is described with the call."""

What: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WHAT",
        help="ladder, per-queue, pipeline, native, or a NAME in application.properties; without it all that is there.",
    ),
]


def _described(
    *,
    queue: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Describe a per-queue set, a pipeline or a native here: its queue."),
    ] = None,
    exchange: Annotated[str | None, typer.Option(metavar="NAME", help="And its exchange.")] = None,
    exchange_type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="And the type of its exchanges: topic or direct.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="DELAY", help="And its delay, in milliseconds or such as 30s.")
    ] = None,
    quorum: Annotated[bool, typer.Option("--quorum", help="And that its queues are quorum queues.")] = False,
    no_delay: Annotated[bool, typer.Option("--no-delay", help="And that it has no delay queue.")] = False,
    delayed_retry_min: Annotated[
        str | None,
        typer.Option(
            metavar="DELAY", help="And, for a native or a pipeline, the broker's delay after the first failure."
        ),
    ] = None,
    delayed_retry_max: Annotated[
        str | None, typer.Option(metavar="DELAY", help="And the longest of these delays.")
    ] = None,
    delivery_limit: Annotated[
        str | None, typer.Option(metavar="N", help="And, for a native, the number of retries.")
    ] = None,
) -> dict[str, Entry]:
    options = {
        "queue": ("--queue", queue),
        "exchange": ("--exchange", exchange),
        "exchange-type": ("--type", exchange_type),
        "ttl": ("--ttl", ttl),
        "queue-type": ("--quorum", "quorum" if quorum else None),
        "delay": ("--no-delay", "false" if no_delay else None),
        "delayed-retry-min": ("--delayed-retry-min", delayed_retry_min),
        "delayed-retry-max": ("--delayed-retry-max", delayed_retry_max),
        "delivery-limit": ("--delivery-limit", delivery_limit),
    }
    return {
        option: Entry(flag, "command line", value) for option, (flag, value) in options.items() if value is not None
    }


Described: TypeAlias = Annotated[dict[str, Entry], MadeBy(_described)]
"""The topology that the options describe, by the names that the options have in application.properties."""


@app.command()
def plan(what: What = None, *, settings: Settings, described: Described, as_json: AsJson = False) -> None:
    """Show what `apply` would do: what is to create, what is the same, and what differs; nothing is changed.

    dlqbatch topology plan
    """
    from dlqbatch.topology import job

    compared = job.plan(settings, _chosen(settings, what, described))
    _show_plan(compared.plan, as_json=as_json)
    for item in compared.plan.of(REFUSED):
        remark(f"{item.name}: {item.why}")
    _hint_at_delays(compared)
    raise typer.Exit(0 if compared.is_done else PARTIAL)


@app.command()
def apply(
    what: What = None,
    *,
    settings: Settings,
    described: Described,
    change_ttl: Annotated[
        bool,
        typer.Option(
            "--change-ttl",
            "--yes",
            help="Change delays that differ. It waits for the old and the new delay; cut off, it can be run again.",
        ),
    ] = False,
    demonstration: Annotated[
        bool, typer.Option("--demonstration", help="Also the three test queues of the demo.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Declare what is missing, and list it all; what differs is an error, unless it is a delay and --change-ttl is set.

    Each part is listed as created, changed or the same; as declared, where the broker does not tell whether it was
    there. With --dry-run it is only listed, without a look at the broker; `topology plan` looks.

    dlqbatch topology apply
    dlqbatch topology apply per-queue --queue orders --exchange shop --ttl 30s
    """
    from dlqbatch.topology import job

    kinds = _chosen(settings, what, described)
    applied = None
    if not dry_run:
        applied = job.apply(
            settings,
            kinds,
            change_ttl=change_ttl,
            with_demonstration=demonstration,
            report=lambda name, step: remark(f"{name}: {step}"),
        )
        if not applied.is_done:
            _show_plan(applied.plan, as_json=as_json)
            _hint_at_delays(applied)
            raise typer.Exit(USAGE)
    topology = whole(kinds)
    if demonstration:
        topology += test_queues(ladder_of(settings))
    # Rows of each kind, each with the name of its part.
    parts: tuple[list[tuple[dict[str, object], str]], ...] = (
        [({"kind": "exchange", "name": each.name, "type": each.type}, each.name) for each in topology.exchanges],
        [
            ({"kind": "queue", "name": each.name, "arguments": dict(each.arguments)}, each.name)
            for each in topology.queues
        ],
        [
            ({"kind": "binding", "exchange": each.exchange, "key": each.key, "queue": each.queue}, each.in_words)
            for each in topology.bindings
        ],
        [
            ({"kind": "policy", "name": each.name, "queue": each.queue, "definition": dict(each.definition)}, each.name)
            for each in topology.policies
        ],
    )
    if described and what:
        remark(
            f"for `dlqbatch drain` to know of it, describe it in application.properties: {_lines(what[0], described)}"
        )
    if as_json:
        print_json([row for rows in parts for row, _ in rows])
        return
    done = {} if applied is None else _done(applied)
    for rows in parts:
        shown = [
            {**_readable(row), **({"done": done.get((row["kind"], name), _DECLARED)} if applied is not None else {})}
            for row, name in rows
        ]
        if shown:
            print_table(shown, below=("arguments", "definition"))


@app.command()
def export(
    what: What = None,
    *,
    settings: Settings,
    described: Described,
    broker_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="For a broker of this version, such as 3.13 or 4.1; else the broker is asked for its own.",
        ),
    ] = None,
    _as_json: AsJson = False,
) -> None:
    """Print definitions for the broker's own import (`rabbitmqctl import_definitions FILE`), as JSON.

    dlqbatch topology export --broker-version 4.1
    """
    from dlqbatch.topology import job

    kinds = _chosen(settings, what, described)
    version = None
    if broker_version is not None:
        numbers = broker_version.split(".")
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            raise typer.BadParameter("it is a version such as 3.13 or 4.1", param_hint="--broker-version")
        version = tuple(int(number) for number in numbers)
    print_json(job.export(settings, kinds, version))


@app.command()
def delete(
    what: What = None,
    *,
    settings: Settings,
    described: Described,
    with_messages: Annotated[
        bool, typer.Option("--with-messages", help="Also queues that hold messages, which are lost.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete what a topology has made, and the ways back to queues that are gone; nothing if any part is still in use.

    What another topology of application.properties shares stays.

    dlqbatch topology delete ladder --dry-run
    """
    if not what:
        raise typer.BadParameter("say what is to be deleted: a kind, or the NAME of a topology", param_hint="WHAT")
    if not yes and not dry_run:
        raise typer.BadParameter("it deletes queues: look with --dry-run, then add --yes", param_hint="--yes")
    from dlqbatch.topology import job

    kinds = _chosen(settings, what, described)
    done = job.delete(settings, kinds, with_messages=with_messages, dry_run=dry_run)
    rows = [each.as_dict() for each in done]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows)
    in_the_way = sum(1 for each in done if each.why)
    gone = sum(1 for each in done if each.is_gone)
    if not as_json:
        remark(f"{len(done) - in_the_way} would be deleted, {in_the_way} in the way" if dry_run else f"{gone} deleted")
    raise typer.Exit((PARTIAL if gone else _REFUSED) if in_the_way else 0)


def _readable(row: Mapping[str, object]) -> dict[str, object]:
    return {
        column: " ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else value
        for column, value in row.items()
    }


def _done(applied: Applied) -> dict[tuple[object, str], str]:
    """What `apply` did to each part, by the part's kind and name."""
    done: dict[tuple[object, str], str] = {
        (item.kind, item.name): _DONE.get(item.state, _CHANGED) for item in applied.plan.items
    }
    return done | {("queue", name): _CHANGED for name in applied.delays}


def _chosen(
    settings: configuration.Settings, what: Sequence[str] | None, described: dict[str, Entry]
) -> tuple[Kind, ...]:
    if not described:
        from dlqbatch.topology.job import choose

        return choose(settings, what or ())
    if what not in (["per-queue"], ["pipeline"], ["native"]):
        flag = next(iter(described.values())).key
        raise typer.BadParameter(
            "it describes a `per-queue` set, a `pipeline` or a `native`: say which of them", param_hint=flag
        )
    for option in _NEEDED[what[0]]:
        if option not in described:
            raise typer.BadParameter(f"a {what[0]} needs it", param_hint=f"--{option}")
    return (from_options(what[0], described, settings),)


def _lines(kind: str, described: dict[str, Entry]) -> str:
    pairs = {"kind": kind, **{option: str(entry.value) for option, entry in described.items()}}
    return ", ".join(f"dlqbatch.topology.NAME.{option}={value}" for option, value in pairs.items())


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print_json([item.as_dict() for item in plan.items])
        return
    for item in plan.items:
        sys.stdout.write(plain(f"{_SIGNS[item.state]} {item.kind:<8} {item.name}  ({item.state})") + "\n")
        for difference in item.differences:
            text = f"    {difference.argument}: found {difference.found}, wanted {difference.wanted}"
            sys.stdout.write(plain(text) + "\n")


def _hint_at_delays(applied: Applied) -> None:
    if applied.left_behind:
        remark(
            f"{', '.join(applied.left_behind)}: of delays that the settings have no more. What waits there comes back "
            "at its time; `dlqbatch doctor` prints how to delete each once it is empty"
        )
    if applied.is_done:
        return
    if applied.is_marked:
        remark(
            "a change of a delay is under way, or was cut off, and until it is done no run declares anything: if "
            "nobody is at it, `dlqbatch topology apply --change-ttl` ends it"
        )
    elif applied.delays:
        remark(
            f"the delay of {', '.join(applied.delays)} is to be changed: `dlqbatch topology apply --change-ttl` "
            "empties each queue first, which takes as long as the old and the new delay, and loses nothing"
        )
