"""What a dead message is to the store: every row of the design's table, and what several runs at once make of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from arrivals import arrival
from dead_rows import NOW, begin_attempts, store_at
from program import HANGS_AFTER, eventually
from query_plans import statements_of, walk
from sqlalchemy import insert, make_url, select, text

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.errors import DatabaseForbids, DatabaseUnreadable
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.known_rows import content_key, possible_duplicates_of
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.lifecycle import attempts
from dlqbatch.lifecycle.leases import claim
from dlqbatch.lifecycle.max_attempts import MAX_ATTEMPTS
from dlqbatch.messages.actions import MessageActions
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.store.engine import create_engine_for, reading, writing
from dlqbatch.store.journal import RowMove, move_many
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS, TRANSITIONS

if TYPE_CHECKING:
    from sqlalchemy import Engine, Row, Table

LATER = NOW + timedelta(hours=1)
RECORDED, DUPLICATE, FAILED = ("recorded", None), ("duplicate", None), ("recorded", "attempt-failed")


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def store(engine: Engine, *batch: Examined, now: Any = NOW) -> list[tuple[str, str | None]]:
    """As one run that is cut before its acknowledgements are known of."""
    return Ingestion(engine).store(batch, now)


def rows(engine: Engine, table: Table = MESSAGES) -> list[Row[Any]]:
    with reading(engine) as connection:
        return list(connection.execute(select(table).order_by(table.c.id)))


def row(engine: Engine, identity: str) -> Row[Any]:
    (found,) = [each for each in rows(engine) if each.identity == identity]
    return found


def journal(engine: Engine, row_id: int) -> list[tuple[str | None, str, str, str]]:
    return [
        (each.from_status, each.to_status, each.actor, each.reason)
        for each in rows(engine, TRANSITIONS)
        if each.message_id == row_id
    ]


def outcomes(engine: Engine) -> list[tuple[int, str | None]]:
    return [(each.number, each.outcome) for each in rows(engine, ATTEMPTS)]


def send(engine: Engine, now: Any = LATER) -> dict[int, int]:
    """Every due row is retried: claimed, its attempt begun and confirmed."""
    tokens = {row.row_id: row.token for row in claim(engine, "w", now)}
    numbers = begin_attempts(engine, tokens, Strategy.IMMEDIATE, "w", now)
    attempts.mark_sent(engine, numbers, now)
    return numbers


def succeed(engine: Engine, identity: str, number: int) -> None:
    found = row(engine, identity)
    with writing(engine) as connection:
        assert attempts.close_attempts(connection, {found.id: number}, "succeeded", LATER)
        leaving = RowMove(found.id, Status.PROCESSING, Status.RESOLVED, found.lock_token, "seen", {})
        assert move_many(connection, [leaving], LATER, "lifecycle")


# --- What a message is, first match wins


def test_a_new_id_is_a_new_pending_row_with_everything_it_brought(engine: Engine) -> None:
    ingestion = Ingestion(engine, system_state=lambda: {"cpu": 0.5})
    assert ingestion.store([arrival("a", parent="z")], NOW) == [RECORDED]
    (found,) = rows(engine)
    assert (found.identity, found.parent, found.had_id, found.status) == ("a", "z", True, "pending")
    assert (bytes(found.body), bytes(found.properties), found.message_id) == (b"body", b"\0\0", "m-1")
    assert (found.source_queue, found.exchange, found.routing_key) == ("dlq-queue", "dlq-exchange", "dlq-routing-key")
    assert (found.origin_queue, found.origin_exchange, found.origin_key) == ("orders", "shop", "orders.created")
    assert (found.event, found.tags, found.source) == ("orders.created", ["orders", "shop"], "shop")
    assert (found.reason, found.error_type, found.error_message) == ("retries-exhausted", "ValueError", "no stock")
    assert (found.retry_count, found.dlq_retry_count, found.priority, found.strategy) == (3, 0, 3, None)
    assert (found.first_failed_at, found.last_failed_at) == (NOW - timedelta(hours=2), NOW - timedelta(hours=1))
    assert (found.created_at, found.status_since, found.next_retry_at) == (NOW, NOW, NOW + timedelta(minutes=1))
    assert (found.system_state, found.possible_duplicate, found.lock_token) == ({"cpu": 0.5}, False, None)
    assert journal(engine, found.id) == [(None, "pending", "ingest", "its id is new")]


def test_a_failure_that_asks_to_wait_is_not_due_before(engine: Engine) -> None:
    assert store(engine, replace(arrival("a"), asked=600), replace(arrival("b"), asked=5)) == [RECORDED] * 2
    assert row(engine, "a").next_retry_at == NOW + timedelta(minutes=10)
    assert row(engine, "b").next_retry_at == NOW + timedelta(minutes=1)
    send(engine)
    # Each failed attempt may ask anew; a second failure alone would wait for 5 minutes.
    assert store(engine, replace(arrival("a", 1), asked=1200), arrival("b", 1), now=LATER) == [FAILED] * 2
    assert row(engine, "a").next_retry_at == LATER + timedelta(minutes=20)
    assert row(engine, "b").next_retry_at == LATER + timedelta(minutes=5)


def test_rows_of_one_batch_are_in_the_order_of_arrival_whatever_their_ids(engine: Engine) -> None:
    """A replay in order goes by it, and an id says nothing of when its message failed."""
    ids = [*"dacfeb"]
    store(engine, *(arrival(each, 4 if each in "ad" else None) for each in ids))
    frozen = freeze(engine, Selection(everything=True, in_order="$.account"), actor="ann", reason="r", now=LATER)
    planned = select(MESSAGES.c.identity).join(PLAN_ITEMS, PLAN_ITEMS.c.message_id == MESSAGES.c.id)
    with reading(engine) as connection:
        found = connection.scalars(planned.where(PLAN_ITEMS.c.plan_id == frozen.plan_id).order_by(PLAN_ITEMS.c.place))
        assert list(found) == ids


def test_an_attempt_of_a_deleted_row_is_a_new_row_in_manual(engine: Engine) -> None:
    assert store(engine, arrival("a", 4)) == [RECORDED]
    (found,) = rows(engine)
    assert (found.identity, found.status, found.dlq_retry_count, found.next_retry_at) == ("a", "manual", 4, None)


@pytest.mark.parametrize(("attempt", "status"), [(None, "pending"), (2, "manual")])
def test_an_id_with_another_digest_is_another_message(engine: Engine, attempt: int | None, status: str) -> None:
    store(engine, arrival("a"))
    assert store(engine, arrival("a", attempt, body=b"other")) == [RECORDED]
    first, second = rows(engine)
    assert (first.identity, bytes(first.body), first.status) == ("a", b"body", "pending")
    assert (second.parent, bytes(second.body), second.status) == ("a", b"other", status)
    assert second.identity not in {"a", ""}
    assert second.dlq_retry_count == (attempt or 0)


def test_a_return_of_the_open_attempt_fails_it_and_its_row_is_pending_again(engine: Engine) -> None:
    store(engine, arrival("a"))
    assert send(engine) == {rows(engine)[0].id: 1}
    back = arrival("a", 1, failure=Failure("KeyError", "worse", "stack"), fingerprint="e" * 16, last_failed_at=LATER)
    assert store(engine, replace(back, properties=b"other"), now=LATER) == [FAILED]
    (found,) = rows(engine)
    assert (found.status, found.lock_token, found.dlq_retry_count, found.is_due) == ("pending", None, 1, False)
    assert found.next_retry_at is not None
    assert found.next_retry_at > LATER
    assert (found.error_type, found.fingerprint, found.last_failed_at) == ("KeyError", "e" * 16, LATER)
    assert (bytes(found.properties), bytes(found.body)) == (b"\0\0", b"body")
    assert outcomes(engine) == [(1, "failed")]
    assert journal(engine, found.id)[-1] == ("processing", "pending", "ingest", "attempt 1 failed")


def test_where_it_came_back_is_where_it_will_be_looked_for(engine: Engine) -> None:
    """Unless it failed where only a plan had sent it: from its origin it would come back as before."""
    store(engine, arrival("a"), arrival("b"))
    send(engine)
    moved = Origin("elsewhere", None, "orders.created")
    with writing(engine) as connection:
        told = {"state_since": NOW, "created_at": NOW, "actor": "ann", "reason": "r", "filters": {}, "risks": []}
        plan = insert(PLANS).values(told | {"hash": "h", "state": "done", "to_queue": "elsewhere", "size": 1})
        plan_id = connection.execute(plan.returning(PLANS.c.id)).scalar_one()
        seen = {"seen_status": "pending", "seen_updated_at": NOW, "state": "sent", "attempt": 1}
        item = {"plan_id": plan_id, "place": 1, "message_id": row(engine, "b").id, **seen}
        connection.execute(insert(PLAN_ITEMS).values(item))
    batch = (arrival("a", 1, source_queue="new.dlq"), arrival("b", 1, source_queue="elsewhere.dlq", origin=moved))
    assert store(engine, *batch, now=LATER) == [FAILED, FAILED]
    assert [each.source_queue for each in rows(engine)] == ["new.dlq", "dlq-queue"]


def test_five_failed_attempts_end_in_failed(engine: Engine) -> None:
    store(engine, arrival("a"))
    for number in range(1, MAX_ATTEMPTS + 1):
        now = NOW + timedelta(days=number)
        assert list(send(engine, now).values()) == [number]
        assert store(engine, arrival("a", number), now=now) == [FAILED]
    (found,) = rows(engine)
    assert (found.status, found.dlq_retry_count, found.next_retry_at) == ("failed", MAX_ATTEMPTS, None)
    assert outcomes(engine) == [(number, "failed") for number in range(1, MAX_ATTEMPTS + 1)]
    assert send(engine, NOW + timedelta(days=99)) == {}


def test_the_same_return_twice_is_a_duplicate(engine: Engine) -> None:
    store(engine, arrival("a"))
    send(engine)
    assert store(engine, arrival("a", 1), arrival("a", 1), now=LATER) == [FAILED, DUPLICATE]
    assert store(engine, arrival("a", 1), now=LATER) == [DUPLICATE]
    (found,) = rows(engine)
    assert (found.status, found.dlq_retry_count) == ("pending", 1)
    assert journal(engine, found.id)[-1] == ("pending", "pending", "ingest", "attempt 1 came back before")


@pytest.mark.parametrize(("failures", "status"), [(0, "pending"), (4, "failed")])
def test_a_late_return_takes_a_resolved_row_back(engine: Engine, failures: int, status: str) -> None:
    store(engine, arrival("a"))
    for number in range(1, failures + 1):
        now = NOW + timedelta(days=number)
        send(engine, now)
        store(engine, arrival("a", number), now=now)
    number = failures + 1
    send(engine, NOW + timedelta(days=9))
    succeed(engine, "a", number)
    assert store(engine, arrival("a", number), now=LATER) == [FAILED]
    (found,) = rows(engine)
    assert (found.status, found.lock_token, found.dlq_retry_count) == (status, None, number)
    assert outcomes(engine)[-1] == (number, "failed")
    moves = [(start, end) for start, end, *_ in journal(engine, found.id)]
    assert ("resolved", "pending") in moves
    assert moves[-1][1] == status


def test_another_attempts_return_is_a_note(engine: Engine) -> None:
    store(engine, arrival("a"))
    send(engine)
    assert store(engine, arrival("a", 7), now=LATER) == [DUPLICATE]
    (found,) = rows(engine)
    assert (found.status, outcomes(engine)) == ("processing", [(1, None)])
    assert "attempt 7" in journal(engine, found.id)[-1][3]


def test_a_return_for_a_row_that_is_at_rest_is_a_linked_row_in_manual(engine: Engine) -> None:
    store(engine, arrival("a"))
    assert store(engine, arrival("a", 3)) == [RECORDED]
    first, second = rows(engine)
    assert (first.status, second.status, second.parent, second.dlq_retry_count) == ("pending", "manual", "a", 3)


def test_the_same_message_again_is_a_note_and_brings_a_resolved_row_back(engine: Engine) -> None:
    store(engine, arrival("a"))
    assert store(engine, arrival("a", properties=b"other")) == [DUPLICATE]
    assert journal(engine, rows(engine)[0].id)[-1] == ("pending", "pending", "ingest", "the same message again")
    send(engine)
    succeed(engine, "a", 1)
    assert store(engine, arrival("a"), now=LATER) == [DUPLICATE]
    (found,) = rows(engine)
    assert (found.status, found.next_retry_at) == ("pending", LATER + timedelta(minutes=1))
    assert bytes(found.properties) == b"\0\0"


def test_without_an_id_every_first_delivery_is_a_new_row(engine: Engine) -> None:
    assert store(engine, arrival(), arrival(), arrival(attempt=2)) == [RECORDED] * 3
    found = rows(engine)
    assert sorted((each.had_id, str(each.status)) for each in found) == [
        (False, "manual"),
        (False, "pending"),
        (False, "pending"),
    ]
    assert len({each.identity for each in found}) == 3


def test_redelivered_without_an_id_it_is_the_one_row_whose_acknowledgement_is_not_known(engine: Engine) -> None:
    again = arrival(redelivered=True)
    assert store(engine, again) == [RECORDED]
    second = Ingestion(engine)
    assert second.store([again], NOW) == [DUPLICATE]
    # That row stands for one message: one more like it is another, in this run and in every other.
    assert second.store([again], NOW) == [RECORDED]
    second.acknowledged()
    assert [each.possible_duplicate for each in rows(engine)] == [False] * 2
    assert store(engine, again) == [RECORDED]
    assert [each.possible_duplicate for each in rows(engine)] == [False] * 3


def test_redelivered_after_two_cuts_both_rows_are_flagged(engine: Engine) -> None:
    """The run that took it for the row was cut before its acknowledgement, or after: nobody can tell."""
    again = arrival(redelivered=True)
    assert [store(engine, each) for each in (arrival(), again, again)] == [[RECORDED], [DUPLICATE], [RECORDED]]
    assert [each.possible_duplicate for each in rows(engine)] == [True, True]


def test_redelivered_under_an_id_of_anothers_both_rows_are_flagged(engine: Engine) -> None:
    """Its row has an identity that was made here: whether it is the same message again nobody can tell."""
    other = arrival("a", body=b"other")
    assert store(engine, arrival("a")) == [RECORDED]
    assert [store(engine, each) for each in (other, replace(other, redelivered=True))] == [[RECORDED]] * 2
    assert [(each.parent, each.possible_duplicate) for each in rows(engine)] == [
        (None, False),
        ("a", True),
        ("a", True),
    ]
    assert store(engine, arrival("a", body=b"third", redelivered=True)) == [RECORDED]
    assert not rows(engine)[-1].possible_duplicate


def test_a_redelivered_return_of_what_a_person_has_ended_is_flagged_too(engine: Engine) -> None:
    store(engine, arrival("a"))
    MessageActions(engine).discard([rows(engine)[0].id], actor="ann", reason="of no use", now=LATER)
    back = arrival("a", attempt=1)
    assert [store(engine, each) for each in (back, replace(back, redelivered=True))] == [[RECORDED]] * 2
    assert [each.possible_duplicate for each in rows(engine)] == [False, True, True]


def test_a_twin_is_of_the_same_queue(engine: Engine) -> None:
    store(engine, arrival())
    assert store(engine, arrival(redelivered=True, source_queue="dlq.other")) == [RECORDED]


def test_two_twins_leave_it_in_doubt(engine: Engine) -> None:
    store(engine, arrival(), arrival(), arrival(body=b"other"))
    assert store(engine, arrival(redelivered=True)) == [RECORDED]
    assert sorted((bytes(each.body), each.possible_duplicate) for each in rows(engine)) == [
        (b"body", True),
        (b"body", True),
        (b"body", True),
        (b"other", False),
    ]


def test_equal_messages_of_one_run_are_never_taken_for_each_other(engine: Engine) -> None:
    """They were put back before, by a dry run for example, and are held at the same time."""
    ingestion = Ingestion(engine)
    again = arrival(redelivered=True)
    assert ingestion.store([again, again], NOW) == [RECORDED] * 2
    assert ingestion.store([again], NOW) == [RECORDED]
    assert len(rows(engine)) == 3


def test_a_row_stands_for_one_of_several_that_are_like_it(engine: Engine) -> None:
    store(engine, arrival())
    again = arrival(redelivered=True)
    assert store(engine, again, again) == [DUPLICATE, RECORDED]


def test_once_acknowledged_nothing_is_taken_for_its_row(engine: Engine) -> None:
    ingestion = Ingestion(engine)
    ingestion.store([arrival()], NOW)
    ingestion.acknowledged()
    assert store(engine, arrival(redelivered=True)) == [RECORDED]
    # A run that goes on after that may be cut as well.
    again = arrival(body=b"later", redelivered=True)
    assert [ingestion.store([again], NOW), store(engine, again)] == [[RECORDED], [DUPLICATE]]


def test_a_batch_may_hold_everything_at_once(engine: Engine) -> None:
    store(engine, arrival("back"), arrival("seen"))
    send(engine)
    batch = [
        arrival("new"),
        arrival("back", 1),
        arrival("seen"),
        arrival("new"),
        arrival("new", body=b"other"),
        arrival("back", 1),
        arrival(),
        arrival("gone", 2),
        arrival("new"),
    ]
    expected = [RECORDED, FAILED, DUPLICATE, DUPLICATE, RECORDED, DUPLICATE, RECORDED, RECORDED, DUPLICATE]
    assert store(engine, *batch, now=LATER) == expected
    assert len(rows(engine)) == 6


def test_an_empty_batch_asks_whether_the_store_is_there(engine: Engine) -> None:
    assert store(engine) == []


# --- What a message may hold


@pytest.mark.parametrize("size", [0, 10 * 1024 * 1024])
def test_a_body_is_kept_whole_whatever_its_size(engine: Engine, size: int) -> None:
    body = bytes(range(256)) * (size // 256)
    store(engine, arrival("a", body=body))
    assert bytes(rows(engine)[0].body) == body


def test_text_that_no_database_takes_is_shown_and_bytes_are_kept(engine: Engine) -> None:
    odd = b"\xff\0\xfe".decode("utf-8", "surrogateescape")
    strange = arrival(
        odd,
        body=b"\xff\0",
        properties=b"\0\0\xff",
        message_id=b"\xff\0",
        app_id=b"\0\xff",
        exchange=odd,
        routing_key=odd,
        source_queue=odd,
        parent=odd,
        origin=Origin(odd, odd, odd),
        reason=odd,
        failure=Failure(odd, odd + "x" * 1_000_000, odd * 400_000),
    )
    assert store(engine, strange, arrival("after")) == [RECORDED] * 2
    assert store(engine, strange) == [DUPLICATE]
    first = next(each for each in rows(engine) if each.identity != "after")
    assert (bytes(first.body), bytes(first.properties)) == (b"\xff\0", b"\0\0\xff")
    assert len(first.error_message) == len(first.error_stack) == 65_536


def test_ids_that_only_look_the_same_stop_nobody(engine: Engine) -> None:
    batch = [arrival("a\0"), arrival("a\\x00", body=b"other"), arrival("b")]
    assert store(engine, *batch) == [RECORDED] * 3


def test_absurd_numbers_fit(engine: Engine) -> None:
    huge = arrival("a", 2**63 - 1, retries=2**31 - 1, priority=255)
    assert store(engine, huge, replace(huge, id="b")) == [RECORDED] * 2
    assert {each.dlq_retry_count for each in rows(engine)} == {2**31 - 1}
    # A person replays one, and it fails again.
    first = rows(engine)[0]
    with writing(engine) as connection:
        lock = {"lock_owner": "ann", "lock_token": "t", "locked_at": LATER, "lease_until": LATER}
        replaying = RowMove(first.id, Status.MANUAL, Status.PROCESSING, None, "again", lock)
        assert move_many(connection, [replaying], LATER, "ann")
    numbers = begin_attempts(engine, {first.id: "t"}, None, "w", LATER)
    attempts.mark_sent(engine, numbers, LATER)
    back = replace(huge, id=first.identity, attempt=numbers[first.id])
    assert store(engine, back, arrival("c"), now=LATER) == [FAILED, RECORDED]
    found = row(engine, first.identity)
    assert (found.status, found.dlq_retry_count) == ("failed", 2**31 - 1)


# --- Several runs at once


def together(engine: Engine, *batches: list[Examined]) -> list[list[tuple[str, str | None]]]:
    barrier = Barrier(len(batches))

    def one(batch: list[Examined]) -> list[tuple[str, str | None]]:
        ingestion = Ingestion(engine)
        barrier.wait()
        return ingestion.store(batch, NOW)

    with ThreadPoolExecutor(len(batches)) as pool:
        return list(pool.map(one, batches))


def test_runs_that_store_the_same_messages_make_one_row_of_each(engine: Engine) -> None:
    for number in range(8):
        batch = [arrival(f"{number}-{each}", each % 3 or None) for each in range(60)]
        results = together(engine, batch, batch[::-1], batch[30:] + batch[:30])
        counted = [result[0] for each in results for result in each]
        # Of a deleted row's attempt every later copy is a return to a row at rest: linked, and in manual.
        plain = [each for each in batch if each.attempt is None]
        identities = [each.identity for each in rows(engine)]
        assert len(identities) == len(set(identities))
        assert {each.id for each in batch} <= set(identities)
        assert counted.count("duplicate") == 2 * len(plain)


def test_runs_that_fail_the_same_attempts_fail_each_once(engine: Engine) -> None:
    store(engine, *(arrival(f"a{each}") for each in range(50)))
    send(engine)
    batch = [arrival(f"a{each}", 1) for each in range(50)]
    results = together(engine, batch, batch[::-1])
    assert sorted(result for each in results for result in each) == sorted([FAILED, DUPLICATE] * 50, key=str)
    assert {each.dlq_retry_count for each in rows(engine)} == {1}


def test_runs_that_each_hold_one_like_the_same_row_take_only_one_of_them_for_it(engine: Engine) -> None:
    store(engine, *(arrival(body=b"%d" % each) for each in range(20)))
    batch = [arrival(body=b"%d" % each, redelivered=True) for each in range(20)]
    results = together(engine, batch, batch[::-1])
    assert sorted(result[0] for each in results for result in each) == ["duplicate"] * 20 + ["recorded"] * 20
    assert len(rows(engine)) == 40


def test_a_run_ends_in_order_after_whoever_compares_with_its_rows(database_url: str) -> None:
    """Else a message might be taken for a row whose own is acknowledged in the same moment."""
    engine = store_at(database_url)
    ingestion = Ingestion(engine)
    ingestion.store([arrival()], NOW)
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with (
        psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as watch,
        ThreadPoolExecutor(1) as pool,
    ):
        with writing(engine) as connection:
            again = arrival(redelivered=True)
            assert len(possible_duplicates_of(connection, [again], "another run", ())[content_key(again)]) == 1
            ending = pool.submit(ingestion.acknowledged)
            assert eventually(lambda: watch.execute(waits).fetchone() == (1,))
        ending.result(HANGS_AFTER)
    assert store(engine, again) == [RECORDED]


def test_a_run_that_waits_in_a_circle_with_another_is_the_one_that_starts_again(database_url: str) -> None:
    engine = store_at(database_url)
    store(engine, arrival("a"), arrival("b"))
    first, second = (f"UPDATE dlq_messages SET priority = 9 WHERE identity = '{name}'" for name in "ba")
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    url = database_url.replace("+psycopg", "")
    with (
        psycopg.connect(url) as other,
        psycopg.connect(url, autocommit=True) as watch,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("SET deadlock_timeout = '60s'")
        other.execute(first.encode())
        storing = pool.submit(store, engine, arrival("a"), arrival("b"), arrival("c"))
        assert eventually(lambda: watch.execute(waits).fetchone() == (1,))
        other.execute(second.encode())
        other.commit()
        assert storing.result(HANGS_AFTER) == [DUPLICATE, DUPLICATE, RECORDED]
    found = rows(engine)
    assert sorted((each.identity, each.priority) for each in found) == [("a", 9), ("b", 9), ("c", 3)]
    assert len(rows(engine, TRANSITIONS)) == 5


def test_a_store_that_is_cut_in_the_middle_has_stored_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ingestion = Ingestion(engine)
    store(engine, arrival(body=b"unproven"))

    def cut(*_: Any) -> None:
        raise OSError("the network is gone")

    batch = [arrival("a"), arrival(body=b"unproven", redelivered=True), arrival("a")]
    with monkeypatch.context() as patched:
        patched.setattr("dlqbatch.ingest.rows.note_many", cut)
        with pytest.raises(DatabaseUnreadable):
            ingestion.store(batch, NOW)
    assert len(rows(engine)) == len(rows(engine, TRANSITIONS)) == 1
    assert ingestion.store(batch, NOW) == [RECORDED, DUPLICATE, DUPLICATE]


def test_who_may_only_read_the_runs_that_were_cut_is_told_the_role_that_may_lock_them(database_url: str) -> None:
    engine = store_at(database_url)
    owner = make_url(database_url)
    role = f"reader_{owner.database}"
    reader = owner.set(username=role, password="open-sesame").render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'open-sesame'")
        connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    try:
        with (
            pytest.raises(DatabaseForbids, match=f"dlq_unproven_runs; .*GRANT dlqbatch_worker TO {role}` a job"),
            reading(create_engine_for(reader, connect_timeout=30)) as connection,
        ):
            possible_duplicates_of(connection, [arrival(redelivered=True)], "this run", ())
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role}")
            connection.exec_driver_sql(f"DROP ROLE {role}")


# --- What a framework publishes anew has none of our headers


F = "6d2c1a9e-framework"


def anew(number: int = 0, **changes: Any) -> Examined:
    """As Dramatiq publishes a retry: a new message, with the id in its body as before."""
    body = b"%d" % number
    died = {"failure": Failure("KeyError", f"retry {number}", None), "last_failed_at": LATER + timedelta(minutes=1)}
    return arrival(body=body, message_id=None, retries=number, **{"framework_id": F, **died, **changes})


AFTER = LATER + timedelta(hours=1)


def test_what_died_again_without_our_headers_is_the_open_attempts_failure(engine: Engine) -> None:
    assert store(engine, anew(0, last_failed_at=NOW)) == [RECORDED]
    assert send(engine) == {rows(engine)[0].id: 1}
    assert store(engine, anew(2), now=AFTER) == [FAILED]
    (found,) = rows(engine)
    assert (found.status, found.dlq_retry_count, bytes(found.body), found.error_message) == (
        ("pending", 1, b"0", "retry 2")
    )
    assert outcomes(engine) == [(1, "failed")]
    assert journal(engine, found.id)[-1] == ("processing", "pending", "ingest", "attempt 1 failed")


def test_what_died_again_after_its_row_was_resolved_opens_it(engine: Engine) -> None:
    store(engine, anew(0, last_failed_at=NOW))
    send(engine)
    succeed(engine, rows(engine)[0].identity, 1)
    assert store(engine, anew(2), now=AFTER) == [FAILED]
    (found,) = rows(engine)
    assert (found.status, outcomes(engine)) == ("pending", [(1, "failed")])
    assert journal(engine, found.id)[-1][3] == "attempt 1 failed, seen late"


def test_an_ingest_that_was_cut_before_its_acknowledgements_counts_no_failure_twice(engine: Engine) -> None:
    """The broker delivers the message again; meanwhile the row has been retried once more."""
    store(engine, anew(0, last_failed_at=NOW))
    send(engine)
    assert store(engine, anew(2), now=AFTER) == [FAILED]
    send(engine, AFTER + timedelta(days=1))
    again = anew(2, redelivered=True, full_digest=b"a delivery count of a quorum queue".ljust(32))
    assert store(engine, again, now=AFTER + timedelta(days=1)) == [DUPLICATE]
    assert outcomes(engine) == [(1, "failed"), (2, None)]
    assert len(rows(engine)) == 1


def test_two_in_one_batch_are_one_failure_and_one_row_for_a_person(engine: Engine) -> None:
    """Equal to the last byte or not: neither is acknowledged, so they are two messages."""
    store(engine, anew(0, last_failed_at=NOW))
    send(engine)
    batch = (anew(2), anew(2), anew(3), anew(2, redelivered=True))
    assert store(engine, *batch, now=AFTER) == [FAILED, RECORDED, RECORDED, RECORDED]
    first, *others = rows(engine)
    assert [(each.status, each.parent) for each in others] == [("manual", first.identity)] * 3
    assert outcomes(engine) == [(1, "failed")]


def test_what_comes_while_its_row_rests_is_a_linked_row(engine: Engine) -> None:
    """For a person after a retry of ours; before any, it is a copy of the framework's, and is retried as before."""
    store(engine, anew(0, last_failed_at=NOW))
    assert store(engine, anew(1)) == [RECORDED]
    send(engine)
    store(engine, anew(2), anew(3), now=AFTER)
    assert store(engine, anew(4), now=AFTER) == [RECORDED]
    first, copy, late = rows(engine)
    assert (copy.parent, late.parent) == (first.identity, copy.identity)
    assert outcomes(engine) == [(1, "failed"), (1, "failed")]
    assert (copy.status, late.status, late.next_retry_at) == ("pending", "manual", None)


