"""Bulk statements: a list of values, or a table of them, as one parameter for each column, however many rows.

So a statement is short and always the same text: SQLAlchemy and psycopg do not take a list of values apart for each
row, and the database plans and runs it once for all rows. PostgreSQL takes arrays, SQLite takes JSON.

psycopg looks at each value of a list several times and writes it as quoted text; for the rows of a batch that took more
time than the server did. Here an array is encoded in the server's own binary form: each value once, and an equal text
once for all rows that have it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Integer,
    LargeBinary,
    Select,
    SmallInteger,
    String,
    Subquery,
    Table,
    any_,
    bindparam,
    func,
    insert,
    literal,
    select,
    type_coerce,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

from dlqbatch.store.column_types import Json
from dlqbatch.store.text import to_json

if TYPE_CHECKING:
    import psycopg

_TABLE_NAME: Final = "given"


def insert_into(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An INSERT that knows ON CONFLICT, in the dialect of the database."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def in_list(connection: Connection, column: ColumnElement[Any], values: Iterable[Any]) -> ColumnElement[bool]:
    """The condition that the column is one of the values."""
    listed = list(values)
    if connection.dialect.name == "postgresql":
        return column == any_(_array_parameter(column.type, listed))
    kept = json.dumps(_for_sqlite(connection.dialect, column, listed), ensure_ascii=False)
    return column.in_(select(func.json_each(kept).table_valued("value").c.value))


def distinct(connection: Connection, column: ColumnElement[Any], limit: int | None = None) -> list[str]:
    """The values of a column, which an index has to begin with: one look at the index for each value."""
    steps = select(func.min(column).label("value")).where(column.is_not(None)).cte("steps", recursive=True)
    following = select(func.min(column)).where(column > steps.c.value).scalar_subquery()
    steps = steps.union_all(select(following).where(steps.c.value.is_not(None)))
    return list(connection.scalars(select(steps.c.value).where(steps.c.value.is_not(None)).limit(limit)))


def values_table(connection: Connection, columns: Mapping[Column[Any], Sequence[Any]]) -> Subquery:
    """A table of these values; its columns have the names of those that the values are for."""
    if connection.dialect.name == "postgresql":
        arrays = (
            func.unnest(_array_parameter(column.type, values), type_=column.type).label(column.name)
            for column, values in columns.items()
        )
        return select(*arrays).subquery(_TABLE_NAME)
    rows = zip(*(_for_json(connection.dialect, column, values) for column, values in columns.items()), strict=True)
    each = func.json_each(json.dumps(list(rows), ensure_ascii=False)).table_valued("value", name="rows")
    found = (
        type_coerce(_extracted(each.c.value, place, column), column.type).label(column.name)
        for place, column in enumerate(columns)
    )
    return select(*found).subquery(_TABLE_NAME)


def _for_json(dialect: Dialect, column: Column[Any], values: Sequence[Any]) -> Sequence[Any]:
    if isinstance(column.type, LargeBinary):
        return [None if value is None else bytes(value).hex() for value in values]
    return _for_sqlite(dialect, column, values)


def _extracted(row: ColumnElement[Any], place: int, column: Column[Any]) -> ColumnElement[Any]:
    value = func.json_extract(row, f"$[{place}]")
    return func.dlqbatch_unhex(value) if isinstance(column.type, LargeBinary) else value


def constants_and_lists(rows: Collection[Mapping[str, Any]], key: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The columns that have one value in all rows, and lists of values for the key and the other columns.

    Every row has the same columns.
    """
    constants: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for name, first in next(iter(rows)).items():
        values = [row[name] for row in rows]
        if name != key and all(value is first or value == first for value in values):
            constants[name] = first
        else:
            lists[name] = values
    return constants, lists


def bulk_insert(connection: Connection, table: Table, rows: Collection[Mapping[str, Any]], key: str) -> None:
    """Insert rows that have the same columns; `key` is a column in which they differ."""
    connection.execute(insert(table).from_select(*rows_to_insert(connection, table, rows, key), include_defaults=False))


def rows_to_insert(
    connection: Connection, table: Table, rows: Collection[Mapping[str, Any]], key: str
) -> tuple[list[str], Select[Any]]:
    """The columns' names, and a query that gives the rows in their order, for `insert().from_select()`."""
    constants, lists = constants_and_lists(rows, key)
    listed = values_table(connection, {table.c[name]: values for name, values in lists.items()})
    literals = (literal(value, table.c[name].type) for name, value in constants.items())
    return [*lists, *constants], select(*listed.c, *literals)


def _for_sqlite(dialect: Dialect, column: ColumnElement[Any], values: Sequence[Any]) -> Sequence[Any]:
    process = column.type.dialect_impl(dialect).bind_processor(dialect)
    return [process(value) for value in values] if process is not None else values


