"""A plan from its freezing to its end, as the database keeps it: what is in it, what is skipped, who holds what."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, fill, row, store_at
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
    go_to,
    items_of,
    rest,
    send,
    status,
)
from program import HANGS_AFTER, eventually
from sqlalchemy import select, text, update

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.lifecycle import attempts, leases
from dlqbatch.lifecycle.attempts import close_attempts
from dlqbatch.lifecycle.ended_replays import release_ended_plans
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.replay import plan as plan_states
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.plan import NoSuchPlan, PlanRefused
from dlqbatch.store import journal as states
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dlqbatch.replay.items import PlanItems
    from dlqbatch.replay.risk_facts import Frozen


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def test_a_plan_holds_what_waits_the_oldest_first_and_nothing_else(engine: Engine) -> None:
    newest = add(engine, dead(), at=NOW + timedelta(minutes=3))
    oldest = add(engine, dead(), dead(status=Status.MANUAL), at=NOW)
    failed, busy, gone = add(engine, dead(), dead(), dead(), at=NOW + timedelta(minutes=1))
    go_to(engine, failed, Status.PENDING, Status.PROCESSING, Status.FAILED)
    go_to(engine, busy, Status.PENDING, Status.PROCESSING)
    go_to(engine, gone, Status.PENDING, Status.PROCESSING, Status.RESOLVED)
    frozen = freeze(engine)
    assert items_of(engine, frozen) == [(row_id, "waiting") for row_id in [*oldest, failed, *newest]]
    assert (frozen.size, frozen.left_out) == (4, {"processing": 1})
    assert frozen.by_status == {"pending": 2, "manual": 1, "failed": 1}
    assert status(engine, frozen).state == "planned"
    assert column(engine, "plan_id", *oldest) == [None, None]


def test_filters_ids_a_limit_and_dates_choose_what_is_in_it(engine: Engine) -> None:
    timeouts = add(engine, *(dead(error_type="TIMEOUT_ERROR", error_message=f"took 5{n}") for n in range(3)))
    other = add(engine, dead(error_type="OTHER"), at=NOW + timedelta(days=1))
    chosen: list[tuple[Selection, list[int]]] = [
        (Selection(Filters.parse(error_type="TIMEOUT_ERROR")), timeouts),
        (Selection(Filters.parse(text="took 51")), timeouts[1:2]),
        (Selection(limit=2), timeouts[:2]),
        (Selection(Filters.parse(text="TOOK"), limit=1), timeouts[:1]),
        (Selection(row_ids=(other[0], timeouts[0])), [timeouts[0], other[0]]),
        (Selection(Filters.parse(until="2030-06-01")), timeouts),
        (Selection(Filters.parse(since="2030-06-02")), other),
        (Selection(Filters.parse(until=NOW.isoformat())), timeouts),
        (Selection(Filters.parse(origin="elsewhere")), []),
    ]
    for what, expected in chosen:
        assert [row_id for row_id, _ in items_of(engine, freeze(engine, what))] == expected, what


def test_a_plan_of_everything_has_to_be_asked_for_and_odd_wishes_are_refused(engine: Engine) -> None:
    (row_id,) = add(engine, dead())
    wishes: list[dict[str, Any]] = [
        {},
        {"filters": Filters.parse(event="x"), "row_ids": (row_id,)},
        {"filters": Filters(statuses=(Status.RESOLVED,))},
        {"row_ids": (row_id,), "limit": 1},
    ]
    for wish in wishes:
        with pytest.raises(NotUnderstood):
            Selection(**wish)
    assert freeze(engine, Selection(row_ids=(row_id, row_id + 1, 2**70))).left_out == {"no such message": 2}


def test_a_dry_run_and_a_plan_of_nothing_are_not_kept(engine: Engine) -> None:
    assert freeze(engine).size == 0
    add(engine, dead())
    assert freeze(engine, dry_run=True).size == 1
    assert plan_states.recent(engine) == ()


def test_a_secret_in_the_filter_of_a_plan_is_masked(engine: Engine) -> None:
    add(engine, dead(error_message="login with password=hunter2 failed"))
    frozen = freeze(engine, Selection(Filters.parse(text="password=hunter2")))
    assert (frozen.size, status(engine, frozen).filters) == (1, {"text": "password=***"})


def test_what_a_cut_apply_of_an_aborted_plan_held_is_let_go_after_its_lease_and_not_before(engine: Engine) -> None:
    ids = add(engine, dead(), dead())
    frozen, other = freeze(engine), freeze(engine)
    cut = applying(engine, frozen)
    cut.reserve()
    cut.take(1, None, LATER)
    abort(engine, frozen, LATER)
    release_ended_plans(engine, actor="bob", worker="b", lease=LEASE, now=LATER)
    assert column(engine, "status", *ids) == ["processing", "pending"]
    release_ended_plans(engine, actor="bob", worker="b", lease=LEASE, now=AFTER_LEASE)
    assert (column(engine, "status", *ids), column(engine, "plan_id", *ids)) == (["pending"] * 2, [None] * 2)
    assert status(engine, frozen).do_next.startswith("nothing was sent: 0 were skipped, 2 given up")
    assert status(engine, other).state == "planned"


def carried(engine: Engine, frozen: Frozen, row_id: int) -> tuple[str, ...]:
    """What a plan's row carries, in the words of the table."""
    with reading(engine) as connection:
        row = connection.execute(select(MESSAGES).where(MESSAGES.c.id == row_id)).one()
        sent = connection.scalars(select(ATTEMPTS.c.sent_at).where(ATTEMPTS.c.message_id == row_id)).all()
    attempt = "none" if not sent else "begun" if sent[0] is None else "sent"
    status = "unchanged" if row.status == "pending" else row.status
    has = ["yes" if value is not None else "no" for value in (row.plan_id, row.lease_until)]
    return (dict(items_of(engine, frozen))[row_id], status, *has, attempt)


