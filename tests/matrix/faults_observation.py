"""The run or its database is killed while a lifecycle writes down what it has seen of retries sent before."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import rawamqp
from cutting_link import CuttingLink
from dead_rows import add
from lifecycle_rows import ORIGIN, due
from rawamqp import Peer

from matrix.scenario import Count, fault
from matrix.store_jobs import DONE, KILLED, OLD, PARTIAL, UNREACHABLE, Sends, body_of, number_of
from matrix.work import wait

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from matrix.ground import Ground

STORES = ("postgresql", "sqlite")
BATCH = 150
NEW = "work.new"
"""Where the retries go that are due now; those to the other queue were sent and acknowledged before."""
LAG = 1.0
"""Seconds, as the run is told; what the management API says is waited for."""
SIGHTINGS, PROOFS, BEFORE_SENDING = (
    b"INSERT INTO dlq_queue_readings",
    b"UPDATE dlq_attempts SET acknowledged_at",
    b"DELETE FROM dlq_scope_unproven",
)
"""Statements; the last comes when what succeeded is resolved and committed, before anything is claimed to be sent."""
COMMITS = 6
"""So many a run makes before it sends, if it has something to resolve."""
_LADDER = '["retry-queue", "retry-queue-1", "retry-queue-2", "retry-queue-3"]'


class Observing(Sends):
    """Half of the rows are under observation and have succeeded, half are due."""

    job = "lifecycle"
    size = 2 * BATCH

    def more_settings(self) -> dict[str, str]:
        return {"management_url": self.ground.management_url, "statistics_delay": f"{LAG:g}s"}

    def fill(self) -> None:
        with Peer(self.ground.url) as peer:
            peer.queue(ORIGIN)
            peer.queue(NEW)
        add(self.engine, *(self.row(number) for number in range(BATCH)), at=OLD)
        self._run()
        with Peer(self.ground.url) as peer:
            taken = Counter(number_of(seen.body) for seen in peer.read(ORIGIN))
        assert taken == Counter(range(BATCH)), "what is to succeed was not sent"
        wait(self._is_told, "the broker to tell of the acknowledgements")
        time.sleep(LAG)
        add(self.engine, *(self.row(number) for number in range(BATCH, self.size)), at=OLD)

    def row(self, number: int) -> dict[str, Any]:
        queue = ORIGIN if number < BATCH else NEW
        headers = [
            (b"dlqbatch-id", rawamqp.text(f"due-{number}")),
            (b"dlqbatch-origin-queue", rawamqp.text(queue)),
            (b"dlqbatch-origin-exchange", rawamqp.text("")),
            (b"dlqbatch-origin-key", rawamqp.text("orders.created")),
        ]
        properties = rawamqp.properties(headers, delivery_mode=2)
        return due(number, body=body_of(number), origin_queue=queue, properties=properties)

    def _is_told(self) -> bool:
        queue = self.ground.management.queue(ORIGIN)
        stats = queue.get("message_stats", {})
        settled = sum(stats.get(name, 0) for name in ("ack", "deliver_no_ack", "get_no_ack"))
        return queue.get("messages") == 0 and settled >= BATCH

    def prove(self) -> None:
        """A run proves that they were acknowledged; that they did not come back is to be seen yet."""
        due_later = f"UPDATE dlq_messages SET next_retry_at = '2999-01-01T00:00:00.000000+00:00' WHERE id > {BATCH}"
        self.tables.do(due_later)
        self._run()
        self.ease()
        self.look()

    def look(self) -> None:
        """As if a drain and an ingest had found nothing anywhere they could come back."""
        now = "strftime('%Y-%m-%dT%H:%M:%f000+00:00', 'now')" if self.tables.is_sqlite else "clock_timestamp()"
        for job, emptied in (("drain", _LADDER), ("ingest", '["dlq-queue"]')):
            self.tables.do(
                "INSERT INTO dlq_runs (job, started_at, ended_at, outcome, stopped_by, emptied, report) "
                f"VALUES ('{job}', {now}, {now}, 'ok', 'empty', '{emptied}', '{{}}')"
            )
            time.sleep(0.01)

    def _run(self) -> None:
        done = self.end(self.start())
        assert done.code == DONE, (done.out, done.err)

    def ease(self) -> None:
        super().ease()
        self.look()

    def is_quiet(self) -> bool:
        return not self._unresolved() and not self.unsent()

    def unsent(self) -> int:
        return self.tables.number(
            f"SELECT count(*) FROM dlq_messages AS m WHERE m.origin_queue = '{NEW}' AND NOT EXISTS (SELECT 1 FROM "
            "dlq_attempts AS a WHERE a.message_id = m.id AND a.sent_at IS NOT NULL AND a.closed_at IS NULL)"
        )

    def _unresolved(self) -> int:
        return self.tables.number(
            f"SELECT count(*) FROM dlq_messages WHERE origin_queue = '{ORIGIN}' AND status <> 'resolved'"
        )

    def count(self) -> tuple[int, int, int]:
        """One that succeeded and is resolved twice, or without a proof, is changed."""
        resolved = self.tables.all(
            "SELECT m.id, (SELECT count(*) FROM dlq_transitions AS t WHERE t.message_id = m.id AND "
            "t.to_status = 'resolved'), (SELECT count(*) FROM dlq_attempts AS a WHERE a.message_id = m.id), "
            "(SELECT count(*) FROM dlq_attempts AS a WHERE a.message_id = m.id AND a.outcome = 'succeeded' "
            f"AND a.proof IS NOT NULL) FROM dlq_messages AS m WHERE m.origin_queue = '{ORIGIN}'"
        )
        wrong = [row for row in resolved if row[1:] != (1, 1, 1)]
        with Peer(self.ground.url) as peer:
            assert not peer.depth(ORIGIN), "what had succeeded was sent again"
            seen = peer.read(NEW)
        found = Counter(number_of(one.body) for one in seen)
        changed = found.pop(None, 0) + len(wrong)
        if wrong:
            self.ground.note(f"{len(wrong)} changed, such as {wrong[:3]}")
        lost = len(set(range(BATCH, self.size)) - found.keys()) + BATCH - len(resolved)
        return lost, changed, found.total() - len(found)


def _at(ground: Ground, text: bytes, act: Callable[[Observing], object], *, cuts: bool = False) -> Count:
    """`act`, while this statement of a run waits for it."""
    with Observing(ground) as one:
        if text == BEFORE_SENDING or ground.random.random() < 0.5:
            one.prove() if text != PROOFS else None
        with CuttingLink(one.database, 1, act=lambda: act(one), text=text, cuts=cuts) as link:
            done = one.end(one.start(database_url=link.url))
            assert done.code in {DONE, PARTIAL, UNREACHABLE}, (done.code, done.err)
            hit = link.has_cut.is_set()
            assert not hit or link.has_acted.wait(120)
        return one.found(crashes=int(hit), hits=int(hit))


def sessions_ended(ground: Ground) -> Count:
    """An administrator ends all our sessions."""

    def act(one: Observing) -> None:
        one.tables.number(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'dlqbatch' "
            "AND datname = current_database()"
        )

    return _at(ground, ground.random.choice((SIGHTINGS, PROOFS)), act)


def database_killed(ground: Ground) -> Count:
    """PostgreSQL's `immediate`: as after a power cut; it recovers from its log."""
    cluster = ground.cluster

    def act(_: Observing) -> None:
        cluster.abandon()
        cluster.start()

    return _at(ground, ground.random.choice((SIGHTINGS, PROOFS)), act, cuts=True)


