"""The properties of a content header, cut where ours must change and carried as bytes everywhere else."""

from __future__ import annotations

from collections.abc import Container
from struct import Struct
from typing import Final, NamedTuple

from dlqbatch.amqp.table import LENGTH, UnreadableTable, encode_field, fields, new

_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE = 0x8000, 0x4000, 0x2000, 0x1000
_EXPIRATION, _USER_ID, _TIMESTAMP, _PRIORITY = 0x0100, 0x0010, 0x0040, 0x0800
_MESSAGE_ID, _TYPE, _APP_ID = 0x0080, 0x0020, 0x0008
_AFTER_DELIVERY_MODE: Final = (0x0800, 0x0400, 0x0200, 0x0100, 0x0080, 0x0040, 0x0020, 0x0010, 0x0008, 0x0004)
_MORE_FLAGS: Final = 0x0001
_FLAGS: Final = Struct(">H")
_PERSISTENT: Final = b"\x02"


class Properties(NamedTuple):
    """Where the parts of one message's properties lie; `data` holds the flags and all values as delivered."""

    data: bytes
    flags: int
    head_end: int
    """The end of content type and encoding, which stand before the headers."""
    table_start: int
    table_end: int
    """The content of the header table; both equal when there is none."""
    tail_start: int
    """Priority and all that follows it."""
    expiration: bytes | None
    user_id: bytes | None


def split(data: bytes) -> Properties:
    """Raise UnreadableTable if the lengths inside do not add up."""
    flags = data[0] << 8 | data[1]
    if flags & _MORE_FLAGS:
        raise UnreadableTable
    position = 2
    if flags & _CONTENT_TYPE:
        position += 1 + data[position]
    if flags & _CONTENT_ENCODING:
        position += 1 + data[position]
    head_end = table_start = table_end = position
    if flags & _HEADERS:
        table_start = position + 4
        position = table_end = table_start + LENGTH(data, position)[0]
    if flags & _DELIVERY_MODE:
        position += 1
    if position > len(data):
        raise UnreadableTable
    expiration = user_id = None
    if flags & (_EXPIRATION | _USER_ID):
        parts = _tail(data, flags, position)
        expiration, user_id = parts.get(_EXPIRATION), parts.get(_USER_ID)
        expiration = expiration and expiration[1:]
        user_id = user_id and user_id[1:]
    return new(Properties, (data, flags, head_end, table_start, table_end, position, expiration, user_id))


def join(properties: Properties, table: bytes, login: bytes | None) -> bytes:
    """The same properties around another header table: persistent, without expiration or a foreign user_id.

    `table` is a table's content. The broker closes the channel over a user_id that is not `login`.
    """
    flags, tail = properties.flags, properties.data[properties.tail_start :]
    keeps_user = properties.user_id is None or properties.user_id == login
    if properties.expiration is not None or not keeps_user:
        parts = _tail(properties.data, flags, properties.tail_start)
        dropped = _EXPIRATION | (0 if keeps_user else _USER_ID)
        flags &= ~dropped
        tail = b"".join(part for flag, part in parts.items() if not flag & dropped)
    return b"".join(
        (
            _FLAGS.pack(flags | _HEADERS | _DELIVERY_MODE),
            properties.data[2 : properties.head_end],
            len(table).to_bytes(4, "big"),
            table,
            _PERSISTENT,
            tail,
        )
    )


def without_entries(properties: Properties, names: Container[bytes]) -> bytes:
    """The same properties without these entries of the header table, and without a table that is empty then."""
    data, start, end = properties.data, properties.table_start, properties.table_end
    if not properties.flags & _HEADERS:
        return data
    kept = b"".join(encode_field(name, field) for name, field in fields(data, start, end) if name not in names)
    if not kept:
        return b"".join((_FLAGS.pack(properties.flags & ~_HEADERS), data[2 : properties.head_end], data[end:]))
    return b"".join((data[: properties.head_end], len(kept).to_bytes(4, "big"), kept, data[end:]))


def _tail(data: bytes, flags: int, position: int) -> dict[int, bytes]:
    """The encoded values after the delivery mode, by their flag."""
    parts: dict[int, bytes] = {}
    for flag in _AFTER_DELIVERY_MODE:
        if flags & flag:
            size = 1 if flag == _PRIORITY else 8 if flag == _TIMESTAMP else 1 + data[position]
            parts[flag] = data[position : position + size]
            position += size
    if position > len(data):
        raise UnreadableTable
    return parts


class Labels(NamedTuple):
    """The properties that people and the dead store need."""

    priority: int
    message_id: bytes | None
    app_id: bytes | None
    message_type: bytes | None = None


def labels(properties: Properties) -> Labels:
    """Never raises: what cannot be read is not there."""
    try:
        parts = _tail(properties.data, properties.flags, properties.tail_start)
    except (UnreadableTable, IndexError):
        return Labels(0, None, None)
    message_id, app_id, message_type = parts.get(_MESSAGE_ID), parts.get(_APP_ID), parts.get(_TYPE)
    return Labels(
        parts[_PRIORITY][0] if _PRIORITY in parts else 0,
        message_id[1:] if message_id is not None else None,
        app_id[1:] if app_id is not None else None,
        message_type[1:] if message_type is not None else None,
    )
