"""Messages of every kind that can reach a drain, each with the place where it belongs.

The places come from a small table of rules of its own, written from the contract and not from dlqbatch's code.
"""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from drain_setup import ORIGIN
from rawamqp import Entry, Message, array, binary, death, number, properties, table, text, timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAYMENTS, LONG_NAMED = "payment.worker", "long-named-" + "n" * 244
ORIGINS = (ORIGIN, PAYMENTS, LONG_NAMED)
DELAYS = tuple(f"queue.delay.{tier}" for tier in (1, 2, 3))
PLACES = (*DELAYS, "dlq-queue", *ORIGINS)

RETRIES: dict[bytes, int | None] = {
    b"orders.created": 3,
    b"orders.cancelled": 1,
    b"stock.eu.changed": 2,
    b"stock.us.west.changed": None,
    b"payment": 5,
    b"payment.card.refused": 5,
    b"never.retried": 0,
    b"defaulted": 3,
    b"twice": 2,
    b"nobody.knows": None,
    b"orders.Created": None,
    b"": None,
    b"long." + b"k" * 195: 2,
    b"long." + b"k" * 240: 2,
    b"long." + b"k" * 250: 2,
    b"odd.\xff\xfe.\xc3": 2,
    PAYMENTS.encode(): 5,
    LONG_NAMED.encode(): None,
}
"""What the stage's policy says of each routing key, by hand."""
KEYS = tuple(key for key in RETRIES if key not in {PAYMENTS.encode(), LONG_NAMED.encode()})


Belongs = tuple[str, bytes, dict[bytes, bytes | None], str | None]


class Case(NamedTuple):
    message: Message
    queue: str
    """Where it belongs in the end, with this key and these headers of ours."""
    key: bytes
    ours: dict[bytes, bytes | None]
    reason: str | None = None


# --- the rules, as the contract's table has them --------------------------------------------------------------------


def failed_at(key: bytes, used: int, ours: dict[bytes, bytes | None]) -> Belongs:
    most = RETRIES[key]
    if most is None or used >= most:
        return dead("not-configured" if most is None else "retries-exhausted", ours | {b"retries": number(used)})
    tier = min(used + 1, 3)
    wanted = b"binding.%b.%d" % (key, tier)
    route = wanted if len(wanted) <= 255 else b"binding.%d" % tier
    return f"queue.delay.{tier}", route, ours | {b"retries": number(used + 1)}, None


def dead(reason: str, ours: dict[bytes, bytes | None]) -> Belongs:
    return "dlq-queue", b"dlq-routing-key", ours, reason


def origin(queue: str | None, exchange: str, key: bytes) -> dict[bytes, bytes | None]:
    named: dict[bytes, bytes | None] = {b"origin-exchange": text(exchange), b"origin-key": text(key)}
    return named | {b"origin-queue": None if queue is None else text(queue)}


# --- messages -------------------------------------------------------------------------------------------------------


