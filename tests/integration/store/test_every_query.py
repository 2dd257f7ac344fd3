"""No question of a job or a person makes PostgreSQL read a large table from end to end, or more rows than are bounded.

The rows are few, so the bounds of the program are set lower by as much: what reads more than these has none.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from dead_rows import NOW, store_at
from many_rows import fill_many
from query_plans import LARGE, statements_of
from store_queries import queries

from dlqbatch.store.bulk import register_arrays

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS: Final = 20_000
BOUNDS: Final = {
    "dlqbatch.messages.queries.COUNTED": 200,
    "dlqbatch.messages.queries.LOOKED_THROUGH": 500,
    "dlqbatch.messages.actions.JOURNAL_LOOKED_THROUGH": 500,
    "dlqbatch.messages.composition.LOOKED_AT": 200,
    "dlqbatch.console.messages.COUNTED": 500,
    "dlqbatch.store.filter_conditions._COUNTED": 200,
    "dlqbatch.store.filter_conditions._TELL_EXCHANGES": 5,
    "dlqbatch.groups.inbox._OLDEST_RESOLVED": 20,
    "dlqbatch.monitor.measure.DEATHS_LOOKED_AT": 500,
    "dlqbatch.monitor.measure.ENDINGS_LOOKED_AT": 500,
    "dlqbatch.monitor.measure.ITEMS_LOOKED_AT": 500,
    "dlqbatch.monitor.measure.RUNS_LOOKED_AT": 500,
}
MOST_READ: Final = 4_500
"""What the bounds allow for 50 groups, and for a filter whose index has few more rows than are wanted."""


@pytest.mark.slow
def test_every_query_reads_a_bounded_number_of_rows(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = store_at(database_url)
    fill_many(engine, ROWS, now=NOW, groups=200)
    for name, number in BOUNDS.items():
        monkeypatch.setattr(name, number)
    too_many = []
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection:
        register_arrays(connection)
        # What stands in memory is cheap to read, and 20,000 rows do: a disk makes the same choices as a million.
        connection.execute("SET enable_seqscan = off")
        for name, ask in queries(engine, NOW).items():
            with statements_of(engine) as seen:
                ask()
            for statement, parameters in seen:
                shown = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}".encode()
                (plan,) = connection.execute(shown, parameters).fetchone() or ()
                connection.rollback()
                read = {table: rows for table, rows in rows_read(plan) if rows > MOST_READ}
                if read:
                    too_many.append(f"{name}: {read}\n{statement}\n{json.dumps(plan, indent=1)}")
    assert not too_many, "\n\n".join(too_many)


def rows_read(plan: Any) -> Iterator[tuple[str, int]]:
    """How many rows each node of a plan has read from a large table, shown or not."""
    if isinstance(plan, list):
        for each in plan:
            yield from rows_read(each)
    elif isinstance(plan, dict):
        if plan.get("Relation Name") in LARGE:
            loops = plan["Actual Loops"]
            removed = sum(plan.get(f"Rows Removed by {what}", 0) for what in ("Filter", "Index Recheck"))
            yield plan["Relation Name"], int((plan["Actual Rows"] + removed) * loops)
        for each in plan.values():
            yield from rows_read(each)
