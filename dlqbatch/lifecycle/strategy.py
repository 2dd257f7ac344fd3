"""What becomes of a claimed message: it is sent now, waits for a better time, or waits for a person.

immediate    sent when its back-off is over
scheduled    sent in an off-peak hour
conditional  sent when its circuit breaker lets it through and this machine is not too busy
manual       left to a person
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, assert_never

from dlqbatch.lifecycle.backoff_and_off_peak import Options, is_off_peak, next_retry
from dlqbatch.lifecycle.rules import UNKNOWN, Rule, classify
from dlqbatch.store.states import Status, Strategy

RESCHEDULED: Final = "rescheduled"
MANUAL: Final = "manual"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row that a worker has claimed, with what the decision about it needs."""

    row_id: int
    token: str
    identity: str
    error_type: str | None
    error_message: str | None
    event: str | None
    origin: str | None
    """The key of its circuit breaker; None if nobody knows where it failed."""
    failed_attempts: int
    next_retry_at: datetime | None
    body_size: int
    has_attempt: bool = False
    """It was taken over with an attempt that may have been published; the same attempt is sent again."""


class Back(NamedTuple):
    """What becomes of a claimed row that is not sent."""

    token: str
    to: Status
    reason: str
    next_retry_at: datetime | None = None
    strategy: Strategy | None = None
    """Its new strategy; None keeps the old one."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The load of this machine, in per cent, from which on conditional messages wait."""

    cpu: float = 80.0
    memory: float = 85.0

    def exceeded(self, cpu: float, memory: float) -> list[str]:
        """The reasons against sending now; empty if the machine is not too busy."""
        loads = (("CPU", cpu, self.cpu), ("memory", memory, self.memory))
        # Written so that a load which is not a number holds it back too.
        return [f"{name} at {load:.0f} %, must be below {most:.0f} %" for name, load, most in loads if not load < most]


@dataclass(frozen=True, slots=True)
class Choice:
    """Decides what becomes of claimed rows."""

    rules: tuple[Rule, ...]
    options: Options
    limits: LoadLimits
    load: Callable[[], tuple[float, float]]
    """CPU and memory of this machine, in per cent; called only when a row's sending depends on it."""
    jitter: Callable[[], float]
    """A random number from 0 to 1."""

    def decide(
        self, rows: Sequence[Claimed], admit: Callable[[Sequence[Claimed]], set[int]], now: datetime
    ) -> tuple[dict[int, Strategy | None], dict[int, tuple[Back, str, str]]]:
        """Rows to send, by id, with their strategy; and those to give back, with what they count as and why.

        `admit` returns the ids of the rows that the circuit breakers of their origins let through.

        A row is classified at each claim, so a changed rule holds from the next attempt on.
        """
        # Matching the rules costs more than all else here, and most rows of a batch failed alike.
        failures = {(row.error_type, row.error_message) for row in rows}
        classified = {failure: classify(*failure, self.rules) for failure in failures}
        chosen = {row.row_id: classified[row.error_type, row.error_message] for row in rows}
        busy: list[str] = []
        admitted: set[int] = set()
        conditional = [row for row in rows if not row.has_attempt and chosen[row.row_id][0] is Strategy.CONDITIONAL]
        if conditional:
            busy = self.limits.exceeded(*self.load())
            # A machine that is too busy must not use up a breaker's one probe.
            admitted = set() if busy else admit(conditional)
        off_peak = is_off_peak(now, self.options)
        send: dict[int, Strategy | None] = {}
        back: dict[int, tuple[Back, str, str]] = {}
        for row in rows:
            if row.has_attempt:
                send[row.row_id] = None
                continue
            strategy, rule = chosen[row.row_id]
            match strategy:
                case Strategy.MANUAL:
                    known = rule != UNKNOWN
                    reason = f"the rule '{rule}' leaves it to a person" if known else "no rule knows this failure"
                    to_person = Back(row.token, Status.MANUAL, reason, None, strategy)
                    back[row.row_id] = to_person, MANUAL, "rule" if known else UNKNOWN
                case Strategy.SCHEDULED if not off_peak:
                    due = next_retry(strategy, row.failed_attempts, now, self.options, jitter=self.jitter())
                    later = Back(row.token, Status.PENDING, "waits for an off-peak hour", due, strategy)
                    back[row.row_id] = later, RESCHEDULED, "off-peak"
                case Strategy.CONDITIONAL if row.row_id not in admitted:
                    reason = "; ".join(busy) or "the circuit breaker of its origin is open"
                    later = Back(row.token, Status.PENDING, reason, self.again(now), strategy)
                    back[row.row_id] = later, RESCHEDULED, "too-busy" if busy else "breaker-open"
                case Strategy.IMMEDIATE | Strategy.SCHEDULED | Strategy.CONDITIONAL:
                    send[row.row_id] = strategy
                case _:
                    assert_never(strategy)
        return send, back

    def again(self, now: datetime) -> datetime:
        """When a row that cannot be sent now is due again."""
        return now + self.options.recheck * (1 + self.options.spread * self.jitter())
