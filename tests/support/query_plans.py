"""What a database would do to answer: which statements read a large table from end to end."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import event

from dlqbatch.store.bulk import register_arrays
from dlqbatch.store.engine import reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

LARGE = ("dlq_messages", "dlq_transitions", "dlq_attempts", "dlq_runs", "dlq_plan_items", "dlq_fields")


@contextmanager
def statements_of(engine: Engine) -> Iterator[list[tuple[str, Any]]]:
    seen: list[tuple[str, Any]] = []

    def keep(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        if statement.startswith(("SELECT", "WITH", "UPDATE", "DELETE")) and any(table in statement for table in LARGE):
            seen.append((statement, parameters[0] if isinstance(parameters, list) else parameters))

    event.listen(engine, "before_cursor_execute", keep)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", keep)


def walk(engine: Engine, statement: str, parameters: Any) -> str | None:
    """The plan, if it reads a large table from end to end."""
    if engine.dialect.name == "sqlite":
        with reading(engine) as connection:
            plan = [line[3] for line in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
        walks = any("INDEX" not in line and line.startswith(tuple(f"SCAN {table}" for table in LARGE)) for line in plan)
        return f"{statement}\n" + "\n".join(plan) if walks else None
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        register_arrays(connection)
        (found,) = connection.execute(f"EXPLAIN (FORMAT JSON) {statement}".encode(), parameters).fetchone() or ()
    shown = json.dumps(found, indent=1)
    tables = {node["Relation Name"] for node in _nodes(found) if node.get("Node Type") == "Seq Scan"}
    return f"{statement}\n{shown}" if tables & set(LARGE) else None


def _nodes(plan: Any) -> Iterator[dict[str, Any]]:
    if isinstance(plan, list):
        for item in plan:
            yield from _nodes(item)
    elif isinstance(plan, dict):
        yield plan
        for item in plan.values():
            yield from _nodes(item)
