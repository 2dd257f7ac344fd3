"""An ingest is cut at any instant of its work, again and again; then one run finishes.

Whatever the cut, every message is a row. One with an id is exactly one; without an id, what was under way may be two.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pika
import psycopg
import pytest
from frame_link import FrameLink, Point
from program import DLQ, HANGS_AFTER, Client, Program, client, eventually
from rawamqp import Message, Peer, properties, text

from dlqbatch.broker.transfer import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator

WITH_ID, WITHOUT_ID = 3_000, 1_500
KILLS, KILLS_WITHOUT_ID = 10, 4
PARTIAL, UNREACHABLE = 3, 4


class Scene:
    def __init__(self, program: Program, team: Client, store: psycopg.Connection[Any]) -> None:
        self.program, self.team, self.store = program, team, store
        seed = secrets.randbits(32)
        sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
        self.random = random.Random(seed)

    def rows(self) -> int:
        found = self.store.execute("SELECT count(*) FROM dlq_messages").fetchone()
        assert found is not None
        return int(found[0])

    def start_and_reach_the_middle(self, most: int) -> subprocess.Popen[str]:
        """An ingest that has stored some, by chance few or many; and then a moment more."""
        wanted = self.rows() + self.random.randint(0, most)
        process = self.program.start("ingest", "--json")
        assert eventually(lambda: self.rows() >= wanted or process.poll() is not None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=self.random.uniform(0, 0.06))
        return process

    def kill(self, most: int) -> bool:
        process = self.start_and_reach_the_middle(most)
        process.kill()
        process.communicate(timeout=HANGS_AFTER)
        return process.returncode == -signal.SIGKILL

    def finish(self, expected: int) -> None:
        """One run; what a cut one held is back before, or this one takes the rest in another."""

        def is_done() -> bool:
            done = self.program.run("ingest", "--json")
            assert done.code == 0, done.said
            return self.team.depth(DLQ) == 0 and len(self.bodies()) >= expected

        assert eventually(is_done)
        found = self.bodies()
        assert found == {b"%d" % number for number in range(expected)}

    def bodies(self) -> set[bytes]:
        return {bytes(row[0]) for row in self.store.execute("SELECT body FROM dlq_messages", binary=True)}


@pytest.fixture
def scene(broker_url: str, database_url: str) -> Iterator[Scene]:
    program = Program({"broker_url": broker_url, "database_url": database_url, "log_level": "error"})
    done = program.run("db", "upgrade")
    assert done.code == 0, done.said
    with (
        client(broker_url) as team,
        psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as store,
    ):
        team.channel.queue_declare(DLQ, durable=True)
        yield Scene(program, team, store)


def fill(url: str, numbers: range, *, with_ids: bool) -> None:
    with Peer(url) as peer:
        peer.publish(
            Message(
                "",
                DLQ.encode(),
                properties([(b"dlqbatch-id", text(f"id-{each}"))] if with_ids else None, delivery_mode=2),
                b"%d" % each,
            )
            for each in numbers
        )


@pytest.mark.slow
def test_an_ingest_killed_at_any_instant_makes_every_message_with_an_id_one_row(scene: Scene, broker_url: str) -> None:
    fill(broker_url, range(WITH_ID), with_ids=True)
    published = WITH_ID
    for _ in range(KILLS):
        # One that ended before it was killed has left nothing for the others.
        while not scene.kill(WITH_ID // KILLS):
            fill(broker_url, range(published, published + WITH_ID), with_ids=True)
            published += WITH_ID
    scene.finish(published)
    assert scene.rows() == published


@pytest.mark.slow
def test_without_ids_no_more_than_was_under_way_is_doubled(scene: Scene, broker_url: str) -> None:
    fill(broker_url, range(WITHOUT_ID), with_ids=False)
    killed = sum(scene.kill(WITHOUT_ID // KILLS_WITHOUT_ID) for _ in range(KILLS_WITHOUT_ID))
    assert killed > 0
    scene.finish(WITHOUT_ID)
    sys.stdout.write(f"{scene.rows() - WITHOUT_ID} doubled by {killed} kills\n")
    assert scene.rows() <= WITHOUT_ID + WINDOW * killed


@pytest.mark.usefixtures("on_every_broker")
def test_what_a_quorum_queue_delivers_once_more_without_an_id_is_the_row_that_it_was(
    scene: Scene, broker_url: str
) -> None:
    queue, team = "dead.quorum", scene.team
    team.channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    for number, headers in enumerate((None, {}, {"trace": "t"})):
        written = pika.BasicProperties(headers=headers, delivery_mode=2)
        team.channel.basic_publish("", queue, b"%d" % number, written, mandatory=True)
    with FrameLink(broker_url, Point("ack", 1, "before")) as link:
        scene.program.but(broker_url=link.url).run("ingest", queue)
    stored = scene.rows()
    assert 1 <= stored <= 3  # of the batch that was cut at its acknowledgement; on a busy machine not all are in it
    team.await_depth(queue, 3)
    done = scene.program.run("ingest", queue, "--json")
    counts = done.told["counts"]
    assert (counts["duplicate"], counts["recorded"]) == (stored, 3 - stored), done.said
    assert scene.rows() == 3


@pytest.mark.slow
def test_a_database_connection_that_is_cut_ends_the_run_with_a_reason_and_the_next_one_finishes(
    scene: Scene, broker_url: str
) -> None:
    fill(broker_url, range(WITH_ID), with_ids=True)
    process = scene.start_and_reach_the_middle(WITH_ID // 4)
    cut = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'dlqbatch' AND pid <> pg_backend_pid()"
    )
    # It may be over already, or not have connected yet.
    assert eventually(lambda: scene.store.execute(cut).fetchone() != (0,) or process.poll() is not None)
    output, errors = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode in {PARTIAL, UNREACHABLE}, output + errors
    assert "cannot be used" in output + errors
    assert eventually(lambda: scene.team.depth(DLQ) + scene.rows() >= WITH_ID)
    scene.finish(WITH_ID)
    assert scene.rows() == WITH_ID
