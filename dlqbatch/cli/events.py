"""`dlqbatch events`: show and edit which events are retried, and how often."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from dlqbatch.cli.options import Actor, AsJson, Commands, DryRun, JournalReason, ScopedReach, Settings
from dlqbatch.cli.printing import print_json, print_table, remark
from dlqbatch.logs import plain

app = Commands(
    help="""The policy: which events are retried, and how often.

    dlqbatch events list
    dlqbatch events set 'payments.#' 3
    """,
)

Name = Annotated[str, typer.Argument(help="A routing key, or a topic pattern such as orders.*.created or payment.#")]

_NOT_FOUND: Final = 1


@app.command("list")
def list_events(settings: Settings, *, as_json: AsJson = False) -> None:
    """Every event of the table dlq_event_config and of application.properties, and the delays that some have.

    dlqbatch events list
    """
    from dlqbatch.drain.event_config import event_config
    from dlqbatch.topology.model import in_name

    rows: list[dict[str, object]] = [
        {"event": row.name, "max_retries": row.max_retries, "from": "table", "id": row.id}
        for row in event_config(settings).read()
    ]
    rows += [
        {"event": name, "max_retries": retries, "from": "application.properties", "id": None}
        for name, retries in settings.events.items()
    ]
    print_table(rows, as_json=as_json, columns=("event", "max_retries", "from", "id"))
    if not as_json:
        sys.stdout.write(f"An event without a number gets {settings.default_max_retries} retries.\n")
        for name, delays in settings.event_delays.items():
            sys.stdout.write(plain(f"'{name}' has the delays {', '.join(map(in_name, delays))}.") + "\n")


@app.command("set")
def set_event(
    name: Name,
    max_retries: Annotated[
        int | None, typer.Argument(help="Delayed retries after the first failure; without it, the default number.")
    ] = None,
    *,
    settings: Settings,
    reason: JournalReason = "set",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Add an event to the table, or change its number of retries.

    dlqbatch events set 'payments.#' 3
    """
    from dlqbatch.drain.event_config import event_config
    from dlqbatch.store.action_log import By

    store = event_config(settings)
    action = None
    if dry_run:
        counting = max((row.id for row in store.read() if row.name == name), default=None)
        done, row_id = "would be added" if counting is None else "would be changed", counting
    else:
        row, action = store.set(name, max_retries, By(actor, reason))
        done, row_id = "set", row.id
    shown = {"event": name, "max_retries": max_retries, "id": row_id, "done": done, "action": action}
    print_table([shown], as_json=as_json)


@app.command("remove")
def remove_event(
    name: Name,
    settings: Settings,
    *,
    reason: JournalReason = "removed",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take an event out of the table; if nothing else names it, its messages become dead letters.

    dlqbatch events remove 'payments.#'
    """
    from dlqbatch.drain.event_config import event_config
    from dlqbatch.store.action_log import By

    store = event_config(settings)
    if dry_run:
        number, action = len([row for row in store.read() if row.name == name]), None
    else:
        number, action = store.remove(name, By(actor, reason))
    word = "would be removed" if dry_run else "removed"
    word = word if number else "nothing: the table does not hold it"
    shown = {"event": name, "rows": number, "done": word, "action": action}
    print_table([shown], as_json=as_json)
    raise typer.Exit(0 if number else _NOT_FOUND)


@app.command("test")
def explain_event(
    routing_key: Annotated[str, typer.Argument(help="The routing key that a message failed with.")],
    *,
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Tell what the policy says of a routing key, and which rule says it; and after which delays it is retried.

    dlqbatch events test payments.created
    """
    from dlqbatch.drain.event_config import load_policy
    from dlqbatch.drain.event_delays import EventDelays
    from dlqbatch.topology.model import in_name

    rule = load_policy(settings).explain(routing_key)
    named = EventDelays(settings.event_delays).find(routing_key)
    delays = settings.tier_ttls if named is None else settings.event_delays[named]
    if as_json:
        shown = {
            "event": routing_key,
            "max_retries": rule.max_retries if rule else None,
            "rule": rule.name if rule else None,
            "from": rule.source if rule else None,
            "delays": [delay / 1000 for delay in delays],
            "delays_by": named,
        }
        print_table([shown], as_json=True)
    else:
        text = str(rule) if rule else "not configured, so it becomes a dead letter"
        sys.stdout.write(plain(f"'{routing_key}': {text}") + "\n")
        by = "the tiers" if named is None else f"'{named}' in application.properties"
        sys.stdout.write(plain(f"delays by {by}: {', '.join(map(in_name, delays))}; the last one repeats") + "\n")
    raise typer.Exit(0 if rule else _NOT_FOUND)


@app.command("simulate")
def simulate_events(
    numbers: Annotated[
        list[str], typer.Argument(metavar="NAME=N", help="An event or a topic pattern, and its number of retries.")
    ],
    *,
    reach: ScopedReach,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="What was ingested then or later: 7d, yesterday, or a date.")
    ] = "7d",
    as_json: AsJson = False,
) -> None:
    """Show what would have become of what failed, had these events had other numbers of retries. Nothing is changed.

    Only messages that died are on record, and not those that a delayed retry has saved. A retry from the dead store
    stands for the delayed one; it came later, so that `handled` is at most so many.

    dlqbatch events simulate --since 7d 'payments.#=5' orders.created=0
    """
    from dlqbatch.drain.died_rows import numbers_of
    from dlqbatch.drain.simulate import FATES
    from dlqbatch.drain.simulate_since import simulate_since

    found = reach.run(simulate_since, numbers_of(numbers), since).as_dict()
    rows = found["events"]
    if as_json:
        print_json(found)
    else:
        print_table(rows, columns=("event", "max_retries", "messages", *FATES, "retries", "waits"))
        if not found["is_complete"]:
            remark("only the newest messages were looked at; --since with a later time looks at all since then")
    raise typer.Exit(0 if rows else _NOT_FOUND)
