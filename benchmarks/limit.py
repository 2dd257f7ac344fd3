"""The limit: one socket, frames encoded beforehand, gets, confirmed publishes and acks pipelined, and no work at all.

What it takes from the queue is only counted, and what it publishes was made before it began: a client that decides
anything, or looks at a header, cannot be faster on one connection.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import pika

METHOD, HEADER, BODY = 1, 2, 3
END: Final = b"\xce"
FRAME_MAX: Final = 131_072
WINDOW: Final = 512
TAKING, GIVING = 1, 2
DELIVER, GET_OK, GET_EMPTY, ACK = 60 << 16 | 60, 60 << 16 | 71, 60 << 16 | 72, 60 << 16 | 80
_HEAD = struct.Struct(">BHI").unpack_from
_METHOD = struct.Struct(">I").unpack_from
_TAG = struct.Struct(">Q").unpack_from


class Raw:
    """A connection with two channels, one to take and one, with confirms, to give."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.sock = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 5672), 30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unread = b""
        login = b"\0%b\0%b" % (unquote(parts.username or "guest").encode(), unquote(parts.password or "guest").encode())
        self.sock.sendall(b"AMQP\0\0\x09\x01")
        self.expect(10, 10)
        self.sock.sendall(
            method(
                0,
                10,
                11,
                struct.pack(">I", 0) + short(b"PLAIN") + struct.pack(">I", len(login)) + login + short(b"en_US"),
            )
        )
        self.expect(10, 30)
        self.sock.sendall(method(0, 10, 31, struct.pack(">HIH", 16, FRAME_MAX, 0)))
        self.sock.sendall(method(0, 10, 40, short(unquote(parts.path[1:] or "/").encode()) + b"\0\0"))
        self.expect(10, 41)
        for channel in (TAKING, GIVING):
            self.sock.sendall(method(channel, 20, 10, b"\0"))
            self.expect(20, 11)
        self.sock.sendall(method(GIVING, 85, 10, b"\0"))
        self.expect(85, 11)

    def expect(self, class_id: int, method_id: int) -> None:
        while True:
            kind, _, payload = self.frame()
            if kind == METHOD:
                if payload[:4] != struct.pack(">HH", class_id, method_id):
                    raise SystemExit(f"the broker said {payload[:60]!r}")
                return

    def frame(self) -> tuple[int, int, bytes]:
        while len(self.unread) < 7 or len(self.unread) < 8 + _HEAD(self.unread)[2]:
            self.unread += self.more()
        kind, channel, size = _HEAD(self.unread)
        payload, self.unread = self.unread[7 : 7 + size], self.unread[8 + size :]
        return kind, channel, payload

    def more(self) -> bytes:
        data = self.sock.recv(1024 * 1024)
        if not data:
            raise SystemExit("the broker closed the connection of the limit")
        return data

    def close(self) -> None:
        self.sock.sendall(method(0, 10, 50, struct.pack(">HBHH", 200, 0, 0, 0)))
        self.sock.close()


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def method(channel: int, class_id: int, method_id: int, arguments: bytes) -> bytes:
    payload = struct.pack(">HH", class_id, method_id) + arguments
    return struct.pack(">BHI", METHOD, channel, len(payload)) + payload + END


def message(exchange: str, key: str, properties: pika.BasicProperties, body: bytes) -> bytes:
    """A mandatory publish with its content, ready to be sent."""
    encoded = b"".join(properties.encode())
    header = struct.pack(">HHQ", 60, 0, len(body)) + encoded
    frames = method(GIVING, 60, 40, b"\0\0" + short(exchange.encode()) + short(key.encode()) + b"\1")
    frames += struct.pack(">BHI", HEADER, GIVING, len(header)) + header + END
    for start in range(0, len(body), FRAME_MAX - 8):
        part = body[start : start + FRAME_MAX - 8]
        frames += struct.pack(">BHI", BODY, GIVING, len(part)) + part + END
    return frames


def by_gets(url: str, queue: str, publish: bytes, number: int, window: int = WINDOW) -> float:
    """Messages per second from a classic queue, connecting and all."""
    started = time.perf_counter()
    raw = Raw(url)
    get = method(TAKING, 60, 70, b"\0\0" + short(queue.encode()) + b"\0")
    asked = min(window, number)
    raw.sock.sendall(get * asked)
    got = confirmed = settled = 0
    while settled < number:
        arrived, done, _ = _read(raw)
        got += arrived
        confirmed = max(confirmed, done)
        out = []
        if arrived:
            out.append(publish * arrived)
        if confirmed > settled:
            out.append(method(TAKING, 60, 80, struct.pack(">QB", confirmed, 1)))
            more = min(number - asked, confirmed - settled)
            settled = confirmed
            if more > 0:
                asked += more
                out.append(get * more)
        if out:
            raw.sock.sendall(b"".join(out))
    _synchronize(raw)
    raw.close()
    return number / (time.perf_counter() - started)


def by_consuming(url: str, queue: str, publish: bytes, number: int, window: int = WINDOW) -> float:
    """The same from a quorum queue, which a consumer empties far faster than gets."""
    started = time.perf_counter()
    raw = Raw(url)
    raw.sock.sendall(method(TAKING, 60, 10, struct.pack(">IHB", 0, window, 0)))
    raw.expect(60, 11)
    raw.sock.sendall(
        method(TAKING, 60, 20, b"\0\0" + short(queue.encode()) + short(b"limit") + b"\0" + struct.pack(">I", 0))
    )
    settled = confirmed = 0
    while settled < number:
        arrived, done, _ = _read(raw)
        confirmed = max(confirmed, done)
        out = []
        if arrived:
            out.append(publish * arrived)
        # Not one by one: as few as keep the broker busy.
        if confirmed - settled >= window // 8 or confirmed == number:
            settled = confirmed
            out.append(method(TAKING, 60, 80, struct.pack(">QB", confirmed, 1)))
        if out:
            raw.sock.sendall(b"".join(out))
    raw.sock.sendall(method(TAKING, 60, 30, short(b"limit") + b"\0"))
    raw.expect(60, 31)
    _synchronize(raw)
    raw.close()
    return number / (time.perf_counter() - started)


def _read(raw: Raw) -> tuple[int, int, int]:
    """How many messages one read brought, the highest confirm in it, and how often the queue was empty."""
    data = raw.unread + raw.more()
    position, size, arrived, confirmed, empty = 0, len(data), 0, 0, 0
    while size - position >= 8:
        kind, channel, length = _HEAD(data, position)
        end = position + 8 + length
        if end > size:
            break
        if kind == METHOD:
            what = _METHOD(data, position + 7)[0]
            if what in {GET_OK, DELIVER}:
                arrived += 1
            elif what == ACK and channel == GIVING:
                confirmed = max(confirmed, _TAG(data, position + 11)[0])
            elif what == GET_EMPTY:
                raise SystemExit("the queue was empty before the limit was done")
            elif what >> 16 != 60:
                raise SystemExit(f"the broker said {data[position + 7 : end - 1][:60]!r}")
        position = end
    raw.unread = data[position:]
    return arrived, confirmed, empty


def _synchronize(raw: Raw) -> None:
    """A question that is answered only after all that went before it on the channel."""
    raw.sock.sendall(method(TAKING, 60, 10, struct.pack(">IHB", 0, 1, 0)))
    raw.expect(60, 11)
