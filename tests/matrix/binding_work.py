"""A drain whose delays end while we look on: what it delays comes back out of the ladder, and goes to its origin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import drain_setup
import oracle
import rawamqp
from rawamqp import Message

from matrix.drain_work import DrainWork
from matrix.witness import judge
from matrix.work import QUIET_WITHIN, peer, retried

if TYPE_CHECKING:
    from rawamqp import Peer, Seen

PLACES = (drain_setup.ORIGIN, "dlq-queue")
SOURCE = "retry-queue"
_CASES = (
    ("orders.created", 0, drain_setup.ORIGIN),
    ("orders.created", 1, drain_setup.ORIGIN),
    ("payment.refused", 2, drain_setup.ORIGIN),
    ("nobody.knows", 0, "dlq-queue"),
)
"""Key, retries used, and where it is when all is quiet: one for each tier, and one that is given up."""
TIERS = (1, 2, 3)


class BindingWork(DrainWork):
    sources = (SOURCE,)
    tier_ttls = "8s,8s,8s"

    def fill(self, number: int) -> None:
        begin = len(self.expected)
        with peer(self.ground) as one:
            self.expected |= drain_setup.put(one, [_message(each) for each in range(begin, begin + number)])

    def finished(self, one: Peer) -> int:
        return sum(map(one.depth, (*PLACES, *(f"queue.delay.{tier}" for tier in TIERS))))

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        found: list[Seen] = []

        def all_there() -> bool:
            self.run_until_empty()
            with peer(self.ground) as one:
                found.extend(one.read(*PLACES))
            return len(oracle.copies(found)) >= len(self.expected)

        retried(all_there, within)
        # A copy of the last one may be on its way still.
        with peer(self.ground) as one:
            retried(lambda: not any(one.depth(f"queue.delay.{tier}") for tier in TIERS), within)
            self.run_until_empty()
            found.extend(one.read(*PLACES))
        return judge(
            self.ground, self.expected, found, lambda before, after: drain_setup._problems(self.stage, before, after)
        )


def _message(number: int) -> Message:
    key, retries, place = _CASES[number % len(_CASES)]
    ticket = b"t-%d-%b" % (number, place.encode())
    headers = [(b"attempted", b"d" + number.to_bytes(8, "big")), rawamqp.death(drain_setup.ORIGIN, key.encode())]
    if retries:
        headers += [
            (b"dlqbatch-id", rawamqp.text(f"id-{number}")),
            (b"dlqbatch-retries", rawamqp.number(retries)),
            (b"dlqbatch-trips", rawamqp.number(retries)),
            (b"dlqbatch-origin-queue", rawamqp.text(drain_setup.ORIGIN)),
            (b"dlqbatch-origin-exchange", rawamqp.text("")),
            (b"dlqbatch-origin-key", rawamqp.text(key)),
        ]
    properties = rawamqp.properties(headers, correlation_id=ticket, delivery_mode=2)
    return Message("", SOURCE.encode(), properties, ticket * 10)