def test_a_row_of_a_plan_carries_what_the_documented_table_says(engine: Engine) -> None:
    page = (Path(__file__).parents[3] / "docs" / "dead-store.md").read_text(encoding="utf-8")
    line = r"^\| (waiting|sent|skipped) \| [\w ]+ \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$"
    table = re.findall(line, page, re.MULTILINE)
    first, second, other = add(engine, dead(), dead(), dead())
    frozen = freeze(engine)
    walked = [carried(engine, frozen, first)]
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == other).values(updated_at=LATER))
    items = applying(engine, frozen)
    items.reserve()
    walked.append(carried(engine, frozen, first))
    numbers = items.take(1, None, LATER).numbers
    walked.append(carried(engine, frozen, first))
    items.sent(numbers, LATER)
    walked.append(carried(engine, frozen, first))
    assert [*walked, carried(engine, frozen, other)] == table
    items.give_back(dict.fromkeys(items.take(1, None, LATER).numbers, "the run has ended"), LATER)
    assert carried(engine, frozen, second)[:-1] == table[1][:-1]


def test_the_hash_tells_two_plans_of_the_same_messages_apart_and_is_found_by_its_beginning(engine: Engine) -> None:
    add(engine, dead())
    first, second = freeze(engine), freeze(engine, Selection(everything=True, to_queue="elsewhere"))
    assert first.hash != second.hash
    assert plan_states.status(engine, first.hash[:8].upper()).id == first.plan_id
    for stale in ("", first.hash[:7], "0" * 16, "%%%%%%%%", "x' OR '1'='1"):
        with pytest.raises(NoSuchPlan):
            plan_states.status(engine, stale)


def test_what_is_known_of_its_messages_is_counted(engine: Engine) -> None:
    add(engine, dead(dlq_retry_count=1, body=b"x"), dead(), row(fingerprint="1" * 16))
    add(engine, row(origin_exchange="orders", origin_key="a"), row(origin_exchange="", origin_key="direct"))
    frozen = freeze(engine)
    places = {(origin.queue, origin.exchange): number for origin, number in frozen.by_origin.items()}
    assert places == {("work", None): 2, (None, "orders"): 1, ("direct", None): 1}
    assert frozen.known.without_origin == 1
    assert frozen.facts((), 1).failed_before == 4  # all but one are of the group that failed before
    assert frozen.by_event == {"unknown": 3, "work": 2}