def test_a_copy_that_died_before_the_retry_was_sent_is_not_its_failure(engine: Engine) -> None:
    store(engine, anew(0, last_failed_at=NOW))
    send(engine)
    assert store(engine, anew(1, last_failed_at=NOW), now=AFTER) == [RECORDED]
    assert outcomes(engine) == [(1, None)]


@pytest.mark.parametrize(
    "other",
    [anew(2, framework_id="another"), anew(2, framework_id=None), anew(2, origin=Origin("mail", "", "mail"))],
)
def test_another_id_or_another_queue_is_another_message(engine: Engine, other: Examined) -> None:
    store(engine, anew(0, last_failed_at=NOW))
    send(engine)
    assert store(engine, other, now=AFTER) == [RECORDED]
    assert [(each.status, each.parent) for each in rows(engine)] == [("processing", None), ("pending", None)]


def test_what_the_framework_rejects_at_once_is_known_by_our_own_id_and_counts_once(engine: Engine) -> None:
    store(engine, anew(0, last_failed_at=NOW))
    send(engine)
    identity = rows(engine)[0].identity
    assert store(engine, replace(anew(0), id=identity, attempt=1), anew(2), now=AFTER) == [FAILED, RECORDED]
    assert outcomes(engine) == [(1, "failed")]
    assert [each.status for each in rows(engine)] == ["pending", "manual"]


