"""Publishers and failing workers that keep books of their own; nothing here uses a line of dlqbatch.

A ticket's kind says how often its worker fails: never, once, twice, until the dead store sends it again, or always. So
each way through dlqbatch is taken all the time, and every message ends somewhere that can be counted.
"""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pika
from rawamqp import AmqpError, Message, Peer, array, number, properties, table, text

if TYPE_CHECKING:
    from collections.abc import Callable

EXCHANGE, ORIGIN, KEY = "work", "work.orders", b"work.created"
PARKED, PARKED_MESSAGES = "parked.slow", 200
BATCH = 200
PREFETCH = 100
KINDS, WEIGHTS = b"abcde", (30, 40, 20, 9, 1)
_DIGEST = 64
_AGAIN = 0.3
"""Seconds until a worker or a publisher whose broker went away tries again."""


class Books:
    """By ticket: whether its publish was confirmed, and how often a worker was done with it."""

    def __init__(self) -> None:
        self.confirmed = bytearray()
        """1: the broker took it. 2: nobody knows; it may be there or not."""
        self.done = bytearray()
        self.changed: list[str] = []
        self._nowhere = 0
        """Publishes that nobody answered, and of which no worker has heard: most of them have never arrived."""
        self._lock = threading.Lock()

    def reserve(self, count: int) -> int:
        with self._lock:
            first = len(self.confirmed)
            self.confirmed += bytes(count)
            self.done += bytes(count)
            return first

    def published(self, first: int, count: int, *, known: bool) -> None:
        with self._lock:
            self.confirmed[first : first + count] = bytes([1 if known else 2]) * count
            if not known:
                self._nowhere += self.done.count(0, first, first + count)

    def finish(self, ticket: int) -> None:
        with self._lock:
            if self.confirmed[ticket] == 2 and not self.done[ticket]:
                self._nowhere -= 1
            self.done[ticket] = min(self.done[ticket] + 1, 255)

    @property
    def waiting(self) -> int:
        """Published, and no worker was done with them yet."""
        return self.done.count(0)

    @property
    def under_way(self) -> int:
        """Those that the broker took."""
        return self.waiting - self._nowhere


def body_of(ticket: int, seed: int) -> bytes:
    random = Random(f"{seed}-{ticket}")
    kind = random.choices(KINDS, WEIGHTS)[0]
    text_ = b"t-%08d.%c." % (ticket, kind) + random.randbytes(random.choice((0, 20, 200, 2000))).hex().encode()
    return text_ + hashlib.sha256(text_).hexdigest().encode()


class Ticket(NamedTuple):
    number: int
    kind: bytes


def ticket_of(body: bytes) -> Ticket | None:
    """None if a byte of it is another than when it was published."""
    said, digest = body[:-_DIGEST], body[-_DIGEST:]
    if hashlib.sha256(said).hexdigest().encode() != digest:
        return None
    return Ticket(int(said[2:10]), said[11:12])


_ERRORS = {b"d": b"SocketTimeoutException: connect timed out", b"e": b"ValidationError: the amount is missing"}


def _message(body: bytes) -> Message:
    headers = [(b"x-exception-message", text(_ERRORS[body[11:12]]))] if body[11:12] in _ERRORS else []
    return Message(EXCHANGE, KEY, properties(headers, delivery_mode=2), body)


class _Party(threading.Thread):
    """Goes on until it is told to end; a broker that went away is tried again."""

    def __init__(self, name: str, url: str, books: Books) -> None:
        super().__init__(name=name, daemon=True)
        self.url, self.books = url, books
        self.ending = threading.Event()
        self.problem: str | None = None

    def run(self) -> None:
        while not self.ending.is_set():
            try:
                self.work()
            except (OSError, AmqpError, pika.exceptions.AMQPError):
                self.ending.wait(_AGAIN)
            except Exception as error:
                self.problem = repr(error)
                raise

    def work(self) -> None:
        raise NotImplementedError


class Publisher(_Party):
    """As fast as the others get done with it: never more than `most` are under way."""

    def __init__(self, url: str, books: Books, seed: int, most: int, under_way: Callable[[], int]) -> None:
        super().__init__("publisher", url, books)
        self._seed, self._most, self._under_way = seed, most, under_way

    def work(self) -> None:
        with Peer(self.url) as peer:
            while not self.ending.is_set():
                if self._under_way() >= self._most:
                    self.ending.wait(0.05)
                    continue
                first = self.books.reserve(BATCH)
                try:
                    peer.publish(_message(body_of(first + each, self._seed)) for each in range(BATCH))
                except BaseException:
                    self.books.published(first, BATCH, known=False)
                    raise
                self.books.published(first, BATCH, known=True)


class Worker(_Party):
    """Takes from the origin; rejects what its kind says, and notes the rest before it acknowledges."""

    def work(self) -> None:
        parameters = pika.URLParameters(self.url)
        parameters.heartbeat = 10
        connection = pika.BlockingConnection(parameters)
        try:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=PREFETCH)
            for method, said, body in channel.consume(ORIGIN, inactivity_timeout=0.2):
                if self.ending.is_set():
                    return
                if method is None:
                    continue
                ticket = ticket_of(body)
                if ticket is None:
                    self.books.changed.append(f"{ORIGIN}: {body[:40]!r}")
                    channel.basic_ack(method.delivery_tag)
                elif _fails(ticket.kind, said.headers or {}):
                    channel.basic_reject(method.delivery_tag, requeue=False)
                else:
                    self.books.finish(ticket.number)
                    channel.basic_ack(method.delivery_tag)
        finally:
            with suppress(pika.exceptions.AMQPError, OSError):
                connection.close()


def _fails(kind: bytes, headers: dict[str, object]) -> bool:
    retries = headers.get("dlqbatch-retries", 0)
    if kind == b"d":
        return "dlqbatch-attempt" not in headers
    needed = {b"a": 0, b"b": 1, b"c": 2}.get(kind)
    return needed is None or not isinstance(retries, int) or retries < needed


def prepare(url: str) -> None:
    """The team's own side: where its work arrives and fails, and a queue of failures that nobody looks after."""
    quorum = {"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-dead-letter-strategy": "at-least-once"}
    dead = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
    deaths = {b"count": number(1), b"reason": text("rejected"), b"queue": text(ORIGIN), b"exchange": text(EXCHANGE)}
    x_death = (b"x-death", array(table([*deaths.items(), (b"routing-keys", array(text(KEY)))])))
    with Peer(url) as peer:
        peer.exchange(EXCHANGE)
        peer.queue(ORIGIN, quorum | dead)
        peer.bind(ORIGIN, EXCHANGE, b"#")
        peer.queue(PARKED)
        peer.publish(
            Message("", PARKED.encode(), properties([x_death], delivery_mode=2), b"parked %d" % each)
            for each in range(PARKED_MESSAGES)
        )


def await_end(parties: list[_Party], seconds: float = 20.0) -> None:
    for party in parties:
        party.ending.set()
    deadline = time.monotonic() + seconds
    for party in parties:
        party.join(max(deadline - time.monotonic(), 0.1))
