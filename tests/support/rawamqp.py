"""Raw AMQP over a socket: property bytes go out as they are given and come back as they were delivered.

It uses none of dlqbatch's code and no client library, so that what either of them would change can be seen.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from program import HANGS_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Entry = tuple[bytes, bytes]
"""Name and encoded value of one header: the type's tag and what follows it."""

FRAME_MAX = 131_072
PROPERTIES_MAX = FRAME_MAX - 8 - 12
"""Bytes of flags and values that fit into one content header."""
_BATCH = 500

FLAGS = {
    "content_type": 0x8000,
    "content_encoding": 0x4000,
    "headers": 0x2000,
    "delivery_mode": 0x1000,
    "priority": 0x0800,
    "correlation_id": 0x0400,
    "reply_to": 0x0200,
    "expiration": 0x0100,
    "message_id": 0x0080,
    "timestamp": 0x0040,
    "type": 0x0020,
    "user_id": 0x0010,
    "app_id": 0x0008,
    "cluster_id": 0x0004,
}
_SIZES = {"delivery_mode": 1, "priority": 1, "timestamp": 8}
_VALUE_SIZES = {b"tbB": 1, b"su": 2, b"Iif": 4, b"lLdT": 8, b"D": 5, b"V": 0}
_FIXED = {tag: size for tags, size in _VALUE_SIZES.items() for tag in tags}


class AmqpError(AssertionError):
    """The broker refused something, or said something that is not AMQP."""


class Message(NamedTuple):
    exchange: str
    key: bytes
    properties: bytes
    body: bytes


class Seen(NamedTuple):
    """One delivery."""

    queue: str
    exchange: bytes
    key: bytes
    redelivered: bool
    properties: bytes
    body: bytes


def text(value: str | bytes) -> bytes:
    return _long(b"S", value.encode() if isinstance(value, str) else value)


def binary(value: bytes) -> bytes:
    return _long(b"x", value)


def number(value: int) -> bytes:
    return b"l" + value.to_bytes(8, "big", signed=True)


def timestamp(seconds: int) -> bytes:
    return b"T" + seconds.to_bytes(8, "big")


def array(*values: bytes) -> bytes:
    return _long(b"A", b"".join(values))


def table(entries: Iterable[Entry]) -> bytes:
    return _long(b"F", _entries(entries))


def properties(headers: Iterable[Entry] | None = None, **named: bytes | int) -> bytes:
    """Flags and values of a content header; `headers` None leaves the table out."""
    flags, values = 0, b""
    for name, flag in FLAGS.items():
        if name == "headers":
            if headers is not None:
                flags |= flag
                content = _entries(headers)
                values += struct.pack(">I", len(content)) + content
        elif name in named:
            flags |= flag
            value = named[name]
            if isinstance(value, int):
                values += value.to_bytes(_SIZES[name], "big")
            else:
                values += short(value)
    return struct.pack(">H", flags) + values


def death(queue: str, key: bytes, *, exchange: str = "", reason: str = "rejected", when: int = 1_700_000_000) -> Entry:
    """The x-death header of a message that died once, as the broker writes it."""
    names = {b"count": number(1), b"reason": text(reason), b"queue": text(queue), b"time": timestamp(when)}
    names |= {b"exchange": text(exchange), b"routing-keys": array(text(key))}
    return b"x-death", array(table(names.items()))


