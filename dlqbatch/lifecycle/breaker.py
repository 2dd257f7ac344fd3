"""A circuit breaker for each origin, as plain data that the database keeps.

closed ──too many of the recent attempts failed──▶ open ──cool-down is over──▶ half-open, one probe
   ▲                                                ▲                               │
   └───────────────the probe succeeded──────────────┼───────────────────────────────┤
                                                    └──────the probe failed─────────┘

An attempt is counted when it is sent, a failure when it comes back. A success is known only after the observation
window, long after a failure would be: a rate over attempts whose outcome is known would open on the first failures of
every batch. Only attempts sent in the present phase count, so that what failed before cannot reopen what has healed.

`breaker_rows.py` changes a state under a row lock; so of two workers that both see the cool-down over, one gets the
probe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from dlqbatch.errors import SettingsError
from dlqbatch.store.states import Phase


@dataclass(frozen=True, slots=True)
class Limits:
    failure_rate: float = 0.5
    """Opens at this share of the recent attempts, or above."""
    min_attempts: int = 10
    window: timedelta = timedelta(minutes=30)
    """An attempt counts for at least half of it and at most all of it."""
    cool_down: timedelta = timedelta(minutes=5)
    probe_timeout: timedelta = timedelta(hours=2)
    """A probe without an outcome for so long is given up and another goes; far longer than the observation window."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not 0 < self.failure_rate <= 1:
            problems.append("the failure rate of the circuit breaker must be above 0 and at most 1")
        if self.min_attempts < 1:
            problems.append("the circuit breaker needs at least one attempt before it may open")
        if min(self.window, self.cool_down, self.probe_timeout) <= timedelta(0):
            problems.append(
                "the window, the cool-down and the probe time-out of the circuit breaker must be longer than zero"
            )
        if problems:
            raise SettingsError(*problems)


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state for one origin; an origin without one has `Breaker()`."""

    phase: Phase = Phase.CLOSED
    since: datetime | None = None
    """When it entered the phase; for an open one that is when it opened."""
    probe: str | None = None
    """The one attempt that is sent to see whether the origin is well, by whatever name its sender gives it."""
    counted_from: datetime | None = None
    """Where the present half of the window begins."""
    sent: int = 0
    failed: int = 0
    sent_before: int = 0
    """In the half of the window before."""
    failed_before: int = 0


def admit(breaker: Breaker, attempt: str, now: datetime, limits: Limits) -> tuple[bool, Breaker]:
    """Whether this attempt may be sent now, and the state to keep if so: the first after the cool-down is the probe."""
    if breaker.phase is Phase.CLOSED or attempt == breaker.probe:
        return True, breaker
    wait = limits.cool_down if breaker.phase is Phase.OPEN else limits.probe_timeout
    if breaker.since is not None and now < breaker.since + wait:
        return False, breaker
    return True, Breaker(Phase.HALF_OPEN, now, attempt)


def sent(breaker: Breaker, now: datetime, limits: Limits, attempts: int = 1) -> Breaker:
    """The broker confirmed so many attempts."""
    if breaker.phase is not Phase.CLOSED:
        return breaker
    breaker = _at(breaker, now, limits)
    return replace(breaker, sent=breaker.sent + attempts)


def failed(breaker: Breaker, attempt: str, sent_at: datetime, now: datetime, limits: Limits) -> Breaker:
    """An attempt came back."""
    if breaker.phase is Phase.HALF_OPEN and attempt == breaker.probe:
        return Breaker(Phase.OPEN, now)
    if breaker.phase is not Phase.CLOSED or _is_of_earlier_phase(breaker, sent_at):
        return breaker
    breaker = _at(breaker, now, limits)
    breaker = replace(breaker, failed=breaker.failed + 1)
    return Breaker(Phase.OPEN, now) if _is_too_much(breaker, limits) else breaker


def succeeded(breaker: Breaker, attempt: str, now: datetime) -> Breaker:
    if breaker.phase is Phase.HALF_OPEN and attempt == breaker.probe:
        return Breaker(Phase.CLOSED, now)
    return breaker


def released(breaker: Breaker, attempt: str) -> Breaker:
    """The outcome of this attempt will never be known: if it was the probe, the next attempt is, at once."""
    if breaker.phase is Phase.HALF_OPEN and attempt == breaker.probe:
        return Breaker(Phase.HALF_OPEN)
    return breaker


def proven(breaker: Breaker, sent_at: datetime, now: datetime) -> Breaker:
    """An attempt of lifecycle or replay was resolved: if it was sent in this phase, the breaker closes."""
    if breaker.phase is not Phase.CLOSED and not _is_of_earlier_phase(breaker, sent_at):
        return Breaker(Phase.CLOSED, now)
    return breaker


def _is_of_earlier_phase(breaker: Breaker, sent_at: datetime) -> bool:
    return breaker.since is not None and sent_at < breaker.since


def _at(breaker: Breaker, now: datetime, limits: Limits) -> Breaker:
    """The counts as they are now: each half of the window is dropped when it is older than the window."""
    half = limits.window / 2
    start = breaker.counted_from
    if start is None or now >= start + 2 * half:
        return replace(breaker, counted_from=now, sent=0, failed=0, sent_before=0, failed_before=0)
    if now < start + half:
        return breaker
    return replace(
        breaker, counted_from=start + half, sent=0, failed=0, sent_before=breaker.sent, failed_before=breaker.failed
    )


def _is_too_much(breaker: Breaker, limits: Limits) -> bool:
    failures = breaker.failed + breaker.failed_before
    # A failure may come back after its sending has left the window; a rate above one says no more than one.
    attempts = max(breaker.sent + breaker.sent_before, failures)
    return attempts >= limits.min_attempts and failures >= limits.failure_rate * attempts
