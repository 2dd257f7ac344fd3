"""From settings to a finished run: the one room that knows every adapter.

Here is what every run needs. What one job needs alone is loaded with the job; replays, topologies and the doctor are
asked for by their own modules.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.cloud.events import Ignored, Request, understand
from dlqbatch.deadstore.run_log import RunRecord, record
from dlqbatch.errors import BrokerUnreachable, DatabaseRefused, SettingsError
from dlqbatch.wiring import secrets
from dlqbatch.wiring.access import broker_parameters
from dlqbatch.wiring.embedded import print_metrics
from dlqbatch.wiring.ladders import apply_topology, ladder_of
from dlqbatch.wiring.occasion import Occasion
from dlqbatch.wiring.stores import dead_store, editing, event_config, load_policy, migrations, rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings

log = logs.get(__name__)

__all__ = [
    "JOBS",
    "RUN_OPTIONS",
    "Ignored",
    "Occasion",
    "Request",
    "apply_topology",
    "broker_parameters",
    "dead_store",
    "editing",
    "event_config",
    "ladder_of",
    "load_policy",
    "migrations",
    "print_metrics",
    "rules",
    "run",
    "understand",
]

_LOGGED: Final = frozenset({"job", "outcome", "stopped_by", "dry_run", "counts", "reasons", "elapsed_seconds"})

_LONGEST_NAME: Final = 60

JOBS: Final = ("drain", "ingest", "check", "lifecycle", "retain", "monitor")
"""Each is the function of this name in the module of this name, loaded by the run that needs it."""

RUN_OPTIONS: Final = (
    *("max_messages", "max_bytes", "max_seconds", "allow_empty_policy"),
    *("check_queues", "check_max_deaths", "check_target", "allow_delivery_cost"),
)
"""Settings that an event may change for one run; `dry_run` is understood beside them."""


def run(
    job: str, settings: Settings, occasion: Occasion, *, read_again: Callable[[], Settings] | None = None
) -> Report:
    """One run of a job; its report is logged and returned.

    `read_again` reads the settings as they were read before. If nobody is let in, and a secret has other addresses or
    passwords by now, the run is repeated with them, once; the report is of the repeated one.
    """
    if job not in JOBS:
        # Anything may have been pasted there, also an address with its password.
        named = "of the name that was given" if "@" in job or "://" in job else f"'{logs.plain(job, _LONGEST_NAME)}'"
        raise SettingsError(f"there is no job {named}; the jobs are: {', '.join(JOBS)}")
    # Whatever else a cold start would import, no run of this job would use.
    act: Callable[[Settings, Occasion], Report] = getattr(import_module(f"{__name__}.{job}"), job)
    for warning in settings.warnings:
        log.warning("settings", problem=warning)
    began = time.monotonic()
    try:
        report = act(settings, occasion)
    except (BrokerUnreachable, DatabaseRefused) as refused:
        # Safe to repeat, as every run is: refused at its beginning, it has taken nothing; later, it has put back what
        # it took, or left it where the next run finds it.
        settings = secrets.renewed(settings, read_again, refused)
        report = act(settings, occasion.now())
    if not occasion.dry_run:
        report = replace(report, warnings=(*report.warnings, *_keep(settings, report, began)))
    for warning in report.warnings:
        log.warning(warning, job=job)
    log.info("run", failure=None, **{key: value for key, value in report.as_dict().items() if key in _LOGGED})
    return report


def _keep(settings: Settings, report: Report, began: float) -> tuple[str, ...]:
    """Put the run into the log of runs, if the database keeps one; a warning if it should have and could not."""
    told = replace(report, details={}).as_dict()  # a monitor's figures, once a minute for a month, would add up
    # Both by the clock as it is now, which the log compares with the database's: it may have been set meanwhile.
    ended = datetime.now(UTC)
    started = ended - timedelta(seconds=time.monotonic() - began)
    run = RunRecord(report.job, started, ended, report.outcome, report.stopped_by, report.emptied, told)
    kept = record(settings.database_url.get_secret_value(), run)
    if kept.is_refused and settings.secret is not None:
        secrets.stale(settings.secret)
    return () if kept.warning is None else (kept.warning,)
