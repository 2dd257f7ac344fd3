"""How far and how fast a replay plan is sent: which messages go first, canary steps, failure rate, messages a second.

A canary step of four messages goes first. When it is known that all of them were handled, the next step goes, of up to
five times as many as are proven by then, and so on. The next run goes on where this one stopped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from dlqbatch.errors import SettingsError

FIRST_STEP: Final = 4
"""Messages of the first canary step."""
GROWTH: Final = 5
"""A step ends at so many times what is proven at most."""
MAX_FAILURE_RATE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Kind:
    """The messages of a plan that failed in one queue in one way; messages are named by their places in the plan."""

    queue: str
    messages: int
    oldest: int
    largest: int
    """The one with the largest body."""


def first_ones(kinds: Sequence[Kind], overall: Sequence[int] = ()) -> list[int]:
    """The places that go first, so that the first steps show every queue, then every kind, old and large ones.

    `overall` are places that come before all others, such as the oldest and the largest of the whole plan.
    """
    by_queue: dict[str, list[Kind]] = {}
    for kind in sorted(kinds, key=lambda kind: (-kind.messages, kind.oldest)):
        by_queue.setdefault(kind.queue, []).append(kind)
    # The largest kind of each queue, then the second largest of each, and so on.
    rounds = [kind for turn in zip_longest(*by_queue.values()) for kind in turn if kind is not None]
    ones = [kind.largest if number % 2 else kind.oldest for number, kind in enumerate(rounds)]
    others = [kind.oldest if number % 2 else kind.largest for number, kind in enumerate(rounds)]
    return list(dict.fromkeys([*overall, *ones, *others]))


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
class Step:
    """A canary step: it is complete when `to` messages of the plan are sent in total."""

    to: int = FIRST_STEP
    after: int = 0
    """Messages that were sent before it."""
    failed_before: int = 0


@dataclass(frozen=True, slots=True)
class Go:
    step: Step | None
    """What may be sent; None: all."""

    @property
    def limit(self) -> int | None:
        return None if self.step is None else self.step.to


@dataclass(frozen=True, slots=True)
class Wait:
    step: Step
    """The canary step that was sent, and whose outcomes are not all known."""


@dataclass(frozen=True, slots=True)
class Stop:
    why: str


Verdict = Go | Wait | Stop


def how_far(outcomes: Outcomes, step: Step | None = None, *, canary: bool, max_failure_rate: float) -> Verdict:
    """What may be sent next, after the step before; a failure rate of 1 is never exceeded."""
    if outcomes.failure_rate > max_failure_rate:
        rate = f"{outcomes.failure_rate:.0%}"
        return Stop(
            f"{outcomes.failed:,} of {outcomes.sent:,} came back, which is {rate} and more than {max_failure_rate:.0%}"
        )
    if not canary:
        return Go(None)
    step = step or Step(max(FIRST_STEP, outcomes.sent))
    if outcomes.sent < step.to:
        return Go(step)
    if outcomes.open:
        return Wait(step)
    proven = GROWTH * outcomes.succeeded
    if outcomes.failed > step.failed_before:
        # Something of it came back, though no more than may: the next step is not larger than this one.
        proven = min(proven, outcomes.sent + step.to - step.after)
    return Go(Step(max(proven, outcomes.sent + 1), outcomes.sent, outcomes.failed))


LEAST_TURN: Final = 10.0
"""Seconds of a run that each released plan has at least."""


def turn_of(left: float, plans: int) -> tuple[float, float]:
    """For the next of so many plans that share a run: the seconds of its turn, and of them for the wait for outcomes.

    Where there are too many for a turn of each, none waits, so that all of them may send what they can.
    """
    share = left / plans
    return (share, share) if share >= LEAST_TURN else (min(LEAST_TURN, left), 0.0)


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

    Its clock is monotonic and starts at the first call. `idle` is the seconds since an earlier run sent something: so
    a rate of one an hour is one an hour over many short runs.
    """

    def __init__(self, per_second: float | None, idle: float | None = None) -> None:
        self.per_second = per_second
        """It may be changed at any time."""
        self._now: float | None = None
        self._idle = idle or 0.0
        self._allowed = 1.0 if idle is None else 0.0

    def allowed(self, now: float, room: int) -> int:
        if self.per_second is None:
            return room
        most = max(self.per_second * _SAVED_UP, 1.0)
        since = self._idle if self._now is None else now - self._now
        self._allowed = min(self._allowed + since * self.per_second, most)
        self._now = now
        return min(room, int(self._allowed))

    def took(self, number: int) -> None:
        if self.per_second is not None:
            self._allowed -= number
