"""How far a run is, on one line of a terminal that is rewritten; elsewhere nothing.

Runs of the scheduler share its terminal as their stderr, and would write over one another. Their stdin is a pipe; that
of a run by hand is the terminal too.
"""

from __future__ import annotations

import sys
import time
from typing import Final

_EVERY: Final = 0.5
"""Seconds between two lines; a run that ends sooner shows none."""


class Progress:
    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty() and sys.stdin is not None and sys.stdin.isatty()
        self._began = self._next = time.monotonic()
        self._next += _EVERY
        self._is_open = False

    def __call__(self, taken: int, of: int) -> None:
        now = time.monotonic()
        if not self._is_shown or now < self._next:
            return
        self._next = now + _EVERY
        self._is_open = True
        rate = taken / (now - self._began)
        sys.stderr.write(f"\r{taken:,} of {of:,} taken, {rate:,.0f}/s\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        """Take the line away, so that what comes next begins at the left."""
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            self._is_open = False