def test_sent_items_are_done_and_their_rows_let_go_at_the_end(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(5)))
    frozen = freeze(engine)
    items = applying(engine, frozen)
    assert items.reserve() == {}
    assert column(engine, "plan_id", *ids) == [frozen.plan_id] * 5
    assert leases.claim(engine, "lifecycle", NOW + timedelta(days=1)) == []
    assert send(items, 3) == ids[:3]
    assert plan_states.finish(engine, frozen.plan_id, LATER).state == "applying"
    assert send(items) == ids[3:]
    done = plan_states.finish(engine, frozen.plan_id, LATER)
    assert (done.state, done.sent, done.waiting, done.outcomes.open) == ("done", 5, 0, 5)
    assert column(engine, "status", *ids) == ["processing"] * 5
    rest(engine, *ids)
    assert (column(engine, "plan_id", *ids), column(engine, "lease_until", *ids)) == ([None] * 5, [None] * 5)
    with pytest.raises(PlanRefused, match="is done"):
        plan_states.check(engine, frozen.hash, resume_stopped=True)


def test_what_comes_to_rest_before_its_plan_is_over_stays_reserved_until_then(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(2)))
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    assert send(items, 1) == ids[:1]
    rest(engine, ids[0])
    assert column(engine, "status", *ids) == ["manual", "pending"]
    assert column(engine, "plan_id", *ids) == [frozen.plan_id] * 2
    assert send(items) == ids[1:]
    assert plan_states.finish(engine, frozen.plan_id, LATER).state == "done"
    assert column(engine, "plan_id", *ids) == [None, frozen.plan_id]
    rest(engine, ids[1])
    assert column(engine, "plan_id", *ids) == [None, None]


def test_what_came_to_rest_in_the_moment_in_which_its_plan_ended_is_let_go(engine: Engine) -> None:
    """As a transaction leaves it that has read of the plan before its end, and commits after it."""
    ids = add(engine, *(dead() for _ in range(2)))
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    send(items)
    plan_states.finish(engine, frozen.plan_id, LATER)
    rest(engine, ids[0])
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == ids[0]).values(plan_id=frozen.plan_id))
    release_ended_plans(engine, actor="bob", worker="b", lease=LEASE, now=LATER)
    assert column(engine, "plan_id", *ids) == [None, frozen.plan_id]


def test_what_changed_since_the_plan_is_skipped_with_its_reason(engine: Engine) -> None:
    moved, touched, deleted, reserved, homeless, good = add(engine, dead(), dead(), dead(), dead(), row(), dead())
    frozen = freeze(engine)
    go_to(engine, moved, Status.PENDING, Status.PROCESSING, Status.MANUAL)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == touched).values(updated_at=LATER))
        connection.execute(MESSAGES.delete().where(MESSAGES.c.id == deleted))
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == reserved).values(plan_id=frozen.plan_id + 1))
    items = applying(engine, frozen)
    assert sum(items.reserve().values()) == 5
    assert send(items) == [good]
    assert set(status(engine, frozen).skipped_why) == {
        "it changed since the plan: it is manual",
        "it changed since the plan",
        "it is no longer in the dead store",
        "another plan has reserved it",
        "origin-unknown",
    }
    assert column(engine, "plan_id", homeless, moved) == [None, None]


def test_what_changes_after_it_was_reserved_is_skipped_too(engine: Engine) -> None:
    ids = add(engine, dead(), dead())
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    go_to(engine, ids[0], Status.PENDING, Status.PROCESSING, Status.MANUAL, Status.ARCHIVED)
    taken = items.take(10, None, LATER)
    assert (list(taken.sizes), taken.skipped) == ([ids[1]], {"it changed since the plan: it is archived": 1})
    assert column(engine, "plan_id", ids[0]) == [None]


