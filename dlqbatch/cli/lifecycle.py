"""`dlqbatch lifecycle`."""

from __future__ import annotations

import typer

from dlqbatch.cli.choices import AsJson, Config, DryRun, MaxBytes, MaxMessages, MaxSeconds, Settings, overrides
from dlqbatch.cli.job import run_job


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
    """Send dead messages whose time has come again, and resolve those that stayed away."""
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    raise typer.Exit(run_job("lifecycle", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))
