"""Plans whose applies were cut, or are late, or meet their own rows: nothing goes twice, and nothing stays behind."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
from dead_rows import store_at
from plan_rows import (
    AFTER_LEASE,
    LATER,
    LEASE,
    abort,
    add,
    applying,
    column,
    dead,
    freeze,
    items_of,
    rest,
    send,
    status,
)
from sqlalchemy import func, select

from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.lifecycle import leases
from dlqbatch.lifecycle.attempts import close_attempts
from dlqbatch.lifecycle.ended_replays import release_ended_plans
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.lifecycle.resend import Resend
from dlqbatch.replay import abort as abort_module
from dlqbatch.replay import plan as plan_states
from dlqbatch.replay.batches import ApplyOptions, Batches
from dlqbatch.replay.canary_and_rate import Pace, Stop, how_far
from dlqbatch.replay.executor import Inline
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from sqlalchemy import Connection, Engine

    from dlqbatch.replay.items import PlanItems

LATER_STILL = AFTER_LEASE + LEASE + timedelta(seconds=1)


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def take(items: PlanItems, now: datetime, ceiling: int | None = None) -> dict[int, int]:
    """What is left for it, whether it waits or was left behind."""
    while not (taken := items.take(100, ceiling, now)).is_over:
        if taken.numbers:
            return dict(taken.numbers)
    return {}


def attempts_of(engine: Engine) -> list[tuple[int, bool, str | None]]:
    with reading(engine) as connection:
        asked = select(ATTEMPTS.c.number, ATTEMPTS.c.sent_at, ATTEMPTS.c.outcome).order_by(ATTEMPTS.c.id)
        return [(number, sent_at is not None, outcome) for number, sent_at, outcome in connection.execute(asked)]


def release_plans(engine: Engine, now: datetime = LATER) -> None:
    release_ended_plans(engine, actor="bob", worker="b", lease=LEASE, now=now)


# --- An abort that was cut


def test_an_abort_that_is_cut_after_its_commit_leaves_nothing_reserved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = add(engine, dead(), dead(status=Status.MANUAL))
    frozen, other = freeze(engine), freeze(engine)
    applying(engine, frozen).reserve()

    def cut(*_: object) -> None:
        raise DatabaseUnreadable("somewhere", "gone")

    with monkeypatch.context() as patch:
        patch.setattr(abort_module, "release_reservations", cut)
        with pytest.raises(DatabaseUnreadable):
            abort(engine, frozen)
    assert (status(engine, frozen).state, column(engine, "plan_id", *ids)) == ("aborted", [frozen.plan_id] * 2)
    release_plans(engine)
    assert column(engine, "plan_id", *ids) == [None, None]
    assert status(engine, other).state == "planned"


def test_an_apply_killed_after_its_plan_was_aborted_leaves_nothing_reserved(engine: Engine) -> None:
    ids = add(engine, dead(), dead())
    frozen = freeze(engine)
    running = applying(engine, frozen)
    running.reserve()
    taken = running.take(10, None, LATER)
    abort(engine, frozen)
    release_plans(engine)
    assert column(engine, "plan_id", *ids) == [frozen.plan_id] * 2  # it sends them at this moment
    running.give_back(dict.fromkeys(taken.numbers, "the apply ended before it was sent"), LATER)
    assert (column(engine, "plan_id", *ids), column(engine, "status", *ids)) == ([None] * 2, ["pending"] * 2)


# --- A confirm that comes late


def test_what_was_taken_over_and_not_sent_keeps_its_number_for_the_confirm_that_comes_late(engine: Engine) -> None:
    (row_id,) = add(engine, dead())
    frozen = freeze(engine)
    late, hasty = applying(engine, frozen), applying(engine, frozen, "two")
    late.reserve()
    numbers = late.take(1, None, LATER).numbers
    assert take(hasty, AFTER_LEASE) == numbers == {row_id: 1}
    hasty.give_back({row_id: "origin-check-failed"}, AFTER_LEASE)
    assert attempts_of(engine) == [(1, False, None)]
    late.sent(numbers, AFTER_LEASE)
    assert take(applying(engine, frozen, "three"), LATER_STILL) == {}
    done = plan_states.finish(engine, frozen.plan_id, LATER_STILL)
    assert (done.state, done.sent, attempts_of(engine)) == ("done", 1, [(1, True, None)])


def test_what_was_taken_over_and_never_confirmed_goes_again_under_its_number(engine: Engine) -> None:
    (row_id,) = add(engine, dead())
    frozen = freeze(engine)
    first, second, third = (applying(engine, frozen, worker) for worker in ("one", "two", "three"))
    first.reserve()
    assert take(first, LATER) == take(second, AFTER_LEASE) == {row_id: 1}
    second.give_back({row_id: "unroutable"}, AFTER_LEASE)
    assert take(third, LATER_STILL) == {row_id: 1}
    third.give_back({row_id: "origin-gone"}, LATER_STILL, to_person=True)
    assert column(engine, "status", row_id) == ["manual"]


def test_what_is_confirmed_after_its_plan_was_aborted_is_not_sent_again(engine: Engine) -> None:
    """By no other plan, and not by the lifecycle: it is under observation."""
    first, second = add(engine, dead(), dead(next_retry_at=LATER))
    frozen = freeze(engine)
    late = applying(engine, frozen)
    late.reserve()
    numbers = late.take(2, None, LATER).numbers
    abort(engine, frozen, AFTER_LEASE)
    assert (column(engine, "status", first, second), attempts_of(engine)[0][2]) == (["pending"] * 2, "abandoned")
    late.sent(numbers, AFTER_LEASE)
    again = freeze(engine)
    with writing(engine) as connection:
        connection.execute(MESSAGES.delete().where(MESSAGES.c.id == second))
    assert send(applying(engine, again, "two"), now=LATER_STILL) == []
    done = plan_states.finish(engine, again.plan_id, LATER_STILL)
    assert (done.state, done.sent, items_of(engine, again)[0]) == ("done", 1, (first, "sent"))
    assert attempts_of(engine) == [(1, True, None)]
    assert column(engine, "status", first) == ["processing"]
    rest(engine, first)
    assert (column(engine, "lease_until", first), column(engine, "plan_id", first)) == ([None], [None])


def test_a_later_attempt_is_not_undone_by_the_confirm_of_one_that_was_given_up(engine: Engine) -> None:
    (row_id,) = add(engine, dead())
    frozen = freeze(engine)
    late = applying(engine, frozen)
    late.reserve()
    numbers = take(late, LATER)
    abort(engine, frozen, AFTER_LEASE)
    assert take(applying(engine, freeze(engine), "two"), LATER_STILL) == {row_id: 2}
    late.sent(numbers, LATER_STILL)
    assert attempts_of(engine) == [(1, True, "abandoned"), (2, False, None)]


# --- A canary


def test_a_plan_that_goes_on_after_a_stop_takes_over_no_more_than_its_canary_allows(engine: Engine) -> None:
    add(engine, *(dead() for _ in range(20)))
    frozen = freeze(engine)
    cut = applying(engine, frozen)
    cut.reserve()
    assert len(cut.take(16, None, LATER).numbers) == 16
    plan_states.stop(engine, frozen.plan_id, "too much came back", LATER)
    resumed = applying(engine, frozen, "two", again=True, now=AFTER_LEASE)
    assert len(send(resumed, 100, 1, AFTER_LEASE)) == 1
    assert resumed.take(100, 1, AFTER_LEASE).is_over
    assert resumed.outcomes().sent == status(engine, frozen).counted.sent == 1
    assert len(send(resumed, 100, 10, AFTER_LEASE)) == 9
    assert resumed.take(100, 10, AFTER_LEASE).is_over
    assert len(take(resumed, AFTER_LEASE) | take(resumed, AFTER_LEASE)) == 10


def test_a_canary_that_came_back_before_it_was_marked_stops_its_plan(engine: Engine) -> None:
    ids = add(engine, dead(), dead())
    frozen = freeze(engine)
    cut = applying(engine, frozen)
    cut.reserve()
    assert cut.take(100, 1, LATER).numbers == {ids[0]: 1}
    with writing(engine) as connection:
        (token,) = connection.scalars(select(MESSAGES.c.lock_token).where(MESSAGES.c.id == ids[0])).all()
        assert close_attempts(connection, {ids[0]: 1}, "failed", LATER)
        back = states.move(connection, ids[0], Status.PROCESSING, Status.PENDING, token, LATER, "ingest", "failed")
        assert back
    again = applying(engine, frozen, "two")
    assert again.reserve() == {}
    assert items_of(engine, frozen) == [(ids[0], "sent"), (ids[1], "waiting")]
    outcomes = again.outcomes()
    assert (outcomes.sent, outcomes.failed) == (1, 1)
    assert isinstance(how_far(outcomes, canary=True, max_failure_rate=0.1), Stop)


def test_a_canary_that_nobody_waits_for_any_more_is_no_success(engine: Engine) -> None:
    (row_id, _) = add(engine, dead(), dead())
    items = applying(engine, freeze(engine))
    items.reserve()
    assert send(items, ceiling=1) == [row_id]
    assert SentAttempts(engine).leave_to_person({row_id: (1, "its origin is gone")}, LATER) == {row_id}
    outcomes = items.outcomes()
    assert (outcomes.sent, outcomes.failed, outcomes.open) == (1, 1, 0)
    assert isinstance(how_far(outcomes, canary=True, max_failure_rate=0.1), Stop)


# --- What an apply has under way itself


@dataclass
class Clock:
    now: datetime

    def __call__(self) -> datetime:
        return self.now


def batches(items: PlanItems, clock: Clock, *, batch_size: int = 100, lease: float = 60) -> Batches:
    options = ApplyOptions(batch_size, canary=False, lease=lease)
    nothing = cast("Any", None)  # only what is published asks for an origin
    return Batches(items, Resend(nothing, nothing, b"", 0), Pace(None), options, clock, None, lambda: False, Inline())


def test_leases_of_what_is_under_way_are_renewed_so_that_nobody_takes_it_over(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(3)))
    frozen = freeze(engine)
    items, clock = applying(engine, frozen), Clock(LATER)
    items.reserve()
    source = batches(items, clock, lease=0)  # on the monotonic clock it is always time to renew
    assert {offer.tag for offer in source.more(512) or ()} == set(ids)
    clock.now = LATER + LEASE / 2
    source.flush()
    assert column(engine, "lease_until", *ids) == [clock.now + LEASE] * 3
    assert take(applying(engine, frozen, "two"), AFTER_LEASE) == {}
    for row_id in ids:
        source.confirmed(row_id)
    source.close()
    assert plan_states.finish(engine, frozen.plan_id, AFTER_LEASE).sent == 3


def test_an_apply_that_meets_its_own_rows_after_their_lease_sends_none_of_them_again(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(3)))
    frozen = freeze(engine)
    items, clock = applying(engine, frozen), Clock(LATER)
    items.reserve()
    source = batches(items, clock, batch_size=2)
    assert len(source.more(512) or ()) == 2
    clock.now = AFTER_LEASE
    assert len(source.more(512) or ()) == 1
    source.confirmed(ids[0])
    source.confirmed(ids[0])  # a copy of it, if there were one
    for _ in range(2):
        assert source.more(512) == ()  # neither what is under way nor what is confirmed, and not written down yet
    assert source.more(512) is None
    source.confirmed(ids[1])
    source.held(ids[2], "not-confirmed")
    source.close()
    assert plan_states.finish(engine, frozen.plan_id, LATER_STILL).sent == 2
    much_later = LATER_STILL + 2 * LEASE
    assert [row.row_id for row in leases.take_over(engine, "v", much_later, plan_id=frozen.plan_id)] == [ids[2]]


def test_what_waits_to_be_offered_and_is_taken_over_from_ourselves_is_offered_once(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(2)))
    items = applying(engine, freeze(engine))
    items.reserve()
    times = iter([LATER, AFTER_LEASE])  # of the first batch, and of the look for a second one
    source = batches(items, lambda: next(times, LATER_STILL), batch_size=2)
    offered = [offer.tag for offer in source.more(1) or ()]
    source.confirmed(ids[0])
    while (offers := source.more(512)) is not None:
        offered += [offer.tag for offer in offers]
    assert offered == ids


def test_what_is_confirmed_while_its_lease_is_renewed_is_sent_and_no_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread renews leases while another writes down the confirms of the same messages."""
    ids = add(engine, *(dead() for _ in range(2)))
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    numbers = items.take(100, None, LATER).numbers

    @contextmanager
    def after_the_confirm(store: Engine) -> Iterator[Connection]:
        monkeypatch.undo()
        items.sent({ids[0]: numbers[ids[0]]}, LATER)
        with writing(store) as connection:
            yield connection

    monkeypatch.setattr("dlqbatch.replay.items.writing", after_the_confirm)
    assert items.begin(numbers, LATER) == {ids[1]: numbers[ids[1]]}
    assert items_of(engine, frozen) == [(ids[0], "sent"), (ids[1], "waiting")]


