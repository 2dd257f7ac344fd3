from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dlqbatch.errors import SettingsError
from dlqbatch.lifecycle.breaker import Breaker, Limits, admit, failed, proven, sent, succeeded
from dlqbatch.store.states import Phase

NOW = datetime(2026, 2, 11, 12, tzinfo=UTC)
LIMITS = Limits()


def later(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


def after(sends: int, failures: int, limits: Limits = LIMITS) -> Breaker:
    breaker = Breaker()
    for _ in range(sends):
        breaker = sent(breaker, NOW, limits)
    for number in range(failures):
        breaker = failed(breaker, str(number), NOW, later(1), limits)
    return breaker


@pytest.mark.parametrize(
    ("sends", "failures", "phase"),
    [
        (10, 4, Phase.CLOSED),
        (10, 5, Phase.OPEN),
        (9, 9, Phase.CLOSED),  # too few to say
        (100, 49, Phase.CLOSED),
        (100, 50, Phase.OPEN),
        (0, 10, Phase.OPEN),  # sent before anybody counted
    ],
)
def test_it_opens_on_the_failure_rate_of_recent_attempts(sends: int, failures: int, phase: Phase) -> None:
    assert after(sends, failures).phase is phase


def test_failures_known_long_before_successes_do_not_open_it() -> None:
    # A tenth of a batch comes back within a minute; the others count as successes only after the observation window.
    assert after(100, 10).phase is Phase.CLOSED


def test_what_lies_further_back_than_the_window_no_longer_counts() -> None:
    breaker = after(10, 4)
    assert failed(breaker, "x", NOW, later(14), LIMITS).phase is Phase.OPEN
    assert failed(breaker, "x", NOW, later(16), LIMITS).phase is Phase.OPEN  # the half before still counts
    assert failed(breaker, "x", NOW, later(31), LIMITS) == Breaker(counted_from=later(31), failed=1)


def test_while_it_is_open_nothing_goes_until_the_cool_down_is_over() -> None:
    breaker = after(10, 5)
    assert breaker == Breaker(Phase.OPEN, later(1))
    assert admit(breaker, "a", later(5.9), LIMITS) == (False, breaker)
    assert admit(breaker, "a", later(6), LIMITS) == (True, Breaker(Phase.HALF_OPEN, later(6), "a"))


def test_half_open_lets_exactly_one_through() -> None:
    _, breaker = admit(after(10, 5), "probe", later(6), LIMITS)
    assert admit(breaker, "other", later(7), LIMITS) == (False, breaker)
    assert admit(breaker, "probe", later(7), LIMITS) == (True, breaker)  # a takeover sends the same attempt again
    assert sent(breaker, later(7), LIMITS) == breaker


def test_the_probe_decides_and_nobody_else() -> None:
    _, breaker = admit(after(10, 5), "probe", later(6), LIMITS)
    assert failed(breaker, "old", NOW, later(7), LIMITS) == breaker
    assert succeeded(breaker, "old", later(7)) == breaker
    assert succeeded(breaker, "probe", later(25)) == Breaker(Phase.CLOSED, later(25))
    assert failed(breaker, "probe", later(6), later(8), LIMITS) == Breaker(Phase.OPEN, later(8))
    assert admit(Breaker(Phase.OPEN, later(8)), "next", later(12), LIMITS)[0] is False


def test_what_failed_before_it_healed_does_not_open_it_again() -> None:
    breaker = Breaker(Phase.CLOSED, later(25))
    for number in range(50):
        breaker = failed(breaker, str(number), NOW, later(26), LIMITS)
    assert breaker == Breaker(Phase.CLOSED, later(25))


def test_a_probe_that_nobody_heard_of_again_does_not_block_for_ever() -> None:
    _, breaker = admit(after(10, 5), "lost", later(6), LIMITS)
    assert admit(breaker, "next", later(125), LIMITS)[0] is False
    assert admit(breaker, "next", later(126), LIMITS) == (True, Breaker(Phase.HALF_OPEN, later(126), "next"))


@pytest.mark.parametrize(
    "limits",
    [
        {"failure_rate": 0.0},
        {"failure_rate": 1.1},
        {"min_attempts": 0},
        {"window": timedelta(0)},
        {"cool_down": timedelta(-1)},
        {"probe_timeout": timedelta(0)},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        Limits(**limits)  # type: ignore[arg-type]  # the table holds a value for any of the fields


@given(st.integers(0, 60), st.integers(0, 60))
def test_it_is_open_exactly_if_the_rate_was_reached_at_some_failure(sends: int, failures: int) -> None:
    reached = any(max(sends, n) >= 10 and n >= 0.5 * max(sends, n) for n in range(1, failures + 1))
    assert (after(sends, failures).phase is Phase.OPEN) == reached


class Origin(RuleBasedStateMachine):
    """Workers that send and hear back in any order, at a clock that only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(min_attempts=3, window=timedelta(minutes=20), probe_timeout=timedelta(days=365))
        self.breaker = Breaker()
        self.now = NOW
        self.out: dict[str, datetime] = {}
        self.counter = 0
        self.sent_while_half_open = 0

    @rule(minutes=st.integers(0, 30))
    def time_passes(self, minutes: int) -> None:
        self.now += timedelta(minutes=minutes)

    @rule()
    def somebody_sends(self) -> None:
        self.counter += 1
        before = self.breaker
        ok, self.breaker = admit(self.breaker, f"a{self.counter}", self.now, self.limits)
        if before.phase is Phase.OPEN:
            assert before.since is not None
            assert ok == (self.now >= before.since + self.limits.cool_down)
            self.sent_while_half_open = 0
        if ok:
            self.breaker = sent(self.breaker, self.now, self.limits)
            self.out[f"a{self.counter}"] = self.now
            self.sent_while_half_open += self.breaker.phase is Phase.HALF_OPEN

    @rule(good=st.booleans(), which=st.integers(0, 99))
    def an_outcome_is_known(self, good: bool, which: int) -> None:
        if not self.out:
            return
        attempt = list(self.out)[which % len(self.out)]
        sent_at, before = self.out.pop(attempt), self.breaker
        if good:
            self.breaker = succeeded(self.breaker, attempt, self.now)
        else:
            self.breaker = failed(self.breaker, attempt, sent_at, self.now, self.limits)
        if before.phase is Phase.HALF_OPEN:
            decides = attempt == before.probe
            expected = (Phase.CLOSED if good else Phase.OPEN) if decides else Phase.HALF_OPEN
            assert self.breaker.phase is expected
        if before.phase is Phase.OPEN:
            assert self.breaker == before

    @invariant()
    def one_probe_at_most(self) -> None:
        assert self.breaker.phase is not Phase.HALF_OPEN or self.sent_while_half_open == 1
        assert (self.breaker.probe is not None) == (self.breaker.phase is Phase.HALF_OPEN)
        assert self.breaker.phase is Phase.CLOSED or self.breaker.since is not None


TestOrigin = Origin.TestCase


def test_what_was_sent_since_and_is_resolved_closes_it_whoever_sent_it() -> None:
    for held in (Breaker(Phase.OPEN, NOW), Breaker(Phase.HALF_OPEN, NOW, "probe")):
        assert proven(held, later(1), later(2)) == Breaker(Phase.CLOSED, later(2))
        assert proven(held, later(-1), later(2)) == held
    assert proven(Breaker(), later(1), later(2)) == Breaker()
