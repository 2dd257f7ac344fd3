"""`dlqbatch retain`: what is over is deleted or goes to cold storage."""

from __future__ import annotations

from typing import Annotated

import typer

from dlqbatch.cli.choices import AsJson, Config, DryRun, Settings, overrides
from dlqbatch.cli.job import run_job


def retain(
    settings: Settings = None,
    config: Config = None,
    *,
    max_messages: Annotated[
        int | None, typer.Option(help="Archive or delete at most so many messages; else as the setting says.")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Begin nothing after so many seconds.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete what was resolved long ago; move what failed long ago to cold storage, verified before anything goes."""
    given = {"max_messages": max_messages, "max_seconds": max_seconds}
    raise typer.Exit(run_job("retain", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))
