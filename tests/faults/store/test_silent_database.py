"""Something between a run and its database keeps every connection open and forwards nothing more.

No server and no kernel notices. The run ends by itself, within its bounds, with the right code; what it held is back.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
from dead_rows import NOW, add, row, store_at
from lifecycle_rows import ORIGIN, connect, due, number
from program import HANGS_AFTER, RETRY_QUEUE, Client, Program, client, eventually
from rawamqp import Message, Peer, properties, text
from stalling_link import StallingLink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

PARTIAL, UNREACHABLE = 3, 4
SESSION = b"statement_timeout"
"""In the first that a new connection sends."""
BOUNDS = {"max_seconds": "20", "settle_seconds": "1", "connect_timeout_seconds": "2"}
"""Enough for a busy machine to come to the statement that is not answered."""
MESSAGES, DUE = 300, 20
HALF = ("lifecycle", "-s", f"max_messages={DUE // 2}")
NO_ANSWER = "no answer from the database within 23 s"
HUNG = "the run did not end within its bounds"


class Case(NamedTuple):
    command: tuple[str, ...]
    script: tuple[bytes, ...]
    code: int
    says: str
    is_heard: bool = False
    """Whether the last text still reaches the database."""


CASES = (
    Case(("drain",), (), UNREACHABLE, "connection timeout expired"),
    Case(("drain",), (SESSION,), UNREACHABLE, NO_ANSWER),
    Case(("drain",), (b"dlq_event_config",), UNREACHABLE, NO_ANSWER),
    Case(("ingest", "dlq.session"), (SESSION,), UNREACHABLE, NO_ANSWER),
    Case(("ingest", "dlq.first"), (b"INSERT INTO dlq_messages",), UNREACHABLE, NO_ANSWER),
    Case(
        ("ingest", "dlq.second"),
        (b"INSERT INTO dlq_messages", b"COMMIT", b"INSERT INTO dlq_messages"),
        PARTIAL,
        NO_ANSWER,
    ),
    Case(("ingest", "dlq.lost"), (b"INSERT INTO dlq_messages", b"COMMIT"), UNREACHABLE, NO_ANSWER, is_heard=True),
    Case(("lifecycle",), (SESSION,), UNREACHABLE, NO_ANSWER),
    Case(HALF, (b"INSERT INTO dlq_attempts",), UNREACHABLE, NO_ANSWER),
    Case(HALF, (b"UPDATE dlq_attempts",), PARTIAL, f"{DUE // 2} sent message(s) could not be marked as sent"),
    Case(("retain",), (SESSION,), UNREACHABLE, NO_ANSWER),
    Case(("retain",), (b"DELETE FROM dlq_messages",), UNREACHABLE, NO_ANSWER),
    Case(("monitor",), (SESSION,), UNREACHABLE, NO_ANSWER),
    Case(("monitor",), (b"dlq_alerts",), UNREACHABLE, NO_ANSWER),
    # A check reads no database: all that it misses is a line in the log of runs.
    Case(("check", "kept.*"), (b"INSERT INTO dlq_runs",), 0, "this run is not in the log of runs: no answer"),
)


class Scene:
    """A ladder, a policy, and a dead store that is reached through links."""

    def __init__(self, url: str, management_url: str, database_url: str, team: Client) -> None:
        self.database_url, self.team, self.url = database_url, team, url
        self.started: list[subprocess.Popen[str]] = []
        self.program = Program(
            {"broker_url": url, "management_url": management_url, "database_url": database_url, "log_level": "error"}
        )
        self.engine = store_at(database_url)
        self.store = connect(database_url)
        self.store.execute("INSERT INTO dlq_event_config VALUES (1, 'orders.created', 3)")
        assert self.program.run("topology", "apply", "--yes").code == 0

    def fill(self, queue: str) -> None:
        self.team.channel.queue_declare(queue, durable=True)
        with Peer(self.url) as peer:
            peer.publish(
                Message(
                    "",
                    queue.encode(),
                    properties([(b"dlqbatch-id", text(f"{queue}-{each}"))], delivery_mode=2),
                    b"%d" % each,
                )
                for each in range(MESSAGES)
            )

    def start(self, link: StallingLink, *command: str, **settings: str) -> subprocess.Popen[str]:
        run = self.program.but(**{"database_url": link.url, **settings}).start(*command, "--json")
        self.started.append(run)
        return run

    def close(self) -> None:
        """Whatever a test that failed has left."""
        for run in self.started:
            with run:
                run.kill()

    def rows(self, queue: str) -> int:
        return number(self.store, f"SELECT count(*) FROM dlq_messages WHERE source_queue = '{queue}'")


@pytest.fixture
def scene(broker_url: str, management: Any, database_url: str) -> Iterator[Scene]:
    host, port = management._address
    with client(broker_url) as team:
        scene = Scene(broker_url, f"http://{host}:{port}", database_url, team)
        with scene.store, contextlib.closing(scene):
            yield scene


def test_every_job_ends_by_itself_and_what_it_held_is_back(scene: Scene) -> None:
    queues = (RETRY_QUEUE, "dlq.session", "dlq.first", "dlq.second", "dlq.lost", "kept.a")
    for queue in queues:
        scene.fill(queue)
    scene.team.channel.queue_declare(ORIGIN, durable=True)
    add(scene.engine, *(due(each) for each in range(DUE)), at=NOW.replace(year=2020))
    (over,) = add(scene.engine, row(), at=NOW.replace(year=2020))
    scene.store.execute("UPDATE dlq_messages SET status = 'resolved' WHERE id = %s", (over,))
    with contextlib.ExitStack() as stack:
        waiting = []
        for case in CASES:
            link = stack.enter_context(StallingLink(scene.database_url, *case.script, is_heard=case.is_heard))
            run = scene.start(link, *case.command, **BOUNDS)
            # One after the other, so that they do not take the time from one another in which they start.
            assert eventually(lambda link=link, run=run: link.asked.is_set() or run.poll() is not None)
            waiting.append((case, link, run))
        for case, link, run in waiting:
            out, err = run.communicate(timeout=HANGS_AFTER)
            assert link.is_silent, f"{case} never asked: {out + err}"
            assert run.returncode == case.code, f"{case}: {out + err}"
            assert case.says in out + err, f"{case}: {out + err}"
            assert HUNG not in err
            # Who has moved something does not say that nothing was.
            assert case.code != PARTIAL or "No message was moved" not in out + err, f"{case}: {out + err}"
    stored = scene.rows("dlq.second")
    assert 0 < stored < MESSAGES
    for queue in queues:
        scene.team.await_depth(queue, MESSAGES - stored if queue == "dlq.second" else MESSAGES)
    assert scene.rows("dlq.session") == scene.rows("dlq.first") == 0
    # Sent and not noted: it goes out again under the same number. Not noted beforehand: it was not sent.
    scene.team.await_depth(ORIGIN, DUE // 2)
    assert number(scene.store, "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NULL AND number = 1") == DUE // 2
    assert number(scene.store, "SELECT count(*) FROM dlq_messages WHERE status = 'resolved'") == 1
    # Committed, whatever became of the answer: what the next run finds in the queue is known.
    assert scene.rows("dlq.lost") > 0
    again = scene.program.run("ingest", "dlq.lost", "--json")
    assert again.code == 0, again.said
    assert again.told["counts"]["duplicate"] > 0
    assert scene.rows("dlq.lost") == MESSAGES


def test_a_signal_ends_a_run_that_waits_for_a_silent_database(scene: Scene) -> None:
    """Long before the statement's time is over; and whatever time to connect the address allows."""
    for queue in (RETRY_QUEUE, "dlq.held"):
        scene.fill(queue)
    bounds = {"settle_seconds": "0.5", "connect_timeout_seconds": "1"}
    with (
        StallingLink(scene.database_url) as mute,
        StallingLink(scene.database_url, b"INSERT INTO dlq_messages") as link,
    ):
        runs = [
            scene.start(mute, "drain", **bounds, database_url=f"{mute.url}?connect_timeout=600"),
            scene.start(link, "ingest", "dlq.held", **bounds),
        ]
        assert mute.asked.wait(HANGS_AFTER)
        assert link.asked.wait(HANGS_AFTER)
        assert scene.team.depth("dlq.held") < MESSAGES
        began = time.monotonic()
        for run in runs:
            run.send_signal(signal.SIGTERM)
        for run in runs:
            out, err = run.communicate(timeout=HANGS_AFTER)
            assert run.returncode == UNREACHABLE, out + err
            assert HUNG in err
            assert '"outcome": "failed"' in out
        # Were it not for the signal, the run and then the watchdog would wait for minutes.
        assert 10 < time.monotonic() - began < 60
    for queue in (RETRY_QUEUE, "dlq.held"):
        scene.team.await_depth(queue, MESSAGES)


WATCHED = """
import sys, threading, time
import dlqbatch.settings  # a run has read its settings long before anything can hang
from dlqbatch.cli.watchdog import Watchdog

began = time.monotonic()
with Watchdog(float(sys.argv[1]), 0.5, lambda: sys.argv[2] == "signal", as_json=True) as watchdog:
    if sys.argv[2] == "again":
        while time.monotonic() < began + 1:
            watchdog.from_now()
    if sys.argv[2] != "ends":
        threading.Event().wait()
while time.monotonic() < began + 2:  # nobody watches any more
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("longest", "how", "code", "at_least"),
    [
        (1, "hangs", UNREACHABLE, 1.0),
        (600, "signal", UNREACHABLE, 0.5),
        (1, "again", UNREACHABLE, 2.0),
        (1, "ends", 0, 2.0),
    ],
)
def test_what_ignores_every_bound_is_ended_with_its_process(
    longest: float, how: str, code: int, at_least: float
) -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", WATCHED, str(longest), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER, check=False)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - began >= at_least
    assert (HUNG in done.stderr) == (HUNG in done.stdout) == (code != 0)
