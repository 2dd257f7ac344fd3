"""`dlqbatch events`: show and edit which events are retried, and how often."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from dlqbatch.cli.options import AsJson, Commands, DryRun, Settings
from dlqbatch.cli.printing import print_table
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
    """Every event of the table dlq_event_config and of application.properties.

    dlqbatch events list
    """
    from dlqbatch.drain.event_config import event_config

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


@app.command("set")
def set_event(
    name: Name,
    max_retries: Annotated[
        int | None, typer.Argument(help="Delayed retries after the first failure; without it, the default number.")
    ] = None,
    *,
    settings: Settings,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Add an event to the table, or change its number of retries.

    dlqbatch events set 'payments.#' 3
    """
    from dlqbatch.drain.event_config import event_config

    store = event_config(settings)
    if dry_run:
        counting = max((row.id for row in store.read() if row.name == name), default=None)
        done, row_id = "would be added" if counting is None else "would be changed", counting
    else:
        done, row_id = "set", store.set(name, max_retries).id
    shown = {"event": name, "max_retries": max_retries, "id": row_id, "done": done}
    print_table([shown], as_json=as_json)


@app.command("remove")
def remove_event(name: Name, settings: Settings, *, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Take an event out of the table; if nothing else names it, its messages become dead letters.

    dlqbatch events remove 'payments.#'
    """
    from dlqbatch.drain.event_config import event_config

    store = event_config(settings)
    number = len([row for row in store.read() if row.name == name]) if dry_run else store.remove(name)
    word = "would be removed" if dry_run else "removed"
    shown = {"event": name, "rows": number, "done": word if number else "nothing: the table does not hold it"}
    print_table([shown], as_json=as_json)
    raise typer.Exit(0 if number else _NOT_FOUND)


@app.command("test")
def explain_event(
    routing_key: Annotated[str, typer.Argument(help="The routing key that a message failed with.")],
    *,
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Tell what the policy says of a routing key, and which rule says it.

    dlqbatch events test payments.created
    """
    from dlqbatch.drain.event_config import load_policy

    rule = load_policy(settings).explain(routing_key)
    if as_json:
        shown = {
            "event": routing_key,
            "max_retries": rule.max_retries if rule else None,
            "rule": rule.name if rule else None,
            "from": rule.source if rule else None,
        }
        print_table([shown], as_json=True)
    else:
        text = str(rule) if rule else "not configured, so it becomes a dead letter"
        sys.stdout.write(plain(f"'{routing_key}': {text}") + "\n")
    raise typer.Exit(0 if rule else _NOT_FOUND)
