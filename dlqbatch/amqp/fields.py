"""The fields of a message: values by which people look for it, such as an order's number, and the ids of frameworks."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Final

from dlqbatch.amqp.json_path import Path, parse, values
from dlqbatch.amqp.properties import split
from dlqbatch.amqp.table import BOOLEAN, TEXT_TAGS, Field, UnreadableTable, fields

HEADER: Final = "header:"
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
LARGEST_READ: Final = 1024 * 1024
"""Fields are read from bodies of at most so many bytes."""
MOST_VALUES: Final = 20
"""A field of a message has at most so many values."""
CORRELATION_ID, MESSAGE_ID, TASK_ID = BUILT_IN = ("correlation_id", "message_id", "task_id")
"""The fields that need no setting. The row of a message has its message_id already; the last one is Celery's."""
_CORRELATION_ID, _PRIORITY = 0x0400, 0x0800
_TASK, _ID = b"task", b"id"
_NOT_JSON: Final = (ValueError, RecursionError)


def check_place(place: str) -> str:
    """Refuse what is neither a JSON path nor a header; a ValueError continues a sentence that names the option."""
    if place.startswith(HEADER):
        if not 1 <= len(place.removeprefix(HEADER).encode()) <= 255:  # noqa: PLR2004  (AMQP's longest name)
            raise ValueError("names a header that no message can have; write header:NAME")
    else:
        parse(place)
    return place


@dataclass(frozen=True)
class Fields:
    """Which fields there are, and how they are read."""

    places: Mapping[str, str] = field(default_factory=dict)
    """The JSON path, or `header:NAME`, by the field's name."""

    @cached_property
    def _paths(self) -> tuple[tuple[str, Path], ...]:
        return tuple((name, parse(place)) for name, place in self.places.items() if not place.startswith(HEADER))

    @cached_property
    def _headers(self) -> dict[bytes, list[str]]:
        found: dict[bytes, list[str]] = {}
        for name, place in self.places.items():
            if place.startswith(HEADER):
                found.setdefault(place.removeprefix(HEADER).encode(), []).append(name)
        return found

    def read(self, body: bytes, properties: bytes) -> tuple[tuple[str, str], ...]:
        """Names and values, each pair once; never raises."""
        found = [*self._of_properties(properties), *self._of_body(body)]
        number = dict[str, int]()
        kept: dict[tuple[str, str], None] = {}
        for name, value in found:
            if value and number.setdefault(name, 0) < MOST_VALUES and (name, value) not in kept:
                kept[name, value] = None
                number[name] += 1
        return tuple(kept)

    def _of_properties(self, properties: bytes) -> Iterator[tuple[str, str]]:
        try:
            cut = split(properties)
            at = cut.tail_start + bool(cut.flags & _PRIORITY)
            if cut.flags & _CORRELATION_ID:
                yield CORRELATION_ID, _text(properties[at + 1 : at + 1 + properties[at]])
            table = properties[cut.table_start : cut.table_end]
            is_task = _TASK in table
            if is_task or any(name in table for name in self._headers):
                # Few messages have one of the headers: the others are not walked through.
                yield from self._of_headers(dict(fields(table)), is_task=is_task)
        except (UnreadableTable, IndexError, StructError):
            return

    def _of_headers(self, headers: Mapping[bytes, Field], *, is_task: bool) -> Iterator[tuple[str, str]]:
        if is_task and _TASK in headers and _ID in headers:
            yield TASK_ID, _of_header(headers[_ID])
        for header, names in self._headers.items():
            if header in headers:
                yield from ((name, _of_header(headers[header])) for name in names)

    def _of_body(self, body: bytes) -> Iterator[tuple[str, str]]:
        if not self._paths or len(body) > LARGEST_READ or body.removeprefix(BOM_UTF8).lstrip()[:1] not in (b"{", b"["):
            return
        try:
            # Numbers stay as they are written: an order 007 or 1.50 is looked for as it is shown.
            document = json.loads(body, parse_int=str, parse_float=str, parse_constant=str)
        except _NOT_JSON:
            return
        for name, path in self._paths:
            for value in values(path, document):
                inner = value if isinstance(value, list) else [value]
                yield from ((name, _of_json(each)) for each in inner[:MOST_VALUES] if not isinstance(each, list | dict))


def _of_json(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _of_header(held: Field) -> str:
    if held.tag in TEXT_TAGS:
        return _text(held.value)
    if held.tag == BOOLEAN:
        return _of_json(held.value != b"\0")
    number = held.as_integer()
    return "" if number is None else str(number)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