def _long(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack(">I", len(value)) + value


def short(value: bytes) -> bytes:
    return struct.pack(">B", len(value)) + value


def _entries(entries: Iterable[Entry]) -> bytes:
    return b"".join(short(name) + value for name, value in entries)


def named_properties(data: bytes) -> dict[str, bytes]:
    """Each property that is there, still encoded, without the length of a text."""
    flags, position = struct.unpack_from(">H", data)[0], 2
    found: dict[str, bytes] = {}
    for name, flag in FLAGS.items():
        if not flags & flag:
            continue
        if name == "headers":
            size = struct.unpack_from(">I", data, position)[0]
            position += 4
        elif name in _SIZES:
            size = _SIZES[name]
        else:
            size = data[position]
            position += 1
        found[name] = data[position : position + size]
        position += size
    if position != len(data):
        raise AmqpError(f"{len(data)} bytes of properties, {position} of them used")
    return found


def headers_of(data: bytes) -> list[Entry]:
    """Every header in its order, duplicates and all."""
    return entries_of(named_properties(data).get("headers", b""))


def entries_of(content: bytes) -> list[Entry]:
    found, position, stop = [], 0, len(content)
    while position < stop:
        name_end = position + 1 + content[position]
        end = _value_end(content, name_end)
        found.append((content[position + 1 : name_end], content[name_end:end]))
        position = end
    if position != stop:
        raise AmqpError("a header table ends in the middle of a value")
    return found


def items_of(value: bytes) -> list[bytes]:
    """The encoded values of an encoded array."""
    if value[:1] != b"A":
        raise AmqpError(f"not an array: {value[:20]!r}")
    found, position = [], 5
    while position < len(value):
        end = _value_end(value, position)
        found.append(value[position:end])
        position = end
    return found


def _value_end(data: bytes, position: int) -> int:
    tag = data[position]
    size = _FIXED.get(tag)
    if size is not None:
        return position + 1 + size
    if tag not in b"SxAF":
        raise AmqpError(f"no such type of value: {chr(tag)!r}")
    length: int = struct.unpack_from(">I", data, position + 1)[0]
    return position + 5 + length


class Peer:
    """One connection with one channel, in confirm mode; every call waits for the broker's answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._sock = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 5672), HANGS_AFTER)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer, self._at = b"", 0
        self._published = self._confirmed = self._delivered = 0
        self._early: set[int] = set()  # confirmed before one that was published earlier
        login = b"\0%b\0%b" % (unquote(parts.username or "guest").encode(), unquote(parts.password or "guest").encode())
        self._sock.sendall(b"AMQP\0\0\x09\x01")
        self._expect(0, 10, 10)
        self._send(0, 10, 11, b"\0\0\0\0" + short(b"PLAIN") + _long(b"", login) + short(b"en_US"))
        self._expect(0, 10, 30)
        self._send(0, 10, 31, struct.pack(">HIH", 2, FRAME_MAX, 0))
        self._send(0, 10, 40, short(unquote(parts.path[1:] or "/").encode()) + b"\0\0")
        self._expect(0, 10, 41)
        self._send(1, 20, 10, b"\0")
        self._expect(1, 20, 11)
        self._send(1, 85, 10, b"\0")
        self._expect(1, 85, 11)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send(0, 10, 50, struct.pack(">HBHH", 200, 0, 0, 0))
            self._expect(0, 10, 51)
        except (OSError, AmqpError):
            pass  # it was lost before: a broker was killed, and the test knows
        self._sock.close()

    def exchange(self, name: str, kind: str = "topic", arguments: Mapping[str, str | int] | None = None) -> None:
        self._send(1, 40, 10, b"\0\0" + short(name.encode()) + short(kind.encode()) + b"\x02" + _arguments(arguments))
        self._expect(1, 40, 11)

    def queue(self, name: str, arguments: Mapping[str, str | int] | None = None) -> None:
        self._send(1, 50, 10, b"\0\0" + short(name.encode()) + b"\x02" + _arguments(arguments))
        self._expect(1, 50, 11)

    def bind(self, queue: str, exchange: str, key: bytes = b"") -> None:
        names = short(queue.encode()) + short(exchange.encode()) + short(key)
        self._send(1, 50, 20, b"\0\0" + names + b"\0" + _arguments(None))
        self._expect(1, 50, 21)

    def depth(self, queue: str) -> int:
        """Messages ready, by the queue's own count."""
        name = short(queue.encode())
        self._send(1, 50, 10, b"\0\0" + name + b"\x01" + _arguments(None))
        ready: int = struct.unpack_from(">I", self._expect(1, 50, 11), len(name))[0]
        return ready

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = HANGS_AFTER) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
            time.sleep(0.01)

    def publish(self, messages: Iterable[Message]) -> int:
        """How many; each routed to a queue and confirmed."""
        before, batch, waiting = self._published, [], 0
        for message in messages:
            batch += _publish_frames(message)
            waiting += 1
            if waiting == _BATCH:
                self._flush(batch, waiting)
                batch, waiting = [], 0
        self._flush(batch, waiting)
        self._await_confirms(self._published)
        return self._published - before

    def read(self, *queues: str) -> list[Seen]:
        """Everything that is ready in these queues, taken out of them."""
        return [seen for queue in queues for seen in self._consume(queue, reject=False)]

    def reject(self, *queues: str) -> list[Seen]:
        """The same, but rejected by a consumer, many at once, so that the broker dead-letters it."""
        return [seen for queue in queues for seen in self._consume(queue, reject=True)]

    def _flush(self, batch: list[bytes], messages: int) -> None:
        self._sock.sendall(b"".join(batch))
        self._published += messages
        self._await_confirms(self._published - 2 * _BATCH)

    def _await_confirms(self, upto: int) -> None:
        while self._confirmed + len(self._early) < upto:
            tag, multiple = struct.unpack(">QB", self._expect(1, 60, 80))
            if multiple:
                self._confirmed = max(self._confirmed, tag)
            else:
                self._early.add(tag)
            if multiple or tag == self._confirmed + 1:
                self._early = {early for early in self._early if early > self._confirmed}
                while self._confirmed + 1 in self._early:
                    self._confirmed += 1
                    self._early.discard(self._confirmed)

    def _consume(self, queue: str, *, reject: bool) -> list[Seen]:
        count = self.depth(queue)
        if not count:
            return []
        self._send(1, 60, 10, struct.pack(">IHB", 0, 4 * _BATCH if reject else 0, 0))
        self._expect(1, 60, 11)
        bits = b"\0" if reject else b"\x02"
        self._send(1, 60, 20, b"\0\0" + short(queue.encode()) + short(b"oracle") + bits + _arguments(None))
        self._expect(1, 60, 21)
        found: list[Seen] = []
        while len(found) < count:
            found.append(self._delivery(queue))
            if reject and (len(found) % _BATCH == 0 or len(found) == count):
                self._send(1, 60, 120, struct.pack(">QB", self._delivered, 0b01))
        self._send(1, 60, 30, short(b"oracle") + b"\0")
        self._expect(1, 60, 31)
        return found

    def _delivery(self, queue: str) -> Seen:
        payload = self._expect(1, 60, 60)
        _, position = _read_short(payload, 0)
        self._delivered, redelivered = struct.unpack_from(">QB", payload, position)
        exchange, position = _read_short(payload, position + 9)
        key, _ = _read_short(payload, position)
        _, _, header = self._frame()
        size = struct.unpack_from(">Q", header, 4)[0]
        chunks, left = [], size
        while left:
            _, _, chunk = self._frame()
            chunks.append(chunk)
            left -= len(chunk)
        return Seen(queue, exchange, key, bool(redelivered), header[12:], b"".join(chunks))

    def _send(self, channel: int, class_: int, method: int, arguments: bytes) -> None:
        self._sock.sendall(_frame(1, channel, struct.pack(">HH", class_, method) + arguments))

    def _expect(self, channel: int, class_: int, method: int) -> bytes:
        """The arguments of the method that must come next."""
        kind, number_, payload = self._frame()
        if (kind, number_, payload[:4]) != (1, channel, struct.pack(">HH", class_, method)):
            raise AmqpError(f"wanted method {class_}.{method}, the broker sent {payload[:300]!r}")
        return payload[4:]

    def _frame(self) -> tuple[int, int, bytes]:
        while True:
            buffer, at = self._buffer, self._at
            if len(buffer) - at >= 7:
                kind, channel, size = struct.unpack_from(">BHI", buffer, at)
                end = at + 7 + size
                if len(buffer) > end:
                    self._at = end + 1
                    return kind, channel, buffer[at + 7 : end]
            more = self._sock.recv(1 << 20)
            if not more:
                raise AmqpError("the broker closed the connection")
            self._buffer, self._at = buffer[at:] + more, 0


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def _publish_frames(message: Message) -> list[bytes]:
    method = struct.pack(">HHH", 60, 40, 0) + short(message.exchange.encode()) + short(message.key) + b"\x01"
    header = struct.pack(">HHQ", 60, 0, len(message.body)) + message.properties
    step = FRAME_MAX - 8
    parts = [message.body[start : start + step] for start in range(0, len(message.body), step)]
    return [_frame(1, 1, method), _frame(2, 1, header), *(_frame(3, 1, part) for part in parts)]


def _arguments(arguments: Mapping[str, str | int] | None) -> bytes:
    given = (arguments or {}).items()
    return table((name.encode(), text(value) if isinstance(value, str) else number(value)) for name, value in given)[1:]


def _read_short(data: bytes, position: int) -> tuple[bytes, int]:
    end = position + 1 + data[position]
    return data[position + 1 : end], end
