"""An ingest of what Dramatiq has published anew: no header of ours is left, only the id in the body."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import TYPE_CHECKING, Any

from dead_rows import store_at
from rawamqp import Message, Peer, properties

from matrix.work import DONE, QUIET_WITHIN, peer, retried, start, wait

if TYPE_CHECKING:
    from frame_link import FrameLink

    from matrix.ground import Ground

NAME, DEAD = "default", "default.XQ"
SHOWN = 3


class RepublishedWork:
    """Each message died, was stored and sent again; the framework retried it, and it has died once more."""

    job = "ingest"
    sources = (DEAD,)
    queues = (NAME, DEAD)

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.messages = 0
        self._doing = self.job
        self.database = ground.folder / "store.sqlite3"
        store_at(f"sqlite:///{self.database}").dispose()
        kind = {"x-queue-type": ground.kind}
        with peer(ground) as one:
            one.queue(NAME, {**kind, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
            one.queue(DEAD, kind)

    def fill(self, number: int) -> None:
        assert not self.messages, "it is filled once"
        self.messages = number
        with peer(self.ground) as one:
            one.publish(_enqueued(each, retries=1) for each in range(number))
            self._die(one)
            self._run("ingest")
            with self._store() as store:
                store.execute("UPDATE dlq_messages SET next_retry_at = '2020-01-01T00:00:00.000000+00:00'")
            self._run("lifecycle")
            wait(lambda: one.depth(NAME) == number, "the retries to arrive")
            # A worker of the framework fails again: it publishes a new message, and acknowledges the old one.
            one.read(NAME)
            one.publish(_enqueued(each, retries=2) for each in range(number))
            self._die(one)

    def command(self) -> list[str]:
        return [self._doing]

    def settings(self, broker_url: str) -> dict[str, str]:
        given = {"broker_url": broker_url, "database_url": f"sqlite:///{self.database}", "log_level": "error"}
        return given | {"ingest_queues": DEAD}

    def finished(self, one: Peer) -> int:
        return self._number("SELECT count(*) FROM dlq_attempts WHERE outcome = 'failed'")

    def may_double(self, link: FrameLink | None) -> int:
        """What was stored and comes again is told by its content and the time of its death."""
        return 0

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        def all_there() -> bool:
            ended = start(self, self.ground.url).end()
            with peer(self.ground) as one:
                return ended.code == DONE and not one.depth(DEAD) and self.finished(one) >= self.messages

        retried(all_there, within)
        with self._store() as store:
            rows = store.execute(
                "SELECT m.framework_id, m.body, m.status, m.dlq_retry_count, "
                "(SELECT count(*) FROM dlq_attempts AS a WHERE a.message_id = m.id AND a.outcome = 'failed'), "
                "(SELECT count(*) FROM dlq_attempts AS a WHERE a.message_id = m.id) FROM dlq_messages AS m"
            ).fetchall()
        return self._judge(rows)

    def _judge(self, rows: list[tuple[Any, ...]]) -> tuple[int, int, int]:
        """A message is lost if its failure is not written down, and doubled if it has a row or a failure too many."""
        expected = {_id(number): _enqueued(number, retries=1).body for number in range(self.messages)}
        known = {row[0] for row in rows if row[4]}
        wrong = [row for row in rows if row[1] != expected[row[0]] or row[2:4] != ("pending", 1) or row[4:] != (1, 1)]
        if wrong:
            self.ground.note(f"{len(wrong)} changed, such as {wrong[:SHOWN]}")
        doubled = len(rows) - len({row[0] for row in rows})
        return len(expected.keys() - known), len(wrong), doubled

    def _die(self, one: Peer) -> None:
        number = len(one.reject(NAME))
        wait(lambda: one.depth(DEAD) == number, "the dead letters to arrive")

    def _run(self, job: str) -> None:
        self._doing = job
        ended = start(self, self.ground.url).end()
        self._doing = self.job
        assert ended.code == DONE, ended

    def _number(self, query: str) -> int:
        with self._store() as store:
            return int(store.execute(query).fetchone()[0])

    @contextlib.contextmanager
    def _store(self) -> Any:
        with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as store, store:
            yield store


def _id(number: int) -> str:
    return f"dramatiq-{number}"


def _enqueued(number: int, *, retries: int) -> Message:
    told = f'Traceback (most recent call last):\n  File "a.py", line 1, in take\n    do()\nConnectionError: {retries}\n'
    message = {"queue_name": NAME, "actor_name": "take", "args": [number], "message_id": _id(number)}
    body = json.dumps({**message, "options": {"retries": retries, "traceback": told}}, separators=(",", ":"))
    return Message("", NAME.encode(), properties(delivery_mode=2), body.encode())
