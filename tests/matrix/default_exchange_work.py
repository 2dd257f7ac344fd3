"""A drain of messages that go back through the default exchange, where only a digest tells them from others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import drain_setup
import oracle
import rawamqp
from rawamqp import Message

from matrix.drain_work import DrainWork
from matrix.witness import judge
from matrix.work import QUIET_WITHIN, peer, retried, under_way, wait

if TYPE_CHECKING:
    from frame_link import FrameLink
    from rawamqp import Peer, Seen

    from matrix.ground import Ground

FIRST_STAGE, FIRST_TIER = "retry-queue", "retry-queue-1"
KNOWN, UNKNOWN = "queue.delay.2", "queue.delay.1"
"""Where a message waits that has failed twice, and where one waits that has failed once."""


class DefaultExchangeWork(DrainWork):
    """Each message came to its queue by the default exchange, has failed there, and its delay is over.

    When all are back they fail once more. Those that are known again wait in the second delay queue then; one that was
    taken for another message would wait in the first.
    """

    sources = (FIRST_TIER,)
    tier_ttls = "100ms,1h,1h"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        with Path(self.stage.variables["DLQBATCH_CONFIG"]).open("a") as policy:
            policy.write(f"dlqbatch.events.{drain_setup.ORIGIN}=3\n")

    def fill(self, number: int) -> None:
        begin = len(self.expected)
        with peer(self.ground) as one:
            self.expected |= drain_setup.put(one, [_message(each) for each in range(begin, begin + number)])
            self._fail(one, number)
            self.run_until_empty(FIRST_STAGE)
            wait(lambda: one.depth(FIRST_TIER) == number, "the delays to be over")

    def finished(self, one: Peer) -> int:
        return one.depth(drain_setup.ORIGIN)

    def may_double(self, link: FrameLink | None) -> int:
        return under_way(self, link)

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        found: list[Seen] = []

        def all_are_back() -> bool:
            self.run_until_empty(FIRST_TIER)
            with peer(self.ground) as one:
                return one.depth(drain_setup.ORIGIN) >= len(self.expected)

        retried(all_are_back, within)
        with peer(self.ground) as one:
            self._fail(one, one.depth(drain_setup.ORIGIN))
            self.run_until_empty(FIRST_STAGE)
            found += one.read(KNOWN, UNKNOWN, FIRST_TIER)
        return judge(self.ground, self.expected, found, self._problems)

    def _fail(self, one: Peer, number: int) -> None:
        one.reject(drain_setup.ORIGIN)
        wait(lambda: one.depth(FIRST_STAGE) == number, "the failures to arrive")

    def _problems(self, before: Seen, after: Seen) -> list[str]:
        headers = dict(rawamqp.headers_of(after.properties))
        wrong = [] if after.queue == KNOWN else ["it was not known again"]
        wrong += [] if headers.get(b"dlqbatch-retries") == rawamqp.number(2) else ["its retries are not counted"]
        wrong += ["it was taken for another message"] if b"dlqbatch-parent" in headers else []
        return wrong + oracle.changes(before, after, self.stage.login.encode())


def _message(number: int) -> Message:
    ticket = b"t-%d" % number
    headers = [(b"attempted", b"d" + number.to_bytes(8, "big")), (b"", rawamqp.binary(b"\xff%d" % number))]
    properties = rawamqp.properties(headers, correlation_id=ticket, message_id=b"m-%d" % number, delivery_mode=2)
    return Message("", drain_setup.ORIGIN.encode(), properties, ticket * 20)
