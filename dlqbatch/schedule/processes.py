"""Runs of jobs, each a process of its own: the one-shot run that cron would start.

So a run that dies takes nothing with it, its memory is given back, and there is one way to run a job. No run outlives
the scheduler (see child.py), and no run outlives its time: it is asked to end, and killed if it does not. Every method
may be called from any thread.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dlqbatch import logs
from dlqbatch.jobs import COMMANDS, LEFT
from dlqbatch.otlp.figures import RUN_SECONDS

log = logs.get(__name__)

_CHILD: Final = str(Path(__file__).with_name("child.py"))
# Exit codes of a run that did all of its work, and of one that did what could be done.
_ALL, _PART = 0, 3
_NOT_MOVED: Final = frozenset({"got", LEFT})
_STEP: Final = 0.05
_KILLED_WITHIN: Final = 5.0


@dataclass(frozen=True, slots=True)
class RunTimes:
    """How long runs took, as a histogram of Prometheus."""

    buckets: Mapping[float, int] = field(default_factory=lambda: dict.fromkeys(RUN_SECONDS, 0))
    """How many took no longer than so many seconds."""
    total: float = 0.0
    number: int = 0

    def with_run(self, seconds: float) -> RunTimes:
        took = max(seconds, 0.0)  # the clock may have been set back
        buckets = {bound: number + (took <= bound) for bound, number in self.buckets.items()}
        return RunTimes(buckets, self.total + took, self.number + 1)


@dataclass(slots=True)
class Tally:
    """What became of the runs of one job since the scheduler began."""

    started: int = 0
    left_out: int = 0
    failed: int = 0
    failures_in_a_row: int = 0
    last_success: datetime | None = None
    decisions: Mapping[str, int] = field(default_factory=dict)
    """Messages by what became of them, from the reports of its runs."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    times: RunTimes = field(default_factory=RunTimes)

    def add(self, last: LastRun) -> None:
        """Count a run that has ended, whatever its outcome is. What other threads read is replaced, not changed."""
        self.times = self.times.with_run((last.ended - last.began).total_seconds())
        decisions = {name: number for name, number in last.counts.items() if name != "got"}
        self.decisions = _added_up(self.decisions, decisions)
        self.reasons = _added_up(self.reasons, last.report.get("reasons") or {})


@dataclass(frozen=True, slots=True)
class LastRun:
    job: str
    began: datetime
    ended: datetime
    code: int
    """The exit code; if negative, the signal that ended it."""
    report: Mapping[str, Any]
    """The report that it printed with --json; empty if it printed none."""
    timed_out: bool = False
    """Whether it did not end within its time, and was made to."""

    @property
    def is_done(self) -> bool:
        """Whether it did well; a run that left everything did not: it would do so for ever, and nobody would know."""
        return not self.timed_out and (self.code == _ALL or (self.code == _PART and self.moved > 0))

    @property
    def moved(self) -> int:
        """How many messages are not where they were."""
        return sum(number for name, number in self.counts.items() if name not in _NOT_MOVED)

    @property
    def outcome(self) -> str:
        if self.timed_out:
            return "timed_out"
        if self.code == -signal.SIGTERM:
            return "stopped"  # before it had begun: from then on it ends in order, and reports
        if self.code < 0:
            return "killed"
        return str(self.report.get("outcome", "failed"))

    @property
    def counts(self) -> Mapping[str, int]:
        return self.report.get("counts") or {}

    @property
    def seconds(self) -> float:
        return (self.ended - self.began).total_seconds()

    def as_dict(self) -> dict[str, object]:
        return {
            "job": self.job,
            **self.report,
            "outcome": self.outcome,
            "exit_code": self.code,
            "began": self.began.isoformat(timespec="milliseconds"),
            "ended": self.ended.isoformat(timespec="milliseconds"),
        }


@dataclass(frozen=True, slots=True)
class _Run:
    job: str
    began: datetime
    process: subprocess.Popen[str]
    since: float = field(default_factory=time.monotonic)


