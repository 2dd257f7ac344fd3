"""Dead messages for tests of the dead store: a row as ingest would write it, and many made by the database itself."""

from __future__ import annotations

import hashlib
import itertools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ready_store import make_tables
from sqlalchemy import select, text

from dlqbatch.lifecycle import attempts
from dlqbatch.store import journal as states
from dlqbatch.store.engine import create_engine_for, reading, writing
from dlqbatch.store.run_log import RunRecord
from dlqbatch.store.states import Status
from dlqbatch.store.tables import RUNS
from dlqbatch.store.text import key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Engine

    from dlqbatch.store.states import Strategy

NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
_numbers = itertools.count()


def store_at(url: str) -> Engine:
    make_tables(url)
    return create_engine_for(url, connect_timeout=30)


def row(**columns: Any) -> dict[str, Any]:
    body = columns.get("body", b"{}")
    digest = hashlib.sha256(body).digest()
    return {
        "identity": f"id-{next(_numbers):06}",
        "digest": digest,
        "full_digest": digest,
        "had_id": True,
        "source_queue": "dlq-queue",
        "exchange": "dlq-exchange",
        "routing_key": "dlq-routing-key",
        "body": body,
        "properties": b"\0\0",
        "fingerprint": "0" * 16,
        "retry_count": 3,
        "first_failed_at": NOW,
        "last_failed_at": NOW,
        "status": Status.PENDING,
    } | columns


def add(engine: Engine, *rows: dict[str, Any], at: datetime = NOW) -> list[int]:
    with writing(engine) as connection:
        ids = states.arrive(connection, rows, at, "ingest", "test")
    return [ids[key(each["identity"])] for each in rows]


def lock(token: str = "t", lease_until: datetime | None = NOW + timedelta(minutes=5)) -> dict[str, Any]:
    return {"lock_owner": "w", "lock_token": token, "locked_at": NOW, "lease_until": lease_until}


def fill(engine: Engine, number: int, due: int) -> None:
    """`number` rows: the first `due` of them pending and due, the rest of every age, state, event and group.

    Ages go back from NOW by a second for each row.
    """
    postgres = engine.dialect.name == "postgresql"
    series = (
        "generate_series(1, :number) AS n"
        if postgres
        else "(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < :number) SELECT n FROM c)"
    )
    when = (
        "CAST(:now AS timestamptz) - n * interval '1 second'"
        if postgres
        else "strftime('%Y-%m-%dT%H:%M:%S', :now, '-' || n || ' seconds') || '.000000+00:00'"
    )
    digest = "decode(repeat('00', 32), 'hex')" if postgres else "zeroblob(32)"
    body = "convert_to(repeat('x', 200), 'utf8')" if postgres else "zeroblob(200)"
    empty = "''::bytea" if postgres else "x''"
    fingerprint = "lpad(CAST(n % 50 AS text), 16, '0')" if postgres else "printf('%016d', n % 50)"
    others = ("pending", "processing", "resolved", "failed", "manual", "archived")
    status = "CASE " + " ".join(f"WHEN n % 6 = {i} THEN '{name}'" for i, name in enumerate(others)) + " END"
    statement = f"""
        INSERT INTO dlq_messages (identity, digest, full_digest, had_id, source_queue, exchange, routing_key, body,
            properties, origin_queue, event, error_type, error_message, fingerprint, retry_count, first_failed_at,
            last_failed_at, status, status_since, lock_token, next_retry_at, priority, ack_proven, created_at,
            updated_at)
        SELECT 'filled-' || n, {digest}, {digest}, true, 'dlq-queue', 'dlq-exchange', 'dlq-routing-key', {body},
            {empty}, 'queue-' || (n % 100), 'event-' || (n % 200), 'Error' || (n % 20), 'failed on attempt ' || n,
            {fingerprint}, 3, {when}, {when}, s, {when}, CASE WHEN s = 'processing' THEN 't' END,
            CASE WHEN n <= :due THEN {when} WHEN s = 'pending' THEN '2031-01-01T00:00:00.000000+00:00'
                {"::timestamptz" if postgres else ""} END, n % 3, true, {when}, {when}
        FROM (SELECT n, CASE WHEN n <= :due THEN 'pending' ELSE {status} END AS s FROM {series}) AS numbered
    """
    with writing(engine) as connection:
        if postgres:
            connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text(statement), {"number": number, "due": due, "now": NOW.isoformat()})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE dlq_messages" if postgres else "ANALYZE"))


def recent_runs(engine: Engine, job: str | None = None, limit: int = 100) -> list[RunRecord]:
    """The log of runs, the newest first; without a job, of all."""
    query = select(*(RUNS.c[name] for name in RunRecord.__slots__)).order_by(RUNS.c.started_at.desc(), RUNS.c.id.desc())
    if job is not None:
        query = query.where(RUNS.c.job == job)
    with reading(engine) as connection:
        return [RunRecord(*row) for row in connection.execute(query.limit(limit))]


def begin_attempts(
    engine: Engine,
    tokens: Mapping[int, str],
    strategy: Strategy | None,
    worker: str,
    at: datetime,
    lease: timedelta = attempts.LEASE,
) -> dict[int, int]:
    """Attempt numbers by row id, committed."""
    with writing(engine) as connection:
        return attempts.begin(connection, tokens, dict.fromkeys(tokens, strategy), worker, at, lease)
