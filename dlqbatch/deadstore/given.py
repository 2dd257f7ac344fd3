"""What the caller has in hand, as a table in a statement: one parameter for each column, however many rows.

So a statement is short and always the same text: nobody takes a list of values for each row apart anew, and the
database runs it once for all rows. PostgreSQL takes arrays, SQLite JSON.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import any_, bindparam, func, insert, literal, select, type_coerce

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sqlalchemy import BindParameter, Column, ColumnElement, Connection, Dialect, Select, Subquery, Table
    from sqlalchemy.types import TypeEngine

_NAME: Final = "given"


def among(connection: Connection, column: ColumnElement[Any], values: Iterable[Any]) -> ColumnElement[bool]:
    """The column is one of the values."""
    listed = list(values)
    if connection.dialect.name == "postgresql":
        return column == any_(_array(column.type, listed))
    each = func.json_each(_json(connection.dialect, column, listed)).table_valued("value")
    return column.in_(select(each.c.value))


def given(connection: Connection, columns: Mapping[Column[Any], Sequence[Any]]) -> Subquery:
    """Rows of values, each list as long as the others; its columns are named as those that the values are for."""
    if connection.dialect.name == "postgresql":
        arrays = (
            func.unnest(_array(column.type, values), type_=column.type).label(column.name)
            for column, values in columns.items()
        )
        return select(*arrays).subquery(_NAME)
    rows = zip(*(_plain(connection.dialect, column, values) for column, values in columns.items()), strict=True)
    each = func.json_each(json.dumps(list(rows), ensure_ascii=False)).table_valued("value", name="rows")
    found = (
        type_coerce(func.json_extract(each.c.value, f"$[{place}]"), column.type).label(column.name)
        for place, column in enumerate(columns)
    )
    return select(*found).subquery(_NAME)


def apart(rows: Collection[Mapping[str, Any]], key: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What all rows have alike, and the values of the key and of other columns; every row has the same columns."""
    alike: dict[str, Any] = {}
    different: dict[str, list[Any]] = {}
    for name, first in next(iter(rows)).items():
        values = [row[name] for row in rows]
        if name != key and all(value is first or value == first for value in values):
            alike[name] = first
        else:
            different[name] = values
    return alike, different


def add(connection: Connection, table: Table, rows: Collection[Mapping[str, Any]], key: str) -> None:
    """Insert rows that have the same columns."""
    connection.execute(insert(table).from_select(*listing(connection, table, rows, key), include_defaults=False))


def listing(
    connection: Connection, table: Table, rows: Collection[Mapping[str, Any]], key: str
) -> tuple[list[str], Select[Any]]:
    """What an insert of these rows takes: the columns' names, and a query that has the rows in their order.

    `key` is a column in which they differ.
    """
    alike, different = apart(rows, key)
    listed = given(connection, {table.c[name]: values for name, values in different.items()})
    constants = (literal(value, table.c[name].type) for name, value in alike.items())
    return [*different, *alike], select(*listed.c, *constants)


def _array(of: TypeEngine[Any], values: Sequence[Any]) -> BindParameter[Any]:
    from dlqbatch.deadstore.arrays import array  # noqa: PLC0415  (SQLite's users need no psycopg)

    encoded, kind = array(values, of)
    return bindparam(None, encoded, type_=kind)


def _plain(dialect: Dialect, column: ColumnElement[Any], values: Sequence[Any]) -> Sequence[Any]:
    """As SQLite keeps them."""
    process = column.type.dialect_impl(dialect).bind_processor(dialect)
    return [process(value) for value in values] if process is not None else values


def _json(dialect: Dialect, column: ColumnElement[Any], values: Sequence[Any]) -> str:
    return json.dumps(_plain(dialect, column, values), ensure_ascii=False)
