"""`dlqbatch schedule`: start the jobs at their times, each run as a process, until a signal."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from types import FrameType
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

import typer

from dlqbatch import logs
from dlqbatch import settings as configuration
from dlqbatch.cli import ONE_REQUEST_SECONDS, prepare_long_process
from dlqbatch.cli.options import AsJson, ConfigFile, DryRun, SettingPairs, load_settings, overrides
from dlqbatch.schedule.due import JOBS, Due
from dlqbatch.settings.sources import CONFIG_VARIABLE, option_named, variable

if TYPE_CHECKING:  # loaded after the handlers of signals are in place
    from dlqbatch.schedule.processes import LastRun
    from dlqbatch.schedule.scheduler import Scheduler

log = logs.get(__name__)

_TIMES_SHOWN: Final = 3
"""The next times of each job in a dry run."""
_CLOCK_CHECK_SECONDS: Final = 1.0
_NOT_IN_ORDER: Final = 1
"""The exit code after a run had to be killed, or the clock stood still."""


def schedule(
    settings: SettingPairs = None, config: ConfigFile = None, *, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Run the jobs on their own times, each run a process; more drains while the queues are deep; until a signal.

    dlqbatch schedule --dry-run
    dlqbatch schedule
    """
    # Before anything else is loaded, so that no signal is lost.
    signals: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _noting(signals))
    loaded = load_settings(settings, config)
    from dlqbatch.schedule.scheduler import Scheduler

    environment, arguments = _environment_and_arguments(overrides(settings), config)
    scheduler = Scheduler(
        loaded, environment, arguments, _RunPrinter(as_json=as_json), partial(load_settings, settings, config)
    )
    if dry_run:
        _show_plan(loaded, scheduler.due, as_json=as_json)
        return
    raise typer.Exit(_serve(scheduler, signals))


def _noting(signals: SimpleQueue[int]) -> Callable[[int, FrameType | None], None]:
    first: list[float] = []

    def note(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM and first and now - first[0] <= ONE_REQUEST_SECONDS:
            return
        first.append(now)
        signals.put(number)  # no other queue may be used in a signal handler

    return note


def _serve(scheduler: Scheduler, signals: SimpleQueue[int]) -> int:
    prepare_long_process()
    address = scheduler.start()
    log.info("scheduling", jobs=[due.job for due in scheduler.due], health=address or "off")
    received = None
    while received is None and scheduler.is_alive():
        with suppress(Empty):
            received = signals.get(timeout=_CLOCK_CHECK_SECONDS)
        scheduler.keep_time()
    if received is None:
        log.error("the clock stands still, so that nothing would be started any more; the scheduler ends")
    else:
        log.info("ending: nothing more is started, every run settles what it holds", signal=_signal_name(received))
    killed = scheduler.end(at_once=lambda: not signals.empty())
    if killed:
        log.warning("runs were killed before they had settled; what they held is back in its queue", killed=killed)
    if received is not None and not signals.empty():
        return 128 + signals.get()
    return _NOT_IN_ORDER if received is None or killed else 0


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _environment_and_arguments(stated: Mapping[str, object], config: Path | None) -> tuple[dict[str, str], list[str]]:
    """The settings of the command line for the runs, as variables if possible: `ps` shows arguments to everybody."""
    environment = dict(os.environ)
    arguments = []
    if config is not None:
        environment[CONFIG_VARIABLE] = str(config)
    for key, value in stated.items():
        option = option_named(key)
        if option is None:
            arguments += ["--set", f"{key}={value}"]  # an option of a topology, which has no variable
        else:
            environment[variable(option)] = str(value)
    return environment, arguments


class _RunPrinter:
    """Prints one line for each run that has ended; several threads may call it."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lock = Lock()

    def __call__(self, last: LastRun) -> None:
        line = json.dumps(last.as_dict()) if self._as_json else _line(last)
        # The scheduler goes on when the reader of its output is gone.
        with self._lock, suppress(OSError, ValueError):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def _line(last: LastRun) -> str:
    said = [last.outcome.replace("_", " ")]
    if not last.is_done:
        error = last.report.get("error")
        kind = f", {error.get('type')}" if isinstance(error, dict) else ""
        said = [f"{said[0]} ({f'signal {-last.code}' if last.code < 0 else f'exit code {last.code}'}{kind})"]
    said += [f"{name.replace('_', ' ')} {number}" for name, number in last.counts.items() if number]
    text = f"{last.ended:%Y-%m-%d %H:%M:%S} {last.job}: {', '.join(said)}, {last.seconds:.2f} s"
    return logs.plain(logs.masked(text))


def _show_plan(settings: configuration.Settings, due: Sequence[Due], *, as_json: bool) -> None:
    zone = ZoneInfo(settings.time_zone)
    times = {each.job: [at.astimezone(zone) for at in each.times(_TIMES_SHOWN)] for each in due}
    if as_json:
        plan = {
            "dry_run": True,
            "jobs": [
                {
                    "job": each.job,
                    "when": each.when,
                    "jitter_seconds": each.jitter.total_seconds(),
                    "next": [at.isoformat(timespec="seconds") for at in times[each.job]],
                }
                for each in due
            ],
            "trigger": {
                "depth": settings.trigger_depth,
                "interval_seconds": settings.trigger_interval.total_seconds(),
                "max_workers": settings.max_workers,
                "ingest_depth": settings.trigger_ingest_depth if "ingest" in times else 0,
                "max_ingest_workers": settings.max_ingest_workers,
            },
            "health_address": settings.health_address,
        }
        sys.stdout.write(json.dumps(plan) + "\n")
        return
    sys.stdout.write(f"dry run of schedule at {datetime.now(UTC).astimezone(zone):%Y-%m-%d %H:%M:%S %Z}\n")
    for each in due:
        late = f" (each up to {each.jitter.total_seconds():g} s later)" if each.jitter else ""
        shown = ", ".join(f"{at:%Y-%m-%d %H:%M:%S}" for at in times[each.job])
        sys.stdout.write(f"  {each.job:<10} {each.when:<12} {shown}{late}\n")
    for job in sorted(set(JOBS) - times.keys()):
        sys.stdout.write(f"  {job:<10} off\n")
    ingest_depth = settings.trigger_ingest_depth if "ingest" in times else 0
    parts = [
        f"at {depth} messages up to {most} {runs} at once"
        for runs, depth, most in (
            ("drains", settings.trigger_depth, settings.max_workers),
            ("ingests", ingest_depth, settings.max_ingest_workers),
        )
        if depth
    ]
    seconds = settings.trigger_interval.total_seconds()
    trigger = f"{', '.join(parts)}, looked at every {seconds:g} s" if parts else "off"
    sys.stdout.write(f"  {'trigger':<10} {trigger}\n")
    sys.stdout.write(f"  {'health':<10} {settings.health_address}\n")
