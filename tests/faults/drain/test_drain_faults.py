"""A drain is cut at any instant of its work, again and again; then runs are made until it is quiet.

Whatever the cut, nothing is lost and nothing changed. What may be doubled is what was under way at a cut.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import pytest
from drain_setup import COPY, LADDER, PLACES, arrived, ordinary, put, report_of, set_stage, verify, waiting
from program import HANGS_AFTER
from rawamqp import AmqpError, Peer

from dlqbatch.broker.transfer import WINDOW
from dlqbatch.errors import BrokerLost, BrokerUnreachable
from scripts.servers.management import Management
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from drain_setup import Stage
    from rawamqp import Seen


Answer = TypeVar("Answer")

DEPTH = 5_000
"""Messages on the queues whenever a drain is started."""
KILLS, STOPS, CLOSES = 12, 5, 5
UNDER_WAY = WINDOW + WINDOW // 8
"""At the instant of a cut: the window, and what one queue's channel has confirmed to it that another's has not read."""
DONE, PARTIAL, UNREACHABLE = 0, 3, 4


class Scene:
    """A stage with a drain that is started again and again on refilled queues."""

    def __init__(self, stage: Stage, peer: Peer) -> None:
        self.stage = stage
        self.peer = peer
        self.expected: dict[bytes, Seen] = {}
        seed = secrets.randbits(32)
        sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
        self.random = random.Random(seed)

    def refill(self) -> None:
        # What a cut drain held comes back only when the broker has noticed.
        self.peer.wait_for(self.is_complete, "all messages to be where they can be counted")
        self.add(DEPTH - waiting(self.peer))

    def add(self, count: int) -> None:
        start = len(self.expected)
        self.expected |= put(self.peer, ordinary(range(start, start + count)))

    def is_complete(self) -> bool:
        return waiting(self.peer) + arrived(self.peer) >= len(self.expected)

    def start_and_reach_the_middle(self) -> subprocess.Popen[str]:
        """A drain of the refilled queues that has moved some of them, by chance few or many."""
        self.refill()
        before = arrived(self.peer)
        process = self.stage.start()
        wanted = before + self.random.randint(1, DEPTH * 3 // 4)
        self.peer.wait_for(lambda: arrived(self.peer) >= wanted or process.poll() is not None, "the drain to be at it")
        return process

    def finish(self) -> int:
        """Runs until it is quiet, then the number of copies too many."""
        self.peer.wait_for(self.is_complete, "all messages to be where they can be counted")
        settings = self.stage.settings()
        while waiting(self.peer):
            assert self.stage.drain(settings)["outcome"] == "ok"
        found = self.peer.read(*PLACES)
        sys.stdout.write(f"{len(found)} found, {len(self.expected)} expected\n")
        return verify(self.stage, self.expected, found)


@pytest.fixture(params=["classic", "quorum"])
def scene(request: pytest.FixtureRequest, broker_url: str, management: Management, tmp_path: Path) -> Iterator[Scene]:
    with (
        set_stage(broker_url, management, tmp_path, DLQBATCH_QUEUE_TYPE=request.param) as stage,
        Peer(broker_url) as peer,
    ):
        yield Scene(stage, peer)


@pytest.mark.slow
def test_a_drain_killed_at_any_instant_loses_nothing_and_doubles_only_what_was_under_way(scene: Scene) -> None:
    killed = 0
    for _ in range(KILLS):
        process = scene.start_and_reach_the_middle()
        process.kill()
        process.communicate(timeout=HANGS_AFTER)
        killed += process.returncode == -signal.SIGKILL
    assert killed > KILLS // 2
    assert scene.finish() <= UNDER_WAY * killed


@pytest.mark.slow
def test_a_drain_told_to_end_settles_what_it_took_and_reports(scene: Scene) -> None:
    reports = []
    for _ in range(STOPS):
        process = scene.start_and_reach_the_middle()
        process.terminate()
        output, errors = process.communicate(timeout=HANGS_AFTER)
        assert process.returncode in {DONE, PARTIAL}, errors
        reports.append(report_of(output))
        # Everything is settled by then: what is not yet moved is back, and nothing is there twice.
        assert scene.is_complete()
        assert waiting(scene.peer) + arrived(scene.peer) == len(scene.expected)
        assert arrived(scene.peer) == sum(report["counts"]["got"] - report["counts"]["left"] for report in reports)
    assert "signal" in {report["stopped_by"] for report in reports}
    assert scene.finish() == 0


@pytest.mark.slow
def test_a_connection_closed_by_the_broker_ends_the_drain_with_a_reason_and_loses_nothing(
    scene: Scene, management: Management
) -> None:
    cut = 0
    for _ in range(CLOSES):
        process = scene.start_and_reach_the_middle()
        management.delete(f"connections/username/{scene.stage.login}")
        output, errors = process.communicate(timeout=HANGS_AFTER)
        assert process.returncode in {DONE, PARTIAL, UNREACHABLE}, errors
        if process.returncode != DONE:
            cut += 1
            assert "CONNECTION_FORCED" in output + errors
        if process.returncode == PARTIAL:
            report_of(output)
    assert cut > 0
    assert scene.finish() <= UNDER_WAY * CLOSES


@pytest.mark.slow
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_broker_that_dies_ends_the_drain_with_a_reason_and_has_every_message_when_it_is_back(
    queue_type: str, work_folder: Path, tmp_path: Path
) -> None:
    with RabbitNode(work_folder / "rabbitmq") as node:
        node.start()
        management = Management(node.management_url)
        with set_stage(
            node.url, management, tmp_path, DLQBATCH_QUEUE_TYPE=queue_type, DLQBATCH_MAX_SECONDS="600"
        ) as stage:
            node.write_down()
            with Peer(node.url) as peer:
                if queue_type == "quorum":
                    peer.wait_for(lambda: registered(node.folder), "the broker to have its queues on disk")
                scene = Scene(stage, peer)
                process = scene.start_and_reach_the_middle()
                node.kill()
            started = time.monotonic()
            output, errors = process.communicate(timeout=HANGS_AFTER)
            assert time.monotonic() - started < 120  # of the 600 s that it may take
            assert process.returncode in {PARTIAL, UNREACHABLE}, errors
            assert "connection to the broker" in output + errors
            if process.returncode == PARTIAL:
                report_of(output)

            node.restart()

            with again(lambda: Peer(node.url)) as scene.peer:
                # A quorum queue without a leader counts 0; these are confirmed only once there is one again.
                scene.add(80)
                scene.finish()


@pytest.mark.slow
def test_a_quorum_queue_that_has_no_leader_yet_is_not_taken_for_empty(work_folder: Path, tmp_path: Path) -> None:
    with RabbitNode(work_folder / "rabbitmq") as node:
        node.start()
        with set_stage(node.url, Management(node.management_url), tmp_path, DLQBATCH_QUEUE_TYPE="quorum") as stage:
            node.write_down()
            with Peer(node.url) as peer:
                peer.wait_for(lambda: registered(node.folder), "the broker to have its queues on disk")
                put(peer, ordinary(range(800)))
            settings = stage.settings()
            node.kill()
            node.restart()
            got, reports = 0, []
            deadline = time.monotonic() + HANGS_AFTER
            while got < 800 and time.monotonic() < deadline:
                with contextlib.suppress(BrokerUnreachable, BrokerLost):
                    reports.append(stage.drain(settings))
                    got += reports[-1]["counts"]["got"] - reports[-1]["counts"]["left"]
                    is_all_there_was = (reports[-1]["outcome"], reports[-1]["stopped_by"]) == ("ok", "empty")
                    assert got == 800 or not is_all_there_was, reports
            assert got == 800, reports


def registered(folder: Path) -> bool:
    """A node killed within half a second of a quorum queue's declaration forgets which files are the queue's."""
    names = [path.read_bytes() for path in folder.glob("data/node/quorum/*/names.dets")]
    return all(any(f"%2F_{queue}".encode() in text for text in names) for queue in (*LADDER, *PLACES, COPY))


def again(ask: Callable[[], Answer]) -> Answer:
    """The answer, once the broker that has just come back gives one."""
    deadline = time.monotonic() + HANGS_AFTER
    while time.monotonic() < deadline:
        with contextlib.suppress(AmqpError, OSError):
            return ask()
        time.sleep(0.05)
    return ask()