def test_what_was_not_sent_is_as_it_was_and_goes_with_the_next_apply(engine: Engine) -> None:
    due = NOW + timedelta(hours=1)
    ids = add(engine, dead(next_retry_at=due), dead(status=Status.MANUAL), dead())
    go_to(engine, ids[2], Status.PENDING, Status.PROCESSING, Status.FAILED)
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    items.take(10, None, LATER)
    assert column(engine, "status", *ids) == ["processing"] * 3
    items.give_back(dict.fromkeys(ids, "unroutable"), LATER)
    assert column(engine, "status", *ids) == ["pending", "manual", "failed"]
    assert column(engine, "next_retry_at", ids[0]) == [due]
    again = applying(engine, frozen, "two")
    assert again.reserve() == {}
    assert send(again) == ids
    with reading(engine) as connection:
        outcomes = connection.execute(select(ATTEMPTS.c.number, ATTEMPTS.c.outcome).order_by(ATTEMPTS.c.id)).all()
    assert outcomes == [(1, "abandoned")] * 3 + [(2, None)] * 3


def test_what_no_later_try_would_send_is_for_a_person(engine: Engine) -> None:
    (row_id,) = add(engine, dead())
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    items.take(10, None, LATER)
    items.give_back({row_id: "origin-gone"}, LATER, to_person=True)
    assert (column(engine, "status", row_id), column(engine, "plan_id", row_id)) == (["manual"], [None])
    assert plan_states.finish(engine, frozen.plan_id, LATER).skipped_why == {"origin-gone": 1}


def test_what_a_cut_apply_held_goes_on_under_its_number_after_the_lease_and_not_before(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(4)))
    frozen = freeze(engine)
    cut = applying(engine, frozen)
    cut.reserve()
    begun = cut.take(2, None, LATER).numbers
    next_one = applying(engine, frozen, "two")
    assert send(next_one) == ids[2:]
    assert next_one.take(10, None, LATER).is_over
    left = plan_states.finish(engine, frozen.plan_id, LATER)
    assert (left.state, left.held, left.held_until) == ("applying", 2, LATER + LEASE)
    taken = next_one.take(10, None, AFTER_LEASE)
    assert taken.numbers == begun == {ids[0]: 1, ids[1]: 1}
    # The one that was cut comes back to life: it must not begin what is another's by now.
    assert cut.begin(begun, AFTER_LEASE) == {}


def test_what_the_broker_confirmed_is_sent_though_the_plan_was_not_told(engine: Engine) -> None:
    """Cut between marking the attempt and marking the item: even if the message came back in the meantime."""
    ids = add(engine, dead(), dead())
    frozen = freeze(engine)
    cut = applying(engine, frozen)
    cut.reserve()
    numbers = cut.take(2, None, LATER).numbers
    from dlqbatch.lifecycle.attempts import mark_sent  # noqa: PLC0415  (the half of `sent` that was done)

    mark_sent(engine, numbers, LATER)
    with writing(engine) as connection:
        (token,) = connection.scalars(select(MESSAGES.c.lock_token).where(MESSAGES.c.id == ids[0])).all()
        assert close_attempts(connection, {ids[0]: 1}, "failed", LATER)
        back = states.move(connection, ids[0], Status.PROCESSING, Status.PENDING, token, LATER, "ingest", "failed")
        assert back
    again = applying(engine, frozen, "two")
    again.reserve()
    assert send(again) == []
    done = plan_states.finish(engine, frozen.plan_id, LATER)
    assert (done.state, done.sent, done.outcomes.failed) == ("done", 2, 1)


def test_two_applies_at_once_take_each_message_once(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(60)))
    frozen = freeze(engine)
    both = [applying(engine, frozen, worker) for worker in ("one", "two")]
    start = Barrier(2)

    def run(items: PlanItems) -> list[int]:
        start.wait(HANGS_AFTER)
        items.reserve()
        sent: list[int] = []
        for _ in range(12):
            sent += send(items, 7)
        return sent

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(run, both)
    assert sorted(one + two) == ids


def test_of_a_canary_step_no_more_goes_than_it_allows_whoever_asks(engine: Engine) -> None:
    add(engine, *(dead() for _ in range(20)))
    frozen = freeze(engine)
    one, two = (applying(engine, frozen, worker) for worker in ("one", "two"))
    one.reserve()
    assert len(send(one, 100, ceiling=1)) == 1
    held = one.take(100, 10, LATER)
    assert len(held.sizes) == 9
    assert two.take(100, 10, LATER).is_over


