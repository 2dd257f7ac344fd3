"""An ingest to be broken: a queue of dead letters with ids, and an empty SQLite store."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import oracle
import rawamqp
from dead_rows import store_at
from rawamqp import Message, Seen

from matrix.witness import judge
from matrix.work import QUIET_WITHIN, peer, retried, start

if TYPE_CHECKING:
    from frame_link import FrameLink
    from rawamqp import Peer

    from matrix.ground import Ground

SOURCE, COPY = "dlq-queue", "copy"


class IngestWork:
    job = "ingest"
    sources = (SOURCE,)
    queues = (SOURCE, COPY)

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.expected: dict[bytes, Seen] = {}
        self.database = ground.folder / "store.sqlite3"
        store_at(f"sqlite:///{self.database}").dispose()
        with peer(ground) as one:
            for queue in self.queues:
                one.queue(queue, {"x-queue-type": ground.kind})

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
        return ["ingest"]

    def settings(self, broker_url: str) -> dict[str, str]:
        return {"broker_url": broker_url, "database_url": f"sqlite:///{self.database}", "log_level": "error"}

    def finished(self, one: Peer) -> int:
        return len(self._rows())

    def may_double(self, link: FrameLink | None) -> int:
        """Each has an id: a copy is told from a new one."""
        return 0

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        def all_there() -> bool:
            ended = start(self, self.ground.url).end()
            with peer(self.ground) as one:
                return ended.code == 0 and not one.depth(SOURCE) and len(self._rows()) >= len(self.expected)

        retried(all_there, within)
        return judge(self.ground, self.expected, self._rows(), lambda a, b: oracle.changes(a, b, b"guest"))

    def _rows(self) -> list[Seen]:
        with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as store:
            query = "SELECT source_queue, exchange, routing_key, properties, body FROM dlq_messages"
            return [
                Seen(queue, exchange.encode(), key.encode(), False, properties, body)
                for queue, exchange, key, properties, body in store.execute(query)
            ]


def _dead(queue: str, number: int) -> Message:
    headers = [
        (b"dlqbatch-id", rawamqp.text(f"id-{number}")),
        (b"dlqbatch-retries", rawamqp.number(3)),
        (b"dlqbatch-trips", rawamqp.number(3)),
        (b"shop", b"d" + number.to_bytes(8, "big")),
    ]
    properties = rawamqp.properties(headers, correlation_id=b"t-%d" % number, delivery_mode=2, type=b"order")
    return Message("", queue.encode(), properties, b"%08d" % number)
