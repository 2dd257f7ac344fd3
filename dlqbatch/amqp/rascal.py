"""The header of rascal, a client for Node: where a message failed, why, and whether rascal rejects it on sight.

rascal's strategy `republish` publishes a failed message to the queue that it came from, by the default exchange. With
`immediateNack` a flag in the header lets rascal reject the copy as soon as it arrives, so that the broker dead-letters
it with the error in its header. rascal removes the flag once x-death shows a newer death; what we send has no x-death.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dlqbatch.amqp.headers import RASCAL
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.amqp.table import TABLE, Field, UnreadableTable, encode_field, fields, first_fields

_FLAG: Final = (b"immediateNack", b"xDeath")
_NOTHING: Final = Field(ord("V"), b"")


def rascal_table(claims: Mapping[bytes, Field]) -> dict[bytes, Field]:
    """The entries of its header; empty if there is none, or it cannot be read."""
    return table_of(claims.get(RASCAL, _NOTHING))


def table_of(field: Field) -> dict[bytes, Field]:
    if field.tag != TABLE:
        return {}
    try:
        return first_fields(field.value)
    except (UnreadableTable, IndexError):
        return {}


def failed_in(claims: Mapping[bytes, Field]) -> Origin | None:
    """The queue that rascal consumed, and how the message was published before rascal did it anew."""
    said = rascal_table(claims)
    names = (b"originalQueue", b"originalExchange", b"originalRoutingKey")
    queue, exchange, key = (said.get(name, _NOTHING).as_text() for name in names)
    return Origin(queue, exchange, queue if key is None else key) if queue else None


def without_immediate_nack(foreign: bytes) -> bytes:
    """The entries of a header table without the flag: what is sent back has to reach the handler."""
    try:
        return b"".join(
            encode_field(name, _changed(field) if name == RASCAL and field.tag == TABLE else field)
            for name, field in fields(foreign)
        )
    except (UnreadableTable, IndexError):
        return foreign


def _changed(rascal: Field) -> Field:
    parts = b""
    for name, field in fields(rascal.value):
        if name == b"recovery" and field.tag == TABLE:
            queues = ((queue, _without_flag(entry)) for queue, entry in fields(field.value))
            parts += encode_field(name, Field(TABLE, b"".join(encode_field(*each) for each in queues)))
        else:
            parts += encode_field(name, field)
    return Field(TABLE, parts)


def _without_flag(entry: Field) -> Field:
    if entry.tag != TABLE:
        return entry
    return Field(TABLE, b"".join(encode_field(*each) for each in fields(entry.value) if each[0] not in _FLAG))
