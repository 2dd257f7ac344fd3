"""How far and how fast a replay plan is sent: the canary steps 1, 10 and 100, the failure rate, messages a second.

A canary step may take longer than a run: a failure is known soon, when the message is dead-lettered again, but a
success only after the observation window. The next run goes on where this one stopped.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from dlqbatch.errors import SettingsError

CANARY_STEPS: Final = (1, 10, 100)
"""The total of sent messages at which a run waits for their outcomes; after the last step all are sent."""
MAX_FAILURE_RATE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of items that were sent since the first apply, or since an apply went on after a stop."""

    sent: int = 0
    failed: int = 0
    succeeded: int = 0

    @property
    def open(self) -> int:
        return self.sent - self.failed - self.succeeded

    @property
    def failure_rate(self) -> float:
        return self.failed / self.sent if self.sent else 0.0


@dataclass(frozen=True, slots=True)
class Go:
    limit: int | None
    """How many may be sent in total; None: all."""


@dataclass(frozen=True, slots=True)
class Wait:
    step: int
    """The canary step that was sent, and whose outcomes are not all known."""


@dataclass(frozen=True, slots=True)
class Stop:
    why: str


Verdict = Go | Wait | Stop


def how_far(outcomes: Outcomes, *, canary: bool, max_failure_rate: float) -> Verdict:
    """What may be sent next; a failure rate of 1 is never exceeded."""
    if outcomes.failure_rate > max_failure_rate:
        rate = f"{outcomes.failure_rate:.0%}"
        return Stop(
            f"{outcomes.failed:,} of {outcomes.sent:,} came back, which is {rate} and more than {max_failure_rate:.0%}"
        )
    if not canary or outcomes.sent > CANARY_STEPS[-1]:
        return Go(None)
    step = next(step for step in (0, *CANARY_STEPS) if step >= outcomes.sent)
    if outcomes.sent < step:
        return Go(step)
    if outcomes.open:
        return Wait(step)
    return Go(next((following for following in CANARY_STEPS if following > step), None))


_RATE: Final = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(/\s*(?P<unit>s|sec|second|m|min|minute|h|hour))?\s*")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_SAVED_UP: Final = 1.0
"""Seconds of a delay whose messages may be sent at once afterwards."""


def rate_of(text: str) -> float:
    """Messages a second, from `50`, `50/s`, `600/min` or `10/h`."""
    found = _RATE.fullmatch(text)
    number = float(found["number"]) / _SECONDS[(found["unit"] or "s")[0]] if found else 0.0
    if not number or math.isinf(number):
        raise SettingsError(f"'{text}' is no rate; write 50/s, 600/min or 10/h")
    return number


class Pace:
    """How many messages may be sent by now, evenly, and at most as many at once as in a second.

    Its clock is monotonic and starts at the first call.
    """

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._now: float | None = None
        self._allowed = 1.0

    def allowed(self, now: float, room: int) -> int:
        if self._per_second is None:
            return room
        most = max(self._per_second * _SAVED_UP, 1.0)
        since = 0.0 if self._now is None else now - self._now
        self._allowed = min(self._allowed + since * self._per_second, most)
        self._now = now
        return min(room, int(self._allowed))

    def took(self, number: int) -> None:
        if self._per_second is not None:
            self._allowed -= number
