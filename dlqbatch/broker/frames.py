"""The few AMQP frames of a drain's busy channels, encoded and decoded without objects."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from dlqbatch.amqp.table import to_bytes, to_text

METHOD, HEADER, BODY = 1, 2, 3

DELIVER: Final = 60 << 16 | 60
GET_OK: Final = 60 << 16 | 71
GET_EMPTY: Final = 60 << 16 | 72
CONFIRM_ACK: Final = 60 << 16 | 80
CONFIRM_NACK: Final = 60 << 16 | 120
RETURN: Final = 60 << 16 | 50
CONSUME_OK: Final = 60 << 16 | 21
CANCEL: Final = 60 << 16 | 30
CANCEL_OK: Final = 60 << 16 | 31
QOS_OK: Final = 60 << 16 | 11
DECLARE_OK: Final = 50 << 16 | 11

method_id: Final = Struct(">I").unpack_from
message_count: Final = Struct(">I").unpack_from
delivery_tag: Final = Struct(">Q").unpack_from
_BODY_SIZE: Final = Struct(">Q").unpack_from
_FRAME_START: Final = Struct(">BHI")
_CONTENT_START: Final = Struct(">BHIHHQ")

FRAME_END: Final = b"\xce"
_END_MARK: Final = FRAME_END[0]
_FRAME: Final = _FRAME_START.pack
_METHOD: Final = Struct(">BHIHH").pack
_SETTLE: Final = Struct(">BHIHHQBB").pack
_CONTENT: Final = _CONTENT_START.pack
_PROPERTIES_AT: Final = 12
"""Class, weight and body size stand before the properties in a content header."""
SHORTEST_METHOD: Final = 4
SHORTEST_HEADER: Final = _PROPERTIES_AT + 2
"""Bytes of a content header without any property; its flags are always there."""
FRAME_OVERHEAD: Final = 8
_BEFORE_PAYLOAD: Final = _FRAME_START.size
_BEFORE_PROPERTIES: Final = _CONTENT_START.size
_READ_FRAME: Final = _FRAME_START.unpack_from
_READ_CONTENT: Final = _CONTENT_START.unpack_from


def get(channel: int, queue: str) -> bytes:
    name = to_bytes(queue)
    return b"%b\x00\x00%c%b\x00\xce" % (_METHOD(METHOD, channel, 8 + len(name), 60, 70), len(name), name)


def passive_declare(channel: int, queue: str) -> bytes:
    """A passive declaration: how many are ready, and nothing is taken."""
    name = to_bytes(queue)
    start = _METHOD(METHOD, channel, 12 + len(name), 50, 10)
    return b"%b\x00\x00%c%b\x01\x00\x00\x00\x00\xce" % (start, len(name), name)


def qos(channel: int, prefetch: int) -> bytes:
    return b"%b\x00\x00\x00\x00%b\x00\xce" % (_METHOD(METHOD, channel, 11, 60, 10), prefetch.to_bytes(2, "big"))


def consume(channel: int, queue: str, consumer: bytes, arguments: bytes = b"") -> bytes:
    """`arguments` are the encoded entries of the table."""
    name = to_bytes(queue)
    table = len(arguments).to_bytes(4, "big") + arguments
    payload = b"\x00\x00%c%b%c%b\x00%b" % (len(name), name, len(consumer), consumer, table)
    return _METHOD(METHOD, channel, 4 + len(payload), 60, 20) + payload + FRAME_END


def cancel(channel: int, consumer: bytes) -> bytes:
    return b"%b%c%b\x00\xce" % (_METHOD(METHOD, channel, 6 + len(consumer), 60, 30), len(consumer), consumer)


def ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    return _SETTLE(METHOD, channel, 13, 60, 80, tag, multiple, 0xCE)


def requeue(channel: int, up_to: int = 0) -> bytes:
    """A nack of all that is not settled yet up to this tag, which must be there; 0 is everything on the channel."""
    return _SETTLE(METHOD, channel, 13, 60, 120, up_to, 0b11, 0xCE)


def reject(channel: int, tag: int) -> bytes:
    """Back into the queue; on a quorum queue it counts as a delivery, on every version of the broker."""
    return _SETTLE(METHOD, channel, 13, 60, 90, tag, 1, 0xCE)


def publish(channel: int, exchange: str, key: str) -> bytes:
    """Always mandatory."""
    exchange_name, routing_key = to_bytes(exchange), to_bytes(key)
    size = 9 + len(exchange_name) + len(routing_key)
    return b"%b\x00\x00%c%b%c%b\x01\xce" % (
        _METHOD(METHOD, channel, size, 60, 40),
        len(exchange_name),
        exchange_name,
        len(routing_key),
        routing_key,
    )


def content(channel: int, method: bytes, body_size: int, properties: bytes, chunks: Sequence[bytes]) -> bytes:
    """All frames of a message: its method, encoded already, its header, its body in as many frames as it came in."""
    header = _CONTENT(HEADER, channel, _PROPERTIES_AT + len(properties), 60, 0, body_size)
    if len(chunks) == 1:
        # Nearly every message has a single chunk, so that its bytes are joined once and not twice.
        chunk = chunks[0]
        return b"".join((method, header, properties, FRAME_END, _FRAME(BODY, channel, len(chunk) - 1), chunk))
    return b"".join((method, header, properties, FRAME_END, *(body(channel, chunk) for chunk in chunks)))


def body(channel: int, chunk: bytes) -> bytes:
    """`chunk` is a payload with the end mark of the frame it came in."""
    return _FRAME(BODY, channel, len(chunk) - 1) + chunk


def properties_limit(frame_max: int) -> int:
    """Bytes of properties that fit into one content header."""
    return frame_max - FRAME_OVERHEAD - _PROPERTIES_AT


def read_content_header(buffer: bytes, start: int, end: int) -> tuple[int, bytes]:
    """Body size and properties."""
    return _BODY_SIZE(buffer, start + 4)[0], buffer[start + _PROPERTIES_AT : end]


def read_content(buffer: bytes, position: int, channel: int) -> tuple[bytes, bytes, int] | None:
    """Properties and body (with its end mark) of the message whose header frame stands here, and where it ends.

    None unless all of it is here, in a single body frame; that is how nearly every message arrives.
    """
    if position + _BEFORE_PROPERTIES > len(buffer):
        return None
    kind, number, size, _, _, body_size = _READ_CONTENT(buffer, position)
    after_header = position + FRAME_OVERHEAD + size
    body_at = after_header + _BEFORE_PAYLOAD
    after = body_at + body_size + 1
    if kind != HEADER or number != channel or after > len(buffer):
        return None
    if _READ_FRAME(buffer, after_header) != (BODY, channel, body_size) or buffer[after - 1] != _END_MARK:
        return None
    return buffer[position + _BEFORE_PROPERTIES : after_header - 1], buffer[body_at:after], after


def read_short_string(buffer: bytes, position: int) -> tuple[str, int]:
    end = position + 1 + buffer[position]
    return to_text(buffer[position + 1 : end]), end
