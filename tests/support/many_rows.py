"""Very many dead messages, made by PostgreSQL itself, with the proportions of a store that has been in use for long.

Messages stand in the table by age, as they do where they arrived one after the other, and retention has kept up but for
the last day: what is resolved is a month old at most, what failed three months, what is archived a year.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from dead_rows import NOW
from sqlalchemy import text

from dlqbatch.store.count_changes import merge
from dlqbatch.store.engine import create_engine_for, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from sqlalchemy import Connection, Engine

SHARES: Final = {
    "archived": (0.20, timedelta(days=366)),
    "failed": (0.05, timedelta(days=91)),
    "manual": (0.05, timedelta(days=90)),
    "resolved": (0.66, timedelta(days=31)),
    "pending": (0.035, timedelta(days=1)),
    "processing": (0.005, timedelta(minutes=10)),
}
"""How many of all messages are in each state, and the age of the oldest of these."""
QUEUES: Final = 40
GROUPS: Final = 1_000
_AT_ONCE: Final = 200_000
_FILLED: Final = ("dlq_messages", "dlq_attempts", "dlq_transitions", "dlq_fields")
_OTHERS: Final = (
    *("dlq_groups", "dlq_actions", "dlq_action_rows", "dlq_plans", "dlq_plan_items", "dlq_runs", "dlq_cold_copies"),
    *("dlq_counts", "dlq_count_changes", "dlq_facet_counts"),
)
_INDEXES: Final = """
    SELECT indexname, indexdef FROM pg_indexes WHERE tablename = :table AND indexname NOT IN
        (SELECT conindid::regclass::text FROM pg_constraint WHERE conrelid = CAST(:table AS regclass))
"""
# Half of the messages are of an eighth of the groups; a group fails in its queue, and one time in ten in another one.
_MESSAGES: Final = """
    INSERT INTO dlq_messages (identity, digest, full_digest, had_id, source_queue, exchange, routing_key, body,
        properties, message_id, origin_queue, origin_exchange, origin_key, event, reason, error_type, error_message,
        error_stack, fingerprint, retry_count, dlq_retry_count, first_failed_at, last_failed_at, status, status_since,
        strategy, lock_owner, lock_token, locked_at, next_retry_at, priority, tags, source, ack_proven, created_at,
        updated_at)
    SELECT 'many-' || n, digest, digest, true, 'dlq-queue', 'dlq-exchange', 'dlq-routing-key',
        convert_to('{{"order": "P-' || n || '", "customer": "C-' || n % 100 || '"}}', 'utf8'),
        convert_to(repeat(md5(CAST(n AS text)), 3), 'utf8'), 'order-' || n, 'queue-' || queue, 'orders',
        'orders.created.' || queue, 'orders.created.' || queue || '.' || grp % 5, 'retries-exhausted',
        'com.example.Error' || grp % 61, 'failed on order ' || n,
        CASE WHEN grp % 5 < 3 THEN repeat(md5(CAST(grp AS text)) || E'\\n\\tat ', 4) END,
        lpad(to_hex(grp), 16, '0'), 3, tries, born, born, state, least(CAST(:now AS timestamptz), born + wait),
        'immediate', CASE WHEN state = 'processing' THEN 'many' END, CASE WHEN state = 'processing' THEN 'many' END,
        CASE WHEN state = 'processing' THEN born END,
        CASE WHEN state = 'pending' AND grp % 200 <> 7 THEN
            CAST(:now AS timestamptz) + (random() - 0.01) * interval '1 hour' END,
        CASE WHEN n % 50 = 0 THEN 5 ELSE 0 END, CASE WHEN n % 5000 = 0 THEN '["vip"]'::jsonb ELSE '[]'::jsonb END,
        'publisher-' || queue % 8, true, born, least(CAST(:now AS timestamptz), born + wait)
    FROM (SELECT *, CASE WHEN n % 10 = 0 THEN (grp * 7 + 3) % {queues} ELSE grp % {queues} END AS queue FROM
        (SELECT n, sha256(convert_to(CAST(n AS text), 'utf8')) AS digest,
            CAST(floor({groups} * random() ^ 3) AS integer) AS grp, CAST(floor(3 * random()) AS integer) AS tries,
            CAST(:now AS timestamptz) - CAST(:youngest AS interval) - random() * CAST(:span AS interval) AS born,
            random() * interval '1 hour' AS wait, random() AS lot
        FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n
        ORDER BY 5 OFFSET 0) AS drawn) AS placed
    CROSS JOIN LATERAL (SELECT CASE {states} END AS state) AS chosen
