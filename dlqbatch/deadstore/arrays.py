"""A list of values as one of PostgreSQL's arrays, in the server's own binary form, encoded at once.

psycopg and SQLAlchemy look at each value of a list several times, and write it as text with its quotes; for the rows of
a batch that took more time than the server did. Here each value is encoded once, and an equal text is encoded once for
all.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from psycopg.adapt import Dumper
from psycopg.pq import Format
from sqlalchemy import BigInteger, Boolean, DateTime, Integer, LargeBinary, SmallInteger, String
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator, UserDefinedType

from dlqbatch.deadstore.column_types import Json
from dlqbatch.deadstore.text import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg
    from sqlalchemy.types import TypeEngine

    Encode = Callable[[Any], Any]

_DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy gives it no types
_SIZE: Final = struct.Struct(">i").pack
_HEAD: Final = struct.Struct(">iiIii").pack
_HEAD_OF_NONE: Final = struct.Struct(">iiI").pack
_NULL: Final = _SIZE(-1)
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


def _sized(encode: Encode) -> Encode:
    def encoded(value: Any) -> bytes:
        found: bytes = encode(value)
        return _SIZE(len(found)) + found

    return encoded


def _fixed(form: str) -> Encode:
    """Of numbers, whose size is known."""
    packed = struct.Struct(f">i{form}")
    size = packed.size - 4
    return lambda value: packed.pack(size, value)


def _microseconds(value: datetime) -> int:
    since = value - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


_time: Final = _fixed("q")
_KINDS: Final[dict[type[TypeEngine[Any]], tuple[str, int, Encode]]] = {
    BigInteger: ("BIGINT", 20, _fixed("q")),
    SmallInteger: ("SMALLINT", 21, _fixed("h")),
    Integer: ("INTEGER", 23, _fixed("i")),
    Boolean: ("BOOLEAN", 16, _fixed("?")),
    DateTime: ("TIMESTAMP WITH TIME ZONE", 1184, lambda value: _time(_microseconds(value))),
    String: ("TEXT", 25, _sized(str.encode)),
    LargeBinary: ("BYTEA", 17, _sized(bytes)),
    JSONB: ("JSONB", 3802, _sized(lambda value: b"\1" + to_json(value).encode())),
}
"""What the server calls a type, its number there, and how one value is written, with its size before it."""
_ARRAYS: Final = {16: 1000, 17: 1001, 20: 1016, 21: 1005, 23: 1007, 25: 1009, 1184: 1185, 3802: 3807}
"""The numbers of the types of arrays by those of their values; they are the same in every release."""


class Encoded:
    """An array as it is sent, and the number of its type."""

    __slots__ = ("data", "oid")

    def __init__(self, data: bytes, oid: int) -> None:
        self.data = data
        self.oid = oid


class _EncodedDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Encoded) -> bytes:
        return obj.data

    def get_key(self, obj: Encoded, format: object) -> Any:  # noqa: A002, ARG002  (psycopg's name for it)
        return type(obj), obj.oid

    def upgrade(self, obj: Encoded, format: object) -> _EncodedDumper:  # noqa: A002, ARG002  (the same)
        one = type(self)(type(obj))
        one.oid = obj.oid
        return one


def teach(connection: psycopg.Connection[Any]) -> None:
    """Without it a connection does not know what to do with an array of ours."""
    connection.adapters.register_dumper(Encoded, _EncodedDumper)


class Array(UserDefinedType[Any]):
    """A parameter that is a list of values of a column's type."""

    cache_ok = True
    render_bind_cast = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        return f"{self.name}[]"


def array(values: Sequence[Any], of: TypeEngine[Any]) -> tuple[Encoded, Array]:
    """The values as a column of that type keeps them, and the type of the parameter."""
    impl = of.dialect_impl(_DIALECT)
    plain = impl.impl_instance if isinstance(impl, TypeDecorator) else impl
    name, oid, encode = next(kind for base, kind in _KINDS.items() if isinstance(plain, base))
    # JSON is made fit for the server as it is encoded.
    process = None if isinstance(of, Json) else impl.bind_processor(_DIALECT)
    encoded = _texts(values, process, encode) if isinstance(plain, String) else _each(values, process, encode)
    head = _HEAD(1, _NULL in encoded, oid, len(encoded), 1) if encoded else _HEAD_OF_NONE(0, 0, oid)
    return Encoded(b"".join((head, *encoded)), _ARRAYS[oid]), Array(name)


def _each(values: Sequence[Any], process: Encode | None, encode: Encode) -> list[bytes]:
    kept = values if process is None else map(process, values)
    return [_NULL if value is None else encode(value) for value in kept]


def _texts(values: Sequence[Any], process: Encode | None, encode: Encode) -> list[bytes]:
    """Names and failures come again and again."""
    known: dict[Any, bytes] = {None: _NULL}
    found: list[bytes] = []
    for value in values:
        one = known.get(value)
        if one is None:
            one = known[value] = encode(value if process is None else process(value))
        found.append(one)
    return found
