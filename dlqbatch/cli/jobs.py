"""`dlqbatch drain`, `ingest`, `check`, `lifecycle`, `retain` and `monitor`: one run of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from dlqbatch.cli.options import (
    AsJson,
    Config,
    DryRun,
    MaxBytes,
    MaxMessages,
    MaxSeconds,
    Prometheus,
    Settings,
    list_of,
    overrides,
)
from dlqbatch.cli.run import run_job
from dlqbatch.settings.sources import Spelled


def drain(
    settings: Settings = None,
    config: Config = None,
    *,
    max_messages: MaxMessages = None,
    max_bytes: MaxBytes = None,
    max_seconds: MaxSeconds = None,
    allow_empty_policy: Annotated[
        bool,
        typer.Option(
            "--allow-empty-policy",
            help="Run although not a single event is configured: every failed message becomes a dead letter.",
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take what failed and decide by the policy: delay it, return it, or dead-letter it.

    dlqbatch drain --dry-run
    dlqbatch drain --max-messages 1000
    """
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    given["allow_empty_policy"] = allow_empty_policy or None
    raise typer.Exit(run_job("drain", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))


def ingest(
    queues: Annotated[
        list[str] | None,
        typer.Argument(help="Dead-letter queues, or wildcards such as 'dlq.*'; else as the setting says."),
    ] = None,
    settings: Settings = None,
    config: Config = None,
    *,
    max_messages: MaxMessages = None,
    max_bytes: MaxBytes = None,
    max_seconds: MaxSeconds = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take dead letters out of their queues into the dead store: committed first, then acknowledged.

    dlqbatch ingest
    dlqbatch ingest 'dlq.*' --dry-run
    """
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    given["ingest_queues"] = list_of(queues)
    raise typer.Exit(run_job("ingest", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))


def check(
    queues: Annotated[
        list[str] | None,
        typer.Argument(help="Queues, or wildcards such as 'dlq.*'; else as the setting says."),
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
    """Look at every message once: move what has failed too often to another queue, leave the rest in its place.

    dlqbatch check orders.dlq --max-deaths 5 --to dead.orders --dry-run
    """
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    given |= {"check_queues": list_of(queues), "check_max_deaths": max_deaths, "check_target": to}
    given["allow_delivery_cost"] = allow_delivery_cost or None
    raise typer.Exit(run_job("check", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))


def lifecycle(
    settings: Settings = None,
    config: Config = None,
    *,
    max_messages: MaxMessages = None,
    max_bytes: MaxBytes = None,
    max_seconds: MaxSeconds = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send dead messages whose time has come again, and resolve those that stayed away.

    dlqbatch lifecycle --dry-run
    dlqbatch lifecycle
    """
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    raise typer.Exit(run_job("lifecycle", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))


def retain(
    settings: Settings = None,
    config: Config = None,
    *,
    max_messages: Annotated[
        int | None, typer.Option(help="Archive or delete at most so many messages; without it, all.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Begin nothing after so many seconds.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete what was resolved long ago; move what failed long ago to cold storage, verified before anything goes.

    dlqbatch retain --dry-run
    dlqbatch retain --max-messages 10000
    """
    given: dict[str, object] = {
        Spelled("retain_max_messages", "--max-messages"): max_messages,
        Spelled("retain_max_seconds", "--max-seconds"): max_seconds,
    }
    raise typer.Exit(run_job("retain", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))


def monitor(
    settings: Settings = None,
    config: Config = None,
    *,
    prometheus: Prometheus = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Measure the dead store; fire and end alerts, and tell of them. It needs no broker.

    dlqbatch monitor
    dlqbatch monitor --prometheus /var/lib/node_exporter/dlqbatch.prom
    """
    given = {"prometheus_file": None if prometheus is None else str(prometheus)}
    raise typer.Exit(run_job("monitor", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))
