"""A message for a person to read: properties and headers as plain values, a body as JSON, text or hex.

Nothing here is ever sent again: the bytes that a message is made of stay as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from struct import Struct
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Final, Literal, NamedTuple

from dlqbatch.amqp.properties import split
from dlqbatch.amqp.table import ARRAY, BOOLEAN, TABLE, TEXT_TAGS, Field, UnreadableTable, fields, items
from dlqbatch.amqp.x_death import LATEST_TIME

BodyForm = Literal["json", "text", "hex"]

_DEEPEST: Final = 20
"""A header table can nest thousands of times; nobody reads that, and no stack holds it."""
_TOO_DEEP: Final = "…"
_SHORT_STRINGS: Final = (
    (0x0400, "correlation_id"),
    (0x0200, "reply_to"),
    (0x0100, "expiration"),
    (0x0080, "message_id"),
    (0x0020, "type"),
    (0x0010, "user_id"),
    (0x0008, "app_id"),
    (0x0004, "cluster_id"),
)
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE = 0x8000, 0x4000, 0x2000, 0x1000
_PRIORITY, _TIMESTAMP = 0x0800, 0x0040
_U64: Final = Struct(">Q")
_FLOATS: Final = {ord("f"): Struct(">f"), ord("d"): Struct(">d")}
_DECIMAL = ord("D")
_DECIMAL_VALUE: Final = Struct(">Bi")

_HEX_WIDTH: Final = 16
_NOT_TEXT: Final = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_LONGEST_PARSED: Final = 16 * 1024 * 1024
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_INDENT, _DEEPEST_INDENT = "  ", 40


class Readable(NamedTuple):
    properties: Mapping[str, object]
    """The properties that the message has, by their AMQP names."""
    headers: Mapping[str, object]
    """The headers by name; of two with the same name the second is called `name (2)`."""
    is_whole: bool
    """False: from some place on the bytes were not properties."""


def readable(properties: bytes) -> Readable:
    """Never raises: what cannot be read is not there."""
    found: dict[str, object] = {}
    headers: dict[str, object] = {}
    try:
        cut = split(properties)
        position = 2
        for flag, name in ((_CONTENT_TYPE, "content_type"), (_CONTENT_ENCODING, "content_encoding")):
            if cut.flags & flag:
                found[name], position = _short(properties, position)
        if cut.flags & _DELIVERY_MODE:
            found["delivery_mode"] = properties[cut.tail_start - 1]
        found.update(_tail(properties, cut.flags, cut.tail_start))
    except (UnreadableTable, IndexError, StructError):
        return Readable(found, headers, is_whole=False)
    is_whole = _entries(properties[cut.table_start : cut.table_end], headers, 0)
    return Readable(found, headers, is_whole)


def _tail(data: bytes, flags: int, position: int) -> Iterator[tuple[str, object]]:
    """What follows the delivery mode; the timestamp stands between the short strings."""
    if flags & _PRIORITY:
        yield "priority", data[position]
        position += 1
    for flag, name in _SHORT_STRINGS:
        if name == "type" and flags & _TIMESTAMP:
            yield "timestamp", _time(_U64.unpack_from(data, position)[0])
            position += 8
        if flags & flag:
            value, position = _short(data, position)
            yield name, value


def _short(data: bytes, position: int) -> tuple[str, int]:
    end = position + 1 + data[position]
    if end > len(data):
        raise UnreadableTable
    return _text(data[position + 1 : end]), end


def _entries(table: bytes, into: dict[str, object], depth: int) -> bool:
    try:
        for raw, field in fields(table):
            name = first = _text(raw)
            number = 1
            while name in into:
                number += 1
                name = f"{first} ({number})"
            into[name] = _value(field, depth)
    except (UnreadableTable, IndexError, StructError):
        return False
    return True


def _value(field: Field, depth: int) -> object:
    tag, data = field
    if tag in TEXT_TAGS:
        return _text(data)
    if tag in (TABLE, ARRAY):
        if depth >= _DEEPEST:
            return _TOO_DEEP
        if tag == ARRAY:
            return [_value(item, depth + 1) for item in items(data)]
        inner: dict[str, object] = {}
        if not _entries(data, inner, depth + 1):
            raise UnreadableTable
        return inner
    return _scalar(field)


def _scalar(field: Field) -> object:
    tag, data = field
    if (seconds := field.as_timestamp()) is not None:
        return _time(seconds)
    if tag == BOOLEAN:
        return data != b"\0"
    if tag in _FLOATS:
        number = _FLOATS[tag].unpack(data)[0]
        return number if math.isfinite(number) else str(number)
    if tag == _DECIMAL:
        scale, digits = _DECIMAL_VALUE.unpack(data)
        return str(Decimal(digits).scaleb(-scale))
    return field.as_integer()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _time(seconds: int) -> object:
    """A number where it is no date."""
    return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds <= LATEST_TIME else seconds


# --- Bodies


def body_form(body: bytes) -> BodyForm:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "hex"
    if _NOT_TEXT.search(text):
        return "hex"
    if len(body) <= _LONGEST_PARSED and text.lstrip()[:1] in ("{", "["):
        try:
            json.loads(text, parse_int=len, parse_float=len)  # the values do not matter, and huge ones cost time
        except (ValueError, RecursionError):
            return "text"
        return "json"
    return "text"


def body_lines(body: bytes, form: BodyForm) -> Iterator[str]:
    """The lines, made one by one: the head of a large body costs no more than the head."""
    if form == "hex":
        return _hex(body)
    text = body.decode()
    return _pretty(text) if form == "json" else _lines(text)


def _lines(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end].removesuffix("\r")
        start = end + 1


def _hex(body: bytes) -> Iterator[str]:
    for start in range(0, len(body), _HEX_WIDTH):
        row = body[start : start + _HEX_WIDTH]
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)  # noqa: PLR2004  (printable ASCII)
        yield f"{start:08x}  {row.hex(' '):<{3 * _HEX_WIDTH}} {shown}"


def _pretty(text: str) -> Iterator[str]:
    """Valid JSON, indented; every name and value stays as it was written, duplicates and long numbers too."""
    line, depth, before = "", 0, ""
    for found in _TOKEN.finditer(text):
        part = found.group()
        if part in "}]":
            depth -= 1
            if before not in "{[":
                yield line
                line = _indent(depth)
        elif before and before in "{[,":
            yield line
            line = _indent(depth)
        line += ": " if part == ":" else part
        if part in "{[":
            depth += 1
        before = part
    yield line


def _indent(depth: int) -> str:
    return _INDENT * min(depth, _DEEPEST_INDENT)
