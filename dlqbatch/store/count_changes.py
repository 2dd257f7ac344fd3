"""Adding up what the triggers of the messages have appended, and counting what was there before them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, Engine, text

from dlqbatch.store.counts import (
    COUNTS,
    FACET_COUNTS,
    FACETS,
    IS_COUNTED,
    IS_COUNTED_BY_FACET,
    LONGEST_FACET,
    NO_SCOPE,
)
from dlqbatch.store.engine import translated, writing
from dlqbatch.store.indexes import alone
from dlqbatch.store.states import Status

_AT_ONCE: Final = 10_000
_MERGES_ONE_AT_A_TIME: Final = 0x646C7163006D7267  # 'dlqc mrg', the key of an advisory lock
_COUNTS_ONE_AT_A_TIME: Final = 0x646C7163006E6577  # 'dlqc new', the key of an advisory lock
_KEY: Final = "scope_id, fingerprint, origin_queue"


def _each(form: str, between: str = ", ") -> str:
    """The text for the column of every state."""
    return between.join(form.format(each=status.value) for status in Status)


_MERGE: Final = text(
    f"""
    WITH taken AS (
        DELETE FROM dlq_count_changes WHERE ctid = ANY(ARRAY(SELECT ctid FROM dlq_count_changes LIMIT :most))
        RETURNING *
    ), merged AS (
        INSERT INTO dlq_counts AS kept ({_KEY}, {_each("{each}")})
        SELECT {_KEY}, {_each("coalesce(sum({each}), 0)")} FROM taken GROUP BY {_KEY}
        ON CONFLICT ({_KEY}) DO UPDATE SET {_each("{each} = kept.{each} + excluded.{each}")}
    )
    SELECT count(*) FROM taken
    """  # noqa: S608  (names of columns)
)
_FORGET_ZEROS: Final = text(f"DELETE FROM dlq_counts WHERE scope_id <> {NO_SCOPE} AND {_each('{each} = 0', ' AND ')}")  # noqa: S608
_ADD_WHAT_WAS_THERE: Final = text(
    f"""
    INSERT INTO dlq_count_changes ({_KEY}, {_each("{each}")})
    SELECT {_KEY}, {_each("sum({each})")} FROM (
        SELECT scope_id, fingerprint, coalesce(origin_queue, '') AS origin_queue,
            {_each("count(*) FILTER (WHERE status = '{each}') AS {each}")}
        FROM dlq_messages GROUP BY 1, 2, 3
        UNION ALL SELECT {_KEY}, {_each("-{each}")} FROM dlq_counts
        UNION ALL SELECT {_KEY}, {_each("-{each}")} FROM dlq_count_changes
    ) AS difference GROUP BY {_KEY} HAVING {_each("sum({each}) <> 0", " OR ")}
    """  # noqa: S608  (names of columns)
)


_FACET_KEY: Final = f"{_KEY}, {', '.join(FACETS)}"
_FORGET_ZEROS_OF_FACETS: Final = text(
    f"DELETE FROM dlq_facet_counts WHERE scope_id <> {NO_SCOPE} AND {_each('{each} = 0', ' AND ')}"  # noqa: S608
)
_ADD_FACETS_OF_WHAT_WAS_THERE: Final = text(
    f"""
    INSERT INTO dlq_facet_counts AS kept ({_FACET_KEY}, {_each("{each}")})
    SELECT {_FACET_KEY}, {_each("coalesce(sum({each}), 0)")} FROM (
        SELECT {_KEY}, {", ".join(f"coalesce({name}, '') AS {name}" for name in FACETS)}, {_each("{each}")} FROM (
            SELECT scope_id, fingerprint, coalesce(origin_queue, '') AS origin_queue,
                {", ".join(f"substr({name}, 1, {LONGEST_FACET}) AS {name}" for name in FACETS)},
                {_each("count(*) FILTER (WHERE status = '{each}') AS {each}")}
            FROM dlq_messages GROUP BY 1, 2, 3, 4, 5, 6
            UNION ALL SELECT {_FACET_KEY}, {_each("-{each}")} FROM dlq_facet_counts
            UNION ALL SELECT {_FACET_KEY}, {_each("-{each}")} FROM dlq_count_changes
        ) AS listed
    ) AS difference GROUP BY {_FACET_KEY} HAVING {_each("sum({each}) <> 0", " OR ")}
    ON CONFLICT ({_FACET_KEY}) DO UPDATE SET {_each("{each} = kept.{each} + excluded.{each}")}
    """  # noqa: S608  (names of columns)
)


def merge(engine: Engine, seconds: float = 5.0) -> int:
    """Add up what was appended, in transactions of a bounded size, for so long; returns the number of rows."""
    ends = time.monotonic() + seconds
    done = 0
    while True:
        with writing(engine) as connection:
            taken = _merged(connection) if connection.dialect.name == "postgresql" else 0
            done += taken or 0
            if taken == _AT_ONCE and time.monotonic() < ends:
                continue
            if taken is not None:
                connection.execute(_FORGET_ZEROS)
                if connection.dialect.name == "sqlite":  # in PostgreSQL the trigger has forgotten them
                    connection.execute(_FORGET_ZEROS_OF_FACETS)
            return done


def _merged(connection: Connection) -> int | None:
    """None: another process does it at this moment."""
    if not connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _MERGES_ONE_AT_A_TIME}):
        return None
    return int(connection.scalar(_MERGE, {"most": _AT_ONCE}) or 0)


def count_stored(engine: Engine, progress: Callable[[str], None] = lambda _: None) -> None:
    """Count the messages that were there before the triggers, while jobs go on; nothing, if that was done before.

    One statement, and so one snapshot, has the messages and what the triggers have counted so far. Their difference
    stays right whatever is written meanwhile. It is committed whole or not at all: if it was cut, the next `dlqbatch db
    upgrade` does it. In SQLite the upgrade itself has done it.
    """
    if engine.dialect.name != "postgresql":
        return
    with translated(engine.url), alone(engine, _COUNTS_ONE_AT_A_TIME):
        with writing(engine) as connection:
            if connection.scalar(IS_COUNTED) is None:
                progress("counting the messages that are there; jobs go on meanwhile")
                connection.execute(_ADD_WHAT_WAS_THERE)
                connection.execute(COUNTS.insert().values(scope_id=NO_SCOPE, fingerprint="", origin_queue=""))
        with writing(engine) as connection:
            if connection.scalar(IS_COUNTED_BY_FACET) is None:
                progress("counting them by error type, event and publisher")
                # A merge waits for the next monitor; the lock comes first, and then the snapshot of the statement.
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MERGES_ONE_AT_A_TIME})
                connection.execute(_ADD_FACETS_OF_WHAT_WAS_THERE)
                marker = dict.fromkeys(("fingerprint", "origin_queue", *FACETS), "")
                connection.execute(FACET_COUNTS.insert().values(scope_id=NO_SCOPE, **marker))
