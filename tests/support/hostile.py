"""Hostile messages, made by a seed: headers that imitate dlqbatch's and the broker's, and every type that AMQP has.

It uses none of dlqbatch's code.
"""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

from rawamqp import Entry, array, binary, number, table, text, timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN_NAMES = tuple(
    b"dlqbatch-" + name
    for name in (
        *(b"id", b"parent", b"retries", b"trips", b"origin-queue", b"origin-exchange", b"origin-key"),
        *(b"first-failed-at", b"history", b"expiration", b"user-id", b"attempt", b"reason", b"dead-at", b"retry-after"),
    )
)
BROKERS_NAMES = (
    b"x-death",
    *(b"x-%b-death-%b" % (a, b) for a in (b"first", b"last") for b in (b"queue", b"reason", b"exchange")),
    *(b"x-delivery-count", b"x-acquired-count", b"x-opt-deaths"),
)
CLAIMS = (b"x-original-exchange", b"x-original-routingKey", b"NServiceBus.FailedQ", b"MT-Fault-InputAddress")
CLAIMS += (b"x-original-channel", b"x-original-group", b"rascal", b"Retry-After")
NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 99, 100, 101, 2**31, 2**63 - 1)


class Hostile:
    """What somebody writes who wants a message to reach one of `places`, or to break what reads it."""

    def __init__(self, seed: int, places: Sequence[str] = ("victim",)) -> None:
        self.random = random.Random(seed)
        self._places = [place.encode() for place in places]

    def forged(self, *, mild: bool = False) -> list[Entry]:
        """Headers as ours, the broker's and other software's, each with a value that may be right, wrong or absurd.

        Mild: with an x-death that RabbitMQ 3.10 can add to. Over any other it ends the connection of who rejects it.
        """
        names = [*OWN_NAMES, *BROKERS_NAMES, *CLAIMS]
        chosen = self.random.choices(names, k=self.random.choice((1, 2, 3, 5, 8, 14)))
        if self.random.random() < 0.5:
            # All that an honest message has, and somebody else's names in it.
            chosen += OWN_NAMES[:7]
        return [
            (name, self._deaths(whole=True) if mild and name == b"x-death" else self._value(name)) for name in chosen
        ]

    def _value(self, name: bytes) -> bytes:  # noqa: PLR0911  (one return for each kind of header)
        if self.random.random() < 0.15:
            return self.any_value(2)
        if name == b"x-death":
            return self._deaths()
        if name == b"dlqbatch-history":
            return self.random.choice((self._deaths(), array(number(1)), array()))
        if name.endswith((b"-retries", b"-trips", b"-attempt", b"-count")):
            return number(self.random.choice(NUMBERS))
        if name.endswith((b"-failed-at", b"-dead-at")):
            return timestamp(self.random.choice((0, 1_700_000_000, 253402300800, 2**64 - 1)))
        place = self.random.choice(self._places)
        if name == b"MT-Fault-InputAddress":
            forms = (
                b"rabbitmq://host/%b",
                b"rabbitmq://host/%%2Fother/%b?x=1",
                b"queue:%b",
                b"//[%b",
                b"amqp://h/v/../%b",
            )
            return text(self.random.choice(forms) % place)
        if name == b"NServiceBus.FailedQ":
            return text(self.random.choice((place, place + b"@other-vhost", b"@" + place)))
        return text(self.random.choice((place, place, place, b"", b"\xff\xfe", b"q" * 256, b"a\0b", b"../" + place)))

    def _deaths(self, *, whole: bool = False) -> bytes:
        return array(*(self._death(whole=whole) for _ in range(self.random.choice((0, 1, 1, 2, 3)))))

    def _death(self, *, whole: bool) -> bytes:
        entries = [
            (b"count", number(self.random.choice(NUMBERS))),
            (b"reason", text(self.random.choice((b"rejected", b"expired", b"maxlen", b"delivery_limit", b"")))),
            (b"queue", text(self.random.choice((*self._places, b"work.orders", b"retry-queue", b"victim.XQ", b"")))),
            (b"time", timestamp(self.random.choice((0, 1_700_000_000, 2**64 - 1)))),
            (b"exchange", text(self.random.choice((*self._places, b"", b"work", b"route-delay")))),
            (b"routing-keys", array(text(self.random.choice((*self._places, b"orders.created"))), text(b"#"))),
        ]
        if self.random.random() < 0.3:
            entries.append((b"original-expiration", text(self.random.choice((b"1", b"-1", b"never")))))
        if not whole and self.random.random() < 0.3:
            entries.pop(self.random.randrange(len(entries)))
        if self.random.random() < 0.3:
            self.random.shuffle(entries)
        return table(entries)

    def any_value(self, depth: int) -> bytes:  # noqa: PLR0911  (one return for each kind of value)
        """Of every type that a broker of 3.10 and of 4.3 accepts."""
        kind = self.random.choice("tbBsuIilLfdDTVSxSxAF" if depth else "tbBsuIilLfdDTVSx")
        noise = self.random.randbytes
        if kind == "V":
            return b"V"
        if kind == "t":
            return b"t" + self.random.choice((b"\0", b"\1"))
        if kind in "fd":
            # Not a number and infinity close the connection.
            value = self.random.choice((0.0, -0.0, 0.75, -1e30, 1e-30, 5e-324 if kind == "d" else 1e-45))
            return kind.encode() + struct.pack(f">{kind}", value)
        if kind in _SIZES:
            return kind.encode() + self.random.choice(
                (noise(_SIZES[kind]), b"\xff" * _SIZES[kind], bytes(_SIZES[kind]))
            )
        if kind == "A":
            return array(*(self.any_value(depth - 1) for _ in range(self.random.randrange(4))))
        if kind == "F":
            return table(self.any_entries(self.random.randrange(4), depth - 1))
        content = self.random.choice(
            (b"", b"plain", b"\xc3\xa9\xe2\x82\xac", b"\xff\xfe\x80", b"\x1b[2J\0", noise(20), b"x" * 300)
        )
        return (text if kind == "S" else binary)(content)

    def any_entries(self, count: int, depth: int) -> list[Entry]:
        """Some names twice, some empty, some that are not UTF-8."""
        names = [
            self.random.choice((b"", b"a", b"a", b"\xff", b"n" * 255, self.random.randbytes(5))) for _ in range(count)
        ]
        return [(name, self.any_value(depth)) for name in names]


_SIZES = {"b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4, "l": 8, "L": 8, "D": 5, "T": 8}
