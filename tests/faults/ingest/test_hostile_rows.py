"""Whoever writes somebody else's id into a message gets a row of their own, and changes none."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, lock, row, store_at
from dead_rows import add as add_row
from sqlalchemy import insert, select

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS, TRANSITIONS

if TYPE_CHECKING:
    from sqlalchemy import Engine, Row

OURS = Origin("orders", "shop", "orders.created")
THEIRS = Origin("stolen", "shop", "orders.created")
LATER = NOW + timedelta(hours=1)


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def arrival(attempt: int | None, origin: Origin | None) -> Examined:
    """The same id, body and message_id as the row's: all that a reader of the message knows."""
    content = row(body=b"known")
    return Examined(
        source_queue="dlq-queue",
        exchange="dlq-exchange",
        routing_key="dlq-routing-key",
        redelivered=False,
        properties=b"\0\0",
        body=b"known",
        id="theirs",
        parent=None,
        attempt=attempt,
        digest=content["digest"],
        full_digest=content["full_digest"],
        message_id=None,
        app_id=None,
        priority=0,
        origin=origin,
        reason=None,
        failure=Failure(None, None, None),
        fingerprint="0" * 16,
        retries=0,
        first_failed_at=NOW,
        last_failed_at=NOW,
    )


def everything(engine: Engine, row_id: int) -> tuple[list[Any], ...]:
    with reading(engine) as connection:
        return (
            list(connection.execute(select(MESSAGES).where(MESSAGES.c.id == row_id))),
            list(connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.message_id == row_id))),
            list(connection.execute(select(TRANSITIONS).where(TRANSITIONS.c.message_id == row_id))),
        )


def others(engine: Engine, row_id: int) -> list[Row[Any]]:
    with reading(engine) as connection:
        return list(connection.execute(select(MESSAGES).where(MESSAGES.c.id != row_id).order_by(MESSAGES.c.id)))


def a_row(engine: Engine, status: Status, place: Origin = OURS) -> int:
    columns: dict[str, Any] = {"identity": "theirs", "body": b"known", "status": Status.PENDING}
    columns |= {"origin_queue": place.queue, "origin_exchange": place.exchange, "origin_key": place.key}
    (row_id,) = add_row(engine, row(**columns))
    outcome = {Status.PROCESSING: None, Status.RESOLVED: "succeeded"}.get(status, "failed")
    held = lock() if status is Status.PROCESSING else {}
    closed = {"closed_at": NOW} if outcome is not None else {}
    with writing(engine) as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == row_id).values(status=status, **held))
        attempt = {"message_id": row_id, "number": 1, "worker": "w", "created_at": NOW, "sent_at": NOW}
        connection.execute(insert(ATTEMPTS).values(attempt | closed | {"outcome": outcome}))
    return row_id


@pytest.mark.parametrize("attempt", [None, 1, 2, 2**63 - 1])
@pytest.mark.parametrize("status", [Status.PENDING, Status.PROCESSING, Status.RESOLVED, Status.FAILED])
def test_a_copy_that_failed_elsewhere_is_a_row_of_its_own_and_changes_nothing_of_the_other(
    status: Status, attempt: int | None, engine: Engine
) -> None:
    row_id = a_row(engine, status)
    before = everything(engine, row_id)

    told = Ingestion(engine).store([arrival(attempt, THEIRS), arrival(attempt, None)], LATER)

    assert told == [("recorded", None)] * 2
    assert everything(engine, row_id) == before
    new = others(engine, row_id)
    assert [each.parent for each in new] == ["theirs"] * 2
    # A retry of ours that something made another message of would circle if it were retried again.
    assert {each.status for each in new} == {Status.PENDING if attempt is None else Status.MANUAL}


@pytest.mark.parametrize(
    ("row_at", "came_from"),
    [
        (OURS, OURS),
        (OURS, OURS._replace(exchange=None, key="another")),
        (Origin(None, "shop", "k"), Origin("any", "shop", "k")),
        (OURS, Origin("moved-to", None, "orders.created")),
    ],
)
def test_what_comes_back_from_where_it_was_sent_is_the_attempt_that_failed(
    row_at: Origin, came_from: Origin, engine: Engine
) -> None:
    row_id = a_row(engine, Status.PROCESSING, row_at)
    with writing(engine) as connection:
        plan = {"hash": "h", "state": "done", "state_since": NOW, "created_at": NOW, "actor": "a", "reason": "r"}
        plan |= {"filters": {}, "to_queue": "moved-to", "size": 1, "risks": []}
        plan_id = connection.execute(insert(PLANS).values(plan)).inserted_primary_key[0]
        item = {"plan_id": plan_id, "place": 1, "message_id": row_id, "seen_status": Status.PENDING}
        connection.execute(insert(PLAN_ITEMS).values(item | {"seen_updated_at": NOW, "state": "sent"}))

    assert Ingestion(engine).store([arrival(1, came_from)], LATER) == [("recorded", "attempt-failed")]

    assert others(engine, row_id) == []
    ((found,), (attempt,), _) = everything(engine, row_id)
    assert (found.status, attempt.outcome) == (Status.PENDING, "failed")
