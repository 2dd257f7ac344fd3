"""A job run by hand, from cron or in a container: signals, the report on stdout, an exit code that means something."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from dlqbatch import jobs, logs
from dlqbatch.aws.secrets import fetch
from dlqbatch.cli import ONE_REQUEST_SECONDS, end_now
from dlqbatch.cli.failure import PARTIAL, failed, tell_job
from dlqbatch.cli.watchdog import Watchdog
from dlqbatch.errors import DlqbatchError
from dlqbatch.jobs import LEFT, Depth, Report
from dlqbatch.settings import Settings, load, secrets_of, stated_format
from dlqbatch.settings.sources import CONFIG_VARIABLE

_LONGEST_LINE: Final = 500
_QUEUES_SHOWN: Final = 20
# The keys of these details are names of queues, which are shown as they are.
_BY_QUEUE: Final = "queues"
_PROGRESS_SECONDS: Final = 0.5
"""The time between two lines of progress; a run that ends sooner shows none."""


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
    run_options = jobs.RunOptions(dry_run=dry_run, stopped=on_signal(), progress=progress)
    if job is not None:
        tell_job(job)
    try:
        read = partial(settings_from, options or {}, config)
        settings = read()
        tell_job(job or settings.job)
        with Watchdog.of(settings, job or settings.job, run_options.stopped, as_json=as_json) as watchdog:

            def read_again() -> Settings:
                watchdog.from_now()  # a run that is repeated has its whole time
                return read()

            report = jobs.run(job or settings.job, settings, run_options, read_again=read_again)
    except DlqbatchError as error:
        progress.end()
        return failed(error, as_json=as_json)
    progress.end()
    print_report(report, as_json=as_json)
    return {"ok": 0, "partial": PARTIAL}.get(report.outcome, 1)


def on_signal() -> _Stop:
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.ask)
    return stop


class _Stop:
    """Whether a signal has asked for the end; a second one ends the process at once."""

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def ask(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif number != signal.SIGTERM or now - self._asked_at > ONE_REQUEST_SECONDS:
            end_now(number)

    def __call__(self) -> bool:
        return self._asked_at is not None


_LEFT_WHERE: Final = {
    "drain": ("its queue", "docs/drain.md"),
    "ingest": ("its queue", "docs/ingest.md"),
    "lifecycle": ("the dead store", "docs/lifecycle.md"),
    "retain": ("the dead store", "docs/retention.md"),
    "replay": ("the dead store", "docs/replay.md"),
}


def print_report(report: Report, *, as_json: bool) -> None:
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
            shown = "would be sent" if report.dry_run and name == "sent" else name.replace("_", " ")
            sys.stdout.write(f"  {shown:<16}{number:>9}\n")
    if report.reasons:
        sys.stdout.write("  by reason\n")
    for reason, number in report.reasons.items():
        sys.stdout.write(f"    {reason:<20}{number:>9}\n")
    _show_queues(report.queues)
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


def _show_queues(queues: Mapping[str, Depth]) -> None:
    """The deepest first; of a queue that was empty and is empty there is nothing to say."""
    held = [(queue, depth) for queue, depth in queues.items() if depth.found or depth.left]
    held.sort(key=lambda one: one[1].left or one[1].found, reverse=True)
    if held:
        sys.stdout.write(f"  {'by queue':<16}{'found':>9}{'left':>9}\n")
    for queue, depth in held[:_QUEUES_SHOWN]:
        left = "?" if depth.left is None else f"{depth.left}"
        sys.stdout.write(logs.plain(f"    {depth.found:>21}{left:>9}  {queue}", _LONGEST_LINE) + "\n")
    if len(held) > _QUEUES_SHOWN:
        sys.stdout.write(f"    … and {len(held) - _QUEUES_SHOWN:,} more queues\n")


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


def settings_from(given: Mapping[str, object], config: Path | None) -> Settings:
    """The settings of one command, with its logs set up as they say.

    `given` is what the command line says of them; `config` goes before DLQBATCH_CONFIG.
    """
    environ = os.environ if config is None else {**os.environ, CONFIG_VARIABLE: str(config)}
    try:
        settings = load(given, environ, secrets=fetch)
    except DlqbatchError:
        logs.configure(style=stated_format(given, environ))
        raise
    logs.hide(secrets_of(settings))
    logs.configure(settings.log_level, settings.log_format)
    return settings


class Progress:
    """How far a run is, on one line of a terminal that is rewritten; elsewhere nothing.

    Runs of the scheduler share its terminal as their stderr, and would write over one another. Their stdin is a pipe;
    that of a run by hand is the terminal too.
    """

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty() and sys.stdin is not None and sys.stdin.isatty()
        self._began = self._next = time.monotonic()
        self._next += _PROGRESS_SECONDS
        self._is_open = False

    def __call__(self, taken: int, of: int) -> None:
        rate = taken / max(time.monotonic() - self._began, _PROGRESS_SECONDS)
        self._show(f"{taken:,} of {of:,} taken, {rate:,.0f}/s")

    def waiting(self, held: int) -> None:
        """An abort waits for the runs that still hold so many."""
        self._show(f"waiting for the run that sends {held:,} of them now")

    def _show(self, line: str) -> None:
        now = time.monotonic()
        if not self._is_shown or now < self._next:
            return
        self._next = now + _PROGRESS_SECONDS
        self._is_open = True
        sys.stderr.write(f"\r{line}\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        """Take the line away, so that what comes next begins at the left."""
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            self._is_open = False