class Maker:
    """Makes one message after another; `random` decides its kind and everything about it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.number = 0
        self._noise = self.random.randbytes(200_000)

    def cases(self, count: int) -> Iterator[Case]:
        kinds: dict[Callable[[], Case], float] = {
            self.fresh: 40,
            self.retried: 25,
            self.moved_on: 3,
            self.malformed: 3,
            self.beyond_number: 0.2,
            self.circling: 0.5,
            self.attempted: 0.5,
            self.from_nowhere: 3,
            self.claimed: 1,
            self.alternate: 2,
            self.returned: 18,
            self.returned_through_exchange: 1,
            self.homeless: 1.5,
            self.returned_malformed: 0.5,
        }
        for kind in self.random.choices(list(kinds), list(kinds.values()), k=count - 1):
            self.number += 1
            yield kind()
        # A single one has nothing at all: no body, no property.
        empty = Message("retry-exchange", b"retry-routing-key", properties(), b"")
        yield Case(empty, *dead("origin-unknown", {b"trips": number(1), b"retries": number(0)}))

    def failing(self, key: bytes) -> Message:
        """Nothing but its key is certain of it."""
        self.number += 1
        return self._case("work", key, (), dead("", {})).message

    def fresh(self) -> Case:
        queue, exchange, key = self._place()
        return self._case(exchange, key, (), failed_at(key, 0, origin(queue, exchange, key) | {b"trips": number(1)}))

    def retried(self) -> Case:
        queue, exchange, key = self._place()
        used, trips = self.random.randrange(1, 7), self.random.randrange(1, 100)
        place = origin(queue, exchange, key)
        ours = self._ours(place, used, trips)
        wanted = place | {b"id": ours[b"id"], b"trips": number(trips + 1)}
        return self._case(exchange, key, self._marks(ours), failed_at(key, used, wanted))

    def moved_on(self) -> Case:
        """It failed in another queue before, so that it starts anew here."""
        queue, exchange, key = self._place()
        ours = self._ours(origin("elsewhere", "work", b"some.key"), 2, 7)
        wanted = origin(queue, exchange, key) | {b"parent": ours[b"id"], b"trips": number(8)}
        return self._case(exchange, key, self._marks(ours), failed_at(key, 0, wanted))

    def malformed(self) -> Case:
        _, exchange, key = self._place()
        return self._case(exchange, key, (self._bad(),), dead("malformed", {}))

    def beyond_number(self) -> Case:
        queue, exchange, key = self._place(b"orders.created")
        place = origin(queue, exchange, key)
        return self._case(exchange, key, self._marks(self._ours(place, 10**18, 3)), failed_at(key, 10**18, place))

    def circling(self) -> Case:
        queue, exchange, key = self._place()
        place = origin(queue, exchange, key)
        marks = self._marks(self._ours(place, 1, 100))
        return self._case(exchange, key, marks, dead("too-many-trips", place | {b"trips": number(101)}))

    def attempted(self) -> Case:
        queue, exchange, key = self._place()
        place = origin(queue, exchange, key) | {b"attempt": number(2)}
        return self._case(exchange, key, self._marks(self._ours(place, 0, 1)), dead("attempt-failed", place))

    def from_nowhere(self) -> Case:
        wanted = dead("origin-unknown", {b"trips": number(1), b"retries": number(0)})
        return self._case("retry-exchange", b"retry-routing-key", (), wanted)

    def claimed(self) -> Case:
        """A client names an origin, and nobody has allowed it."""
        claim = self.random.choice(
            (
                ((b"x-original-exchange", text("work")), (b"x-original-routingKey", text("orders.created"))),
                ((b"NServiceBus.FailedQ", text(f"{ORIGIN}@machine")),),
                ((b"MT-Fault-InputAddress", text(f"rabbitmq://host/vhost/{ORIGIN}?durable=true")),),
            )
        )
        return self._case("retry-exchange", b"retry-routing-key", claim, dead("origin-unknown", {b"trips": number(1)}))

    def alternate(self) -> Case:
        """Unroutable at an exchange whose alternate exchange leads here."""
        key = self.random.choice(KEYS)
        return self._case("edge", key, (), failed_at(key, 0, origin(None, "edge", key) | {b"trips": number(1)}))

    def returned(self) -> Case:
        queue, key = self.random.choice(ORIGINS), self.random.choice(KEYS)
        place = origin(queue, self.random.choice(("work", "", "gone-by-now")), key)
        return self._return(place, lambda ours: (queue, key, ours, None))

    def returned_through_exchange(self) -> Case:
        key = self.random.choice(KEYS)
        return self._return(origin(None, "work", key), lambda ours: (ORIGIN, key, ours, None))

    def homeless(self) -> Case:
        places = {
            "origin-gone": (origin("was-deleted", "", b"orders.created"), origin(None, "was-deleted", b"k")),
            "origin-unknown": (origin("retry-queue", "", b"k"), origin(None, "route-delay", b"k")),
        }
        reason = self.random.choice(list(places))
        return self._return(self.random.choice(places[reason]), lambda ours: dead(reason, ours))

    def returned_malformed(self) -> Case:
        tier = self.random.randrange(1, 4)
        return self._case(f"retry-exchange-{tier}", b"retry.x.%d" % tier, (self._bad(),), dead("malformed", {}))

    def _return(self, place: dict[bytes, bytes | None], belongs: Callable[[dict[bytes, bytes | None]], Any]) -> Case:
        tier = self.random.randrange(1, 4)
        trips = self.random.randrange(1, 100)
        ours = self._ours(place, self.random.randrange(1, 6), trips)
        marks, wanted = self._marks(ours), dict(ours)
        if self.random.random() < 0.8:
            marks.append(death(f"queue.delay.{tier}", b"binding.x.1", exchange="route-delay", reason="expired"))
        else:
            # It came past the delay queue, so that no first stage has counted this trip.
            wanted[b"trips"] = number(trips + 1)
        return self._case(f"retry-exchange-{tier}", b"retry.x.%d" % tier, marks, belongs(wanted))

    def _place(self, key: bytes | None = None) -> tuple[str, str, bytes]:
        """Queue, exchange and key of a failure."""
        if key is None and self.random.random() < 0.2:
            queue = self.random.choice((PAYMENTS, PAYMENTS, LONG_NAMED))
            return queue, "", queue.encode()
        return ORIGIN, "work", self.random.choice(KEYS) if key is None else key

    def _ours(self, place: dict[bytes, bytes | None], used: int, trips: int) -> dict[bytes, bytes | None]:
        return {b"id": text(f"id-{self.number}"), b"retries": number(used), b"trips": number(trips), **place}

    def _marks(self, ours: dict[bytes, bytes | None]) -> list[Entry]:
        return [(b"dlqbatch-" + name, value) for name, value in ours.items() if value is not None]

    def _bad(self) -> Entry:
        no_count: tuple[bytes, ...] = (
            number(-1),
            text("three"),
            text("3"),
            b"d" + struct.pack(">d", 3.0),
            b"t\x01",
            b"V",
            b"b\xff",
        )
        no_count += (array(number(3)), table([(b"n", number(3))]), timestamp(3), b"D\x00\x00\x00\x00\x03", binary(b"3"))
        return b"dlqbatch-" + self.random.choice((b"retries", b"retries", b"trips")), self.random.choice(no_count)

    def _case(self, exchange: str, key: bytes, marks: Any, wanted: Belongs) -> Case:
        dice = self.random.random
        named: dict[str, bytes | int] = {}
        size = self._size()
        if size < 10 or dice() < 0.7:
            named["correlation_id"] = b"t-%d" % self.number
        for name, chance, values in _PROPERTIES:
            if dice() < chance:
                named[name] = self.random.choice(values)
        headers = list(marks)
        for _ in range(self.random.choice((0, 1, 1, 2, 5))):
            headers += self.random.choice(_FOREIGN)
        if self.number % 2_500 == 0:
            # Near the limit of a frame, with room for what we add: what leaves none is a test of its own.
            headers.append((b"large", binary(self._noise[: self.random.randrange(100_000, 128_000)])))
        self.random.shuffle(headers)
        start = self.random.randrange(100_000)
        body = (b"%010d" % self.number + self._noise[start : start + size])[:size]
        content = properties(headers if headers or dice() < 0.5 else None, **named)
        return Case(Message(exchange, key, content, body), *wanted)

    def _size(self) -> int:
        chance = self.random.random()
        if chance < 0.05:
            return 0
        return 65_536 if chance < 0.053 else self.random.randrange(1, 1_024)


_PROPERTIES: tuple[tuple[str, float, tuple[bytes | int, ...]], ...] = (
    ("content_type", 0.5, (b"application/json", b"", b"\xff\x00")),
    ("content_encoding", 0.2, (b"gzip",)),
    ("delivery_mode", 0.8, (1, 2, 2, 2)),
    ("priority", 0.3, (0, 5, 255)),
    ("reply_to", 0.1, (b"amq.rabbitmq.reply-to.x", b"replies")),
    ("expiration", 0.1, (b"86400000", b"90000000")),
    ("message_id", 0.3, (b"the same for many", b"\xc3\x28", b"m" * 255)),
    ("timestamp", 0.3, (0, 1_700_000_000, 1_700_000_000_000, 2**63, 2**64 - 1)),
    ("type", 0.2, (b"order", b"")),
    ("user_id", 0.1, (b"guest",)),
    ("app_id", 0.2, (b"shop",)),
    ("cluster_id", 0.05, (b"old",)),
)
_FOREIGN: tuple[tuple[Entry, ...], ...] = (
    ((b"float", b"f" + struct.pack(">f", 0.75)), (b"double", b"d" + struct.pack(">d", 1e-300))),
    ((b"when", timestamp(2**64 - 1)), (b"then", timestamp(0)), (b"odd", timestamp(10**15))),
    ((b"binary", binary(bytes(range(256)))), (b"text", text(b"\xff\xfe not UTF-8"))),
    ((b"void", b"V"), (b"yes", b"t\x01"), (b"decimal", b"D\x02\x00\x00\x30\x39")),
    ((b"long", b"l" + b"\xff" * 8), (b"unsigned", b"L" + b"\xff" * 8), (b"short", b"s\x80\x00")),
    ((b"byte", b"b\x80"), (b"octet", b"B\xff"), (b"ushort", b"u\xff\xff"), (b"uint", b"i" + b"\xff" * 4)),
    ((b"", text("an empty name")), (b"\xff\xfe", number(1)), (b"n" * 255, number(2))),
    ((b"twice", text("one")), (b"twice", number(2))),
    ((b"nested", table([(b"a", array(table([(b"", array())]), b"V", text(b"\x80"))), (b"e", table([]))])),),
    ((b"dlqbatch-worker-retries", number(4)), (b"dlqbatch", text("not quite ours"))),
    ((b"CC", array(text("no.such.binding"))),),
    ((b"x-exception-message", text("it broke")), (b"x-exception-stacktrace", text("at line 1\n" * 50))),
)
