"""What is asked of one run, and the bounds that follow from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from dlqbatch.broker.transfer import Bounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.settings import Settings

_CLOSING: Final = 5.0
"""Seconds that a silent broker may keep a run beyond `max_seconds` and `settle_seconds`. A change of a delay waits so
long for the runs that were under way."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """What is asked of this one run, apart from the settings."""

    dry_run: bool = False
    seconds_left: float | None = None
    """Until the platform ends the process, if it does; counted from `at`."""
    stopped: Callable[[], bool] = lambda: False
    """Whether a signal has asked for the end."""
    progress: Callable[[int, int], None] = lambda _taken, _of: None
    """Told now and then how many messages were taken, and of how many."""
    at: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""

    def now(self) -> Occasion:
        """The same with what is left of its time."""
        if self.seconds_left is None:
            return self
        now = time.monotonic()
        return replace(self, seconds_left=max(self.seconds_left - (now - self.at), 0.0), at=now)


def bounds_of(settings: Settings, occasion: Occasion) -> Bounds:
    """The platform's time has to be enough for all of a run: taking, settling, closing, and the log of runs.

    Closing ends in the first half of the margin; the second half is for what comes after it. Where little time is left
    taking gets as much of it as settling.
    """
    seconds, settling, closing = settings.max_seconds, settings.settle_seconds, _CLOSING
    left = occasion.now().seconds_left
    if left is not None:
        margin = min(settings.lambda_margin_seconds, left)
        free = left - margin
        settling = min(settling, (free + margin / 4) / 2)
        seconds = min(seconds, max(free - settling, free / 2))
        closing = min(closing, left - margin / 2 - seconds - settling)
    return Bounds(
        time.monotonic() + seconds, settling, settings.max_bytes, occasion.stopped, occasion.progress, closing
    )
