"""Two jobs that publish what a dead store holds, to be broken: a lifecycle, and the replay of a plan."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import oracle
import rawamqp
from dead_rows import NOW, add, store_at
from lifecycle_rows import ORIGIN, due
from rawamqp import Seen

from matrix.witness import judge
from matrix.work import DONE, PARTIAL, QUIET_WITHIN, USAGE, peer, retried, start

if TYPE_CHECKING:
    from frame_link import FrameLink
    from rawamqp import Peer

    from matrix.ground import Ground
    from matrix.work import Ended


class LifecycleWork:
    """Every row is due, and has the same origin."""

    job = "lifecycle"
    sources = ()
    queues = (ORIGIN,)

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.expected: dict[bytes, Seen] = {}
        self.database = ground.folder / "store.sqlite3"
        self.engine = store_at(f"sqlite:///{self.database}")
        ground.stack.callback(self.engine.dispose)
        with peer(ground) as one:
            one.queue(ORIGIN, {"x-queue-type": ground.kind})

    @property
    def messages(self) -> int:
        return len(self.expected)

    def fill(self, number: int) -> None:
        begin = len(self.expected)
        rows = []
        for each in range(begin, begin + number):
            properties, body = _properties(each), b"%08d" % each
            rows.append(due(each, properties=properties, body=body))
            self.expected[b"t-%d" % each] = Seen("dlq-queue", b"", b"", False, properties, body)
        add(self.engine, *rows, at=NOW.replace(year=2020))

    def command(self) -> list[str]:
        return ["lifecycle"]

    def settings(self, broker_url: str) -> dict[str, str]:
        given = {"broker_url": broker_url, "database_url": f"sqlite:///{self.database}", "log_level": "error"}
        return given | {"lease": "1s", "recheck": "1ms", "settle_seconds": "2"}

    def finished(self, one: Peer) -> int:
        return one.depth(ORIGIN)

    def may_double(self, link: FrameLink | None) -> int:
        """What was begun, and not marked as sent."""
        return self._number("SELECT count(*) FROM dlq_attempts WHERE sent_at IS NULL AND closed_at IS NULL")

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        def all_there() -> bool:
            ended = self._again()
            return ended.code == 0 and not self._unsent()

        retried(all_there, within)
        with peer(self.ground) as one:
            found = one.read(ORIGIN)
        return judge(self.ground, self.expected, found, _problems)

    def _again(self) -> Ended:
        return start(self, self.ground.url).end()

    def _unsent(self) -> int:
        """Rows that nobody has marked as sent."""
        sent = "SELECT count(DISTINCT message_id) FROM dlq_attempts WHERE sent_at IS NOT NULL"
        return len(self.expected) - self._number(sent)

    def _number(self, query: str) -> int:
        with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as store:
            return int(store.execute(query).fetchone()[0])


class ReplayWork(LifecycleWork):
    """The same rows in one plan, that is applied again until all are out."""

    job = "replay"
    plan = ""

    def fill(self, number: int) -> None:
        assert not self.plan, "a plan is frozen"
        super().fill(number)
        planned = start(self, self.ground.url).end()
        assert planned.code == 0, planned
        assert planned.report is not None
        self.plan = str(planned.report["hash"])

    def command(self) -> list[str]:
        return ["replay", "apply", self.plan, "--no-canary"] if self.plan else ["replay", "plan", "--all"]

    def settings(self, broker_url: str) -> dict[str, str]:
        given = super().settings(broker_url)
        return {name: value for name, value in given.items() if name not in {"lease", "recheck"}}

    def _again(self) -> Ended:
        # What a killed run held is held for five minutes: here they are over at once.
        with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as store, store:
            over = "UPDATE dlq_messages SET lease_until = '2020-01-01T00:00:00.000000+00:00'"
            store.execute(f"{over} WHERE status = 'processing' AND lease_until IS NOT NULL")
        # A plan that is done is not applied again, and nothing else is a wrong usage.
        ended = start(self, self.ground.url).end(codes=(DONE, PARTIAL, USAGE))
        assert ended.code != USAGE or not self._unsent(), ended
        return ended._replace(code=ended.code if ended.code != USAGE else DONE)


def _problems(before: Seen, after: Seen) -> list[str]:
    return ([] if after.queue == ORIGIN else [f"belongs in {ORIGIN}"]) + oracle.changes(before, after, b"guest")


def _properties(number: int) -> bytes:
    """As a drain dead-letters it."""
    headers = [
        (b"dlqbatch-id", rawamqp.text(f"due-{number}")),
        (b"dlqbatch-trips", rawamqp.number(3)),
        (b"dlqbatch-origin-queue", rawamqp.text(ORIGIN)),
        (b"dlqbatch-origin-exchange", rawamqp.text("")),
        (b"dlqbatch-origin-key", rawamqp.text("orders.created")),
        (b"shop", b"d" + number.to_bytes(8, "big")),
    ]
    return rawamqp.properties(headers, correlation_id=b"t-%d" % number, delivery_mode=2, type=b"order")
