"""The state machine walked by what the jobs and people really call; breakers and strategies; on both databases.

The clock is the test's.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from dead_rows import NOW, store_at
from lifecycle_rows import ORIGIN, due
from sqlalchemy import select

from dlqbatch.actions.undo import undo
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.lifecycle import attempts, breaker, leases
from dlqbatch.lifecycle.backoff_and_off_peak import Options
from dlqbatch.lifecycle.outbox import admit
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.lifecycle.rules import Rule
from dlqbatch.lifecycle.strategy import Back, Choice, LoadLimits
from dlqbatch.messages.actions import MessageActions
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import MoveRefused, On, Phase, Status, Strategy, allowed, pairs
from dlqbatch.store.tables import BREAKERS, MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from dlqbatch.lifecycle.strategy import Claimed

MINUTE = timedelta(minutes=1)
BREAKER = breaker.Limits(min_attempts=4, cool_down=5 * MINUTE)
RULES = (
    Rule(1, "time-out", On.TEXT, "timed out", Strategy.IMMEDIATE),
    Rule(2, "overload", On.TEXT, "too many", Strategy.SCHEDULED),
    Rule(3, "refused", On.TEXT, "unavailable", Strategy.CONDITIONAL),
    Rule(4, "invalid", On.TEXT, "invalid", Strategy.MANUAL),
)


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def arrival(identity: str, attempt: int | None = None, message: str = "timed out") -> Examined:
    digest = hashlib.sha256(identity.encode()).digest()
    return Examined(
        source_queue="dlq-queue",
        exchange="dlq-exchange",
        routing_key="dlq-routing-key",
        redelivered=False,
        properties=b"\0\0",
        body=b"body",
        id=identity,
        parent=None,
        attempt=attempt,
        digest=digest,
        full_digest=digest,
        message_id=None,
        app_id=None,
        priority=0,
        origin=Origin(ORIGIN, "", "orders.created"),
        reason=None,
        failure=Failure("Error", message, None),
        fingerprint="f" * 16,
        retries=0,
        first_failed_at=NOW,
        last_failed_at=NOW,
    )


class Store:
    """One worker at a clock that the test moves."""

    def __init__(self, engine: Engine, owner: str = "w") -> None:
        self.engine = engine
        self.now = NOW
        self.owner = owner
        self.observations = SentAttempts(engine)
        self.review = MessageActions(engine)

    def discard_and_undo(self, row_id: int) -> None:
        before = self.status(row_id)
        done = self.review.discard([row_id], actor="ann", reason="of no use", now=self.now)
        assert done.action is not None
        undo(self.engine, done.action, actor="ann", reason="the wrong one", now=self.now)
        assert self.status(row_id) is before

    def ingest(self, *arrivals: Examined) -> None:
        Ingestion(self.engine, limits=BREAKER).store(arrivals, self.now)

    def claim(self) -> Sequence[Claimed]:
        self.now += 2 * timedelta(hours=1)
        return self.claim_at_once(100)

    def claim_at_once(self, limit: int) -> Sequence[Claimed]:
        return leases.claim(self.engine, self.owner, self.now, limit)

    def take_over(self, limit: int) -> Sequence[Claimed]:
        return leases.take_over(self.engine, self.owner, self.now, limit)

    def give_back(self, rows: dict[int, Back]) -> set[int]:
        return leases.give_back(self.engine, rows, self.now)

    def admit(self, rows: Sequence[Claimed], *, keep: bool = True) -> set[int]:
        return admit(self.engine, rows, self.now, BREAKER, keep=keep)

    def begin(self, row: Claimed, strategy: Strategy, now: datetime) -> dict[int, int]:
        with writing(self.engine) as connection:
            tokens, strategies = {row.row_id: row.token}, {row.row_id: strategy}
            return attempts.begin(connection, tokens, strategies, self.owner, now, 5 * MINUTE)

    def send(self, rows: Sequence[Claimed], strategy: Strategy = Strategy.IMMEDIATE) -> dict[int, int]:
        numbers = {row_id: number for row in rows for row_id, number in self.begin(row, strategy, self.now).items()}
        attempts.mark_sent(self.engine, numbers, self.now, BREAKER)
        return numbers

    def status(self, row_id: int) -> Status:
        with reading(self.engine) as connection:
            return Status(connection.scalar(select(MESSAGES.c.status).where(MESSAGES.c.id == row_id)))

    def id_of(self, identity: str) -> int:
        with reading(self.engine) as connection:
            return connection.scalars(select(MESSAGES.c.id).where(MESSAGES.c.identity == identity)).one()

    def ids(self) -> list[int]:
        with reading(self.engine) as connection:
            return list(connection.scalars(select(MESSAGES.c.id).order_by(MESSAGES.c.id)))

    def moves(self) -> set[tuple[str | None, str]]:
        with reading(self.engine) as connection:
            found = connection.execute(select(TRANSITIONS.c.from_status, TRANSITIONS.c.to_status)).all()
        return {(row.from_status, row.to_status) for row in found}

    def breaker(self) -> breaker.Breaker:
        with reading(self.engine) as connection:
            found = connection.execute(select(*(BREAKERS.c[name] for name in breaker.Breaker.__slots__))).one()
        return breaker.Breaker(*found)

    def person(self, row_id: int, start: Status, end: Status, **columns: Any) -> None:
        with writing(self.engine) as connection:
            assert states.move(connection, row_id, start, end, None, self.now, "ann", "a person's replay", **columns)


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


def test_every_move_of_the_table_is_made_by_what_makes_it_and_no_other_can_be(store: Store) -> None:
    store.ingest(arrival("a"), arrival("b"), arrival("deleted", attempt=3))
    first, second, unknown = (store.id_of(identity) for identity in ("a", "b", "deleted"))
    assert store.status(unknown) is Status.MANUAL
    walked: list[tuple[int, Status]] = []

    def at(row_id: int, status: Status) -> None:
        walked.append((row_id, status))
        assert store.status(row_id) is status

    # Rescheduled, then sent; it fails five times.
    tokens = {row.row_id: row.token for row in store.claim()}
    at(first, Status.PROCESSING)
    back = {row_id: Back(token, Status.PENDING, "off-peak", store.now) for row_id, token in tokens.items()}
    assert store.give_back(back) == {first, second}
    at(first, Status.PENDING)
    for number in range(1, 6):
        rows = [row for row in store.claim() if row.row_id == first]
        assert store.send(rows) == {first: number}
        store.ingest(arrival("a", attempt=number))
        at(first, Status.FAILED if number == 5 else Status.PENDING)
    store.person(first, Status.FAILED, Status.PROCESSING, lock_token="p")
    with writing(store.engine) as connection:
        states.move(connection, first, Status.PROCESSING, Status.FAILED, "p", store.now, "ann", "given up")
    store.discard_and_undo(first)
    store.review.discard([first], actor="ann", reason="of no use", now=store.now)
    at(first, Status.ARCHIVED)
    store.review.restore([first], actor="ann", reason="of use after all", now=store.now)
    at(first, Status.MANUAL)
    store.person(first, Status.MANUAL, Status.PROCESSING, lock_token="p")
    with writing(store.engine) as connection:
        states.move(connection, first, Status.PROCESSING, Status.MANUAL, "p", store.now, "ann", "not now")
    store.review.discard([first], actor="ann", reason="of no use", now=store.now)
    at(first, Status.ARCHIVED)

    # The other one is resolved, comes back late, and is left to a person.
    store.now += timedelta(hours=1)
    rows = store.take_over(100)
    assert [row.row_id for row in rows] == [second]
    (number,) = store.send(rows).values()
    assert store.observations.resolve({second: (number, "stayed away")}, store.now) == {second}
    at(second, Status.RESOLVED)
    assert store.observations.resolve({second: (number, "again")}, store.now) == set()
    store.ingest(arrival("b", attempt=number))
    at(second, Status.PENDING)
    store.discard_and_undo(second)
    with writing(store.engine) as connection:
        moved = states.RowMove(second, Status.PENDING, Status.PENDING, None, "sooner", {"next_retry_at": store.now})
        assert states.move_many(connection, [moved], store.now, "ann") == {second}
    (row,) = store.claim()
    manual = {second: Back(row.token, Status.MANUAL, "no rule knows it", None, Strategy.MANUAL)}
    assert store.give_back(manual) == {second}
    at(second, Status.MANUAL)

    notes = {(status.value, status.value) for status in Status} - set(pairs())
    assert store.moves() - notes == set(pairs())
    assert {status for _, status in walked} == set(Status)
    refuse_the_rest(store, first)


def refuse_the_rest(store: Store, row_id: int) -> None:
    """Every move that is not in the table, by a person and by a job, before anything is written."""
    before = store.status(row_id)
    others = [(start, end) for start in Status for end in Status if not allowed(start, end)]
    assert len(others) == len(Status) ** 2 - len([pair for pair in pairs() if pair[0]])
    for start, end in others:
        for actor in ("ann", "lifecycle"):
            with writing(store.engine) as connection, pytest.raises(MoveRefused):
                states.move(connection, row_id, start, end, None, store.now, actor, "no", lock_token="t")
    assert store.status(row_id) is before


def test_an_attempt_that_is_sent_is_observed_until_it_is_resolved_or_comes_back(store: Store) -> None:
    store.ingest(arrival("a"), arrival("b"))
    numbers = store.send(store.claim())
    later = store.now + MINUTE
    first, second = store.observations.sent_before(later, 10)
    assert (first.sent_at, first.sent_to) == (store.now, Origin(ORIGIN, "", "orders.created"))
    assert store.observations.sent_before(later, 10, (first.sent_at, first.attempt_id)) == [second]
    assert store.observations.sent_before(store.now, 10) == []
    store.ingest(arrival("a", attempt=1))
    both = {row_id: (number, "stayed away") for row_id, number in numbers.items()}
    assert store.observations.resolve(both, later) == {second.row_id}
    assert store.observations.sent_before(later, 10) == []


def test_a_taken_over_row_goes_on_under_its_number_and_the_first_worker_writes_nothing_more(engine: Engine) -> None:
    one, two = Store(engine, "one"), Store(engine, "two")
    one.ingest(arrival("a"))
    (row,) = one.claim()
    begun = one.begin(row, Strategy.IMMEDIATE, one.now)
    two.now = one.now + 6 * MINUTE
    (taken,) = two.take_over(10)
    assert (taken.row_id, taken.has_attempt) == (row.row_id, True)
    assert one.begin(row, Strategy.IMMEDIATE, two.now) == {}
    one.now = two.now
    assert one.give_back({row.row_id: Back(row.token, Status.PENDING, "late")}) == set()
    assert two.send([taken]) == begun
    assert one.breaker().sent == 1
    attempts.mark_sent(engine, begun, two.now, BREAKER)  # its confirm came after all
    assert one.breaker().sent == 1


# --- Circuit breakers


def test_a_breaker_opens_on_failures_lets_one_probe_through_and_closes_on_its_success(store: Store) -> None:
    store.ingest(*(arrival(f"m-{number}") for number in range(6)))
    rows = store.claim()
    store.send(rows[:4])
    assert store.breaker().sent == 4
    store.ingest(arrival("m-0", attempt=1))
    assert store.admit(rows[4:]) == {row.row_id for row in rows[4:]}
    store.ingest(arrival("m-1", attempt=1), arrival("m-2", attempt=1))
    assert store.breaker().phase is Phase.OPEN
    assert store.admit(rows[4:]) == set()
    store.now += 6 * MINUTE
    assert store.admit(rows[4:], keep=False) == {rows[4].row_id}
    assert store.admit(rows[4:]) == {rows[4].row_id}
    assert store.breaker().probe == str(rows[4].row_id)
    assert store.admit(rows[5:]) == set()
    numbers = store.send(store.take_over(10))
    probe = rows[4].row_id
    assert store.observations.resolve({probe: (numbers[probe], "stayed away")}, store.now) == {probe}
    assert store.breaker().phase is Phase.CLOSED


@pytest.mark.parametrize("end", ["discarded", "left to a person", "its origin is gone"])
def test_a_probe_that_nobody_will_hear_of_makes_room_for_the_next(store: Store, end: str) -> None:
    store.ingest(*(arrival(f"m-{number}") for number in range(6)))
    rows = store.claim()
    store.send(rows[:4])
    store.ingest(*(arrival(f"m-{number}", attempt=1) for number in range(3)))
    store.now += 6 * MINUTE
    probe, waiting = rows[4], rows[5]
    assert store.admit([probe, waiting]) == {probe.row_id}
    if end == "left to a person":
        assert store.give_back({probe.row_id: Back(probe.token, Status.MANUAL, "gone")})
    else:
        (sent,) = store.send(store.take_over(1)[:1]).items()
        assert sent == (probe.row_id, 1)
        if end == "discarded":
            assert store.review.discard([probe.row_id], actor="ann", reason="no", now=store.now).done == 1
        else:
            assert store.observations.leave_to_person({probe.row_id: (1, "nobody can tell")}, store.now)
    assert store.admit([waiting]) == {waiting.row_id}


def test_of_several_workers_one_gets_the_probe(engine: Engine) -> None:
    store = Store(engine)
    store.ingest(*(arrival(f"m-{number}") for number in range(8)))
    rows = store.claim()
    store.send(rows[:4])
    store.ingest(*(arrival(f"m-{number}", attempt=1) for number in range(3)))
    store.now += 6 * MINUTE
    barrier = Barrier(4)

    def ask(row: Claimed) -> set[int]:
        barrier.wait()
        return admit(engine, [row], store.now, BREAKER)

    with ThreadPoolExecutor(4) as pool:
        admitted = [found for found in pool.map(ask, rows[4:]) if found]
    assert len(admitted) == 1


def test_many_workers_count_the_first_sendings_of_an_origin_together(engine: Engine) -> None:
    store = Store(engine)
    store.ingest(*(arrival(f"m-{number}") for number in range(8)))
    rows = store.claim()
    barrier = Barrier(4)

    def send(part: int) -> None:
        mine = Store(engine)
        mine.now = store.now
        barrier.wait()
        mine.send(rows[part * 2 : part * 2 + 2])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))
    assert store.breaker().sent == 8


# --- Strategies


def choice(cpu: float = 10.0, **changes: Any) -> Choice:
    options = Options(zone=ZoneInfo("Europe/Berlin"))
    return replace(Choice(RULES, options, LoadLimits(), lambda: (cpu, 10.0), lambda: 0.5), **changes)


@pytest.mark.parametrize(
    ("message", "hour", "cpu", "expected"),
    [
        ("timed out", 12, 10, "send"),
        ("too many requests", 1, 10, "send"),  # three o'clock in Berlin, in summer
        ("too many requests", 12, 10, "off-peak"),
        ("unavailable", 12, 10, "send"),
        ("unavailable", 12, 90, "too-busy"),
        ("invalid", 12, 10, "rule"),
        ("what is this", 12, 10, "unknown"),
    ],
)
def test_the_strategy_of_a_claimed_row(store: Store, message: str, hour: int, cpu: float, expected: str) -> None:
    store.ingest(arrival("a", message=message))
    (row,) = store.claim()
    now = NOW.replace(hour=hour)
    send, back = choice(cpu).decide([row], lambda rows: admit(store.engine, rows, now, BREAKER), now)
    if expected == "send":
        assert (list(send), back) == ([row.row_id], {})
        return
    given, _, reason = back[row.row_id]
    assert (send, reason) == ({}, expected)
    due_at: dict[str, datetime | None] = {
        "off-peak": NOW.replace(day=2, hour=0, minute=7, second=30),
        "too-busy": now + 5 * MINUTE * 1.05,
    }
    assert given.next_retry_at == due_at.get(expected)
    leases.give_back(store.engine, {row.row_id: given}, now)
    assert store.status(row.row_id) is (Status.MANUAL if expected in {"rule", "unknown"} else Status.PENDING)


def test_a_row_with_an_attempt_under_way_goes_on_whatever_its_rule_says(store: Store) -> None:
    store.ingest(arrival("a", message="invalid"))
    (row,) = store.claim()
    assert choice().decide([replace(row, has_attempt=True)], store.admit, NOW)[0] == {row.row_id: None}


def test_a_dry_run_finds_what_a_run_would_take(store: Store) -> None:
    with writing(store.engine) as connection:
        states.arrive(connection, [due(1), due(2, priority=5), due(3, next_retry_at=NOW + MINUTE)], NOW, "ingest", "t")
    ids = store.ids()
    assert {row.row_id for row in leases.due(store.engine, 10, NOW)} == set(ids[:2])
    with reading(store.engine) as connection:
        assert [row.identity for row in attempts.without_bodies(connection, ids[1:2])] == ["due-2"]
    (first, _) = store.claim_at_once(10)
    assert leases.due(store.engine, 10, NOW) == []
    assert {row.row_id for row in leases.due(store.engine, 10, NOW + 6 * MINUTE)} == set(ids)
    assert first.token
