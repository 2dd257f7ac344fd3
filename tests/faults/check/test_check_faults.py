"""A check is cut at any instant of its work, again and again; then one run finishes.

Whatever the cut, no message is lost. What is doubled is at most what was under way: published, and not acknowledged.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import rawamqp
from program import HANDLER, HANGS_AFTER, Program, eventually
from rawamqp import Message, Peer

from dlqbatch.broker.transfer import WINDOW

if TYPE_CHECKING:
    from scripts.servers.management import Management

DEPTH, KILLS = 6_000, 8
SOURCE, TARGET = "dlq.a", "permanent_failure_queue"
PARTIAL, UNREACHABLE = 3, 4
COMMAND = (sys.executable, HANDLER, "check")
KINDS = pytest.mark.parametrize("kind", ["classic", "quorum"])


def fill(peer: Peer, kind: str) -> None:
    peer.queue(SOURCE, {"x-queue-type": kind})
    for number in range(0, DEPTH, 2_000):
        peer.publish(_dead(each) for each in range(number, number + 2_000))


def _dead(number: int) -> Message:
    entries = [(b"dlqbatch-retries", rawamqp.number(9 if number % 2 else 1))]
    properties = rawamqp.properties(entries, correlation_id=b"%d" % number, delivery_mode=2)
    return Message("", SOURCE.encode(), properties, b"%08d" % number)


def program(url: str, management: Management) -> Program:
    host, port = management._address
    given = {"broker_url": url, "management_url": f"http://{host}:{port}", "log_level": "error"}
    return Program(given | {"database_url": "sqlite:////dev/null"}, COMMAND)


def start_and_reach_the_middle(check: Program, peer: Peer, chance: random.Random) -> subprocess.Popen[str]:
    wanted = peer.depth(TARGET) + chance.randint(0, DEPTH // (2 * KILLS))
    process = check.start(SOURCE, "--json")
    assert eventually(lambda: peer.depth(TARGET) > wanted or process.poll() is not None)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=chance.uniform(0, 0.03))
    return process


def finish(check: Program, peer: Peer) -> int:
    """The number of copies too many, once a run has gone through."""

    def is_done() -> bool:
        done = check.run(SOURCE, "--json")
        assert done.code == 0, done.said
        return bool(eventually(lambda: peer.depth(SOURCE) == DEPTH // 2, 5.0))

    assert eventually(is_done)
    stayed = [int(seen.body) for seen in peer.read(SOURCE)]
    gone = [int(seen.body) for seen in peer.read(TARGET)]
    assert sorted(stayed) == list(range(0, DEPTH, 2))
    assert set(gone) == set(range(1, DEPTH, 2))
    return len(gone) - DEPTH // 2


def chances() -> random.Random:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
    return random.Random(seed)


@pytest.mark.slow
@KINDS
def test_a_check_killed_at_any_instant_loses_nothing_and_doubles_only_what_was_under_way(
    broker_url: str, management: Management, kind: str
) -> None:
    chance, check = chances(), program(broker_url, management)
    with Peer(broker_url) as peer:
        fill(peer, kind)
        peer.queue(TARGET, {"x-queue-type": kind})
        killed = 0
        for _ in range(KILLS):
            process = start_and_reach_the_middle(check, peer, chance)
            process.kill()
            process.communicate(timeout=HANGS_AFTER)
            killed += process.returncode == -signal.SIGKILL
            # What it held comes back only when the broker has noticed.
            peer.wait_for(lambda: peer.depth(SOURCE) + peer.depth(TARGET) >= DEPTH, "all to be where they are counted")
        assert killed > KILLS // 2
        doubled = finish(check, peer)
        sys.stdout.write(f"{doubled} doubled by {killed} kills\n")
        assert doubled <= WINDOW * killed


@pytest.mark.slow
@KINDS
def test_a_check_told_to_end_puts_everything_back_and_doubles_nothing(
    broker_url: str, management: Management, kind: str
) -> None:
    chance, check = chances(), program(broker_url, management)
    with Peer(broker_url) as peer:
        fill(peer, kind)
        peer.queue(TARGET, {"x-queue-type": kind})
        process = start_and_reach_the_middle(check, peer, chance)
        process.terminate()
        output, errors = process.communicate(timeout=HANGS_AFTER)
        assert process.returncode in {0, PARTIAL}, output + errors
        peer.wait_for(lambda: peer.depth(SOURCE) + peer.depth(TARGET) == DEPTH, "all to be where they are counted")
        assert finish(check, peer) == 0


@pytest.mark.slow
def test_a_connection_that_the_broker_closes_ends_the_check_with_a_reason(
    broker_url: str, management: Management
) -> None:
    chance, check = chances(), program(broker_url, management)
    with Peer(broker_url) as peer:
        fill(peer, "classic")
        peer.queue(TARGET)
        process = start_and_reach_the_middle(check, peer, chance)
        named = [
            one["name"]
            for one in management.get("connections")
            if one["vhost"] == management.vhost
            and one.get("client_properties", {}).get("connection_name") == "dlqbatch check"
        ]
        for name in named:
            management.delete(f"connections/{name.replace(' ', '%20').replace('>', '%3E')}")
        output, errors = process.communicate(timeout=HANGS_AFTER)
        assert process.returncode in {0, PARTIAL, UNREACHABLE}, output + errors
        assert process.returncode == 0 or "CONNECTION_FORCED" in output + errors
        if process.returncode == PARTIAL:
            told = json.loads(output)
            assert told["stopped_by"] == "time"
            assert [one for one in told["warnings"] if "raise the bound" in one] == []
        peer.wait_for(lambda: peer.depth(SOURCE) + peer.depth(TARGET) >= DEPTH, "all to be where they are counted")
        assert finish(check, peer) <= WINDOW
