"""What a plan is known by, what speaks against it, how far and how fast it may go."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.errors import SettingsError
from dlqbatch.replay.canary_and_rate import (
    Go,
    Kind,
    Outcomes,
    Pace,
    Step,
    Stop,
    Wait,
    first_ones,
    how_far,
    rate_of,
    turn_of,
)
from dlqbatch.replay.freeze import HASH_LENGTH, PlanHash, Selection
from dlqbatch.replay.risks import (
    BACKED_UP,
    LARGEST_BODY,
    LARGEST_BODY_BEFORE_4,
    Facts,
    Place,
    Risk,
    RiskName,
    largest_body,
    risks,
    unanswered,
)
from dlqbatch.replay.second_person import why_not_alone
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


@pytest.mark.parametrize("mended", [None, "INC-1"])
def test_a_mend_answers_the_risks_that_they_fail_again_the_same_way_and_no_other(mended: str | None) -> None:
    answered = {"loops-back", "failed-before", "rule-says-manual"}
    found = unanswered([Risk(name, 1, "says") for name in RiskName], mended)
    assert {risk.name.value for risk in found} == set(RiskName) - (answered if mended else set())


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


def canary(outcomes: Outcomes, step: Step | None = None, rate: float = 0.1) -> Go | Wait | Stop:
    return how_far(outcomes, step, canary=True, max_failure_rate=rate)


def test_a_canary_grows_to_five_times_what_is_proven() -> None:
    first = Step(4)
    assert canary(Outcomes()) == Go(first)
    assert canary(Outcomes(2, succeeded=2), first) == Go(first)  # a step that was cut is completed first
    assert canary(Outcomes(4, succeeded=3), first) == Wait(first)
    assert canary(Outcomes(4, succeeded=4), first) == Go(Step(20, after=4))
    assert canary(Outcomes(20, succeeded=20), Step(20, 4)) == Go(Step(100, after=20))
    assert canary(Outcomes(100, succeeded=100), Step(100, 20)) == Go(Step(500, after=100))


def test_a_step_of_which_something_came_back_is_followed_by_none_that_is_larger() -> None:
    assert canary(Outcomes(100, 1, 99), Step(100, 20)) == Go(Step(180, 100, 1))
    assert canary(Outcomes(180, 1, 179), Step(180, 100, 1)) == Go(Step(895, 180, 1))
    assert canary(Outcomes(4, 4), Step(4), rate=1.0) == Go(Step(5, 4, 4))


def test_a_plan_without_a_known_step_waits_for_all_that_it_has_sent() -> None:
    assert canary(Outcomes(50, succeeded=49)) == Wait(Step(50))
    assert canary(Outcomes(50, succeeded=50)) == Go(Step(250, 50))


def test_too_many_failures_stop_it_at_once_and_a_rate_of_one_never_does() -> None:
    assert isinstance(canary(Outcomes(1, 1), Step(4)), Stop)
    assert isinstance(canary(Outcomes(10, 2), Step(20, 4)), Stop)
    assert canary(Outcomes(20, 2), Step(20, 4)) == Wait(Step(20, 4))
    assert isinstance(how_far(Outcomes(1000, 101), canary=False, max_failure_rate=0.1), Stop)
    assert how_far(Outcomes(1000, 100), canary=False, max_failure_rate=0.1) == Go(None)
    assert isinstance(canary(Outcomes(1, 1), Step(4), rate=0.0), Stop)


@given(st.integers(0, 2000), st.floats(0, 1), st.data())
def test_a_canary_never_sends_more_than_five_times_what_is_proven(plan: int, rate: float, data: st.DataObject) -> None:
    """From its beginning to its end, whatever comes back."""
    sent = failed = succeeded = 0
    step: Step | None = None
    for _ in range(3 * plan + 3):
        verdict = canary(Outcomes(sent, failed, succeeded), step, rate)
        assert isinstance(verdict, Stop) == bool(sent and failed / sent > rate)
        match verdict:
            case Stop():
                break
            case Wait():
                assert failed + succeeded < sent
                came_back = data.draw(st.integers(0, sent - failed - succeeded))
                failed, succeeded = failed + came_back, sent - failed - came_back
            case Go():
                assert verdict.step is not None
                assert verdict.step.to > sent
                if verdict.step != step:
                    assert failed + succeeded == sent
                    assert verdict.step.to <= max(5 * succeeded, sent + 1, 4)
                step = verdict.step
                sent = data.draw(st.integers(min(sent + 1, plan), min(step.to, plan)))
                if sent == plan:
                    break


KINDS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=20
)  # the queue of each kind, and how many messages are of it


@given(KINDS)
def test_the_first_ones_show_every_queue_then_every_kind_old_and_large(found: list[tuple[str, int]]) -> None:
    places = iter(range(1, 1000))
    kinds = [Kind(queue, number, next(places), next(places)) for queue, number in found]
    first = first_ones(kinds)
    assert sorted(first) == sorted({place for kind in kinds for place in (kind.oldest, kind.largest)})
    queues = {kind.queue for kind in kinds}
    kind_of = {place: kind for kind in kinds for place in (kind.oldest, kind.largest)}
    assert {kind_of[place].queue for place in first[: len(queues)]} == queues
    assert {id(kind_of[place]) for place in first[: len(kinds)]} == {id(kind) for kind in kinds}
    if len(kinds) > 1:
        assert {kind_of[place].oldest == place for place in first[: len(kinds)]} == {True, False}
    assert first_ones(kinds, [500, 1])[:2] == [500, 1]


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


@pytest.mark.parametrize(("idle", "allowed"), [(None, 1), (0.0, 0), (3599.0, 0), (3600.0, 1), (86_400.0, 1)])
def test_a_pace_goes_on_from_what_an_earlier_run_sent(idle: float | None, allowed: int) -> None:
    assert Pace(rate_of("1/h"), idle).allowed(50.0, 100) == allowed


@pytest.mark.parametrize(
    ("left", "plans", "turn"),
    [(50.0, 1, (50.0, 50.0)), (50.0, 5, (10.0, 10.0)), (50.0, 6, (10.0, 0.0)), (3.0, 1, (3.0, 0.0))],
)
def test_plans_share_a_run_and_too_many_do_not_wait(left: float, plans: int, turn: tuple[float, float]) -> None:
    assert turn_of(left, plans) == turn


def test_a_large_plan_needs_a_second_person_and_nobody_else_is_asked() -> None:
    def refused(person: str, size: int = 11, *, is_approved: bool = False, most_alone: int | None = 10) -> bool:
        why = why_not_alone("abc", size, "ann", person, is_approved=is_approved, most_alone=most_alone)
        assert why is None or "`dlqbatch replay approve abc`" in why
        return why is not None

    assert refused("ann")
    assert refused(" Ann")
    assert not refused("bob")
    assert not refused("ann", is_approved=True)
    assert not refused("ann", size=10)
    assert not refused("ann", most_alone=None)
    assert refused("ann", size=1, most_alone=0)
