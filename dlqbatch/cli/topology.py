"""`dlqbatch topology`: what has to be on the broker."""

from __future__ import annotations

from typing import Annotated

import typer

from dlqbatch import wiring
from dlqbatch.cli import table
from dlqbatch.cli.choices import AsJson, Config, DryRun, Settings, configured
from dlqbatch.topology.ladder import demonstration as test_queues

app = typer.Typer(help="Exchanges, queues and bindings on the broker.", no_args_is_help=True)


@app.command()
def apply(
    settings: Settings = None,
    config: Config = None,
    *,
    demonstration: Annotated[
        bool, typer.Option("--demonstration", help="Also the three test queues of the demo.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Declare the ladder and list it; what is there already is left alone, and what differs is an error.

    With --dry-run it is only listed, without a look at the broker.
    """
    loaded = configured(settings, config)
    ladder = wiring.ladder_of(loaded)
    topology = ladder.topology() + test_queues(ladder) if demonstration else ladder.topology()
    if not dry_run:
        wiring.apply_topology(loaded, with_demonstration=demonstration)
    exchanges = [{"kind": "exchange", "name": one.name, "type": one.type} for one in topology.exchanges]
    queues = [{"kind": "queue", "name": one.name, "arguments": dict(one.arguments)} for one in topology.queues]
    bindings = [
        {"kind": "binding", "exchange": one.exchange, "key": one.key, "queue": one.queue} for one in topology.bindings
    ]
    if as_json:
        table.show([*exchanges, *queues, *bindings], (), as_json=True)
        return
    table.show(exchanges, ("kind", "name", "type"), as_json=False)
    in_words = [" ".join(f"{name}={value}" for name, value in one.arguments.items()) for one in topology.queues]
    readable = [{**queue, "arguments": words} for queue, words in zip(queues, in_words, strict=True)]
    table.show(readable, ("kind", "name", "arguments"), as_json=False)
    table.show(bindings, ("kind", "exchange", "key", "queue"), as_json=False)
