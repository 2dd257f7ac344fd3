"""Ten lifecycle runs at once on 10,000 due rows, three of them killed: nothing lost, nothing claimed twice."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import store_at
from lifecycle_rows import ORIGIN, connect, copies, fill, number, worker
from program import HANGS_AFTER, eventually
from rawamqp import Peer

from dlqbatch.broker.transfer import WINDOW

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    import psycopg

ROWS, WORKERS, KILLED = 10_000, 10, 3
LEASE = 12
"""Ten processes take their time to start on a small machine."""
SENT = "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NOT NULL"
IS_HELD = (
    "lease_until IS NOT NULL AND NOT EXISTS (SELECT FROM dlq_attempts AS a WHERE a.message_id = dlq_messages.id "
    "AND a.closed_at IS NULL AND a.sent_at IS NOT NULL)"
)
HELD_BY = f"SELECT count(*) FROM dlq_messages WHERE {IS_HELD} AND lock_owner LIKE '%:{{}}'"
HOLDING = f"SELECT DISTINCT split_part(lock_owner, ':', 2) FROM dlq_messages WHERE {IS_HELD}"
BEGUN_BY = "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NULL AND worker LIKE '%:{}'"


@pytest.mark.slow
def test_ten_at_once_send_each_row_once_and_the_leases_of_three_that_are_killed_are_taken_over(
    broker_url: str, database_url: str
) -> None:
    fill(store_at(database_url), ROWS)
    with Peer(broker_url) as peer:
        peer.queue(ORIGIN, {})
    program = worker(broker_url, database_url, lease=f"{LEASE}s", max_messages=str(ROWS))
    workers = [program.start() for _ in range(WORKERS)]
    with connect(database_url) as store:
        killed = kill_some(store, workers)
        for one in workers:
            output, errors = one.communicate(timeout=HANGS_AFTER)
            assert one.returncode == 0, output + errors
        begun = sum(each[0] for each in killed)
        leased = sum(each[1] for each in killed)
        sys.stdout.write(f"killed with {killed} (begun and unsent, leased)\n")
        assert begun <= leased

        def is_done() -> bool:
            done = program.run()
            assert done.code == 0, done.said
            return number(store, SENT) == ROWS

        assert eventually(is_done, HANGS_AFTER)
        found = copies(broker_url)
        assert found.keys() == {b"%d" % each for each in range(ROWS)}
        doubled = found.total() - ROWS
        sys.stdout.write(f"{doubled} doubled\n")
        assert doubled <= begun <= KILLED * WINDOW
        # The journal: one claim each, and a take-over for what the killed held and for nothing else.
        claims = "SELECT count(*) FROM dlq_transitions WHERE from_status = 'pending' AND to_status = 'processing'"
        assert number(store, claims) == ROWS
        assert number(store, f"SELECT count(DISTINCT message_id) FROM ({claims.replace('count(*)', '*')}) AS c") == ROWS
        assert number(store, "SELECT count(*) FROM dlq_transitions WHERE reason LIKE 'lease expired%'") == leased
        assert number(store, "SELECT count(*) FROM dlq_attempts WHERE number <> 1") == 0
        assert number(store, "SELECT count(*) FROM dlq_attempts") == ROWS
        assert number(store, "SELECT count(*) FROM dlq_messages WHERE status <> 'processing'") == 0
        sent = store.execute("SELECT sent, failed FROM dlq_scope_breakers WHERE origin = %s", (ORIGIN,)).fetchall()
        assert sent == [(ROWS, 0)]


def kill_some(store: psycopg.Connection[Any], workers: list[subprocess.Popen[str]]) -> list[tuple[int, int]]:
    """Kill those that hold rows; how many each had begun without a mark, and how many it held in all.

    All of them stand still while we look, so that the work is not done before enough of them were found.
    """
    assert eventually(lambda: number(store, SENT) > 0, HANGS_AFTER)
    killed: list[int] = []

    def enough_are_dead() -> bool:
        with standing_still(workers):
            holding = {int(row[0]) for row in store.execute(HOLDING)}
            found = [each for each in workers if each.pid in holding and each.poll() is None]
            for process in found[: KILLED - len(killed)]:
                workers.remove(process)
                process.kill()
                process.communicate(timeout=HANGS_AFTER)
                killed.append(process.pid)
        return len(killed) == KILLED

    assert eventually(enough_are_dead, HANGS_AFTER)
    # What they had sent to the database before they died may still be on its way to the disk.
    ended = (
        f"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlqbatch' AND pid = ANY('{backends(store)}')"
    )
    eventually(lambda: number(store, ended) == 0, 0.5)
    return [(number(store, BEGUN_BY.format(each)), number(store, HELD_BY.format(each))) for each in killed]


@contextmanager
def standing_still(workers: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        for each in workers:
            each.send_signal(signal.SIGSTOP)
        yield
    finally:
        for each in workers:
            each.send_signal(signal.SIGCONT)


def backends(store: psycopg.Connection[Any]) -> str:
    """Those that serve somebody at this moment, as an array; each serves one call and ends."""
    pids = store.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'dlqbatch'").fetchall()
    return "{" + ",".join(str(row[0]) for row in pids) + "}"
