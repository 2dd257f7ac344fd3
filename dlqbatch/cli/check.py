"""`dlqbatch check`: move what has failed too often, leave the rest where it is."""

from __future__ import annotations

from typing import Annotated

import typer

from dlqbatch.cli.choices import AsJson, Config, DryRun, MaxBytes, MaxMessages, MaxSeconds, Settings, list_of, overrides
from dlqbatch.cli.job import run_job


def check(
    queues: Annotated[
        list[str] | None, typer.Argument(help="Queues, or wildcards such as 'dlq.*'; else as the setting says.")
    ] = None,
    settings: Settings = None,
    config: Config = None,
    *,
    max_deaths: Annotated[
        int | None, typer.Option(help="Move what has failed more often than this; else as the setting says.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="Where to move it; 'dead.*' takes what the source's * stood for. Declared if missing."
        ),
    ] = None,
    max_messages: MaxMessages = None,
    max_bytes: MaxBytes = None,
    max_seconds: MaxSeconds = None,
    allow_delivery_cost: Annotated[
        bool,
        typer.Option(
            "--allow-delivery-cost",
            help="Look through quorum queues although it can cost the messages a delivery of their limit.",
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Look at every message once: move what has failed too often to another queue, leave the rest in its place."""
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    given |= {"check_queues": list_of(queues), "check_max_deaths": max_deaths, "check_target": to}
    given["allow_delivery_cost"] = allow_delivery_cost or None
    raise typer.Exit(run_job("check", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))
