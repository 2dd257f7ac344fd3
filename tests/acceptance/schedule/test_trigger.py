"""A queue too deep for one drain: `dlqbatch schedule` starts more, as many as may be, and none once it is not deep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
from drain_setup import PLACES, check_sum, ordinary, put, set_stage, verify, waiting
from program import HANDLER, HANGS_AFTER
from rawamqp import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from scripts.servers.management import Management

MESSAGES, THRESHOLD, WORKERS, BOUND = 9_000, 500, 3, 1_500
# Everything but the trigger is off.
JOBS = ("DRAIN", "INGEST", "LIFECYCLE", "REPLAY", "MONITOR", "RETAIN", "CHECK")
SETTINGS = {f"DLQBATCH_SCHEDULE_{job}": "off" for job in JOBS}
SETTINGS |= {
    "DLQBATCH_TRIGGER_INTERVAL": "1s",
    "DLQBATCH_MAX_WORKERS": str(WORKERS),
    "DLQBATCH_HEALTH_ADDRESS": "127.0.0.1:0",
    "DLQBATCH_LOG_LEVEL": "info",
    "DLQBATCH_LOG_FORMAT": "json",
}


def eventually(condition: Callable[[], bool], seconds: float = HANGS_AFTER) -> bool:
    """Asks ten times a second: each question costs the scheduler what its drains could use."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Scheduled:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        both = ((process.stdout, self.out), (process.stderr, self.err))
        self._readers = [threading.Thread(target=self._read, args=one) for one in both]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Iterable[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line)  # noqa: PERF402  (each as soon as it is there)

    def logged(self, event: str) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in list(self.err) if line.startswith("{")]
        return [entry["fields"] for entry in entries if entry["event"] == event]

    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.out)]

    def drains(self) -> dict[str, Any]:
        """What its health says of them."""
        assert eventually(lambda: bool(self.logged("scheduling"))), "".join(self.err)
        address = self.logged("scheduling")[0]["health"]
        with urlopen(f"http://{address}/healthz", timeout=HANGS_AFTER) as answer:
            found: dict[str, Any] = json.load(answer)["jobs"]["drain"]
        return found

    def is_idle(self) -> bool:
        return self.drains()["running"] == 0

    def starts_more(self, than: int, seconds: float = 3.0) -> bool:
        return eventually(lambda: self.drains()["started"] > than, seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(HANGS_AFTER)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join(HANGS_AFTER)
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()


@contextmanager
def scheduled(variables: Mapping[str, str]) -> Iterator[Scheduled]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DLQBATCH_")}
    process = subprocess.Popen(
        [sys.executable, HANDLER, "schedule", "--json"],
        env={**inherited, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Scheduled(process)
    try:
        yield running
    finally:
        running.close()
    assert process.returncode == 0, "".join(running.err)


def most_at_once(runs: list[dict[str, Any]]) -> int:
    """By when each began and ended."""
    return max(sum(one["began"] <= run["began"] < one["ended"] for one in runs) for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_deep_queue_gets_as_many_drains_as_may_be_and_none_when_it_is_not_deep_any_more(
    broker_url: str, management: Management, tmp_path: Path, queue_type: str
) -> None:
    settings = SETTINGS | {
        "DLQBATCH_QUEUE_TYPE": queue_type,
        "DLQBATCH_TRIGGER_DEPTH": str(THRESHOLD),
        "DLQBATCH_MAX_MESSAGES": str(BOUND),
    }
    with set_stage(broker_url, management, tmp_path, **settings) as stage, Peer(broker_url) as peer:
        expected = put(peer, ordinary(range(MESSAGES)))
        peer.wait_for(lambda: waiting(peer) == MESSAGES, "the queues to be as deep as they are")
        with scheduled(stage.variables) as scheduler:
            assert eventually(lambda: waiting(peer) < THRESHOLD and scheduler.is_idle()), scheduler.err
            started = scheduler.drains()["started"]
            assert not scheduler.starts_more(started)

            # Up to one message below the threshold nothing is started; that one more starts one drain.
            rest = waiting(peer)
            more = range(MESSAGES, MESSAGES + THRESHOLD - rest - 1)
            expected |= put(peer, ordinary(more))
            assert not scheduler.starts_more(started)
            expected |= put(peer, ordinary(range(more.stop, more.stop + 1)))
            assert scheduler.starts_more(started, HANGS_AFTER)
            assert eventually(lambda: scheduler.is_idle() and waiting(peer) == 0), scheduler.err
            assert scheduler.drains()["started"] == started + 1

        runs = scheduler.runs()
        assert len(runs) == started + 1
        for run in runs:
            check_sum(run)
            # On a busy machine a run may leave some to a later one, or not see all; then it says which and why.
            is_told = run["exit_code"] == 3 and bool(run["counts"]["left"] or run["warnings"])
            assert run["job"] == "drain"
            assert run["exit_code"] == 0 or is_told, run
        assert sum(run["counts"]["got"] - run["counts"]["left"] for run in runs) == len(expected)
        assert max(run["counts"]["got"] for run in runs) <= BOUND
        assert most_at_once(runs) == WORKERS
        told = scheduler.logged("the queues are deep: more runs")
        assert sum(entry["started"] for entry in told) == started + 1
        assert told[0] == {"job": "drain", "started": WORKERS, "running": WORKERS, "depth": MESSAGES}
        assert all(entry["running"] <= WORKERS and entry["depth"] >= THRESHOLD for entry in told)
        assert verify(stage, expected, peer.read(*PLACES)) == 0


def test_drains_that_can_move_nothing_are_not_started_over_and_over(
    broker_url: str, management: Management, tmp_path: Path
) -> None:
    settings = SETTINGS | {
        "DLQBATCH_TRIGGER_DEPTH": "10",
        "DLQBATCH_DATABASE_URL": "postgresql+psycopg://nobody:s3cret@127.0.0.1:1/away",
    }
    with set_stage(broker_url, management, tmp_path, **settings) as stage, Peer(broker_url) as peer:
        put(peer, ordinary(range(100)))
        with scheduled(stage.variables) as scheduler:
            assert eventually(lambda: len(scheduler.runs()) > WORKERS), scheduler.err
        runs = sorted(scheduler.runs(), key=lambda run: str(run["began"]))
        assert {run["exit_code"] for run in runs[: WORKERS + 1]} == {4}
        first_end = min(datetime.fromisoformat(run["ended"]) for run in runs)
        pause = datetime.fromisoformat(runs[WORKERS]["began"]) - first_end
        assert pause >= timedelta(seconds=4.9)
        assert waiting(peer) == 100
        assert "s3cret" not in "".join([*scheduler.out, *scheduler.err])