# --- Arrays of PostgreSQL

_Encode = Callable[[Any], Any]
_DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy gives it no types
_SIZE: Final = struct.Struct(">i").pack
_HEAD: Final = struct.Struct(">iiIii").pack
_HEAD_OF_EMPTY: Final = struct.Struct(">iiI").pack
_NULL: Final = _SIZE(-1)
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


def _sized(encode: _Encode) -> _Encode:
    def encoded(value: Any) -> bytes:
        data: bytes = encode(value)
        return _SIZE(len(data)) + data

    return encoded


def _fixed(form: str) -> _Encode:
    """Encode numbers, all of which have the size of this format of `struct`."""
    packed = struct.Struct(f">i{form}")
    size = packed.size - 4
    return lambda value: packed.pack(size, value)


def _microseconds(value: datetime) -> int:
    since = value - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


_time: Final = _fixed("q")
# The server's name of a type, the number of the type, and how one value is written, with its size before it.
_ENCODINGS: Final[dict[type[TypeEngine[Any]], tuple[str, int, _Encode]]] = {
    BigInteger: ("BIGINT", 20, _fixed("q")),
    SmallInteger: ("SMALLINT", 21, _fixed("h")),
    Integer: ("INTEGER", 23, _fixed("i")),
    Boolean: ("BOOLEAN", 16, _fixed("?")),
    DateTime: ("TIMESTAMP WITH TIME ZONE", 1184, lambda value: _time(_microseconds(value))),
    String: ("TEXT", 25, _sized(str.encode)),
    LargeBinary: ("BYTEA", 17, _sized(bytes)),
    JSONB: ("JSONB", 3802, _sized(lambda value: b"\1" + to_json(value).encode())),
}
# The numbers of the types of arrays by those of their values; they are the same in every release of PostgreSQL.
_ARRAY_TYPES: Final = {16: 1000, 17: 1001, 20: 1016, 21: 1005, 23: 1007, 25: 1009, 1184: 1185, 3802: 3807}


class _EncodedArray:
    """An array as it is sent, and the number of its type."""

    __slots__ = ("data", "oid")

    def __init__(self, data: bytes, oid: int) -> None:
        self.data = data
        self.oid = oid


class _ArrayType(UserDefinedType[Any]):
    """The type of a parameter that is an array of values of a column's type."""

    cache_ok = True
    render_bind_cast = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        return f"{self.name}[]"


@cache
def _dumper() -> type[Any]:
    from psycopg.adapt import Dumper  # noqa: PLC0415  (users of SQLite need no psycopg)
    from psycopg.pq import Format  # noqa: PLC0415  (as above)

    class EncodedArrayDumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: _EncodedArray) -> bytes:
            return obj.data

        def get_key(self, obj: _EncodedArray, format: object) -> Any:  # noqa: A002, ARG002  (psycopg's name for it)
            return type(obj), obj.oid

        def upgrade(self, obj: _EncodedArray, format: object) -> EncodedArrayDumper:  # noqa: A002, ARG002  (as above)
            dumper = type(self)(type(obj))
            dumper.oid = obj.oid
            return dumper

    return EncodedArrayDumper


def register_arrays(connection: psycopg.Connection[Any]) -> None:
    """Let a new connection take the arrays that `in_list` and `values_table` encode."""
    connection.adapters.register_dumper(_EncodedArray, _dumper())


def _array_parameter(of: TypeEngine[Any], values: Sequence[Any]) -> BindParameter[Any]:
    """The values as an array, encoded as a column of that type keeps them."""
    impl = of.dialect_impl(_DIALECT)
    plain = impl.impl_instance if isinstance(impl, TypeDecorator) else impl
    name, oid, encode = next(found for base, found in _ENCODINGS.items() if isinstance(plain, base))
    # to_json makes JSON fit for the server, so that it needs no other processing.
    process = None if isinstance(of, Json) else impl.bind_processor(_DIALECT)
    if isinstance(plain, String):
        encoded = _texts(values, process, encode)
    else:
        kept = values if process is None else map(process, values)
        encoded = [_NULL if value is None else encode(value) for value in kept]
    head = _HEAD(1, _NULL in encoded, oid, len(encoded), 1) if encoded else _HEAD_OF_EMPTY(0, 0, oid)
    array = _EncodedArray(b"".join((head, *encoded)), _ARRAY_TYPES[oid])
    return bindparam(None, array, type_=_ArrayType(name))


def _texts(values: Sequence[Any], process: _Encode | None, encode: _Encode) -> list[bytes]:
    """Encode texts, each different one once: names and failures come again and again."""
    known: dict[Any, bytes] = {None: _NULL}
    encoded: list[bytes] = []
    for value in values:
        data = known.get(value)
        if data is None:
            data = known[value] = encode(value if process is None else process(value))
        encoded.append(data)
    return encoded
