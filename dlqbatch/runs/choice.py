"""What becomes of a claimed row, by its failure, the rules, the hour, and how this machine and its origin are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from dlqbatch.policy.classify import UNKNOWN, Rule, classify
from dlqbatch.policy.lifecycle import Back, Claimed, Status
from dlqbatch.policy.strategy import Conditions, Limits, Options, Strategy, next_retry
from dlqbatch.runs.resend import MANUAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

RESCHEDULED: Final = "rescheduled"


class Breakers(Protocol):
    def admit(self, rows: Iterable[Claimed], now: datetime) -> set[int]:
        """The ids of those that the circuit breakers of their origins let through."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of claimed rows, by what is known of them alone."""

    rules: tuple[Rule, ...]
    options: Options
    limits: Limits
    load: Callable[[], tuple[float, float]]
    """CPU and memory of this machine, in per cent; asked only when a row's sending depends on it."""
    jitter: Callable[[], float]
    """From 0 to 1."""

    def sort_out(
        self, rows: Sequence[Claimed], breakers: Breakers, now: datetime
    ) -> tuple[dict[int, tuple[str, Strategy | None]], dict[int, tuple[Back, str, str]]]:
        """Rows to send, by id, with token and strategy; and those to give back, with what they count as and why.

        A row is classified whenever it is claimed, so that a rule that somebody changed holds from the next try on.
        """
        send: dict[int, tuple[str, Strategy | None]] = {}
        back: dict[int, tuple[Back, str, str]] = {}
        conditional: list[Claimed] = []
        # Holding a failure against every rule costs more than all else here, and most rows of a batch failed alike.
        classified = {failure: classify(*failure, self.rules) for failure in {_failure(row) for row in rows}}
        for row in rows:
            if row.has_attempt:
                send[row.row_id] = (row.token, None)
                continue
            strategy, rule = classified[_failure(row)]
            match strategy:
                case Strategy.IMMEDIATE:
                    send[row.row_id] = (row.token, strategy)
                case Strategy.SCHEDULED:
                    if self._is_off_peak(now):
                        send[row.row_id] = (row.token, strategy)
                    else:
                        back[row.row_id] = self._later(row, strategy, now, "waits for an off-peak hour", "off-peak")
                case Strategy.CONDITIONAL:
                    conditional.append(row)
                case Strategy.MANUAL:
                    known = rule != UNKNOWN
                    reason = f"the rule '{rule}' leaves it to a person" if known else "no rule knows this failure"
                    given = Back(row.token, Status.MANUAL, reason, None, strategy)
                    back[row.row_id] = (given, MANUAL, "rule" if known else UNKNOWN)
                case _:
                    assert_never(strategy)
        if conditional:
            self._by_conditions(conditional, breakers, now, send, back)
        return send, back

    def _by_conditions(
        self,
        rows: Sequence[Claimed],
        breakers: Breakers,
        now: datetime,
        send: dict[int, tuple[str, Strategy | None]],
        back: dict[int, tuple[Back, str, str]],
    ) -> None:
        cpu, memory = self.load()
        busy = Conditions(True, cpu, memory, True).why_not(self.limits)
        # A machine that is too busy must not use up a breaker's one probe.
        admitted = set() if busy else breakers.admit(rows, now)
        for row in rows:
            if row.row_id in admitted:
                send[row.row_id] = (row.token, Strategy.CONDITIONAL)
                continue
            why = busy or Conditions(False, cpu, memory, True).why_not(self.limits)
            code = "too-busy" if busy else "breaker-open"
            back[row.row_id] = self._later(row, Strategy.CONDITIONAL, now, "; ".join(why), code)

    def _later(self, row: Claimed, strategy: Strategy, now: datetime, reason: str, code: str) -> tuple[Back, str, str]:
        due = next_retry(strategy, row.failed_attempts, now, self.options, jitter=self.jitter())
        return Back(row.token, Status.PENDING, reason, due, strategy), RESCHEDULED, code

    def again(self, now: datetime) -> datetime:
        """When what could not be sent this time is tried again."""
        return now + self.options.recheck * (1 + self.options.spread * self.jitter())

    def _is_off_peak(self, now: datetime) -> bool:
        return now.astimezone(self.options.zone).hour in self.options.off_peak_hours


def _failure(row: Claimed) -> tuple[str | None, str | None]:
    return row.error_type, row.error_message
