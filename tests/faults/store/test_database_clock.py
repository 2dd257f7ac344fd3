"""A worker whose clock is hours ahead or behind: the leases of the others hold, and so do its own.

The dead store counts by the database's clock. A SQLite file has none, and is used by one machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import store_at
from lifecycle_rows import ORIGIN, connect, fill, number
from matrix.store_jobs import PROGRAM
from program import HANGS_AFTER, Program
from rawamqp import Peer
from stalling_link import StallingLink

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

FEW = 10
HOURS = 3 * 3600
OPEN = "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NULL AND closed_at IS NULL"
HELD = (
    "SELECT count(*) FROM dlq_messages WHERE lease_until BETWEEN now() + interval '4 min' AND now() + interval '5 min'"
)


class Scene:
    def __init__(self, broker_url: str, database_url: str, store: psycopg.Connection[Any], peer: Peer) -> None:
        self.database_url, self.store, self.peer = database_url, store, peer
        self.settings = {"broker_url": broker_url, "database_url": database_url, "log_level": "error", "lease": "5m"}

    def worker(self, ahead: int, **settings: str) -> Program:
        return Program({**self.settings, **settings}, ("env", f"STRANGE_CLOCK={ahead}", *PROGRAM))

    def killed_with_a_lease(self, ahead: int) -> None:
        """Its attempts are committed, and nothing is published; the lease says how long they are its own."""
        with StallingLink(self.database_url, b"INSERT INTO dlq_attempts", b"COMMIT", is_heard=True) as link:
            process = self.worker(ahead, database_url=link.url).start("lifecycle", "--json")
            assert link.asked.wait(HANGS_AFTER)
            self.peer.wait_for(lambda: number(self.store, OPEN) == FEW, "the commit to be done")
            process.kill()
            process.communicate(timeout=HANGS_AFTER)


@pytest.fixture
def scene(broker_url: str, database_url: str) -> Iterator[Scene]:
    fill(store_at(database_url), FEW)
    with connect(database_url) as store, Peer(broker_url) as peer:
        peer.queue(ORIGIN)
        yield Scene(broker_url, database_url, store, peer)


@pytest.mark.parametrize(("first", "second"), [(0, HOURS), (-HOURS, 0)])
def test_a_lease_holds_whatever_the_clocks_of_the_workers_say(scene: Scene, first: int, second: int) -> None:
    scene.killed_with_a_lease(first)
    assert number(scene.store, HELD) == FEW
    done = scene.worker(second).run("lifecycle", "--json")
    assert (done.code, done.told["counts"]["got"]) == (0, 0), done.said
    assert scene.peer.depth(ORIGIN) == 0
    scene.store.execute("UPDATE dlq_messages SET lease_until = now()")
    done = scene.worker(second).run("lifecycle", "--json")
    assert (done.code, done.told["counts"]["sent"]) == (0, FEW), done.said
    assert scene.peer.depth(ORIGIN) == FEW
    # Sent now, and looked at since then: a success is found by comparing such times.
    sent = "SELECT count(*) FROM dlq_attempts WHERE sent_at BETWEEN now() - interval '5 min' AND now()"
    assert number(scene.store, sent) == FEW
    runs = "SELECT count(*) FROM dlq_runs WHERE started_at BETWEEN now() - interval '5 min' AND now()"
    assert number(scene.store, runs) == 2


def test_a_clock_that_jumps_while_a_run_goes_on_ends_nothing_before_its_time(scene: Scene) -> None:
    jumping = ("env", f"STRANGE_CLOCK={HOURS}", "STRANGE_CLOCK_AFTER=0.3", *PROGRAM)
    done = Program(scene.settings, jumping).run("lifecycle", "--json")
    assert (done.code, done.told["counts"]["sent"]) == (0, FEW), done.said
    assert number(scene.store, "SELECT count(*) FROM dlq_runs WHERE ended_at > now() + interval '1 min'") == 0