def test_what_another_has_taken_over_while_the_process_stood_still_is_not_offered(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(3)))
    frozen = freeze(engine)
    items, clock = applying(engine, frozen), Clock(LATER)
    items.reserve()
    source = batches(items, clock, lease=0)  # on the monotonic clock it is always time to renew
    assert [offer.tag for offer in source.more(1) or ()] == ids[:1]
    clock.now = AFTER_LEASE
    assert sorted(take(applying(engine, frozen, "two"), AFTER_LEASE)) == ids
    assert not source.more(512)


def test_to_ask_what_came_back_takes_a_twentieth_of_the_time_however_large_the_plan(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(engine, *(dead() for _ in range(9)))
    items = applying(engine, freeze(engine))
    items.reserve()
    seconds, asked = 0.0, list[float]()

    def is_too_much() -> bool:
        nonlocal seconds
        asked.append(seconds)
        seconds += 1
        return False

    source = batches(items, Clock(LATER), batch_size=1)
    source._is_too_much = is_too_much
    source._asks_at = seconds
    monkeypatch.setattr("dlqbatch.replay.batches.time.monotonic", lambda: seconds)
    for _ in range(5):
        assert source.more(512)
        seconds += 10
    assert asked == [0.0, 21.0, 42.0]


def test_no_more_is_begun_at_once_than_two_batches_hold(engine: Engine) -> None:
    add(engine, *(dead() for _ in range(5)))
    items = applying(engine, freeze(engine))
    items.reserve()
    source = batches(items, Clock(LATER), batch_size=2)
    for begun in (4, 5, 5):  # one is being sent, and the next one is taken
        assert source.more(512)
        with reading(engine) as connection:
            assert connection.scalar(select(func.count()).select_from(ATTEMPTS)) == begun


# --- Leases of what is sent


def test_what_is_sent_counts_as_held_in_no_run_and_nobody_takes_it_over(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(5)))
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    assert send(items, 3) == ids[:3]
    assert status(engine, frozen).held == 0
    assert plan_states.finish(engine, frozen.plan_id, LATER).state == "applying"
    assert column(engine, "plan_id", *ids) == [frozen.plan_id] * 5
    assert leases.take_over(engine, "v", LATER_STILL) == []
    assert leases.take_over(engine, "v", LATER_STILL, plan_id=frozen.plan_id) == []


