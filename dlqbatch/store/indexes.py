"""Indexes of large tables, which PostgreSQL builds one by one beside running jobs, after an upgrade of the columns.

An index that is built inside the transaction of an upgrade would hold up every writer for minutes. A build that was cut
leaves an index that is marked as invalid: the next `dlqbatch db upgrade` drops it and builds it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, Engine, Index, text
from sqlalchemy.schema import CreateIndex

from dlqbatch.store.engine import translated
from dlqbatch.store.tables import metadata

REPLACED: Final = (
    *("dlq_messages_due", "dlq_messages_overdue", "dlq_messages_leases"),
    *("dlq_messages_by_age_in_status", "dlq_messages_by_failure", "dlq_attempts_observed"),
    *("dlq_messages_waiting", "dlq_messages_groups"),
)
"""Indexes that no query of this version needs; each goes only when all that replace them are there."""
_CHANGED: Final = ("dlq_messages", "dlq_attempts", "dlq_transitions")
_BUILDS_ONE_AT_A_TIME: Final = 0x646C7162696E6478  # 'dlqbindx', the key of an advisory lock
_LOOKS_EVERY: Final = 0.5
_FOUND: Final = text(
    "SELECT name.relname, ind.indisvalid FROM pg_index ind JOIN pg_class name ON name.oid = ind.indexrelid "
    "WHERE pg_table_is_visible(ind.indexrelid)"
)


def build_missing(engine: Engine, progress: Callable[[str], None] = lambda _: None) -> tuple[str, ...]:
    """Build the indexes that tables.py names and the database does not have, and drop those that they replace.

    Returns the names of what was built. In SQLite the upgrade itself has built them.
    """
    if engine.dialect.name != "postgresql":
        return ()
    built: list[str] = []
    with translated(engine.url), alone(engine, _BUILDS_ONE_AT_A_TIME) as connection:
        states: dict[str, bool] = dict(connection.execute(_FOUND).all())
        for index in _large():
            name = str(index.name)
            if states.get(name):
                continue
            if name in states:
                connection.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS {name}"))
            progress(f"building the index {name}; jobs go on meanwhile")
            statement = str(CreateIndex(index).compile(engine))
            connection.execute(text(statement.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1)))
            built.append(name)
        for name in REPLACED:
            if name in states:
                connection.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS {name}"))
        if built:
            # A new column has no statistics until then, and a plan is made of a guess.
            for table in _CHANGED:
                connection.execute(text(f"ANALYZE {table}"))
    return tuple(built)


def missing_indexes(engine: Engine) -> tuple[str, ...]:
    """The indexes that `build_missing` would build."""
    if engine.dialect.name != "postgresql":
        return ()
    with translated(engine.url), engine.connect() as connection:
        states: dict[str, bool] = dict(connection.execute(_FOUND).all())
    return tuple(str(index.name) for index in _large() if not states.get(str(index.name)))


def _large() -> Iterator[Index]:
    """In the order of their tables; a unique index is made with its columns, and not here."""
    for table in metadata.sorted_tables:
        yield from sorted((each for each in table.indexes if not each.unique), key=lambda each: str(each.name))


@contextmanager
def alone(engine: Engine, lock: int) -> Iterator[Connection]:
    """A connection without transactions, for one process at a time; `lock` is the key of an advisory lock.

    The lock is tried again and again: whoever waits for it inside a statement would be waited for by the build.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        key = {"key": lock}
        while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), key):
            time.sleep(_LOOKS_EVERY)
        try:
            yield connection
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)