def test_the_row_is_found_by_an_index_and_others_are_not_looked_for(engine: Engine) -> None:
    store(engine, anew(0, last_failed_at=NOW), *(arrival(f"id-{number}") for number in range(300)))
    if engine.dialect.name == "postgresql":
        with writing(engine) as connection:
            connection.execute(text("ANALYZE dlq_messages"))
    with statements_of(engine) as seen:
        store(engine, anew(2))
        store(engine, arrival("id-new"), arrival())
    asked = [each for each in seen if "framework_id =" in each[0] or "framework_id IN" in each[0]]
    assert len(asked) == 1
    assert walk(engine, *asked[0]) is None


def test_two_ingests_at_once_fail_one_attempt(engine: Engine) -> None:
    store(engine, anew(0, last_failed_at=NOW))
    send(engine)
    ready = Barrier(2)

    def take(number: int) -> list[tuple[str, str | None]]:
        ingestion = Ingestion(engine)
        ready.wait(HANGS_AFTER)
        return ingestion.store([anew(number)], AFTER)

    with ThreadPoolExecutor(2) as pool:
        told = [done for future in [pool.submit(take, 2), pool.submit(take, 3)] for done in future.result()]
    assert sorted(told, key=str) == sorted([FAILED, RECORDED], key=str)
    assert sorted(each.status for each in rows(engine)) == ["manual", "pending"]
