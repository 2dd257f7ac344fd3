"""Many rows that are due, each with an origin that a broker has; and what a test has to know of them afterwards."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import rawamqp
from dead_rows import NOW, add, row
from program import Program
from rawamqp import Peer

if TYPE_CHECKING:
    from sqlalchemy import Engine

ORIGIN = "work.orders"
_AT_ONCE = 1_000


def properties(identity: str, origin: str = ORIGIN) -> bytes:
    """As a drain dead-letters it."""
    return rawamqp.properties(
        [
            (b"dlqbatch-id", rawamqp.text(identity)),
            (b"dlqbatch-origin-queue", rawamqp.text(origin)),
            (b"dlqbatch-origin-exchange", rawamqp.text("")),
            (b"dlqbatch-origin-key", rawamqp.text("orders.created")),
        ],
        delivery_mode=2,
    )


def due(number: int, **columns: Any) -> dict[str, Any]:
    identity = f"due-{number}"
    return (
        row(
            identity=identity,
            properties=properties(identity),
            body=b"%d" % number,
            next_retry_at=NOW.replace(year=2020),
            origin_queue=ORIGIN,
            origin_exchange="",
            origin_key="orders.created",
            event="orders.created",
            error_message="connection timed out",
        )
        | columns
    )


def fill(engine: Engine, number: int) -> None:
    for start in range(0, number, _AT_ONCE):
        add(engine, *(due(each) for each in range(start, min(start + _AT_ONCE, number))), at=NOW.replace(year=2020))


def worker(broker_url: str, database_url: str, **settings: str) -> Program:
    """A lifecycle run in a process of its own, as cron starts it."""
    given = {"broker_url": broker_url, "database_url": database_url, "job": "lifecycle", "log_level": "error"}
    return Program(given | settings)


def copies(broker_url: str) -> Counter[bytes]:
    """How often each body is in the origin's queue, by a reader that knows nothing of dlqbatch."""
    with Peer(broker_url) as peer:
        return Counter(seen.body for seen in peer.read(ORIGIN))


def connect(database_url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True)


def number(store: psycopg.Connection[Any], query: str) -> int:
    found = store.execute(query.encode()).fetchone()
    assert found is not None
    return int(found[0])