def test_what_a_cut_apply_had_sent_does_not_hide_what_it_had_not(engine: Engine) -> None:
    """More was sent, and its leases end first, than is taken over at once."""
    ids = add(engine, *(dead() for _ in range(5)))
    frozen = freeze(engine)
    cut = applying(engine, frozen)
    cut.reserve()
    assert send(cut, 3) == ids[:3]
    assert list(cut.take(2, None, LATER).numbers) == ids[3:]
    running = applying(engine, frozen, "two")
    assert running.take(2, None, AFTER_LEASE).numbers == {}  # the first look is for what waits
    assert sorted(running.take(2, None, AFTER_LEASE).numbers) == ids[3:]
    abort(engine, frozen, LATER_STILL)
    assert column(engine, "status", *ids) == ["processing"] * 3 + ["pending"] * 2
    rest(engine, *ids[:3])
    assert (column(engine, "plan_id", *ids), column(engine, "lease_until", *ids)) == ([None] * 5, [None] * 5)


def test_leases_of_what_is_sent_are_not_renewed_in_the_middle_of_a_long_run(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(3)))
    frozen = freeze(engine)
    items, clock = applying(engine, frozen), Clock(LATER)
    items.reserve()
    source = batches(items, clock, batch_size=2, lease=0)
    assert len(source.more(512) or ()) == 2
    for row_id in ids[:2]:
        source.confirmed(row_id)
    assert len(source.more(2) or ()) == 1  # so little room that what is confirmed is written down first
    assert [state for _, state in items_of(engine, frozen)] == ["sent", "sent", "waiting"]
    clock.now = AFTER_LEASE
    source.flush()
    assert column(engine, "lease_until", *ids) == [LATER + LEASE, LATER + LEASE, AFTER_LEASE + LEASE]