def test_an_abort_lets_everything_go_but_what_is_being_sent(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(5)))
    frozen = freeze(engine)
    running = applying(engine, frozen)
    running.reserve()
    sent = send(running, 1)
    running.take(2, None, LATER)
    aborted = abort(engine, frozen, LATER)
    assert (aborted.state, aborted.held) == ("aborted", 2)
    assert column(engine, "plan_id", *ids) == [frozen.plan_id] * 3 + [None] * 2
    assert running.take(10, None, LATER).is_over
    # Its apply was cut: an abort after the leases gives those back as well.
    aborted = abort(engine, frozen, AFTER_LEASE)
    assert aborted.held == 0
    assert column(engine, "plan_id", *ids) == [frozen.plan_id, *[None] * 4]
    assert column(engine, "status", *ids) == ["processing", *["pending"] * 4]
    rest(engine, ids[0])
    assert column(engine, "plan_id", ids[0]) == [None]
    assert sent == ids[:1]
    with pytest.raises(PlanRefused, match="is aborted"):
        plan_states.check(engine, frozen.hash, resume_stopped=True)


def test_a_stopped_plan_goes_on_only_when_told_to_and_counts_anew(engine: Engine) -> None:
    ids = add(engine, *(dead() for _ in range(3)))
    frozen = freeze(engine)
    items = applying(engine, frozen)
    items.reserve()
    assert send(items, 1) == ids[:1]
    plan_states.stop(engine, frozen.plan_id, "too much came back", LATER)
    assert items.take(10, None, LATER).is_over
    with pytest.raises(PlanRefused, match="too much came back"):
        plan_states.check(engine, frozen.hash, resume_stopped=False)
    plan = plan_states.check(engine, frozen.hash, resume_stopped=True)
    later = LATER + timedelta(minutes=1)
    with writing(engine) as connection:
        assert close_attempts(connection, {ids[0]: 1}, "failed", LATER)
    assert (status(engine, frozen).counted.sent, status(engine, frozen).counted.failed) == (1, 1)
    plan = plan_states.start(engine, plan, canary=True, max_failure_rate=0.5, resume_stopped=True, now=later)
    assert plan.counted_from == later
    told = status(engine, frozen)
    assert (told.state, told.step, told.outcomes.sent, told.counted.sent) == ("applying", None, 1, 0)
    assert told.do_next.endswith("goes on with the 2 that wait")


@pytest.mark.slow
def test_the_queue_that_a_plan_has_named_is_the_origin_from_then_on(engine: Engine) -> None:
    """It failed there, and the lifecycle sends it there again, though its headers name the old one."""
    ids = add(engine, dead(), dead())
    frozen = freeze(engine, Selection(everything=True, to_queue="moved"))
    items = applying(engine, frozen)
    numbers = items.take(1, None, LATER).numbers
    assert column(engine, "origin_queue", *ids) == ["work", "work"]
    items.sent(numbers, LATER)
    assert column(engine, "origin_queue", *ids) == ["moved", "work"]
    # It comes back through whatever queue the dead letters of that one end in, and not through the one it came from.
    (seen,) = SentAttempts(engine).sent_before(AFTER_LEASE, 10)
    assert (seen.sent_to, seen.is_elsewhere) == (Origin("moved", None, ""), True)
    abort(engine, frozen)
    with writing(engine) as connection:
        (token,) = connection.scalars(select(MESSAGES.c.lock_token).where(MESSAGES.c.id == ids[0])).all()
        assert close_attempts(connection, {ids[0]: 1}, "failed", LATER)
        columns = {"next_retry_at": LATER}
        assert states.move(
            connection, ids[0], Status.PROCESSING, Status.PENDING, token, LATER, "ingest", "failed", **columns
        )
    row = next(row for row in leases.claim(engine, "w", AFTER_LEASE) if row.row_id == ids[0])
    assert row.origin == "moved"
    with writing(engine) as connection:
        numbers = attempts.begin(connection, {row.row_id: row.token}, {row.row_id: None}, "w", AFTER_LEASE, LEASE)
        (again,) = attempts.content_of(connection, numbers)
    assert (again.to_queue, again.attempt) == ("moved", 2)


