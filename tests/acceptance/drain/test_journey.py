"""Three messages go the whole way, with the delays of the original installation: 10, 15 and 20 seconds."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC
from functools import partial
from typing import TYPE_CHECKING, Any

import pika
import pytest
from program import HANGS_AFTER, Program

if TYPE_CHECKING:
    from collections.abc import Callable

    from program import Finished

    from scripts.servers.management import Management

DECISIONS = ("delayed", "returned", "dead_lettered", "recorded", "moved", "left")

EXCHANGES = {
    "retry-exchange",
    "retry-exchange-1",
    "retry-exchange-2",
    "retry-exchange-3",
    "route-delay",
    "dlq-exchange",
    "test-retry-exchange",
}
FAILS_TO = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
QUEUES: dict[str, dict[str, str | int]] = {
    "retry-queue": {},
    "retry-queue-1": {},
    "retry-queue-2": {},
    "retry-queue-3": {},
    "queue.delay.1": {
        "x-dead-letter-exchange": "retry-exchange-1",
        "x-dead-letter-routing-key": "retry.#.1",
        "x-message-ttl": 10_000,
    },
    "queue.delay.2": {
        "x-dead-letter-exchange": "retry-exchange-2",
        "x-dead-letter-routing-key": "retry.#.2",
        "x-message-ttl": 15_000,
    },
    "queue.delay.3": {
        "x-dead-letter-exchange": "retry-exchange-3",
        "x-dead-letter-routing-key": "retry.#.3",
        "x-message-ttl": 20_000,
    },
    "dlq-queue": {},
    "test-pass-queue": {**FAILS_TO},
    "test-fail-queue": {**FAILS_TO},
    "test-fail-pass-queue": {**FAILS_TO},
}
BINDINGS = {
    ("retry-exchange", "retry-routing-key", "retry-queue"),
    ("route-delay", "binding.#.1", "queue.delay.1"),
    ("route-delay", "binding.#.2", "queue.delay.2"),
    ("route-delay", "binding.#.3", "queue.delay.3"),
    ("retry-exchange-1", "retry.#.1", "retry-queue-1"),
    ("retry-exchange-2", "retry.#.2", "retry-queue-2"),
    ("retry-exchange-3", "retry.#.3", "retry-queue-3"),
    ("dlq-exchange", "dlq-routing-key", "dlq-queue"),
    ("dlq-exchange", "dlq-exchange", "dlq-queue"),
    ("test-retry-exchange", "rk.test.pass", "test-pass-queue"),
    ("test-retry-exchange", "rk.test.fail", "test-fail-queue"),
    ("test-retry-exchange", "rk.test.fail.pass", "test-fail-pass-queue"),
}

CONSUMERS: dict[str, Callable[[int], bool]] = {
    "test-pass-queue": lambda _: True,
    "test-fail-queue": lambda _: False,
    "test-fail-pass-queue": lambda delivery: delivery > 1,
}
"""Whether a consumer acknowledges its nth delivery; what it does not acknowledge it rejects."""

BODY = b'\x00\xff{"order": 7}\r\n'
HEADERS = {"x-trace": "abc", "tenant": 12, "nested": {"list": [1, "two", {"three": True}], "none": None}, "": "no name"}
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "identity",
    "delivery_mode": 2,
    "priority": 4,
    "correlation_id": "correlated",
    "reply_to": "answers",
    "timestamp": 1_234_567_890,
    "type": "order",
    "app_id": "shop",
}


@dataclass
class Stage:
    """The consumers of the test queues, and a second subscriber to the same exchange."""

    connection: pika.BlockingConnection
    deliveries: dict[str, list[tuple[float, str, bytes]]] = field(default_factory=dict)
    rejected: dict[str, list[float]] = field(default_factory=dict)
    subscribed: Counter[str] = field(default_factory=Counter)

    def play(self) -> None:
        channel = self.connection.channel()
        for queue in CONSUMERS:
            self.deliveries[queue], self.rejected[queue] = [], []
            channel.basic_consume(queue, partial(self._consume, queue))
        channel.queue_declare("second-subscriber", durable=True)
        channel.queue_bind("second-subscriber", "test-retry-exchange", "rk.test.#")
        channel.basic_consume("second-subscriber", self._subscribe, auto_ack=True)

    def _consume(self, queue: str, channel: Any, method: Any, _: Any, body: bytes) -> None:
        deliveries = self.deliveries[queue]
        deliveries.append((time.monotonic(), method.routing_key, body))
        if CONSUMERS[queue](len(deliveries)):
            channel.basic_ack(method.delivery_tag)
        else:
            self.rejected[queue].append(time.monotonic())
            channel.basic_reject(method.delivery_tag, requeue=False)

    def _subscribe(self, _channel: Any, method: Any, *_: Any) -> None:
        self.subscribed[method.routing_key] += 1

    def waits(self, queue: str) -> list[float]:
        """Seconds from each rejection to the next delivery."""
        returned = [at for at, _, _ in self.deliveries[queue][1:]]
        return [back - gone for gone, back in zip(self.rejected[queue], returned, strict=False)]


def run(program: Program, *arguments: str) -> Finished:
    done = program.run(*arguments)
    assert done.code == 0, done.said
    return done


def drain(program: Program) -> Counter[str]:
    report = run(program, "drain", "--json").told
    assert report["outcome"] == "ok"
    assert report["counts"]["got"] == sum(report["counts"][decision] for decision in DECISIONS)
    return Counter(report["counts"])


def assert_topology_is_the_original(management: Management) -> None:
    exchanges = {one["name"]: one for one in management.exchanges()}
    assert set(exchanges) == EXCHANGES
    for exchange in exchanges.values():
        assert (exchange["type"], exchange["durable"], exchange["auto_delete"]) == ("topic", True, False)
        assert exchange["arguments"] == {}
    queues = {one["name"]: one for one in management.queues()}
    # From 4.x on the broker itself writes down the type of a queue that was declared without one.
    untold = ("x-queue-type", "classic")
    found = {name: dict(queue["arguments"].items() - {untold}) for name, queue in queues.items()}
    assert found == QUEUES
    for queue in queues.values():
        assert (queue["type"], queue["durable"], queue["auto_delete"]) == ("classic", True, False)
    bindings = management.bindings()
    assert {(one["source"], one["routing_key"], one["destination"]) for one in bindings} == BINDINGS
    assert len(bindings) == len(BINDINGS)


@pytest.mark.slow
def test_three_messages_pass_at_once_fail_for_good_and_pass_after_one_delay(
    broker_url: str, sqlite_url: str, management: Management
) -> None:
    program = Program({"broker_url": broker_url, "database_url": sqlite_url})
    run(program, "db", "upgrade")
    for event in ("rk.test.pass", "rk.test.fail", "rk.test.fail.pass"):
        run(program, "events", "set", event, "3")
    run(program, "topology", "apply", "--demonstration")
    assert_topology_is_the_original(management)

    with pika.BlockingConnection(pika.URLParameters(broker_url)) as connection:
        stage = Stage(connection)
        stage.play()
        channel = connection.channel()
        channel.confirm_delivery()
        for event in ("rk.test.pass", "rk.test.fail", "rk.test.fail.pass"):
            properties = pika.BasicProperties(message_id=f"id of {event}", headers=HEADERS, **PROPERTIES)
            channel.basic_publish("test-retry-exchange", event, BODY, properties, mandatory=True)
        started_at = int(time.time())
        deadline = time.monotonic() + HANGS_AFTER
        totals: Counter[str] = Counter()
        while not totals["dead_lettered"]:
            assert time.monotonic() < deadline, f"not there yet: {totals}, {stage.deliveries}"
            # As a scheduler would, once a second, or sooner if something happens.
            connection.process_data_events(1)
            totals += drain(program)
        assert drain(program)["got"] == 0
        connection.process_data_events(0)
        method, properties, body = channel.basic_get("dlq-queue", auto_ack=True)
        left = {queue: channel.queue_declare(queue, passive=True).method.message_count for queue in QUEUES}

    assert totals == Counter(got=9, delayed=4, returned=4, dead_lettered=1)
    assert left == dict.fromkeys(QUEUES, 0)

    # Each consumer got its own message, with its own key, as often as the policy says and no more.
    seen = {queue: [(key, body) for _, key, body in found] for queue, found in stage.deliveries.items()}
    assert seen == {
        "test-pass-queue": [("rk.test.pass", BODY)],
        "test-fail-queue": [("rk.test.fail", BODY)] * 4,
        "test-fail-pass-queue": [("rk.test.fail.pass", BODY)] * 2,
    }
    assert stage.subscribed == {"rk.test.pass": 1, "rk.test.fail": 1, "rk.test.fail.pass": 1}
    for queue, delays in {"test-fail-queue": [10, 15, 20], "test-fail-pass-queue": [10]}.items():
        assert all(wait >= delay for wait, delay in zip(stage.waits(queue), delays, strict=True)), stage.waits(queue)

    # The dead letter: where from, why, its whole history; the rest of it as it was published.
    assert (method.exchange, method.routing_key) == ("dlq-exchange", "dlq-routing-key")
    assert body == BODY
    assert {name: getattr(properties, name) for name in PROPERTIES} == PROPERTIES
    assert properties.message_id == "id of rk.test.fail"
    assert properties.expiration is None
    own = {name: value for name, value in properties.headers.items() if name.startswith("dlqbatch-")}
    assert {name: value for name, value in properties.headers.items() if name not in own} == HEADERS
    assert own["dlqbatch-reason"] == "retries-exhausted"
    assert own["dlqbatch-retries"] == 3
    assert own["dlqbatch-origin-queue"] == "test-fail-queue"
    assert own["dlqbatch-origin-exchange"] == "test-retry-exchange"
    assert own["dlqbatch-origin-key"] == "rk.test.fail"
    first, last = (own[f"dlqbatch-{name}-at"].replace(tzinfo=UTC).timestamp() for name in ("first-failed", "dead"))
    assert started_at - 1 <= first <= last - 44  # whole seconds; of a later failure it would be 35 at most
    assert last - started_at >= 45
    assert [(death["queue"], death["reason"]) for death in own["dlqbatch-history"]] == [
        ("test-fail-queue", "rejected"),
        ("queue.delay.3", "expired"),
        ("test-fail-queue", "rejected"),
        ("queue.delay.2", "expired"),
        ("test-fail-queue", "rejected"),
        ("queue.delay.1", "expired"),
        ("test-fail-queue", "rejected"),
    ]
