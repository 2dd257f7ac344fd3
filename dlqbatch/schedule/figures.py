"""The text of /metrics: the scheduler's own figures, and those of the dead store while its database answers."""

from __future__ import annotations

import time
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.errors import DatabaseUnreadable, DlqbatchError
from dlqbatch.wiring.monitor import metrics_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dlqbatch.schedule.current import Current
    from dlqbatch.schedule.scheduler import Tally

log = logs.get(__name__)

_KEPT: Final = 5.0
"""Seconds for which what was measured is told again: no number of scrapers asks the database more often."""
_PATIENCE: Final = 3.0
"""Seconds that a scraper waits for the database; Prometheus itself gives up after ten."""


class Figures:
    """May be asked by several threads."""

    def __init__(self, current: Current, running: Callable[[str], int]) -> None:
        self._current, self._running = current, running
        self._lock = Lock()
        self._reader: Thread | None = None
        self._read_at = 0.0
        self._store: str | None = None
        self._is_away = False

    def text(self, tallies: Mapping[str, Tally], *, is_well: bool) -> str:
        store = self._of_the_store()
        own = "".join(f"{line}\n" for line in self._own(tallies, is_well=is_well, is_read=store is not None))
        return own + (store or "")

    def _own(self, tallies: Mapping[str, Tally], *, is_well: bool, is_read: bool) -> Iterator[str]:
        yield from _by_job("runs_started_total", "counter", "Runs begun.", {j: t.started for j, t in tallies.items()})
        left_out = {job: tally.left_out for job, tally in tallies.items()}
        told = "Starts left out because the run before was still at work."
        yield from _by_job("starts_left_out_total", "counter", told, left_out)
        failed = {job: tally.failed for job, tally in tallies.items()}
        yield from _by_job("runs_failed_total", "counter", "Runs that did not do well.", failed)
        in_a_row = {job: tally.failures_in_a_row for job, tally in tallies.items()}
        yield from _by_job("failures_in_a_row", "gauge", "Failed runs since the last that did not fail.", in_a_row)
        running = {job: self._running(job) for job in tallies}
        yield from _by_job("runs_at_work", "gauge", "Runs at work.", running)
        ended = {job: tally.last_success.timestamp() for job, tally in tallies.items() if tally.last_success}
        yield from _by_job("last_success_timestamp_seconds", "gauge", "When the last run ended that did well.", ended)
        yield from _one("well", "What /healthz says: 1, or 0.", int(is_well))
        yield from _one("store_read", "Whether the figures of the dead store could be had: 1, or 0.", int(is_read))

    def _of_the_store(self) -> str | None:
        """None: the database does not answer, or not in time."""
        with self._lock:
            if time.monotonic() - self._read_at < _KEPT and self._reader is None:
                return self._store
            if self._reader is None:
                self._reader = Thread(target=self._read, name="figures", daemon=True)
                self._reader.start()
            reader = self._reader
        reader.join(_PATIENCE)
        with self._lock:
            return None if reader is self._reader else self._store

    def _read(self) -> None:
        store, why = None, None
        try:
            store = self._measured()
        except DlqbatchError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  (the scheduler's own figures have to be told all the same)
            log.error("the figures of the dead store could not be made", failure=error)  # noqa: TRY400  (ours: with the trace)
        if why is not None and not self._is_away:
            log.warning("the figures of the dead store cannot be had", why=why)
        with self._lock:
            self._is_away = why is not None
            self._store, self._read_at, self._reader = store, time.monotonic(), None

    def _measured(self) -> str:
        used = self._current.settings
        try:
            return metrics_text(used)
        except DatabaseUnreadable:
            if not self._current.renew(used):
                raise
            return metrics_text(self._current.settings)


def _by_job(name: str, kind: str, meaning: str, numbers: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP dlqbatch_schedule_{name} {meaning}"
    yield f"# TYPE dlqbatch_schedule_{name} {kind}"
    yield from (f'dlqbatch_schedule_{name}{{job="{job}"}} {number!r}' for job, number in numbers.items())


def _one(name: str, meaning: str, number: float) -> Iterator[str]:
    yield f"# HELP dlqbatch_schedule_{name} {meaning}"
    yield f"# TYPE dlqbatch_schedule_{name} gauge"
    yield f"dlqbatch_schedule_{name} {number!r}"
