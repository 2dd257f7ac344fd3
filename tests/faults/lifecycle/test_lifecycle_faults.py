"""A lifecycle run is cut at every step of a retry; a later run finishes it under the same attempt number.

Nothing is lost. What was published without a mark goes out twice, and nothing else does.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import store_at
from lifecycle_rows import ORIGIN, connect, copies, fill, number, worker
from program import HANGS_AFTER, eventually
from rawamqp import Peer
from slow_link import SlowLink

from dlqbatch.broker.transfer import WINDOW

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    import psycopg
    from program import Program

FEW, MANY = 50, 3_000
KILLS = 5
SENT = "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NOT NULL"
UNMARKED = "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NULL AND closed_at IS NULL"
RETRIED = "SELECT count(*) FROM dlq_attempts WHERE number <> 1"
OURS = "application_name = 'dlqbatch' AND datname = current_database() AND pid <> pg_backend_pid()"
BLOCKED = f"SELECT count(*) FROM pg_stat_activity WHERE {OURS} AND wait_event_type = 'Lock'"
CUT = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {OURS}"
PARTIAL, UNREACHABLE = 3, 4
CONFIRM = b"\x00\x3c\x00\x50"
"""Class and method of basic.ack."""


class Silenced(SlowLink):
    """Stops at the first confirm: from then on the program hears nothing."""

    def _deliver(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if CONFIRM in data:
                    self.paused.set()
                    self._open.wait(HANGS_AFTER)
                target.sendall(data)


class Scene:
    def __init__(
        self, program: Program, peer: Peer, url: str, database_url: str, store: psycopg.Connection[Any]
    ) -> None:
        self.program, self.peer, self.url, self.store = program, peer, url, store
        self.database_url = database_url
        seed = secrets.randbits(32)
        sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
        self.random = random.Random(seed)

    def fill(self, rows: int) -> None:
        self.rows = rows
        fill(store_at(self.database_url), rows)

    @contextlib.contextmanager
    def blocking(self, statement: str) -> Iterator[None]:
        """Whoever INSERTs or UPDATEs attempts waits until this ends."""
        self.store.execute(
            "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END'"
        )
        self.store.execute(
            f"CREATE TRIGGER hold BEFORE {statement} ON dlq_attempts FOR EACH ROW EXECUTE FUNCTION hold()".encode()
        )
        self.store.execute("SELECT pg_advisory_lock(7)")
        yield
        self.store.execute("SELECT pg_advisory_unlock(7)")
        self.store.execute("DROP FUNCTION hold CASCADE")

    def kill(self, process: subprocess.Popen[str]) -> bool:
        """False if it had just ended by itself."""
        process.kill()
        process.communicate(timeout=HANGS_AFTER)
        # A backend notices only later that its client is gone.
        self.store.execute(CUT.encode())
        assert eventually(lambda: number(self.store, f"SELECT count(*) FROM pg_stat_activity WHERE {OURS}") == 0)
        return process.returncode == -signal.SIGKILL

    def finish(self) -> int:
        """Run until all are marked as sent; how many copies too many there are."""

        def is_done() -> bool:
            done = self.program.run()
            assert done.code == 0, done.said
            return number(self.store, SENT) == self.rows

        assert eventually(is_done)
        found = copies(self.url)
        assert found.keys() == {b"%d" % each for each in range(self.rows)}
        assert number(self.store, "SELECT count(*) FROM dlq_messages WHERE status <> 'processing'") == 0
        return found.total() - self.rows


@pytest.fixture
def scene(broker_url: str, database_url: str) -> Iterator[Scene]:
    with connect(database_url) as store, Peer(broker_url) as peer:
        peer.queue(ORIGIN, {})
        program = worker(broker_url, database_url, lease="1s", recheck="1ms", settle_seconds="2")
        yield Scene(program, peer, broker_url, database_url, store)


def test_killed_between_the_claim_and_the_publish_each_is_sent_once(scene: Scene) -> None:
    scene.fill(FEW)
    with scene.blocking("INSERT"):
        process = scene.program.start()
        assert eventually(lambda: number(scene.store, BLOCKED) > 0)
        assert scene.kill(process)
    assert scene.peer.depth(ORIGIN) == 0
    assert scene.finish() == 0
    assert number(scene.store, RETRIED) == 0


def test_killed_between_the_publish_and_the_confirm_each_goes_out_once_more_at_most(scene: Scene) -> None:
    scene.fill(FEW)
    with Silenced(scene.url, pause_after=0) as link:
        process = worker(link.url, scene.database_url, lease="1s").start()
        assert eventually(lambda: scene.peer.depth(ORIGIN) == FEW and link.paused.is_set())
        assert scene.kill(process)
        link.go_on()
    published = scene.peer.depth(ORIGIN)
    sys.stdout.write(f"{published} published, {number(scene.store, UNMARKED)} unmarked\n")
    assert scene.finish() == published
    assert number(scene.store, RETRIED) == 0


def test_killed_between_the_confirm_and_the_mark_each_goes_out_twice_under_one_number(scene: Scene) -> None:
    scene.fill(FEW)
    with scene.blocking("UPDATE"):
        process = scene.program.start()
        assert eventually(lambda: number(scene.store, BLOCKED) > 0)
        assert eventually(lambda: scene.peer.depth(ORIGIN) == FEW)
        assert number(scene.store, UNMARKED) == FEW
        assert scene.kill(process)
    assert scene.finish() == FEW
    assert number(scene.store, RETRIED) == 0


@pytest.mark.slow
def test_killed_at_any_instant_no_more_than_was_unmarked_is_doubled(scene: Scene) -> None:
    scene.fill(MANY)
    unmarked = 0
    for _ in range(KILLS):
        wanted = number(scene.store, SENT) + scene.random.randint(1, MANY // KILLS)
        process = scene.program.start()
        assert eventually(lambda wanted=wanted: number(scene.store, SENT) >= wanted or process.poll() is not None)  # noqa: B023
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=scene.random.uniform(0, 0.05))
        if scene.kill(process):
            unmarked += number(scene.store, UNMARKED)
    doubled = scene.finish()
    sys.stdout.write(f"{doubled} doubled, {unmarked} were unmarked at the kills\n")
    assert doubled <= unmarked <= KILLS * WINDOW
    assert number(scene.store, RETRIED) == 0


def test_a_connection_that_is_cut_leaves_what_nobody_confirmed_to_the_next_run_under_one_number(scene: Scene) -> None:
    scene.fill(FEW)
    with Silenced(scene.url, pause_after=0) as link:
        process = worker(link.url, scene.database_url, lease="1s").start()
        assert eventually(lambda: scene.peer.depth(ORIGIN) == FEW and link.paused.is_set())
        published = scene.peer.depth(ORIGIN)
        link.hang_up()
        output, errors = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == PARTIAL, output + errors
    assert "connection to the broker was lost" in output
    assert number(scene.store, UNMARKED) == FEW
    assert scene.finish() == published
    assert number(scene.store, RETRIED) == 0


@pytest.mark.slow
def test_a_database_that_cuts_every_connection_stops_the_run_and_what_it_sent_is_marked_in_the_end(
    scene: Scene,
) -> None:
    scene.fill(MANY)
    with scene.blocking("UPDATE"):
        process = scene.program.start()
        assert eventually(lambda: number(scene.store, BLOCKED) > 0)
        assert number(scene.store, CUT) > 0
    output, errors = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode in {PARTIAL, UNREACHABLE}, output + errors
    assert "cannot be used" in output + errors
    assert scene.finish() <= WINDOW
    assert number(scene.store, RETRIED) <= WINDOW
