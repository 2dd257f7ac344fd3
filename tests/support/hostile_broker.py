"""A broker of the tests' own that greets as RabbitMQ does, and at one moment speaks AMQP as no broker should.

It keeps one queue of failures, `retry-queue`, and answers what a drain asks for. It serves one test and ends with it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final, Self

import rawamqp
from rawamqp import short

if TYPE_CHECKING:
    from collections.abc import Callable

Act = "Callable[[int, Callable[[bytes], None]], None]"
METHOD, HEADER, BODY = 1, 2, 3
DEPTH: Final = 3
PIECE: Final = bytes(1 << 20)
MOST_SENT: Final = 400 << 20
"""Bytes, after which even an endless answer ends: the machine is not the test's alone."""


def frame(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def method(channel: int, class_: int, number: int, arguments: bytes = b"") -> bytes:
    return frame(METHOD, channel, struct.pack(">HH", class_, number) + arguments)


def got(channel: int, tag: int = 1, exchange: bytes = b"retry-exchange") -> bytes:
    arguments = struct.pack(">QB", tag, 0) + short(exchange) + short(b"retry-routing-key") + struct.pack(">I", 0)
    return method(channel, 60, 71, arguments)


def header(channel: int, size: int, properties: bytes = b"\0\0") -> bytes:
    return frame(HEADER, channel, struct.pack(">HHQ", 60, 0, size) + properties)


class HostileBroker:
    """`act` is called with a channel and a function that sends, at `moment`, in place of the right answer."""

    def __init__(
        self, moment: str, act: Callable[[int, Callable[[bytes], None]], None], *, closes: bool = False
    ) -> None:
        self._moment, self._act, self._closes = moment, act, closes
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.acted = threading.Event()
        self.url = f"amqp://guest:guest@127.0.0.1:{self._server.getsockname()[1]}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Without shutting it down first, whoever waits in accept or recv would wait on.
        for each in (self._server, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error, IndexError):
            _Link(sock, self).talk()

    def misbehave(self, moment: str, channel: int, sock: socket.socket) -> bool:
        if moment != self._moment:
            return False
        self.acted.set()
        self._act(channel, sock.sendall)
        if self._closes:
            sock.shutdown(socket.SHUT_RDWR)
        return True


class _Link:
    def __init__(self, sock: socket.socket, broker: HostileBroker) -> None:
        self._sock, self._broker = sock, broker
        self._left = DEPTH
        self._published: dict[int, int] = {}
        self._transacted: set[int] = set()
        self._buffer = b""

    def talk(self) -> None:
        self._read(8)
        if not self._broker.misbehave("greeting", 0, self._sock):
            can = rawamqp.table([(b"publisher_confirms", b"t\1"), (b"basic.nack", b"t\1")])
            properties = rawamqp.table([(b"version", rawamqp.text("3.10.8")), (b"capabilities", can)])[1:]
            mechanisms = struct.pack(">I", 5) + b"PLAIN" + struct.pack(">I", 5) + b"en_US"
            self._sock.sendall(method(0, 10, 10, b"\0\x09" + properties + mechanisms))
        while True:
            kind, channel, size = struct.unpack(">BHI", self._read(7))
            payload = self._read(size + 1)[:-1]
            if kind == METHOD:
                self._answer(channel, *struct.unpack_from(">HH", payload), payload[4:])
            elif kind == HEADER:
                body_size, flags = struct.unpack_from(">QH", payload, 4)
                if flags & rawamqp.FLAGS["expiration"]:
                    refusal = struct.pack(">H", 406) + short(b"PRECONDITION_FAILED - invalid expiration") + bytes(4)
                    self._sock.sendall(method(channel, 20, 40, refusal))
                elif channel in self._transacted:
                    pass  # rolled back before anybody sees it
                elif not body_size:
                    self._confirm(channel)
            elif kind == BODY:
                self._confirm(channel)

    def _confirm(self, channel: int) -> None:
        self._published[channel] = tag = self._published.get(channel, 0) + 1
        if not self._broker.misbehave("confirm", channel, self._sock):
            self._sock.sendall(method(channel, 60, 80, struct.pack(">QB", tag, 0)))

    def _answer(self, channel: int, class_: int, number: int, arguments: bytes) -> None:
        moment = {(10, 11): "login", (10, 40): "open", (20, 10): "channel", (50, 10): "declare", (60, 70): "get"}
        if self._broker.misbehave(moment.get((class_, number), ""), channel, self._sock):
            return
        if (class_, number) == (50, 10):
            name = arguments[3 : 3 + arguments[2]]
            if name == b"dlqbatch.changing":
                text = short(b"NOT_FOUND - no queue 'dlqbatch.changing' in vhost '/'")
                self._sock.sendall(method(channel, 20, 40, struct.pack(">H", 404) + text + bytes(4)))
                return
            depth = self._left if name == b"retry-queue" else 0
            self._sock.sendall(method(channel, 50, 11, short(name) + struct.pack(">II", depth, 0)))
        elif (class_, number) == (60, 20):
            # How a drain learns that it is no quorum queue.
            text = short(b"PRECONDITION_FAILED - invalid arg 'x-stream-offset' of queue type rabbit_classic_queue")
            self._sock.sendall(method(channel, 20, 40, struct.pack(">H", 406) + text + bytes(4)))
        elif (class_, number) == (60, 70):
            if self._left:
                self._left -= 1
                answer = got(channel, DEPTH - self._left) + header(channel, 4) + frame(BODY, channel, b"body")
            else:
                answer = method(channel, 60, 72, b"\0")
            self._sock.sendall(answer)
        elif (class_, number) in _ANSWERS:
            if (class_, number) == (90, 10):
                self._transacted.add(channel)
            elif (class_, number) == (20, 40):
                self._transacted.discard(channel)
            self._sock.sendall(method(channel, *_ANSWERS[class_, number]))

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            more = self._sock.recv(1 << 16)
            if not more:
                raise OSError
            self._buffer += more
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


_ANSWERS: Final[dict[tuple[int, int], tuple[int, int, bytes]]] = {
    (10, 11): (10, 30, struct.pack(">HIH", 2047, rawamqp.FRAME_MAX, 0)),
    (10, 40): (10, 41, b"\0"),
    (10, 50): (10, 51, b""),
    (20, 10): (20, 11, bytes(4)),
    (20, 40): (20, 41, b""),
    (40, 10): (40, 11, b""),
    (40, 30): (40, 31, b""),
    (40, 40): (40, 51, b""),
    (50, 20): (50, 21, b""),
    (60, 10): (60, 11, b""),
    (85, 10): (85, 11, b""),
    (90, 10): (90, 11, b""),
    (90, 30): (90, 31, b""),
}
