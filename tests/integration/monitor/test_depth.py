"""How deep the queues of a drain are, asked of real brokers that come and go."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import pytest
from broker_client import Side
from program import HANGS_AFTER, eventually

from dlqbatch.monitor.queue_depths import DRAIN, INGEST, NAME, Depth, look_once
from dlqbatch.settings import load

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from scripts.servers.management import Management

AWAY = "the depth of the queues is not known"
BACK = "the depth of the queues is known again"
LADDER = ("retry-queue", "retry-queue-1", "retry-queue-2", "retry-queue-3")


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    yield side
    side.close()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.CRITICAL, "pika")
    caplog.set_level(logging.INFO)
    return caplog


class Summed(Depth):
    """A drain's queues together."""

    def sum(self) -> int | None:
        reading = self.read()
        return None if reading is None else reading.of(DRAIN)


@contextlib.contextmanager
def depth_of(
    url: str, config: Path | str = "/dev/null", jobs: Collection[str] = (DRAIN,), **options: object
) -> Iterator[Summed]:
    given = {"broker_url": url, "connect_timeout_seconds": 30, **options}
    depth = Summed(load(given, {"DLQBATCH_CONFIG": str(config)}), jobs)
    try:
        yield depth
    finally:
        depth.close()


class Road:
    """The way to the broker: any number of connections, until it is cut, or falls silent."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._broker = (parts.hostname or "127.0.0.1", parts.port or 5672)
        with socket.create_server(("127.0.0.1", 0)) as chosen:
            self._port = chosen.getsockname()[1]
        self.url = f"amqp://{parts.netloc.rpartition('@')[0]}@127.0.0.1:{self._port}{parts.path}"
        self._listener: socket.socket | None = None
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.accepted = 0
        self.is_silent = False
        """What the broker says is thrown away."""

    @property
    def open_connections(self) -> int:
        with self._lock:
            return len(self._ends) // 2

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._run(self._accept, self._listener)

    def cut(self) -> None:
        listener, self._listener = self._listener, None
        with self._lock:
            ends = [*self._ends, *([listener] if listener else [])]
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if listener:
            listener.close()
        assert eventually(lambda: self.open_connections == 0)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(HANGS_AFTER)

    def _run(self, target: object, *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                program, _ = listener.accept()
                broker = socket.create_connection(self._broker)
                for end in (program, broker):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._ends |= {program, broker}
                    self.accepted += 1
                self._run(self._forward, program, broker)
                self._run(self._forward, broker, program)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if not (self.is_silent and source.getpeername() == self._broker):
                    target.sendall(data)
        with self._lock:
            ends = {source, target} & self._ends
            self._ends -= ends
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if not ends:  # the other direction has ended before
            source.close()
            target.close()


@pytest.fixture
def road(broker_url: str) -> Iterator[Road]:
    with Road(broker_url) as road:
        yield road


def messages(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name.startswith("dlqbatch.")]


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_it_is_the_sum_over_every_queue_that_a_drain_serves(
    side: Side, broker_url: str, tmp_path: Path, kind: str, log: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "application.properties"
    config.write_text(
        "dlqbatch.topology.checkout.kind=per-queue\n"
        "dlqbatch.topology.checkout.queue=checkout\n"
        "dlqbatch.topology.checkout.exchange=shop\n"
    )
    for number, queue in enumerate((*LADDER, "checkout.retry", "checkout", "dlq-queue", "queue.delay.1")):
        side.queue(queue, kind)
        side.fill(queue, [b"x"] * 10**number if number < 5 else [b"not counted"])
    with depth_of(broker_url, config) as depth:
        assert depth.sum() == 11_111
        assert [depth.sum() for _ in range(20)] == [11_111] * 20
    assert side.depth("retry-queue-3") == 1_000
    assert not messages(log)


def test_a_queue_that_is_not_there_holds_nothing_and_is_not_made(
    side: Side, broker_url: str, log: pytest.LogCaptureFixture
) -> None:
    with depth_of(broker_url) as depth:
        assert depth.sum() == 0
        for queue in ("retry-queue-1", "retry-queue-3"):
            side.queue(queue)
            side.fill(queue, [b"x"] * 3)
        assert depth.sum() == 6
        side.channel.queue_delete("retry-queue-1")
        assert depth.sum() == 3
    assert [side.exists(queue) for queue in LADDER] == [False, False, False, True]
    assert not messages(log)


def test_where_nothing_is_drained_nothing_is_asked() -> None:
    with depth_of("amqp://127.0.0.1:1/", ladder="false") as depth:
        assert depth.sum() == 0


def test_one_connection_serves_every_look_and_answers_before_the_heartbeat_is_missed(side: Side, road: Road) -> None:
    side.queue("retry-queue")
    side.fill("retry-queue", [b"x"] * 7)
    with depth_of(road.url, trigger_interval="1s", heartbeat_seconds=3) as depth:
        began, next_look = time.monotonic(), threading.Event()
        while time.monotonic() - began < 8:  # the broker gives up who is silent for six seconds
            assert depth.sum() == 7
            next_look.wait(1.0)
        assert (road.accepted, road.open_connections) == (1, 1)
    assert eventually(lambda: road.open_connections == 0)


def test_looks_far_apart_leave_no_connection_behind(side: Side, road: Road) -> None:
    side.queue("retry-queue")
    side.fill("retry-queue", [b"x"] * 7)
    with depth_of(road.url, trigger_interval="20s", heartbeat_seconds=40) as depth:
        for looks in range(1, 4):
            assert depth.sum() == 7
            # Long before the broker would give it up, after 80 s.
            assert eventually(lambda: road.open_connections == 0, 70)
            assert road.accepted == looks


@pytest.mark.usefixtures("on_every_broker")
def test_a_connection_that_was_closed_by_the_broker_is_replaced_within_the_next_look(
    side: Side, broker_url: str, management: Management, log: pytest.LogCaptureFixture
) -> None:
    side.queue("retry-queue", "quorum")
    side.fill("retry-queue", [b"x"] * 4)
    with depth_of(broker_url) as depth:
        assert depth.sum() == 4

        def ours() -> list[str]:
            told = management.get("connections")
            names = {one["name"]: one.get("client_properties", {}).get("connection_name") for one in told}
            vhosts = {one["name"]: one.get("vhost") for one in told}
            return [name for name in names if names[name] == NAME and vhosts[name] == management.vhost]

        for _ in range(2):
            assert eventually(lambda: len(ours()) == 1)
            (name,) = ours()
            management.delete(f"connections/{name.replace(' ', '%20').replace('>', '%3E')}")
            assert depth.sum() == 4
    assert not messages(log)


def test_a_connection_that_was_lost_is_replaced_within_the_next_look(
    side: Side, road: Road, log: pytest.LogCaptureFixture
) -> None:
    side.queue("retry-queue")
    side.fill("retry-queue", [b"x"] * 5)
    with depth_of(road.url) as depth:
        for look in range(1, 4):
            assert depth.sum() == 5
            assert road.accepted == look
            road.cut()
            road.open()
    assert not messages(log)


def test_a_broker_that_is_away_is_told_once_and_so_is_its_return(
    side: Side, road: Road, log: pytest.LogCaptureFixture
) -> None:
    side.queue("retry-queue")
    side.fill("retry-queue", [b"x"] * 5)
    with depth_of(road.url) as depth:
        assert depth.sum() == 5
        for _ in range(2):
            road.cut()
            began = time.monotonic()
            assert [depth.sum() for _ in range(5)] == [None] * 5
            assert time.monotonic() - began < 60  # of the 150 that connecting may take: the next look is the next try
            road.open()
            assert [depth.sum() for _ in range(3)] == [5] * 3
    assert messages(log) == [AWAY, BACK, AWAY, BACK]
    assert "refused" in str(log.records[0].__dict__["fields"]["why"]).lower()


def test_a_broker_that_falls_silent_costs_no_more_than_the_time_to_connect(
    side: Side, road: Road, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlqbatch.broker.connection._ANSWER_WITHIN", 10 * HANGS_AFTER)
    side.queue("retry-queue")
    side.fill("retry-queue", [b"x"] * 5)
    with depth_of(road.url, connect_timeout_seconds=8) as depth:
        assert depth.sum() == 5
        road.is_silent = True
        for _ in range(2):  # on the kept connection, then on a new one
            began = time.monotonic()
            assert depth.sum() is None
            assert time.monotonic() - began < HANGS_AFTER  # an answer may take ten times as long otherwise
        road.is_silent = False
        assert depth.sum() == 5
    assert messages(log) == [AWAY, BACK]


def test_of_several_hosts_the_first_that_answers_is_asked(side: Side, road: Road, broker_url: str) -> None:
    side.queue("retry-queue")
    side.fill("retry-queue", [b"x"] * 2)
    road.is_silent = True
    with depth_of(f"amqp://127.0.0.1:1/x,{road.url},{broker_url}", connect_timeout_seconds=8) as depth:
        assert depth.sum() == 2


def test_a_refused_login_is_told_without_the_password(broker_url: str, log: pytest.LogCaptureFixture) -> None:
    with depth_of(broker_url.replace("guest:guest", "guest:s3cret-word")) as depth:
        assert [depth.sum(), depth.sum()] == [None, None]
    assert messages(log) == [AWAY]
    assert "user or password is wrong" in str(log.records[0].__dict__["fields"]["why"])
    assert "s3cret-word" not in str([record.__dict__ for record in log.records])


def test_a_queue_that_may_not_be_looked_at_is_told_and_the_others_count(
    broker43_url: str, management43: Management, log: pytest.LogCaptureFixture
) -> None:
    user = f"depth-{management43.vhost}"
    management43.put(f"users/{user}", {"password": "s3cret-word", "tags": ""})
    rights = {"configure": "^$", "write": "^$", "read": "^retry-queue$"}
    management43.put(f"permissions/{management43.vhost}/{user}", rights)
    side = Side(broker43_url)
    try:
        for queue in LADDER:
            side.queue(queue)
        side.fill("retry-queue", [b"x"] * 8)
        with depth_of(broker43_url.replace("guest:guest", f"{user}:s3cret-word")) as depth:
            assert [depth.sum(), depth.sum()] == [8, 8]
            assert messages(log) == [AWAY]
            assert "retry-queue-" in str(log.records[0].__dict__["fields"]["why"])
            management43.put(f"permissions/{management43.vhost}/{user}", rights | {"read": "^retry-queue"})
            # The broker remembers for a while what a channel was allowed, so the next connection is asked.
            depth.close()
            assert depth.sum() == 8
        assert messages(log) == [AWAY, BACK]
    finally:
        side.close()
        management43.delete(f"users/{user}")


def test_many_threads_may_ask_at_once(side: Side, road: Road) -> None:
    side.queue("retry-queue")
    side.fill("retry-queue", [b"x"] * 5)
    found: list[int | None] = []
    with depth_of(road.url) as depth:
        threads = [threading.Thread(target=lambda: found.extend(depth.sum() for _ in range(20))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_AFTER)
    assert found == [5] * 160
    assert road.accepted == 1


def test_closing_waits_for_no_silent_broker_and_leaves_nothing_open(side: Side, road: Road) -> None:
    side.queue("retry-queue")
    with depth_of(road.url, connect_timeout_seconds=10) as depth:
        assert depth.sum() == 0
        road.is_silent = True
        looking = threading.Thread(target=depth.read)
        looking.start()
        assert eventually(depth._lock.locked)
        depth.close()
        assert looking.is_alive()
        looking.join(HANGS_AFTER)
        assert eventually(lambda: road.open_connections == 0)


def test_each_job_has_the_depth_of_its_own_queues_and_wildcards_are_matched(
    side: Side, broker_url: str, management: Management, log: pytest.LogCaptureFixture
) -> None:
    for number, queue in enumerate(("retry-queue", "dlq.orders", "dlq.payments", "elsewhere")):
        side.queue(queue)
        side.fill(queue, [b"x"] * 10**number)
    options = {
        "ingest_queues": "dlq.*,missing",
        "management_url": "http://guest:guest@{}:{}".format(*management._address),
    }
    with depth_of(broker_url, jobs=(DRAIN, INGEST), **options) as depth:
        reading = depth.read()
        assert reading is not None
        assert (reading.of(DRAIN), reading.of(INGEST), reading.of("check")) == (1, 110, 0)
        assert reading.depths["dlq.payments"] == 100
        assert "elsewhere" not in reading.depths
    # Without the management API nobody knows what they match; the queues that are named are looked at all the same.
    options["management_url"] = "http://127.0.0.1:1"
    with depth_of(broker_url, jobs=(DRAIN, INGEST), **options) as depth:
        reading = depth.read()
        assert reading is not None
        assert (reading.of(DRAIN), reading.of(INGEST)) == (1, 0)
        assert depth.read() is not None
    assert messages(log) == [AWAY]
    assert "which queues the wildcards match" in str(log.records[0].__dict__["fields"]["why"])


def test_a_look_is_for_a_broker_that_is_named(side: Side, broker_url: str) -> None:
    side.queue("dlq-queue")
    side.fill("dlq-queue", [b"x"] * 3)
    named = load({"broker_url": broker_url}, {"DLQBATCH_CONFIG": "/dev/null"})
    reading = look_once(named, 5)
    assert reading is not None
    assert reading.depths == {**dict.fromkeys(LADDER, 0), "dlq-queue": 3}
    assert look_once(load({}, {"DLQBATCH_CONFIG": "/dev/null"}), 5) is None
    assert look_once(load({"broker_url": "amqp://127.0.0.1:1/"}, {"DLQBATCH_CONFIG": "/dev/null"}), 1) is None
