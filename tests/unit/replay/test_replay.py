"""What a plan is known by, what speaks against it, how far and how fast it may go."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.errors import SettingsError
from dlqbatch.replay.canary_and_rate import CANARY_STEPS, Go, Outcomes, Pace, Stop, Wait, how_far, rate_of
from dlqbatch.replay.freeze import HASH_LENGTH, PlanHash, Selection
from dlqbatch.replay.risks import (
    BACKED_UP,
    LARGEST_BODY,
    LARGEST_BODY_BEFORE_4,
    Facts,
    Place,
    RiskName,
    largest_body,
    risks,
)
from dlqbatch.store.filters import NotUnderstood

NOW = datetime(2030, 6, 1, tzinfo=UTC)
FINE = Place("work", is_there=True, messages=0, consumers=1)


def hash_of(*items: tuple[int, str, datetime], to_queue: str | None = None, created_at: datetime = NOW) -> str:
    made = PlanHash(to_queue, created_at)
    for item in items:
        made.add(*item)
    return made.hash()


def test_a_hash_changes_with_everything_that_a_plan_freezes() -> None:
    first, second = (1, "pending", NOW), (2, "failed", NOW)
    later = NOW + timedelta(microseconds=1)
    hashes = [
        hash_of(first, second),
        hash_of(second, first),
        hash_of(first),
        hash_of((1, "manual", NOW), second),
        hash_of((1, "pending", later), second),
        hash_of(first, second, to_queue="other"),
        hash_of(first, second, to_queue="None"),
        hash_of(first, second, created_at=later),
        hash_of(),
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(each) for each in hashes} == {HASH_LENGTH}
    assert hash_of(first, second) == hashes[0]


def named(facts: Facts, *places: Place) -> list[tuple[str, int]]:
    return [(risk.name, risk.messages) for risk in risks(facts, {place.name: place for place in places})]


@pytest.mark.parametrize(
    ("place", "risk"),
    [
        (Place("work", is_there=False), RiskName.ORIGIN_MISSING),
        (Place("work", is_there=None, why="locked"), RiskName.ORIGIN_UNCLEAR),
        (Place("work", is_there=True, messages=0, consumers=0), RiskName.NO_CONSUMERS),
        (Place("work", is_there=True, messages=BACKED_UP + 1, consumers=1), RiskName.BACKED_UP),
    ],
)
def test_what_is_wrong_with_an_origin_is_a_risk_for_what_goes_there(place: Place, risk: RiskName) -> None:
    assert named(Facts({"work": 7}), place) == [(risk, 7)]


def test_a_healthy_origin_and_an_exchange_are_none() -> None:
    waiting = Place("full", is_there=True, messages=BACKED_UP, consumers=3)
    assert named(Facts({"work": 1, "orders": 2, "full": 3}), FINE, Place("orders", is_there=True), waiting) == []


def test_retries_that_failed_of_late_mean_that_more_will() -> None:
    assert named(Facts({"work": 5}, recent={"work": (1, 2)}), FINE) == [(RiskName.LOOPS_BACK, 5)]
    assert named(Facts({"work": 5}, recent={"work": (1, 3), "other": (9, 9)}), FINE) == []
    assert named(Facts({"work": 5}, recent={"work": (0, 0)}), FINE) == []


def test_the_gravest_comes_first_and_each_says_how_many_it_concerns() -> None:
    facts = Facts(
        {"work": 5, "gone": 2},
        without_origin=1,
        failed_before=4,
        said_manual={"validation": 3},
        large_bodies=1,
        replaced=2,
        replaced_by=(7, 9),
        possible_duplicates=6,
    )
    found = named(facts, Place("work", is_there=True, messages=0, consumers=0), Place("gone", is_there=False))
    assert found == [
        (RiskName.ORIGIN_MISSING, 2),
        (RiskName.REPLACED, 2),
        (RiskName.POSSIBLE_DUPLICATE, 6),
        (RiskName.ORIGIN_UNKNOWN, 1),
        (RiskName.NO_CONSUMERS, 5),
        (RiskName.FAILED_BEFORE, 4),
        (RiskName.RULE_SAYS_MANUAL, 3),
        (RiskName.BODY_TOO_LARGE, 1),
    ]


def test_newer_brokers_take_smaller_bodies() -> None:
    assert largest_body((3, 10, 8)) == LARGEST_BODY_BEFORE_4
    assert {largest_body(version) for version in [(4, 0, 5), (4, 3)]} == {LARGEST_BODY}
    assert largest_body(()) == LARGEST_BODY_BEFORE_4


def canary(sent: int, failed: int = 0, succeeded: int = 0, rate: float = 0.1) -> Go | Wait | Stop:
    return how_far(Outcomes(sent, failed, succeeded), canary=True, max_failure_rate=rate)


def test_a_canary_sends_one_then_ten_then_a_hundred_then_all() -> None:
    assert canary(0) == Go(1)
    assert canary(1) == Wait(1)
    assert canary(1, succeeded=1) == Go(10)
    assert canary(4, succeeded=1) == Go(10)  # a step that was cut is completed first
    assert canary(10, succeeded=9) == Wait(10)
    assert canary(10, failed=1, succeeded=9) == Go(100)
    assert canary(100, succeeded=99) == Wait(100)
    assert canary(100, succeeded=100) == Go(None)
    assert canary(101, succeeded=100) == Go(None)


def test_too_many_failures_stop_it_at_once_and_a_rate_of_one_never_does() -> None:
    assert isinstance(canary(1, failed=1), Stop)
    assert isinstance(canary(10, failed=2), Stop)
    assert canary(10, failed=1) == Wait(10)
    assert isinstance(how_far(Outcomes(1000, 101), canary=False, max_failure_rate=0.1), Stop)
    assert how_far(Outcomes(1000, 100), canary=False, max_failure_rate=0.1) == Go(None)
    assert canary(1, failed=1, rate=1.0) == Go(10)
    assert isinstance(canary(1, failed=1, rate=0.0), Stop)


@given(st.integers(0, 200), st.data(), st.floats(0, 1))
def test_a_canary_never_sends_beyond_a_step_whose_outcome_is_open(sent: int, data: st.DataObject, rate: float) -> None:
    failed = data.draw(st.integers(0, sent))
    succeeded = data.draw(st.integers(0, sent - failed))
    verdict = canary(sent, failed, succeeded, rate)
    if sent in CANARY_STEPS and failed + succeeded < sent:
        assert not isinstance(verdict, Go)
    if isinstance(verdict, Go) and verdict.limit is not None:
        assert verdict.limit > sent
        assert verdict.limit in CANARY_STEPS
    assert isinstance(verdict, Stop) == bool(sent and failed / sent > rate)


@pytest.mark.parametrize("name", ["", "q" * 256, "ü" * 128, "caf\udce9"])
def test_a_queue_that_no_broker_takes_is_refused(name: str) -> None:
    with pytest.raises(NotUnderstood, match="queue to send to"):
        Selection(everything=True, to_queue=name)
    assert Selection(everything=True, to_queue="ü" * 127 + "q").to_queue


@pytest.mark.parametrize(
    ("text", "rate"), [("50", 50), ("50/s", 50), ("600/min", 10), ("1.5 / s", 1.5), ("36/h", 0.01)]
)
def test_a_rate_is_written_as_people_do(text: str, rate: float) -> None:
    assert rate_of(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "0", "-1", "fast", "5/year", "1e9", "5/", "nan", "9" * 400 + "/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="no rate"):
        rate_of(text)


@given(st.floats(0.5, 5000), st.lists(st.floats(0, 0.2), min_size=1, max_size=300))
def test_no_more_goes_out_than_the_pace_allows(rate: float, waits: list[float]) -> None:
    now = start = 1000.0
    pace = Pace(rate)
    taken = pace.allowed(start, 512)
    pace.took(taken)
    for wait in waits:
        now += wait
        number = pace.allowed(now, 512)
        pace.took(number)
        taken += number
        assert taken <= rate * (now - start) + 1


@given(st.floats(2, 500), st.lists(st.floats(0, 0.2), min_size=1, max_size=300))
def test_who_asks_often_gets_all_that_the_rate_allows(rate: float, waits: list[float]) -> None:
    now = start = 1000.0
    pace = Pace(rate)
    taken = 0
    for wait in [0.0, *waits]:
        now += wait
        number = pace.allowed(now, 512)
        pace.took(number)
        taken += number
    assert taken >= rate * (now - start) - 0.001


def test_a_pace_makes_up_for_little_only() -> None:
    pace = Pace(100)
    assert pace.allowed(50.0, 10_000) == 1
    assert pace.allowed(60.0, 10_000) == 100
    assert Pace(None).allowed(0.0, 512) == 512
