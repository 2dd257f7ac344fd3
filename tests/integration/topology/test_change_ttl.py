"""Changing a delay under a mandatory publisher: nothing lost, nothing doubled, nothing late, wherever it is cut."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pika
import pytest
from broker_client import Side, connected
from pika.exceptions import UnroutableError
from program import HANGS_AFTER

from dlqbatch.broker.management import Api
from dlqbatch.topology import declare
from dlqbatch.topology.change_ttl import ChangeCutOff, ChangeUnderWay, Delays, Wanted, _Change
from dlqbatch.topology.inspect import Reader as Knowing
from dlqbatch.topology.model import CHANGING, Binding, Exchange, Queue, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.broker.connection import Connection
    from scripts.servers.management import Management

OLD, NEW = 1500, 400
BINDING = Binding("entry", "binding.#.1", "delay")
AT_LEAST_ONCE = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


class Cut(Exception):
    """Where the process would have been killed."""


class Cutting(Delays):
    """Killed before its N-th change of what is on the broker."""

    def _send(self, methods: Any) -> None:
        self._count()
        super()._send(methods)

    def _declare(self, queue: Queue) -> None:
        self._count()
        super()._declare(queue)

    def _count(self) -> None:
        CUTS[0] -= 1
        if CUTS[0] < 0:
            raise Cut


CUTS = [0]


def topology(ttl: int, kind: str) -> Topology:
    arguments = {"x-dead-letter-exchange": "out", "x-dead-letter-routing-key": "k", "x-message-ttl": ttl}
    return Topology(
        (Exchange("entry"), Exchange("out")),
        (Queue("delay", arguments | (AT_LEAST_ONCE if kind == "quorum" else {})), Queue("after")),
        (BINDING, Binding("out", "k", "after")),
    )


def wanted(ttl: int, kind: str) -> Wanted:
    return Wanted(topology(ttl, kind).queues[0], (BINDING,), kind == "quorum", entered_directly=False)


class Publisher(threading.Thread):
    """Publishes every few milliseconds; remembers when the broker took what, and what it gave back."""

    def __init__(self, url: str, pause: float) -> None:
        super().__init__()
        self._url, self._pause = url, pause
        self._stop_asked = threading.Event()
        self.sent: dict[bytes, float] = {}
        self.returned = 0

    def run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            number = 0
            persistent = pika.BasicProperties(delivery_mode=2)
            while not self._stop_asked.wait(self._pause):
                body = b"%d" % number
                began = time.monotonic()
                try:
                    channel.basic_publish("entry", "binding.a.1", body, persistent, mandatory=True)
                except UnroutableError:
                    self.returned += 1
                else:
                    self.sent[body] = began
                number += 1

    def end(self) -> None:
        self._stop_asked.set()
        self.join(HANGS_AFTER)


class Reader(threading.Thread):
    """Remembers when what came out."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._stop_asked = threading.Event()
        self.seen: Counter[bytes] = Counter()
        self.at: dict[bytes, float] = {}

    def run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            for method, _, body in channel.consume("after", inactivity_timeout=0.05):
                if method is not None:
                    self.seen[body] += 1
                    self.at[body] = time.monotonic()
                    channel.basic_ack(method.delivery_tag)
                elif self._stop_asked.is_set():
                    break
            channel.cancel()

    def end(self) -> None:
        self._stop_asked.set()
        self.join(HANGS_AFTER)


@contextmanager
def load(url: str, pause: float = 0.002) -> Iterator[tuple[Publisher, Reader]]:
    publisher, reader = Publisher(url, pause), Reader(url)
    publisher.start()
    reader.start()
    try:
        yield publisher, reader
    finally:
        publisher.end()
        reader.end()


def settled(side: Side, publisher: Publisher, reader: Reader) -> None:
    publisher.end()
    side.wait(lambda: len(reader.seen) >= len(publisher.sent))


def bindings(management: Management) -> set[tuple[str, str]]:
    return {(one["source"], one["destination"]) for one in management.bindings()}


def verify(management: Management, publisher: Publisher, reader: Reader, ttl: int) -> None:
    assert publisher.sent.keys() == reader.seen.keys(), "lost, or from nowhere"
    assert set(reader.seen.values()) == {1}
    late = [body for body, sent in publisher.sent.items() if reader.at[body] - sent > (OLD + NEW) / 1000 + 1.0]
    assert not late
    assert {queue["name"] for queue in management.queues()} == {"delay", "after"}
    assert management.queue("delay")["arguments"]["x-message-ttl"] == ttl
    assert bindings(management) == {("entry", "delay"), ("out", "after")}


def api_of(url: str, management: Management) -> Knowing:
    return Knowing(Api(url, "http://guest:guest@{}:{}".format(*management._address)))


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    yield side
    side.close()


def nobody_knows(_: str) -> int | None:
    return None


def changer(connection: Connection, kind: type[Delays] = Delays) -> Delays:
    return kind(connection, nobody_knows, calm_after=0.0, grace=0.1)


@pytest.mark.usefixtures("on_every_broker")
def test_under_a_publisher_nothing_is_lost_doubled_or_late(broker_url: str, side: Side, management: Management) -> None:
    with connected(broker_url) as connection:
        declare.declare(connection, topology(OLD, "classic"))
        with load(broker_url) as (publisher, reader):
            side.wait(lambda: len(publisher.sent) > 100)
            changer(connection).change([wanted(NEW, "classic")])
            settled(side, publisher, reader)
        assert publisher.returned <= 10
        verify(management, publisher, reader, NEW)