"""
_ATTEMPTS: Final = """
    INSERT INTO dlq_attempts (message_id, number, strategy, worker, created_at, sent_at, closed_at, outcome)
    SELECT id, number, 'immediate', 'many', created_at + number * interval '5 minutes',
        created_at + number * interval '5 minutes',
        CASE WHEN is_over THEN created_at + number * interval '6 minutes' END,
        CASE WHEN NOT is_over THEN NULL WHEN number > dlq_retry_count THEN 'succeeded' ELSE 'failed' END
    FROM (SELECT id, created_at, dlq_retry_count, number, status <> 'processing' OR number <= dlq_retry_count AS is_over
        FROM dlq_messages, generate_series(1, dlq_retry_count + CASE WHEN status IN ('resolved', 'processing') THEN 1
        ELSE 0 END) AS number WHERE id BETWEEN :first AND :last) AS tried
"""
_JOURNAL: Final = """
    INSERT INTO dlq_transitions (message_id, from_status, to_status, at, actor, reason)
    SELECT id, CASE step WHEN 1 THEN NULL WHEN 2 THEN 'pending' ELSE 'processing' END,
        CASE step WHEN 1 THEN 'pending' WHEN 2 THEN 'processing' ELSE 'resolved' END,
        created_at + (step - 1) * interval '30 minutes', CASE step WHEN 1 THEN 'ingest' ELSE 'lifecycle' END,
        CASE step WHEN 1 THEN 'arrived' WHEN 2 THEN 'due' ELSE 'attempt 1 did not come back; its queue was empty' END
    FROM dlq_messages, generate_series(1, CASE status WHEN 'resolved' THEN 3 ELSE 1 END) AS step
    WHERE id BETWEEN :first AND :last
"""
_FIELDS: Final = """
    INSERT INTO dlq_fields (name, value, message_id)
    SELECT name, value, id FROM dlq_messages
    CROSS JOIN LATERAL (VALUES ('order', replace(identity, 'many', 'P')), ('customer', 'C-' || id % 100))
        AS read (name, value)
    WHERE id BETWEEN :first AND :last
"""
_DECISIONS: Final = (
    """INSERT INTO dlq_groups (fingerprint, held_at, held_by, held_why, note, updated_at)
        SELECT lpad(to_hex(grp), 16, '0'), CASE WHEN grp % 200 = 7 THEN CAST(:now AS timestamptz) END, 'ann', 'known',
            'ask the shop', CAST(:now AS timestamptz) FROM generate_series(7, CAST(:groups AS integer), 20) AS grp""",
    """INSERT INTO dlq_actions (kind, actor, reason, at, ended_at, counts)
        SELECT 'discard', CASE WHEN n % 3 = 0 THEN 'ann' ELSE 'bob' END, 'not needed any more',
            CAST(:now AS timestamptz) - n * interval '1 hour', CAST(:now AS timestamptz), '{"done": 100}'
        FROM generate_series(least(2000, 1 + CAST(:number AS integer) / 500), 1, -1) AS n""",
    """INSERT INTO dlq_action_rows (action_id, message_id, state, from_status, to_status)
        SELECT 1 + place % (SELECT count(*) FROM dlq_actions), id, 'done', 'manual', 'archived'
        FROM (SELECT id, row_number() OVER (ORDER BY id) AS place FROM dlq_messages WHERE status = 'archived') AS each
        WHERE place % 4 = 0""",
    """INSERT INTO dlq_cold_copies (message_id, part, written_at)
        SELECT id, 'part-' || id / 1000, status_since FROM dlq_messages WHERE status = 'archived' AND id % 2 = 0""",
    """INSERT INTO dlq_runs (job, started_at, ended_at, outcome, stopped_by, emptied, report)
        SELECT (ARRAY['drain', 'ingest', 'lifecycle', 'monitor'])[1 + n % 4],
            CAST(:now AS timestamptz) - n * interval '15 seconds',
            CAST(:now AS timestamptz) - n * interval '15 seconds', 'ok', 'empty',
            '["dlq-queue"]', '{"counts": {"got": 10}}'
        FROM generate_series(least(173000, 100 + CAST(:number AS integer) / 50), 1, -1) AS n""",
    """INSERT INTO dlq_plans (hash, state, state_since, created_at, actor, reason, filters, size, risks)
        SELECT 'hash-' || n, CASE WHEN n = 1 THEN 'planned' ELSE 'done' END, CAST(:now AS timestamptz),
            CAST(:now AS timestamptz) - n * interval '1 day', 'ann', 'mended', '{}', 1, '[]'
        FROM generate_series(20, 1, -1) AS n""",
    """INSERT INTO dlq_plan_items (plan_id, place, message_id, seen_status, seen_updated_at, state, attempt)
        SELECT 1 + place % 20, place, id, 'manual', CAST(:now AS timestamptz),
            CASE WHEN place % 20 = 19 THEN 'waiting' ELSE 'sent' END, 1
        FROM (SELECT id, row_number() OVER (ORDER BY id) AS place FROM dlq_messages WHERE status = 'resolved') AS each
        WHERE place % 10 < 5""",
)


def fill_many(
    engine: Engine,
    number: int,
    *,
    now: datetime = NOW,
    groups: int = GROUPS,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Empty the dead store and fill it, in transactions of a bounded size; a hundredth of what is pending is due.

    As a superuser of the database, because foreign keys are not looked at for each row.
    """
    url = engine.url.render_as_string(hide_password=False)
    patient = create_engine_for(url.replace("+psycopg", ""), connect_timeout=30, statement_timeout=6 * 3600)
    with writing(patient) as connection:
        connection.execute(text(f"TRUNCATE {', '.join((*_FILLED, *_OTHERS))} RESTART IDENTITY CASCADE"))
        connection.execute(text("INSERT INTO dlq_counts (scope_id, fingerprint, origin_queue) VALUES (0, '', '')"))
        columns = "scope_id, fingerprint, origin_queue, error_type, event, source"
        connection.execute(text(f"INSERT INTO dlq_facet_counts ({columns}) VALUES (0, '', '', '', '', '')"))
        # Made anew afterwards, which takes a fraction of the time.
        indexes = [index for table in _FILLED for index in connection.execute(text(_INDEXES), {"table": table}).all()]
        for name, _ in indexes:
            connection.execute(text(f"DROP INDEX {name}"))
    done = 0
    for span, states, some in _sets(number):
        first, last = done + 1, done + some
        with writing(patient) as connection:
            _fill_set(connection, first, last, span, states, now, groups)
        done = last
        progress(f"{done:,} of {number:,} messages")
    for name, definition in indexes:
        progress(f"index {name}")
        with writing(patient) as connection:
            connection.execute(text("SET LOCAL maintenance_work_mem = '512MB'"))
            connection.execute(text(definition))
    known = {"now": now.isoformat(), "number": number, "groups": groups}
    for statement in _DECISIONS:
        with writing(patient) as connection:
            connection.execute(text("SET LOCAL session_replication_role = replica"))
            connection.execute(text(statement), {key: value for key, value in known.items() if f":{key}" in statement})
    merge(patient, seconds=600)  # as a monitor does
    progress("VACUUM ANALYZE")
    with patient.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in (*_FILLED, *_OTHERS):
            connection.execute(text(f"VACUUM (ANALYZE) {table}"))


