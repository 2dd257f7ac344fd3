"""Times, texts, JSON and ids that mean the same in PostgreSQL and in SQLite."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, cast

from sqlalchemy import BigInteger, DateTime, Dialect, Integer, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator, TypeEngine

from dlqbatch.store.text import key, plain, time_text, to_json, visible

BIGINT = BigInteger().with_variant(Integer(), "sqlite")
"""The type of an id: only a plain INTEGER numbers itself in SQLite, and it has 64 bits there too."""


class Time(TypeDecorator[datetime]):
    """An aware time; in SQLite UTC text of one width, so that text order is time order."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without its zone: {value}")
        return time_text(value) if dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, _dialect: Dialect) -> datetime | None:
        if isinstance(value, str):
            return datetime.fromisoformat(value)
        return None if value is None else cast("datetime", value).astimezone(UTC)


class Shown(TypeDecorator[str]):
    """Text for people, from text or bytes: what no database takes is a visible escape, and it is not too long."""

    impl = Text
    cache_ok = True

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def process_bind_param(self, value: str | bytes | None, _dialect: Dialect) -> str | None:
        return value if value is None else visible(value, self.longest)


class Name(TypeDecorator[str]):
    """Text to look things up by, from text or bytes; fits into an index whatever it is made of."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | bytes | None, _dialect: Dialect) -> str | None:
        return value if value is None else key(value)


class Named(TypeDecorator[StrEnum]):
    """One of the names of an enumeration, as text; a CHECK holds the database to them."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        return value if value is None else self.kind(value).value

    def process_result_value(self, value: Any, _dialect: Dialect) -> StrEnum | None:
        return value if value is None else self.kind(value)


class Json(TypeDecorator[Any]):
    """Any JSON value; what a database does not take in it becomes visible text."""

    impl = JSONB
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else JSONB())

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        if value is None:
            return None
        return to_json(value) if dialect.name == "sqlite" else plain(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return json.loads(value) if isinstance(value, str) and dialect.name == "sqlite" else value