@pytest.mark.slow
@pytest.mark.usefixtures("on_every_broker")
def test_a_quorum_queue_under_a_publisher(broker_url: str, side: Side, management: Management) -> None:
    with connected(broker_url) as connection:
        declare.declare(connection, topology(OLD, "quorum"))
        # For half a minute: a message every 2 ms would keep a core busy.
        with load(broker_url, 0.01) as (publisher, reader):
            side.wait(lambda: len(publisher.sent) > 100)
            api = api_of(broker_url, management)
            Delays(connection, api.messages, calm_after=0.0, grace=0.1).change([wanted(NEW, "quorum")])
            settled(side, publisher, reader)
        verify(management, publisher, reader, NEW)


@pytest.mark.usefixtures("on_every_broker")
def test_a_quorum_queue_is_not_empty_while_it_holds_what_it_could_not_dead_letter(
    broker_url: str, side: Side, management: Management
) -> None:
    api = api_of(broker_url, management)
    with connected(broker_url) as connection:
        declare.declare(connection, topology(1, "quorum"))
        side.channel.queue_unbind("after", "out", "k")
        side.channel.confirm_delivery()
        for _ in range(5):
            side.channel.basic_publish("entry", "binding.a.1", b"held", mandatory=True)
        side.wait(lambda: side.depth("delay") == 0 and api.messages("delay") == 5)
        delays = Delays(connection, api.messages, calm_after=0.0, quiet=0.0)
        assert not delays._looks_empty(_Change(wanted(1, "quorum"), 0.0), "delay")


@pytest.mark.usefixtures("on_every_broker")
def test_an_api_that_fails_once_does_not_keep_a_quorum_queue_for_ever(
    broker_url: str, side: Side, management: Management
) -> None:
    answers = iter([3, 0, None])

    def fails_once(_: str) -> int | None:
        return next(answers, 0)

    with connected(broker_url) as connection:
        declare.declare(connection, topology(OLD, "quorum"))
        Delays(connection, fails_once, calm_after=0.0, grace=0.1, quiet=0.5).change([wanted(NEW, "quorum")])
    assert management.queue("delay")["arguments"]["x-message-ttl"] == NEW
    assert not side.exists(CHANGING)


@pytest.mark.usefixtures("on_every_broker")
def test_an_api_that_stays_silent_ends_a_change_that_can_be_resumed(
    broker_url: str, side: Side, management: Management
) -> None:
    answers = iter([3, 2])

    def tells_no_more(_: str) -> int | None:
        return next(answers, None)

    with connected(broker_url) as connection:
        declare.declare(connection, topology(OLD, "quorum"))
        began = time.monotonic()
        with pytest.raises(ChangeCutOff, match=r"'delay'.* run the same command again"):
            Delays(connection, tells_no_more, calm_after=0.0, grace=0.1, quiet=0.5, restarts_within=1.0).change(
                [wanted(NEW, "quorum")]
            )
        assert time.monotonic() - began >= 1.0
        assert side.exists(CHANGING)
        api = api_of(broker_url, management)
        Delays(connection, api.messages, calm_after=0.0, grace=0.1, quiet=0.5).change([wanted(NEW, "quorum")])
    assert management.queue("delay")["arguments"]["x-message-ttl"] == NEW
    assert not side.exists(CHANGING)


@pytest.mark.parametrize("cut", range(12))
def test_cut_before_any_step_it_goes_on_where_it_was(
    broker_url: str, side: Side, management: Management, cut: int
) -> None:
    with connected(broker_url) as connection:
        declare.declare(connection, topology(OLD, "classic"))
    with load(broker_url) as (publisher, reader):
        side.wait(lambda: len(publisher.sent) > 20)
        CUTS[0] = cut
        with connected(broker_url) as connection, pytest.raises(Cut):
            changer(connection, Cutting).change([wanted(NEW, "classic")])
        assert side.exists(CHANGING)
        with connected(broker_url) as connection:
            changer(connection).change([wanted(NEW, "classic")])
        settled(side, publisher, reader)
    assert not side.exists(CHANGING)
    verify(management, publisher, reader, NEW)


def test_cut_in_the_middle_it_can_be_taken_back(broker_url: str, side: Side, management: Management) -> None:
    with connected(broker_url) as connection:
        declare.declare(connection, topology(OLD, "classic"))
    with load(broker_url) as (publisher, reader):
        side.wait(lambda: len(publisher.sent) > 20)
        CUTS[0] = 4
        with connected(broker_url) as connection, pytest.raises(Cut):
            changer(connection, Cutting).change([wanted(NEW, "classic")])
        with connected(broker_url) as connection:
            changer(connection).change([wanted(OLD, "classic")])
        settled(side, publisher, reader)
    verify(management, publisher, reader, OLD)


def test_whoever_declares_the_topology_meanwhile_doubles_nothing_for_long(
    broker_url: str, side: Side, management: Management
) -> None:
    with connected(broker_url) as connection, connected(broker_url) as other:
        declare.declare(connection, topology(OLD, "classic"))
        meddled = []

        def meddle(_queue: str, step: str) -> None:
            if not meddled:
                meddled.append(step)
                declare.declare(other, topology(OLD, "classic"))

        Delays(connection, nobody_knows, calm_after=0.0, grace=0.1, report=meddle).change([wanted(NEW, "classic")])
    assert meddled
    assert bindings(management) == {("entry", "delay"), ("out", "after")}


def test_two_never_change_at_once(broker_url: str, side: Side) -> None:
    with connected(broker_url) as connection, connected(broker_url) as other:
        declare.declare(connection, topology(OLD, "classic"))
        refused = []

        def second(_queue: str, _step: str) -> None:
            with pytest.raises(ChangeUnderWay):
                changer(other).change([wanted(NEW, "classic")])
            refused.append(True)

        Delays(connection, nobody_knows, calm_after=0.0, grace=0.1, report=second).change([wanted(NEW, "classic")])
    assert refused
    assert not side.exists(CHANGING)
