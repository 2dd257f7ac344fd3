"""Many failed attempts at once: a batch means what its messages mean one by one, in a few statements."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, begin_attempts, store_at
from query_plans import statements_of, walk
from sqlalchemy import event, func, select

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.lifecycle import attempts
from dlqbatch.lifecycle.leases import claim
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.store.engine import reading
from dlqbatch.store.states import Strategy
from dlqbatch.store.tables import ATTEMPTS, BREAKERS, MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

LATER = NOW + timedelta(hours=1)
FAILED = ("recorded", "attempt-failed")


def arrival(
    identity: str, attempt: int | None = None, *, queue: str = "orders", framework_id: str | None = None
) -> Examined:
    body = f"body of {framework_id or identity}".encode()
    return Examined(
        source_queue=f"{queue}.dlq",
        exchange="dlq-exchange",
        routing_key="dlq-routing-key",
        redelivered=False,
        properties=b"\0\0",
        body=body,
        id=identity,
        parent=None,
        attempt=attempt,
        digest=hashlib.sha256(body).digest(),
        full_digest=hashlib.sha256(b"full" + body).digest(),
        message_id=b"m",
        app_id=b"shop",
        priority=3,
        origin=Origin(queue, "shop", "orders.created"),
        reason="retries-exhausted",
        failure=Failure("ValueError", f"no {identity}", None),
        fingerprint="f" * 16,
        retries=3,
        first_failed_at=NOW,
        last_failed_at=NOW if attempt is None and identity else LATER + timedelta(minutes=1),
        framework_id=framework_id,
    )


def send(engine: Engine) -> dict[int, int]:
    """Every due row is retried: claimed, its attempt begun and confirmed."""
    sent: dict[int, int] = {}
    while rows := claim(engine, "w", LATER):
        numbers = begin_attempts(engine, {row.row_id: row.token for row in rows}, Strategy.IMMEDIATE, "w", LATER)
        attempts.mark_sent(engine, numbers, LATER)
        sent |= numbers
    return sent


BATCH = (
    arrival("a", 1),  # came back in time
    arrival("b", 1),  # was resolved, and came back late
    arrival("last", 1),  # was resolved, and that was its last attempt
    arrival("c", 1, queue="other"),  # behind another circuit breaker
    arrival("d"),  # was resolved, and the same message came again
    arrival("new"),
    arrival("", framework_id="f-1"),  # published anew by their framework
    arrival("", framework_id="f-2"),
    arrival("a", 1),  # the same one once more
)


def filled(engine: Engine) -> Engine:
    first = [arrival("a"), arrival("b"), arrival("last"), arrival("c", queue="other"), arrival("d")]
    first += [arrival(name, framework_id=name) for name in ("f-1", "f-2")]
    assert Ingestion(engine).store(first, NOW) == [("recorded", None)] * len(first)
    with engine.begin() as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.identity == "last").values(dlq_retry_count=4))
    numbers = send(engine)
    with reading(engine) as connection:
        named = {row.identity: row.id for row in connection.execute(select(MESSAGES.c.identity, MESSAGES.c.id))}
    resolved = {named[name]: (numbers[named[name]], "proven") for name in ("b", "last", "d")}
    assert SentAttempts(engine).resolve(resolved, LATER) == set(resolved)
    return engine


def contents(engine: Engine) -> list[list[tuple[Any, ...]]]:
    """All that was stored, but for numbers that a database gives, and the time that holds the place in its batch."""
    named = MESSAGES.c.identity
    made_here = {"id", "identity", "lock_token", "created_at"}
    messages = select(*(each for each in MESSAGES.c if each.name not in made_here))
    of_attempts = (ATTEMPTS.c.number, ATTEMPTS.c.outcome, ATTEMPTS.c.sent_at, ATTEMPTS.c.closed_at)
    steps = (TRANSITIONS.c.from_status, TRANSITIONS.c.to_status, TRANSITIONS.c.reason)
    with reading(engine) as connection:
        return [
            sorted(map(tuple, connection.execute(messages)), key=repr),
            sorted(map(tuple, connection.execute(select(named, *of_attempts).join(ATTEMPTS))), key=repr),
            [
                tuple(step)
                for step in connection.execute(
                    select(func.length(named), named, *steps).join(TRANSITIONS).order_by(named, TRANSITIONS.c.id)
                )
            ],
            sorted(map(tuple, connection.execute(select(BREAKERS))), key=repr),
        ]


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_a_batch_means_what_its_messages_mean_one_by_one(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    at_once = filled(store_at(str(request.getfixturevalue("database_url" if kind == "postgresql" else "sqlite_url"))))
    singly = filled(store_at(f"sqlite:///{tmp_path / 'singly.sqlite3'}"))
    now = LATER + timedelta(minutes=2)
    told = Ingestion(at_once).store(BATCH, now)
    one_by_one = Ingestion(singly)
    assert told == [result for each in BATCH for result in one_by_one.store([each], now)]
    assert told[:5] == [FAILED, FAILED, FAILED, FAILED, ("duplicate", None)]
    assert contents(at_once) == contents(singly)


@pytest.mark.parametrize("url", ["database_url", "sqlite_url"])
def test_a_batch_of_failed_attempts_takes_few_statements(request: pytest.FixtureRequest, url: str) -> None:
    engine = store_at(str(request.getfixturevalue(url)))
    number = 200
    Ingestion(engine).store([arrival(f"id-{each}") for each in range(number)], NOW)
    assert len(send(engine)) == number
    executed: list[str] = []

    def keep(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        executed.append(statement)

    event.listen(engine, "before_cursor_execute", keep)
    with statements_of(engine) as seen:
        assert Ingestion(engine).store([arrival(f"id-{each}", 1) for each in range(number)], LATER) == [FAILED] * number
    assert len(executed) < 20, len(executed)
    plans = [walk(engine, statement, parameters) or "" for statement, parameters in seen]
    assert not [plan for plan in plans if "SCAN dlq_plan_items" in plan]
