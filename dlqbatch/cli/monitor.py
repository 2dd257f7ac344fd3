"""`dlqbatch monitor`: one run that measures, and tells who has to know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from dlqbatch.cli.choices import AsJson, Config, DryRun, Settings, overrides
from dlqbatch.cli.job import run_job

Prometheus: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--prometheus", metavar="FILE", help="Also write the metrics there, for the textfile collector of Prometheus."
    ),
]


def monitor(
    settings: Settings = None,
    config: Config = None,
    *,
    prometheus: Prometheus = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Measure the dead store; fire and end alerts, and tell of them. It needs no broker."""
    given = {"prometheus_file": None if prometheus is None else str(prometheus)}
    raise typer.Exit(run_job("monitor", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))
