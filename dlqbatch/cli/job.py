"""A job run by hand, from cron or in a container: signals, the report on stdout, an exit code that means something."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from dlqbatch import logs, wiring
from dlqbatch.cli.configuration import settings_from
from dlqbatch.cli.failure import PARTIAL, failed, tell_job
from dlqbatch.cli.progress import Progress
from dlqbatch.cli.watchdog import Watchdog
from dlqbatch.errors import DlqbatchError
from dlqbatch.runs.report import LEFT

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings

_LONGEST_LINE: Final = 500
_BY_QUEUE: Final = "queues"
"""The details whose keys are names of queues, not of our own."""
ONE_WISH: Final = 1.0
"""Seconds in which SIGTERM twice is one: `timeout 60 dlqbatch …` sends it to the process, and to its group with it."""


def run_job(
    job: str | None,
    options: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """The exit code; `job` None is the one that the settings name."""
    progress = Progress()
    occasion = wiring.Occasion(dry_run=dry_run, stopped=on_signal(), progress=progress)
    try:
        read = partial(settings_from, options or {}, config)
        settings = read()
        tell_job(job or settings.job)
        with Watchdog.of(settings, occasion.stopped, as_json=as_json) as watchdog:

            def read_again() -> Settings:
                watchdog.from_now()  # a run that is repeated has its whole time
                return read()

            report = wiring.run(job or settings.job, settings, occasion, read_again=read_again)
    except DlqbatchError as error:
        progress.end()
        return failed(error, as_json=as_json)
    progress.end()
    show(report, as_json=as_json)
    return {"ok": 0, "partial": PARTIAL}.get(report.outcome, 1)


def on_signal() -> _Stop:
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.ask)
    return stop


class _Stop:
    """Asks for the end at the first signal; a second one ends at once."""

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def ask(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif number != signal.SIGTERM or now - self._asked_at > ONE_WISH:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __call__(self) -> bool:
        return self._asked_at is not None


_LEFT_WHERE: Final = {
    "drain": ("its queue", "docs/drain.md"),
    "ingest": ("its queue", "docs/ingest.md"),
    "lifecycle": ("the dead store", "docs/lifecycle.md"),
    "retain": ("the dead store", "docs/retention.md"),
    "replay": ("the dead store", "docs/replay.md"),
}


def show(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
        return
    kind = "dry run of " if report.dry_run else ""
    sys.stdout.write(
        f"{kind}{report.job}: {report.outcome}, stopped by {report.stopped_by}, "
        f"{report.elapsed_seconds:.2f} s, {report.per_second:g}/s\n"
    )
    for name, number in report.counts.items():
        if number or name == "got":
            sys.stdout.write(f"  {name.replace('_', ' '):<16}{number:>9}\n")
    if report.reasons:
        sys.stdout.write("  by reason\n")
    for reason, number in report.reasons.items():
        sys.stdout.write(f"    {reason:<20}{number:>9}\n")
    _show_details(report.details)
    for line in report.preview:
        why = f" ({line['reason']})" if line["reason"] else ""
        text = f"{line['queue']}: {line['event']} from {line['origin']} -> {line['decision'].replace('_', ' ')}{why}"
        sys.stdout.write(logs.plain(f"  {text} by exchange '{line['exchange']}', key '{line['key']}'") + "\n")
    unlisted = report.counts["got"] - report.counts[LEFT] - len(report.preview)
    if report.preview and unlisted > 0:
        sys.stdout.write(f"  … and {unlisted:,} more\n")
    if report.counts.get(LEFT) and not report.dry_run and report.job in _LEFT_WHERE:
        where, page = _LEFT_WHERE[report.job]
        sys.stdout.write(f"  note: what was left is still in {where}; {page} tells what each reason asks for\n")
    for warning in report.warnings:
        sys.stdout.write(logs.plain(f"  note: {logs.masked(warning)}") + "\n")


def _show_details(details: Mapping[str, object]) -> None:
    """A name and a value on each line; a list of alerts or the like by its summaries; nothing that is empty."""
    for name, value in details.items():
        if isinstance(value, Mapping):
            flat = {key: _on_one_line(item) for key, item in value.items() if not isinstance(item, list)}
            for key, text in flat.items():
                if text:
                    shown = key if name == _BY_QUEUE else key.replace("_", " ")
                    sys.stdout.write(logs.plain(f"  {shown:<24} {text}", _LONGEST_LINE) + "\n")
            told: dict[object, str] = {}
            for key, items in value.items():
                for item in items if isinstance(items, list) else ():
                    if isinstance(item, Mapping) and "summary" in item:
                        told.setdefault(item["summary"], key)  # what has just fired is active too
            lines = (logs.plain(f"  {key}: {summary}", _LONGEST_LINE) for summary, key in told.items())
            sys.stdout.writelines(f"{line}\n" for line in lines)
        else:
            sys.stdout.write(logs.plain(f"  {name.replace('_', ' '):<24} {value}", _LONGEST_LINE) + "\n")


def _on_one_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_on_one_line(item)}" for key, item in value.items() if item)
    return "" if value is None else str(value)
