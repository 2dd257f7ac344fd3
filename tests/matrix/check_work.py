"""A check to be broken: a queue of dead letters, of which every other one has failed too often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import oracle
import rawamqp
from rawamqp import Message

from matrix.witness import judge
from matrix.work import QUIET_WITHIN, peer, retried, start, under_way

if TYPE_CHECKING:
    from frame_link import FrameLink
    from rawamqp import Peer, Seen

    from matrix.ground import Ground

SOURCE, TARGET, COPY = "dlq.a", "permanent_failure_queue", "copy"


class CheckWork:
    job = "check"
    sources = (SOURCE,)
    queues = (SOURCE, TARGET, COPY)

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.expected: dict[bytes, Seen] = {}
        arguments: dict[str, str | int] = {"x-queue-type": ground.kind}
        if ground.kind == "quorum" and ground.servers.release == "4.3":
            arguments["x-delivery-limit"] = -1
        with peer(ground) as one:
            for queue in self.queues:
                one.queue(queue, arguments)

    @property
    def messages(self) -> int:
        return len(self.expected)

    def fill(self, number: int) -> None:
        begin = len(self.expected)
        with peer(self.ground) as one:
            one.publish(_dead(COPY, each) for each in range(begin, begin + number))
            self.expected |= {oracle.ticket_of(seen): seen for seen in one.read(COPY)}
            one.publish(_dead(SOURCE, each) for each in range(begin, begin + number))

    def command(self) -> list[str]:
        return ["check", SOURCE]

    def settings(self, broker_url: str) -> dict[str, str]:
        given = {"broker_url": broker_url, "management_url": self.ground.management_url, "log_level": "error"}
        return given | {"database_url": "sqlite:////dev/null"}

    def finished(self, one: Peer) -> int:
        return one.depth(TARGET)

    def may_double(self, link: FrameLink | None) -> int:
        """What was published, and not acknowledged."""
        return under_way(self, link)

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        stays = len(self.expected) - len(self.expected) // 2

        def all_there() -> bool:
            ended = start(self, self.ground.url).end()
            with peer(self.ground) as one:
                return ended.code == 0 and one.depth(SOURCE) == stays

        retried(all_there, within)
        with peer(self.ground) as one:
            found = one.read(SOURCE, TARGET)
        return judge(self.ground, self.expected, found, _problems)


def _problems(before: Seen, after: Seen) -> list[str]:
    must_move = int(before.body) % 2 == 1
    place = TARGET if must_move else SOURCE
    misplaced = [] if after.queue == place else [f"belongs in {place}"]
    return misplaced + oracle.changes(before, after, b"guest")


def _dead(queue: str, number: int) -> Message:
    headers = [
        (b"dlqbatch-id", rawamqp.text(f"id-{number}")),
        (b"dlqbatch-retries", rawamqp.number(9 if number % 2 else 1)),
        (b"dlqbatch-trips", rawamqp.number(1)),
        (b"shop", b"d" + number.to_bytes(8, "big")),
    ]
    properties = rawamqp.properties(headers, correlation_id=b"t-%d" % number, delivery_mode=2, type=b"order")
    return Message("", queue.encode(), properties, b"%08d" % number)
