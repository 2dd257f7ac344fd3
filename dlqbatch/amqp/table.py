"""AMQP field tables, walked in place: what is not needed is never decoded, so that it cannot change."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

LENGTH: Final = Struct(">I").unpack_from
_U64: Final = Struct(">Q")
SECONDS: Final = _U64.unpack_from
_I64: Final = Struct(">q")
_SIZE: Final = Struct(">I").pack

LONG_STRING, BYTES, ARRAY, TABLE, TIMESTAMP, BOOLEAN = b"SxAFTt"

TEXT_TAGS: Final = (LONG_STRING, BYTES)

new: Final = tuple.__new__
"""`new(Kind, (a, b))` makes the named tuple that `Kind(a, b)` makes, at half its price: for what each message needs."""

LONGEST_NAME: Final = 255
"""Bytes of an AMQP short string: queue, exchange and routing key."""

_FIXED_SIZES: Final = {"t": 1, "b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4, "l": 8, "L": 8}
_FIXED_SIZES_OF_OTHERS: Final = {"f": 4, "d": 8, "D": 5, "T": 8, "V": 0}
_INTEGERS: Final = {
    ord(tag): Struct(">" + code).unpack
    for tag, code in {
        "b": "b",
        "B": "B",
        "s": "h",
        "u": "H",
        "I": "i",
        "i": "I",
        "l": "q",
        "L": "q",  # signed as well, and some versions of the broker write it as `l`
    }.items()
}

_PREFIXED: Final = -1
_UNKNOWN: Final = -2
SIZES: Final = [_UNKNOWN] * 256
"""Bytes that a value of a type takes, by its tag; -1: four bytes of length come first; -2: no such type."""
for _tag, _size in {**_FIXED_SIZES, **_FIXED_SIZES_OF_OTHERS}.items():
    SIZES[ord(_tag)] = _size
for _number in (LONG_STRING, BYTES, ARRAY, TABLE):
    SIZES[_number] = _PREFIXED


class UnreadableTable(ValueError):
    """The bytes are not a field table."""


class Field(NamedTuple):
    """A value, still encoded: its type tag and the bytes after it, without the length of a prefixed type."""

    tag: int
    value: bytes

    def as_text(self) -> str | None:
        """Text of a string or a byte array; bytes that are not UTF-8 come back unharmed by `to_bytes`."""
        return to_text(self.value) if self.tag in TEXT_TAGS else None

    def as_integer(self) -> int | None:
        read = _INTEGERS.get(self.tag)
        return int(read(self.value)[0]) if read else None

    def as_timestamp(self) -> int | None:
        """Seconds since 1970, unsigned, as far as they go."""
        return int(_U64.unpack(self.value)[0]) if self.tag == TIMESTAMP else None


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def fields(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[bytes, Field]]:
    """Name and value of each entry of a table's content, in its order, duplicates and all."""
    position, stop = start, len(data) if end is None else end
    while position < stop:
        name_start = position + 1
        name_end = name_start + data[position]
        if name_end >= stop:
            raise UnreadableTable
        value, position = _value(data, name_end, stop)
        yield data[name_start:name_end], value


def first_fields(data: bytes) -> dict[bytes, Field]:
    """All entries of a table; of two entries with the same name the first counts."""
    found: dict[bytes, Field] = {}
    position, stop = 0, len(data)
    sizes = SIZES
    while position < stop:
        name_end = position + 1 + data[position]
        name = data[position + 1 : name_end]
        tag = data[name_end]
        start, size = name_end + 1, sizes[tag]
        if size == _PREFIXED:
            size = int.from_bytes(data[start : start + 4], "big")
            start += 4
        position = start + size
        if size < 0 or position > stop:
            raise UnreadableTable
        if name not in found:
            found[name] = new(Field, (tag, data[start:position]))
    return found


def first_texts(data: bytes) -> dict[bytes, bytes]:
    """The texts of a table up to where it is unreadable; of two entries with the same name the first counts."""
    found: dict[bytes, bytes] = {}
    position, stop = 0, len(data)
    sizes = SIZES
    while position < stop:
        name_end = position + 1 + data[position]
        start = name_end + 1
        if start > stop:
            break
        name, tag = data[position + 1 : name_end], data[name_end]
        size = sizes[tag]
        if size == _PREFIXED:
            size = int.from_bytes(data[start : start + 4], "big")
            start += 4
        position = start + size
        if size < 0 or position > stop:
            break
        if tag in TEXT_TAGS and name not in found:
            found[name] = data[start:position]
    return found


def items(data: bytes) -> Iterator[Field]:
    """Each value of an array's content."""
    position, stop = 0, len(data)
    while position < stop:
        value, position = _value(data, position, stop)
        yield value


def is_array(data: bytes) -> bool:
    """Whether these bytes are an array's content; what is nested in its values is not looked at."""
    position, stop = 0, len(data)
    while position < stop:
        size = SIZES[data[position]]
        if size == _PREFIXED:
            if position + 5 > stop:
                return False
            position += 5 + LENGTH(data, position + 1)[0]
        elif size >= 0:
            position += 1 + size
        else:
            return False
    return position == stop


def first_item(data: bytes) -> Field | None:
    """The first value of an array's content."""
    return _value(data, 0, len(data))[0] if data else None


def _value(data: bytes, position: int, stop: int) -> tuple[Field, int]:
    tag = data[position]
    start, size = position + 1, SIZES[tag]
    if size == _PREFIXED:
        if start + 4 > stop:
            raise UnreadableTable
        size = LENGTH(data, start)[0]
        start += 4
    if size < 0 or start + size > stop:
        raise UnreadableTable
    return Field(tag, data[start : start + size]), start + size


def encode_text(name: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return _start(name, LONG_STRING) + _SIZE(len(data)) + data


def encode_array(name: bytes, content: bytes) -> bytes:
    return _start(name, ARRAY) + _SIZE(len(content)) + content


@lru_cache(maxsize=64)
def _start(name: bytes, tag: int) -> bytes:
    return b"%c%b%c" % (len(name), name, tag)


def encode_integer(name: bytes, number: int) -> bytes:
    return b"%c%bl%b" % (len(name), name, _I64.pack(min(number, 2**63 - 1)))


def encode_timestamp(name: bytes, seconds: int) -> bytes:
    return b"%c%bT%b" % (len(name), name, _U64.pack(seconds))


def encode_field(name: bytes, value: Field) -> bytes:
    length = _SIZE(len(value.value)) if SIZES[value.tag] == _PREFIXED else b""
    return b"%c%b%c%b%b" % (len(name), name, value.tag, length, value.value)


def encode_item(value: Field) -> bytes:
    """A value as an array holds it."""
    length = _SIZE(len(value.value)) if SIZES[value.tag] == _PREFIXED else b""
    return b"%c%b%b" % (value.tag, length, value.value)
