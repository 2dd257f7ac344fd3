"""What a group is doing, from counts and times."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.groups.state import NEW_FOR, QUIET_AFTER, Acknowledged, Arrivals, GroupState, grows, state_of

NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
OLD = Arrivals(NOW - 48 * HOUR, NOW - HOUR / 2, 5, 120, None)
TIMES = st.timedeltas(timedelta(0), timedelta(days=4)).map(lambda ago: NOW - ago)
ARRIVALS = st.builds(
    lambda one, other, recent, before, resolved: Arrivals(min(one, other), max(one, other), recent, before, resolved),
    TIMES,
    TIMES,
    st.integers(0, 2_000),
    st.integers(0, 5_000),
    st.none() | TIMES,
)
KNOWN = st.none() | st.builds(
    Acknowledged,
    TIMES,
    st.none() | TIMES.map(lambda at: at + 48 * HOUR),
    st.none() | st.integers(1, 99),
    st.integers(0, 200),
)


def test_each_state_at_its_border() -> None:
    assert state_of(OLD, None, NOW) is GroupState.ONGOING
    assert state_of(replace(OLD, first=NOW - NEW_FOR + timedelta(seconds=1)), None, NOW) is GroupState.NEW
    assert state_of(replace(OLD, first=NOW - NEW_FOR), None, NOW) is GroupState.ONGOING
    assert state_of(replace(OLD, last=NOW - QUIET_AFTER), None, NOW) is GroupState.QUIET
    assert state_of(replace(OLD, recent=10, before=120), None, NOW) is GroupState.ONGOING
    assert state_of(replace(OLD, recent=11, before=120), None, NOW) is GroupState.GROWING
    assert state_of(replace(OLD, recent=9, before=0), None, NOW) is GroupState.ONGOING
    assert state_of(replace(OLD, resolved=NOW - HOUR), None, NOW) is GroupState.REGRESSED
    assert state_of(replace(OLD, resolved=OLD.last), None, NOW) is GroupState.ONGOING


def test_an_acknowledgement_ends_by_its_time_its_number_or_growth() -> None:
    known = Acknowledged(NOW - HOUR, None, None, 30)
    assert state_of(OLD, known, NOW) is GroupState.ACKNOWLEDGED
    growing = replace(OLD, recent=500)
    assert state_of(growing, known, NOW) is GroupState.GROWING
    assert state_of(growing, replace(known, arrived_since=9), NOW) is GroupState.ACKNOWLEDGED
    assert state_of(growing, replace(known, until=NOW + HOUR), NOW) is GroupState.ACKNOWLEDGED
    assert state_of(growing, replace(known, until=NOW), NOW) is GroupState.GROWING
    assert state_of(growing, replace(known, more=31), NOW) is GroupState.ACKNOWLEDGED
    assert state_of(growing, replace(known, more=30), NOW) is GroupState.GROWING


@given(ARRIVALS, KNOWN)
def test_the_states_exclude_each_other_as_documented(arrivals: Arrivals, known: Acknowledged | None) -> None:
    state = state_of(arrivals, known, NOW)
    without = state_of(arrivals, None, NOW)
    assert state in {GroupState.ACKNOWLEDGED, without}
    assert without is not GroupState.ACKNOWLEDGED
    assert (without is GroupState.QUIET) == (NOW - arrivals.last >= QUIET_AFTER)
    if without is GroupState.GROWING:
        assert grows(arrivals)
        assert NOW - arrivals.first >= NEW_FOR


@given(ARRIVALS, st.integers(0, 500))
def test_more_messages_in_the_last_hour_never_end_growth(arrivals: Arrivals, more: int) -> None:
    assert not grows(arrivals) or grows(replace(arrivals, recent=arrivals.recent + more))
