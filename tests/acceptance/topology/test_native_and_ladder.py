"""The same failures with the broker's own delayed retry and with a ladder: they end alike, and none comes too early."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pika
import pytest
from broker_client import PERSISTENT, Side
from diagnosis import Patient
from program import eventually
from ready_store import make_tables
from sqlalchemy import create_engine, text
from workers import working

from dlqbatch.consumer import Consumer, Context
from dlqbatch.drain.event_config import event_config
from dlqbatch.drain.job import drain
from dlqbatch.ingest.job import ingest
from dlqbatch.jobs import RunOptions
from dlqbatch.settings import load
from dlqbatch.topology import job as topology_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlqbatch.settings import Settings
    from scripts.servers.management import Management

DELAYS = (0.3, 0.6, 0.7)
"""Seconds: 300 ms more with each failure, at most 700."""
FAILURES = {b"works": 0, b"once": 1, b"thrice": 3, b"always": 99, b"never": 99}
HANDLED = [b"once", b"thrice", b"works"]
DEAD = [b"always", b"never"]
CLOCK = 0.98
"""The broker rounds to milliseconds, and may let its clock go a hundredth faster to follow that of the machine."""
OPTIONS = {
    "native": {
        "ladder": "false",
        "topology.orders.kind": "native",
        "topology.orders.queue": "orders",
        "topology.orders.delayed-retry-min": "300",
        "topology.orders.delayed-retry-max": "700",
    },
    "ladder": {"tier_ttls": "300,600,700"},
}


@pytest.fixture
def side(broker43_url: str) -> Iterator[Side]:
    opened = Side(broker43_url)
    yield opened
    opened.close()


@dataclass
class Worker:
    """Fails each message as often as the table says, and notes how long each stayed away."""

    url: str
    requeues: bool
    handled: list[bytes] = field(default_factory=list)
    away: dict[bytes, list[float]] = field(default_factory=lambda: defaultdict(list))
    _failed_at: dict[bytes, float] = field(default_factory=dict)
    _ends: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()

    def _work(self) -> None:
        side = Side(self.url)
        try:
            for method, _, body in side.channel.consume("orders", inactivity_timeout=0.02):
                if body is not None:
                    self._handle(side, method.delivery_tag, body)
                if self._ends.is_set():
                    side.channel.cancel()
                    return
        finally:
            side.close()

    def _handle(self, side: Side, tag: int, body: bytes) -> None:
        now = time.monotonic()
        if body in self._failed_at:
            self.away[body].append(now - self._failed_at[body])
        if len(self.away[body]) >= FAILURES[body]:
            self.handled.append(body)
            side.channel.basic_ack(tag)
            return
        self._failed_at[body] = time.monotonic()
        side.channel.basic_reject(tag, requeue=self.requeues)


def never_early(what: str, away: Sequence[float], wished: Sequence[float]) -> None:
    """How late they came is shown, and no more: that is the machine's."""
    sys.stdout.write(f"{what}: {' '.join(f'{seconds:.3f}' for seconds in away)}\n")
    assert all(seconds >= delay * CLOCK for seconds, delay in zip(away, wished, strict=False)), away


def settings_of(kind: str, url: str, management: Management, database: str) -> Settings:
    given = Patient(url, management, database).settings | OPTIONS[kind]
    return load(given, {"DLQBATCH_CONFIG": "/dev/null"})


def dead(settings: Settings) -> list[tuple[object, ...]]:
    engine = create_engine(settings.database_url.get_secret_value())
    columns = "body, status, origin_queue, event, retry_count"
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(f"SELECT {columns} FROM dlq_messages ORDER BY body"))]
    engine.dispose()
    return found


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_failures_have_the_same_end_and_no_retry_comes_too_early(
    broker43_url: str, management43: Management, sqlite_url: str, side: Side, kind: str
) -> None:
    settings = settings_of(kind, broker43_url, management43, sqlite_url)
    make_tables(sqlite_url)
    event_config(settings).set("orders", len(DELAYS))
    to_ladder = {"dead_letter_exchange": "retry-exchange", "dead_letter_routing_key": "retry-routing-key"}
    topology_job.apply(settings, topology_job.choose(settings, ()))
    # After the policy: a queue that is there hears of it a moment later.
    side.queue("orders", "quorum", **({} if kind == "native" else to_ladder))
    worker = Worker(broker43_url, requeues=kind == "native")
    for body in FAILURES:
        side.channel.basic_publish("", "orders", body, PERSISTENT)

    def is_over() -> bool:
        if kind == "ladder":
            drain(settings, RunOptions())
        return side.depth("dlq-queue") == len(DEAD) and len(worker.handled) == len(HANDLED)

    with worker.at_work():
        assert eventually(is_over)
    assert sorted(worker.handled) == HANDLED
    for body, away in worker.away.items():
        never_early(f"{kind} {body.decode()}", away, DELAYS)
        assert len(away) == min(FAILURES[body], len(DELAYS))
    report = ingest(settings, RunOptions())
    assert report.counts["recorded"] == len(DEAD)
    assert dead(settings) == [(body, "pending", "orders", "orders", len(DELAYS)) for body in DEAD]


def test_what_is_put_back_by_nack_is_neither_delayed_nor_counted(
    broker43_url: str, management43: Management, sqlite_url: str, side: Side
) -> None:
    """So a worker has to reject, and a run of ours that looks at messages costs them nothing."""
    settings = settings_of("native", broker43_url, management43, sqlite_url)
    topology_job.apply(settings, topology_job.choose(settings, ()))
    side.queue("orders", "quorum")
    side.fill("orders", [b"1"])
    taken: list[pika.BasicProperties] = []

    def look() -> bool:
        method, properties, _ = side.channel.basic_get("orders")
        if method is not None:
            taken.append(properties)
            side.channel.basic_nack(method.delivery_tag, requeue=True)
        return len(taken) > 2 * len(DELAYS)

    side.wait(look)
    assert taken[-1].headers == {"x-acquired-count": 2 * len(DELAYS)}


def test_the_consumer_has_its_back_off_from_the_broker(
    broker43_url: str, management43: Management, sqlite_url: str, side: Side
) -> None:
    pipeline = {"kind": "pipeline", "exchange": "step", "queue-type": "quorum", "delayed-retry-min": "300"}
    given = Patient(broker43_url, management43, sqlite_url).settings
    given |= {"ladder": "false", **{f"topology.step.{option}": value for option, value in pipeline.items()}}
    settings = load(given, {"DLQBATCH_CONFIG": "/dev/null"})
    for _ in range(2):
        # The second queue is there later than the policy, and has it from its beginning.
        side.channel.queue_delete("step")
        topology_job.apply(settings, topology_job.choose(settings, ()))
    consumer = Consumer(broker43_url, queue="step", max_retries=3)
    begun: list[tuple[float, int]] = []
    ended: list[float] = []

    @consumer.on("#")
    def fail(_: bytes, context: Context) -> None:
        begun.append((time.monotonic(), context.retries))
        ended.append(time.monotonic())
        raise ValueError("no")

    side.channel.basic_publish("step", "asked", b"1", PERSISTENT)
    with working(consumer):
        assert eventually(lambda: side.depth("dlq.step") == 1)
    assert [retries for _, retries in begun] == [0, 1, 2, 3]
    away = [later - before for before, (later, _) in zip(ended, begun[1:], strict=False)]
    never_early("consumer", away, (0.3, 0.6, 0.9))
    (letter,) = side.empty("dlq.step")
    assert letter.properties.headers["dlqbatch-reason"] == "worker-failed"
