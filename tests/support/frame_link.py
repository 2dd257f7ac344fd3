"""A network between a program and its broker that knows AMQP's frames, and does something when one of them passes.

So a run can be cut at an exact point, such as between a confirm and the acknowledgement that follows it, and nothing
in the program has to help. What has passed is counted here: what was under way at a cut is known to the message.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import urlsplit

from program import HANGS_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

UP, DOWN = "up", "down"
"""To the broker, and to the program."""
_NAMES = {
    (UP, 60, 70): "get",
    (UP, 60, 20): "consume",
    (UP, 60, 40): "publish",
    (UP, 60, 80): "ack",
    (UP, 60, 120): "nack",
    (UP, 60, 90): "reject",
    (UP, 50, 10): "declare",
    (UP, 50, 20): "bind",
    (UP, 40, 20): "exchange-delete",
    (UP, 20, 40): "close",
    (DOWN, 60, 71): "delivery",
    (DOWN, 60, 60): "delivery",
    (DOWN, 60, 72): "empty",
    (DOWN, 60, 80): "confirm",
    (DOWN, 60, 120): "refusal",
    (DOWN, 60, 50): "return",
}
"""What a frame is called; a message is one frame with its header and its body."""
_ANSWERS = frozenset({(DOWN, 60, 71), (DOWN, 60, 72)})
"""Of gets: one each."""
_CONTENT = frozenset({"publish", "delivery", "return"})
_METHOD, _HEADER = 1, 2
_RESET = struct.pack("ii", 1, 0)


class Point(NamedTuple):
    """The number-th frame of a name; what is to happen has happened before it, after it, or in the middle of it.

    Where it is in the middle the first half of the bytes goes out first. A message counts when its last frame passes,
    but stands before, and in the middle of, its first.
    """

    name: str
    number: int = 1
    when: str = "before"


class FrameLink:
    """Forwards connections; at `point` it calls `act` once, and what is not forwarded by then never is, unless `act`
    says by its answer that all goes on."""

    def __init__(self, broker_url: str, point: Point | None = None, act: Callable[[], object] | None = None) -> None:
        parts = urlsplit(broker_url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 5672)
        self._listener = socket.create_server(("127.0.0.1", 0))
        login = parts.netloc.rpartition("@")[0]
        self.url = f"amqp://{login}@127.0.0.1:{self._listener.getsockname()[1]}{parts.path}"
        self.point = point
        self.act = act or self.cut
        self.struck = threading.Event()
        self.passed: Counter[str] = Counter()
        """Frames by name; a message when its last one has passed."""
        self.unsettled: dict[tuple[int, int], set[int]] = {}
        """Delivery tags, by connection and channel, that have passed to the program and were not settled."""
        self.acked = 0
        self._delivered: Counter[tuple[int, int]] = Counter()
        self._gets: Counter[tuple[int, int]] = Counter()
        self._answered: Counter[tuple[int, int]] = Counter()
        self._acks: list[tuple[tuple[int, int], int, int]] = []
        """Of each acknowledgement: its channel, how many gets came before it there, and how many messages it is for."""
        self.seconds_per_read = 0.0
        """A slow network: so long after each read of at most `read_size` bytes."""
        self.read_size = 65_536
        self._dead = threading.Event()
        self._is_finishing = False
        self._one_acts = threading.RLock()
        self._counting: list[threading.Lock] = []
        """One for each direction, held while frames are sent and counted."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def under_way(self) -> int:
        """Messages published by the program whose acknowledgement the broker is not known to have handled.

        What a channel has been sent and has not come to is dropped with its connection, however long ago the broker
        read it (its end goes before all else: gen_server2's priority). Only an answer proves that a channel has come
        as far as to what was asked.
        """
        return self.passed["publish"] - self.handled

    @property
    def handled(self) -> int:
        """Messages acknowledged before a get, on the same channel, that was answered."""
        return sum(number for channel, gets, number in self._acks if gets < self._answered[channel])

    @property
    def held(self) -> int:
        """Messages delivered to the program that it has not settled."""
        return sum(map(len, self.unsettled.values()))

    def finish(self) -> None:
        """The broker is told that the program has gone, and reads all that has passed before."""
        self._die()
        self._is_finishing = True
        for _, broker in self._pairs:
            with contextlib.suppress(OSError):
                # Closing it with something unread would be a reset, and could cost what the broker has not read.
                broker.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Both ends are told that the other has gone, as by a proxy that ends."""
        self.finish()
        for program, _ in self._pairs:
            with contextlib.suppress(OSError):
                program.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Both ends are told that there is no such connection; what they have not read yet is thrown away."""
        self._die()
        for end in (end for pair in self._pairs for end in pair):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # A thread that waits for it keeps it open; being told that nothing more comes, it lets go of it.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
            end.close()

    def silence(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._die()

    def _die(self) -> None:
        """Between the sending of frames and their counting there is no end, unless the broker takes nothing at all."""
        free = [lock for lock in list(self._counting) if lock.acquire(timeout=0.5)]
        self._dead.set()
        for lock in free:
            lock.release()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._dead.set()
        _hang_up(self._listener)
        if self._is_finishing:
            # The broker reads on until the end that it was told of, and then closes.
            for thread in self._threads[1:]:
                thread.join(HANGS_AFTER)
        for pair in self._pairs:
            _hang_up(*pair)
        for thread in list(self._threads):
            thread.join(HANGS_AFTER)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                program, _ = self._listener.accept()
                if self._dead.is_set():
                    self._pairs.append((program, program))
                    continue
                broker = socket.create_connection(self._target)
                for end in (program, broker):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                number = len(self._pairs)
                self._pairs.append((program, broker))
                for side, source, target in ((UP, program, broker), (DOWN, broker, program)):
                    work = _Side(self, number, side, source, target)
                    thread = threading.Thread(target=work.run, daemon=True)
                    self._threads.append(thread)
                    thread.start()


class _Side:
    """One direction of one connection."""

    def __init__(
        self, link: FrameLink, connection: int, side: str, source: socket.socket, target: socket.socket
    ) -> None:
        self._link, self._connection, self._side = link, connection, side
        self._source, self._target = source, target
        self._buffer = b""
        self._counting = threading.Lock()
        link._counting.append(self._counting)
        self._open: dict[int, tuple[str, int]] = {}
        """By channel: the message that is not complete yet, and how much of its body is missing."""
        self._begun: Counter[str] = Counter()

    def run(self) -> None:
        link = self._link
        with contextlib.suppress(OSError):
            greeted = self._side == DOWN
            while data := self._source.recv(link.read_size):
                if link._dead.is_set():
                    continue
                self._buffer += data
                if not greeted and len(self._buffer) >= 8:
                    # The protocol header is not a frame.
                    self._target.sendall(self._buffer[:8])
                    self._buffer, greeted = self._buffer[8:], True
                if greeted:
                    self._forward()
                if link.seconds_per_read:
                    time.sleep(link.seconds_per_read)
        if not link._dead.is_set():
            with contextlib.suppress(OSError):
                self._target.sendall(self._buffer)
            with contextlib.suppress(OSError):
                self._target.shutdown(socket.SHUT_WR)
        # To a program that is gone nothing can be sent; but what the broker says must be read, for to close its socket
        # with something unread would be a reset, and cost the acknowledgements that it has not read.
        with contextlib.suppress(OSError):
            while self._source.recv(link.read_size):
                pass

    def _forward(self) -> None:
        """Every whole frame that is there."""
        position, start, buffer = 0, 0, self._buffer
        whole: list[tuple[str, int, int]] = []
        """What is complete, and not sent yet."""
        link, point = self._link, self._link.point
        while len(buffer) - position >= 7:
            kind, channel, size = struct.unpack_from(">BHI", buffer, position)
            end = position + 8 + size
            if len(buffer) < end:
                break
            name = self._name_of(kind, channel, buffer, position + 7)
            done = self._complete(kind, channel, name, buffer, position + 7, size)
            if point is not None and not link.struck.is_set() and point.name in (name, done):
                which = self._begun[point.name]
                if name == point.name and point.when in {"before", "within"} and which == point.number:
                    half = position + (7 + size // 2 if point.when == "within" else 0)
                    self._send(start, half, whole)
                    if not self._strike():
                        return
                    start = half
                elif done == point.name and point.when == "after" and which == point.number:
                    whole.append((done, channel, position + 7))
                    self._send(start, end, whole)
                    start, done = end, None
                    if not self._strike():
                        return
            if done is not None:
                whole.append((done, channel, position + 7))
            position = end
        self._send(start, position, whole)
        self._buffer = buffer[position:]

    def _send(self, start: int, end: int, whole: list[tuple[str, int, int]]) -> None:
        """These bytes of the buffer; what is complete with them counts if they were sent."""
        with self._counting:
            if start < end and not self._link._dead.is_set():
                self._target.sendall(self._buffer[start:end])
                for name, channel, at in whole:
                    self._count(name, channel, self._buffer, at)
        whole.clear()

    def _strike(self) -> bool:
        """Whether the connection goes on."""
        link = self._link
        with link._one_acts:
            if link.struck.is_set():
                return not link._dead.is_set()
            goes_on = link.act() is True
            if not goes_on:
                link._dead.set()
            link.struck.set()
        return goes_on

    def _name_of(self, kind: int, channel: int, buffer: bytes, at: int) -> str | None:
        if kind != _METHOD:
            return None
        method = (self._side, *struct.unpack_from(">HH", buffer, at))
        name = _NAMES.get(method)
        if name is not None:
            self._begun[name] += 1
        if method in _ANSWERS:
            self._link._answered[self._connection, channel] += 1
        if name in _CONTENT:
            self._open[channel] = (name, -1)
        return name

    def _complete(self, kind: int, channel: int, name: str | None, buffer: bytes, at: int, size: int) -> str | None:
        """The name of what this frame is the last of."""
        if kind == _METHOD:
            return None if name in _CONTENT else name
        if channel not in self._open:
            return None
        opened, left = self._open[channel]
        left = struct.unpack_from(">Q", buffer, at + 4)[0] if kind == _HEADER else left - size
        self._open[channel] = (opened, left)
        if left:
            return None
        del self._open[channel]
        return opened

    def _count(self, name: str, channel: int, buffer: bytes, at: int) -> None:
        link, key = self._link, (self._connection, channel)
        if name == "get":
            link._gets[key] += 1
        elif name == "delivery":
            # Tags count from one, in the order of the deliveries.
            link._delivered[key] += 1
            link.unsettled.setdefault(key, set()).add(link._delivered[key])
        elif name in {"ack", "nack", "reject"} and self._side == UP:
            tag, bits = struct.unpack_from(">QB", buffer, at + 4)
            tags = link.unsettled.get(key, set())
            is_multiple = name != "reject" and bits & 1
            settled = {each for each in tags if each <= tag or not tag} if is_multiple else {tag} & tags
            tags -= settled
            if name == "ack":
                link.acked += len(settled)
                link._acks.append((key, link._gets[key], len(settled)))
        link.passed[name] += 1


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        # Closing alone does not wake a thread that reads from it.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