_Span = tuple[timedelta, timedelta]
"""The ages of the youngest and the oldest message of a set."""


def _sets(number: int) -> Iterator[tuple[_Span, dict[str, float], int]]:
    """Bounded sets of messages, the oldest first: the ages in each, the shares of the states, and how many."""
    ages = sorted({age for _, age in SHARES.values()}, reverse=True)
    made, expected = 0, 0.0
    for oldest, youngest in zip(ages, [*ages[1:], timedelta()], strict=True):
        weights = {
            state: share * ((oldest - youngest) / age) for state, (share, age) in SHARES.items() if age >= oldest
        }
        together = sum(weights.values())
        expected += together * number
        of_span = round(expected) - made
        parts = max(1, -(-of_span // _AT_ONCE))
        step = (oldest - youngest) / parts
        for part in range(parts):
            some = of_span * (part + 1) // parts - of_span * part // parts
            youngest_here = oldest - step * (part + 1)
            shares = {state: weight / together for state, weight in weights.items()}
            if some:
                yield (youngest_here, youngest_here + step), shares, some
        made += of_span


def _fill_set(
    connection: Connection,
    first: int,
    last: int,
    span: _Span,
    states: dict[str, float],
    now: datetime,
    groups: int,
) -> None:
    bound, cases = 0.0, []
    for state, share in states.items():
        bound += share
        cases.append(f"WHEN lot < {bound:.6f} THEN '{state}'")
    chosen = f"{' '.join(cases)} ELSE '{next(reversed(states))}'"
    messages = _MESSAGES.format(queues=QUEUES, groups=groups, states=chosen)
    these: dict[str, Any] = {"first": first, "last": last}
    drawn = these | {"now": now.isoformat(), "youngest": str(span[0]), "span": str(span[1] - span[0])}
    connection.execute(text("SET LOCAL synchronous_commit = off"))
    connection.execute(text("SELECT setseed(0.5)"))
    connection.execute(text(messages), drawn)
    connection.execute(text("SET LOCAL session_replication_role = replica"))
    for statement in (_ATTEMPTS, _JOURNAL, _FIELDS):
        connection.execute(text(statement), these)
