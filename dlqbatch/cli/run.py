"""One run of a job as a process: its settings, its signals, its progress on a terminal, and its exit code."""

from __future__ import annotations

import os
import shutil
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
from dlqbatch.cli.printing import PARTIAL, name_job, print_error, print_json, print_report
from dlqbatch.cli.watchdog import Watchdog
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.settings import Settings, load, mask_secrets, stated_format
from dlqbatch.settings.sources import CONFIG_VARIABLE

_PROGRESS_SECONDS: Final = 0.5
"""The time between two lines of progress; a run that ends sooner shows none."""
_LINE_SECONDS: Final = 30.0
"""The time between two lines of what a run waits for where no terminal is."""


def run_job(
    job: str | None,
    options: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Run the job, print its report, and return the exit code; without `job` it is the job that the settings name."""
    progress = Progress()
    run_options = jobs.RunOptions(dry_run=dry_run, stopped=on_signal(), progress=progress)
    if job is not None:
        name_job(job)
    try:
        read = partial(settings_from, options or {}, config)
        settings = read()
        name_job(job or settings.job)
        with Watchdog.of(settings, job or settings.job, run_options.stopped, as_json=as_json) as watchdog:

            def read_again() -> Settings:
                watchdog.from_now()  # a run that is repeated has its whole time
                return read()

            report = jobs.run(job or settings.job, settings, run_options, read_again=read_again)
    except DlqbatchError as error:
        progress.end()
        return print_error(error, as_json=as_json)
    progress.end()
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
    return {"ok": 0, "partial": PARTIAL}.get(report.outcome, 1)


def on_signal() -> _Stop:
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.ask)
    return stop


class _Stop:
    """Whether a signal has asked the run to end; a second signal ends the process at once."""

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


def settings_from(overrides: Mapping[str, object], config: Path | None, *, may_be_remote: bool = False) -> Settings:
    """Read the settings of one command, and set up its logs as they say.

    `overrides` come from the command line. `config` counts before DLQBATCH_CONFIG. A command that does not go by
    --remote is refused where the settings name a console.
    """
    environ = os.environ if config is None else {**os.environ, CONFIG_VARIABLE: str(config)}
    try:
        settings = load(overrides, environ, secrets=fetch)
    except DlqbatchError:
        logs.configure(style=stated_format(overrides, environ))
        raise
    mask_secrets(settings)
    logs.configure(settings.log_level, settings.log_format)
    if not may_be_remote:
        refuse_remote(settings)
    return settings


def refuse_remote(settings: Settings, instead: str = "") -> None:
    """SettingsError for a command that works on the broker or on files, and cannot be sent to a console."""
    if settings.remote is not None:
        raise SettingsError(
            f"this command does not go by --remote (dlqbatch.remote, {settings.written_in.get('remote', 'settings')}). "
            f"Nothing was done. {instead}Run it where the broker and the database are reached, without --remote"
        )


class Progress:
    """Shows how far a run is, on one line that is written again and again; only on a terminal.

    The runs of a scheduler share its terminal as their stderr and would overwrite each other. They are recognised by
    their stdin, which is a pipe; the stdin of a run by hand is the terminal.
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
        """Show that an abort waits for runs that still hold this number of messages."""
        self._show(f"waiting for the run that sends {held:,} of them now")

    def line(self, line: str) -> None:
        """Show what a run waits for; where no terminal is, now and then in the log."""
        now = time.monotonic()
        if self._is_shown:
            self._show(line[: max(shutil.get_terminal_size().columns - 1, 20)])
        elif now >= self._next:
            self._next = now + _LINE_SECONDS
            logs.get(__name__).info(line)

    def _show(self, line: str) -> None:
        now = time.monotonic()
        if not self._is_shown or now < self._next:
            return
        self._next = now + _PROGRESS_SECONDS
        self._is_open = True
        sys.stderr.write(f"\r{line}\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the line, so that the next output begins at the left."""
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            self._is_open = False