def test_what_is_sent_is_marked_behind_the_lock_of_its_message(database_url: str) -> None:
    """As everybody locks: whoever has the message may lock its attempt, and nobody waits in a circle."""
    engine = store_at(database_url)
    (row_id,) = add(engine, dead())
    items = applying(engine, freeze(engine))
    numbers = items.take(1, None, LATER).numbers
    waits = text(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database "
        "WHERE datname = current_database()) OR NOT granted AND locktype = 'transactionid'"
    )
    with ThreadPoolExecutor(1) as pool, engine.begin() as connection:
        connection.execute(select(MESSAGES.c.id).where(MESSAGES.c.id == row_id).with_for_update())
        marking = pool.submit(items.sent, numbers, LATER)
        with engine.connect() as other:
            assert eventually(lambda: bool(other.scalar(waits)) or marking.done())
        assert not marking.done()
        # It has not locked the attempt before: else this would be a deadlock.
        connection.execute(update(ATTEMPTS).where(ATTEMPTS.c.message_id == row_id).values(worker="another"))
        connection.commit()
        marking.result(HANGS_AFTER)
    assert items_of(engine, freeze(engine)) == []


def test_ten_thousand_are_frozen_and_reserved_in_seconds(engine: Engine) -> None:
    fill(engine, 60_000, due=10_000)
    frozen = freeze(engine, Selection(Filters(statuses=(Status.PENDING,)), limit=15_000))
    assert frozen.size == 15_000
    items = applying(engine, frozen)
    assert items.reserve() == {}
    with reading(engine) as connection:
        held = connection.execute(select(PLANS.c.size).where(PLANS.c.id == frozen.plan_id)).scalar_one()
    assert held == 15_000
    assert len(send(items, 100)) == 100


def test_an_apply_reads_its_items_a_few_times_however_many_there_are(database_url: str) -> None:
    """A plan applied at once has no statistics yet: PostgreSQL must not read all of its items for every batch."""
    engine, number = store_at(database_url), 4_000
    fill(engine, number, due=number)
    frozen = freeze(engine, Selection(everything=True, to_queue="elsewhere"))
    items = applying(engine, frozen)
    items.reserve()
    before = items_read(engine, 0)
    with keeping(engine):
        sent = sum(len(batch) for batch in iter(lambda: send(items, 100), []))
    assert sent == number
    # Taken, given its attempt, marked: the number of its batches would be added for each of these if it read them all.
    assert (items_read(engine, 2 * number) - before) / number < 20


def items_read(engine: Engine, updated: int) -> int:
    """Items that statements have read, once the server has heard of so many updates."""
    asking = text("SELECT n_tup_upd, seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = :name")
    deadline = time.monotonic() + HANGS_AFTER
    while True:
        with reading(engine) as connection:
            updates, read = connection.execute(asking, {"name": PLAN_ITEMS.name}).one()
        if updates >= updated:
            return int(read)
        assert time.monotonic() < deadline, f"{updates} of {updated} updates"


def test_the_first_steps_hold_each_queue_each_kind_the_oldest_and_the_largest(engine: Engine) -> None:
    """400 older messages of one queue, few newer ones of another, in two groups."""
    add(engine, *(dead() for _ in range(30)))
    failures = [{"fingerprint": "a" * 16}, {"fingerprint": "b" * 16}]
    bad = [row(origin_queue="bad", origin_exchange="", origin_key="bad", **kind) for kind in failures for _ in range(3)]
    later = add(engine, *bad, at=NOW + timedelta(hours=1))
    with writing(engine) as connection:
        large = MESSAGES.update().where(MESSAGES.c.id == later[1])
        connection.execute(large.values(body=b"x" * 1000))
    frozen = freeze(engine)
    order = [row_id for row_id, _ in items_of(engine, frozen)]
    assert sorted(order) == sorted(set(order))
    assert len(order) == frozen.size == 36
    first = order[:4]
    assert first[0] == min(order)
    assert first[1] == later[1], "the largest of all"
    assert {later[0], later[3]} & set(first), "the oldest of a kind of the other queue"
    ids = freeze(engine, Selection(limit=5))
    assert ids.size == 5
