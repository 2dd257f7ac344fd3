"""The last resort against a run that does not end: its process does.

Whatever waits has a bound of its own and ends in order, with a report; this is for what nobody thought of. A process
may be killed at any instant without a loss: what it held goes back to its queue, what it had not committed is undone.
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

from dlqbatch.cli.failure import say
from dlqbatch.settings import Settings

_HUNG: Final = 4
# Seconds for what may begin just before a run's bounds and has a bound of its own: a statement (32), the log of runs
# (8), the broker's last answer (15).
_AFTER_THE_LAST_BOUND: Final = 60.0
# Seconds. With the default settings a run ends 25 seconds after a signal; most platforms kill it after 30.
_AFTER_A_SIGNAL: Final = 10.0
_LOOK_EVERY: Final = 0.25
_SAYING: Final = 2.0


class Watchdog:
    """Watches while it is entered; `from_now` begins its time anew."""

    def __init__(self, longest: float, after_signal: float, stopped: Callable[[], bool], *, as_json: bool) -> None:
        """`longest` and `after_signal` are seconds."""
        self._longest = longest
        self._after_signal = after_signal
        self._stopped = stopped
        self._as_json = as_json
        self._ended = threading.Event()
        self._one_ends = threading.Lock()
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
        with self._one_ends:
            self._ended.set()

    def _watch(self) -> None:
        # A signal handler that woke this thread up could wait for a lock that the run it interrupts holds.
        signal_ends_at: float | None = None
        while not self._ended.wait(_LOOK_EVERY):
            now = time.monotonic()
            if signal_ends_at is None and self._stopped():
                signal_ends_at = now + self._after_signal
            if now >= self._ends_at or (signal_ends_at is not None and now >= signal_ends_at):
                self._end()

    def _end(self) -> None:
        with self._one_ends:
            if self._ended.is_set():
                return
            # Writing may be what hangs: a thread of its own is left alone with it.
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
            say("RunHung", text, _HUNG, as_json=self._as_json)
            sys.stdout.flush()
            sys.stderr.flush()
