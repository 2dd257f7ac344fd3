"""The watchdog ends the process of a run that does not end by itself.

Everything that waits has a bound of its own, and the run then ends in order, with a report. The watchdog is for a wait
that has none. Nothing is lost when a process is killed: messages that it held go back to their queue, and a transaction
that it had not committed is rolled back.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from dlqbatch.cli.printing import print_failure
from dlqbatch.settings import Settings

_HUNG: Final = 4
# Seconds for what may begin just before the run's time is over: a statement takes at most 32, the log of runs 8, the
# broker's last answer 15.
_AFTER_THE_LAST_BOUND: Final = 60.0
# Seconds. By default a run ends at most 25 seconds after a signal; most platforms kill it after 30.
_AFTER_A_SIGNAL: Final = 10.0
_LOOK_EVERY: Final = 0.25
_SAYING: Final = 2.0


class Watchdog:
    """Watches a run inside a `with` block; `from_now` starts its time again."""

    def __init__(self, longest: float, after_signal: float, stopped: Callable[[], bool], *, as_json: bool) -> None:
        """`longest` and `after_signal` are the seconds after which the process is ended."""
        self._longest = longest
        self._after_signal = after_signal
        self._stopped = stopped
        self._as_json = as_json
        self._ended = threading.Event()
        self._end_lock = threading.Lock()
        self.from_now()

    @classmethod
    def of(cls, settings: Settings, job: str, stopped: Callable[[], bool], *, as_json: bool) -> Self:
        settling = settings.settle_seconds + settings.connect_timeout_seconds
        longest = settings.longest_run(job) + settling + _AFTER_THE_LAST_BOUND
        return cls(longest, settling + _AFTER_A_SIGNAL, stopped, as_json=as_json)

    def from_now(self) -> None:
        self._ends_at = time.monotonic() + self._longest

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._end_lock:
            self._ended.set()

    def _watch(self) -> None:
        # The signal handler does not wake this thread up: it could wait for a lock that the interrupted run holds.
        signal_ends_at: float | None = None
        while not self._ended.wait(_LOOK_EVERY):
            now = time.monotonic()
            if signal_ends_at is None and self._stopped():
                signal_ends_at = now + self._after_signal
            if now >= self._ends_at or (signal_ends_at is not None and now >= signal_ends_at):
                self._end()

    def _end(self) -> None:
        with self._end_lock:
            if self._ended.is_set():
                return
            # The write itself may hang, so that another thread does it.
            saying = threading.Thread(target=self._say, daemon=True)
            saying.start()
            saying.join(_SAYING)
            os._exit(_HUNG)

    def _say(self) -> None:
        text = (
            "the run did not end within its bounds, so its process was ended. What it waited for cannot be known: look "
            "at the broker, the database and the network. What was not settled is back in its queue."
        )
        with suppress(OSError, ValueError):
            print_failure("RunHung", text, _HUNG, as_json=self._as_json)
            sys.stdout.flush()
            sys.stderr.flush()