def killed_before_sending(ground: Ground) -> Count:
    """What has succeeded is resolved, and nothing of what is due was claimed yet."""
    return _killed(ground, BEFORE_SENDING)


def killed_while_writing(ground: Ground) -> Count:
    return _killed(ground, ground.random.choice((SIGHTINGS, PROOFS)))


def _killed(ground: Ground, text: bytes) -> Count:
    with Observing(ground) as one:
        if text == BEFORE_SENDING:
            one.prove()
        running: list[subprocess.Popen[str]] = []

        def kill() -> None:
            running[0].send_signal(signal.SIGKILL)
            running[0].wait(30)

        with CuttingLink(one.database, 1, is_heard=ground.random.random() < 0.5, act=kill, text=text) as link:
            running.append(one.start(database_url=link.url))
            hits = int(one.end(running[0]).code == KILLED)
        return _nothing_went_out(one, text, hits)


def _nothing_went_out(one: Observing, text: bytes, hits: int) -> Count:
    with Peer(one.ground.url) as peer:
        assert not hits or not peer.depth(NEW), "it was sent before what had been seen was written down"
    if hits and text == BEFORE_SENDING:
        assert not one._unresolved(), "what was resolved is not committed"
    return one.found(crashes=0, hits=hits)


def killed_at_a_commit(ground: Ground) -> Count:
    """One of those before anything is sent, of a run that proves or of one that resolves."""
    number, is_heard = ground.random.randint(1, COMMITS), ground.random.random() < 0.5
    ground.note(f"killed {'after' if is_heard else 'before'} commit {number}")
    with Observing(ground) as one:
        if ground.random.random() < 0.5:
            one.prove()
        done = one.end(one.start({"STRANGE_COMMIT": f"{number}:{'after' if is_heard else 'before'}"}))
        hits = int(done.code == KILLED)
        return one.found(crashes=hits, hits=hits)


for _make, _title, _kinds in (
    (sessions_ended, "sessions ended while what was seen of retries is written", ("postgresql",)),
    (database_killed, "database killed while what was seen of retries is written", ("postgresql",)),
    (killed_while_writing, "killed while what was seen of retries is written", ("postgresql",)),
    (killed_before_sending, "killed between resolving and sending", ("postgresql",)),
    (killed_at_a_commit, "killed before or after a commit, retries under observation", ("sqlite",)),
):
    fault(
        _title,
        name=f"lifecycle-observing-{_make.__name__.replace('_', '-')}",
        job="lifecycle",
        kinds=_kinds,
        runs=10,
    )(_make)