class Processes:
    def __init__(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        on_end: Callable[[str, LastRun], None],
        *,
        longest: Callable[[str], float],
        settling: float,
    ) -> None:
        """`environment` and `arguments` hand the scheduler's settings to the runs; `on_end` is called in a thread.

        After `longest` seconds, by its job, a run is asked to end, and after `settling` more it is killed.
        """
        self._environment = dict(environment)
        self._arguments = tuple(arguments)
        self._on_end = on_end
        self._longest, self._settling = longest, settling
        self._stdin, self._held_open = os.pipe()  # neither is inherited, so that no run holds the other end
        self._lock = threading.Lock()
        self._runs: list[_Run] = []
        self._last: dict[str, LastRun] = {}
        self._unreported = 0
        self._is_ending = False

    def start(self, job: str, most: int | None = None) -> bool:
        """Start a run now; False if it cannot be started, the scheduler is ending, or `most` of the job are at work."""
        with self._lock:
            if self._is_ending or (most is not None and self._running(job) >= most):
                return False
            # Inside the lock, because `end` must not read the list between the start of a process and its entry.
            try:
                run = _Run(job, datetime.now(UTC), self._process(job))
            except OSError as error:
                why = error.strerror or str(error)
                log.error("a run could not be started", job=job, why=why)  # noqa: TRY400  (no trace says more)
                return False
            self._runs.append(run)
        threading.Thread(target=self._follow, args=(run,), name=f"run of {job}", daemon=True).start()
        return True

    def running(self, job: str) -> int:
        with self._lock:
            return self._running(job)

    def is_stuck(self) -> bool:
        """Whether a killed run is still there: the system may hold it, for a disk that does not answer."""
        until = time.monotonic() - (self._settling + _KILLED_WITHIN)
        with self._lock:
            return any(run.since + self._longest(run.job) < until for run in self._runs)

    def last(self) -> Mapping[str, LastRun]:
        with self._lock:
            return dict(self._last)

    def end(self, seconds: float, at_once: Callable[[], bool] = lambda: False) -> int:
        """Start nothing more and let the runs settle; return how many had to be killed, after the time or `at_once`."""
        with self._lock:
            if not self._is_ending:
                os.close(self._held_open)  # each run then gets SIGTERM: see child.py
            self._is_ending = True
        self._await(seconds, at_once)
        with self._lock:
            left = list(self._runs)
        for run in left:
            run.process.kill()
        self._await(_KILLED_WITHIN)
        return len(left)

    def _await(self, seconds: float, at_once: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        # A wait on a lock would miss a signal that comes between its look and its sleep.
        while (self._runs or self._unreported) and time.monotonic() < deadline and not at_once():
            time.sleep(_STEP)

    def _running(self, job: str) -> int:
        return sum(run.job == job for run in self._runs)

    def _process(self, job: str) -> subprocess.Popen[str]:
        return subprocess.Popen(  # noqa: S603  (this program itself)
            [sys.executable, _CHILD, *COMMANDS[job], "--json", *self._arguments],
            env=self._environment,
            stdin=self._stdin,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            # Ctrl-C goes to the whole group of a terminal, and a second one would end a run at once.
            process_group=0,
        )

    def _follow(self, run: _Run) -> None:
        printed, timed_out = self._await_end(run)
        last = LastRun(run.job, run.began, datetime.now(UTC), run.process.returncode, _report(printed), timed_out)
        if last.code < 0 and not last.timed_out and not self._is_ending:
            log.error("a run was killed", job=run.job, by=signal.strsignal(-last.code), seconds=last.seconds)
        with self._lock:
            self._runs.remove(run)
            self._last[run.job] = last
            self._unreported += 1
        try:
            self._on_end(run.job, last)
        finally:
            with self._lock:
                self._unreported -= 1

    def _await_end(self, run: _Run) -> tuple[str, bool]:
        """What the run printed, and whether it had to be made to end."""
        timed_out = False
        steps = (
            (self._longest(run.job), run.process.terminate, "a run takes too long: it is asked to end"),
            (self._settling, run.process.kill, "a run that was asked to end did not: it is killed"),
        )
        for seconds, act, event in steps:
            try:
                return run.process.communicate(timeout=seconds)[0], timed_out
            except subprocess.TimeoutExpired:
                if self._is_ending:
                    break  # `end` waits for it
                at_work = round(time.monotonic() - run.since, 1)
                log.error(event, job=run.job, seconds=at_work, process=run.process.pid)  # noqa: TRY400  (no trace says more)
                timed_out = True
                act()
        return run.process.communicate()[0], timed_out


def _report(printed: str) -> Mapping[str, Any]:
    try:
        found = json.loads(printed)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _added_up(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}
