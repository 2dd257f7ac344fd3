"""Delays are changed while failures arrive and drains run: every message comes back, once for each failure."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pika
import pytest
from program import DLQ, HANGS_AFTER, RETRY_QUEUE, Client, Program, client, eventually

if TYPE_CHECKING:
    from scripts.servers.management import Management

pytestmark = pytest.mark.slow

OLD, NEW = "700,700,700", "300,300,300"
TRIPS = 3
MESSAGES = 400


class Consumer(threading.Thread):
    """Rejects everything TRIPS times, by its own account of each body, then takes it."""

    def __init__(self, url: str, queue: str) -> None:
        super().__init__()
        self._url, self._queue = url, queue
        self._stop_asked = threading.Event()
        self.seen: Counter[bytes] = Counter()

    def run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            for method, _, body in channel.consume(self._queue, inactivity_timeout=0.05):
                if method is not None:
                    self.seen[body] += 1
                    if self.seen[body] <= TRIPS:
                        channel.basic_reject(method.delivery_tag, requeue=False)
                    else:
                        channel.basic_ack(method.delivery_tag)
                elif self._stop_asked.is_set():
                    break
            channel.cancel()

    def end(self) -> None:
        self._stop_asked.set()
        self.join(HANGS_AFTER)


class Drains(threading.Thread):
    """One run after another; with the new delays from the moment that the broker refuses the old ones."""

    def __init__(self, old: Program, new: Program) -> None:
        super().__init__()
        self._program, self._new = old, new
        self._stop_asked = threading.Event()
        self.codes: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            done = self._program.run("drain", "--json")
            self.codes[done.code] += 1
            if done.code == 2:
                self._program = self._new
            else:
                self.reasons.update(done.told["reasons"])

    def end(self) -> None:
        self._stop_asked.set()
        self.join(HANGS_AFTER)


@pytest.fixture
def old(program: Program, management: Management, broker_addresses: tuple[str, str], team: Client) -> Program:
    for queue in ("queue.delay.1", "queue.delay.2", "queue.delay.3"):
        team.channel.queue_delete(queue)
    program = program.but(tier_ttls=OLD, management_url=broker_addresses[1])
    assert program.run("topology", "apply").code == 0
    team.make_origin("orders-queue")
    return program


def ttl_of(management: Management) -> object:
    queues = {queue["name"]: queue["arguments"] for queue in management.queues()}
    return queues.get("queue.delay.1", {}).get("x-message-ttl")


def publish_over_time(url: str, stop: threading.Event) -> None:
    with client(url) as publisher:
        for number in range(MESSAGES):
            publisher.publish("orders", "orders.created", b"%d" % number)
            if stop.wait(0.01):
                return


def test_while_drains_run_every_message_comes_back_once_for_each_failure(
    old: Program, broker_url: str, team: Client, management: Management
) -> None:
    new = old.but(tier_ttls=NEW)
    consumer, drains = Consumer(broker_url, "orders-queue"), Drains(old, new)
    stop = threading.Event()
    publisher = threading.Thread(target=publish_over_time, args=(broker_url, stop))
    threads = (consumer, drains, publisher)
    for thread in threads:
        thread.start()
    try:
        assert eventually(lambda: sum(consumer.seen.values()) > 100)
        # Killed twice on the way, before and after the old queue has gone, then left to end.
        for reached in (lambda: team.exists("queue.delay.1.relay"), lambda: ttl_of(management) == 300):
            changing = new.start("topology", "apply", "--change-ttl")
            assert eventually(reached)
            changing.kill()
            changing.communicate()
        assert new.run("topology", "apply", "--change-ttl").code == 0
        publisher.join(HANGS_AFTER)
        assert eventually(lambda: len(consumer.seen) == MESSAGES)
        assert eventually(lambda: min(consumer.seen.values()) == TRIPS + 1), consumer.seen.most_common()[-5:]
    finally:
        stop.set()
        drains.end()
        consumer.end()
        publisher.join(HANGS_AFTER)
    assert set(consumer.seen.values()) == {TRIPS + 1}, "one was doubled"
    assert team.depth(DLQ) == team.depth(RETRY_QUEUE) == 0
    names = {queue["name"]: queue["arguments"] for queue in management.queues()}
    assert not [name for name in names if name.endswith(".relay") or name.startswith("dlqbatch.")]
    for tier in (1, 2, 3):
        assert names[f"queue.delay.{tier}"]["x-message-ttl"] == 300
    assert set(drains.reasons) <= {"unroutable"}
    assert set(drains.codes) <= {0, 2, 3}
    assert drains.codes[2] <= 1


def test_the_delay_of_a_per_queue_set_is_changed_while_its_drain_stands_by(
    old: Program, broker_url: str, team: Client, management: Management
) -> None:
    described = {"kind": "per-queue", "queue": "created", "exchange": "shop", "ttl": "20s"}
    given = [text for option, value in described.items() for text in ("-s", f"topology.shop.{option}={value}")]
    changed = [text.replace("20s", "2s") for text in given]
    policy = ("-s", "allow_empty_policy=true")
    assert old.run("topology", "apply", *given).code == 0
    assert old.run("events", "set", "created", "3").code == 0
    for number in range(20):
        team.publish("shop", "created", b"%d" % number)
    team.reject_all("created")
    team.await_depth("created.retry", 20)
    assert old.run("drain", "--max-messages", "10", *given, *policy).code == 0
    assert team.depth("created.delay") == 10
    changing = old.start("topology", "apply", "--change-ttl", *changed)
    try:
        assert eventually(lambda: team.exists("created.delay.relay"))
        done = old.run("drain", "--json", *given, *policy)
        assert done.code == 0, done.said
        report = done.told
        assert report["counts"]["got"] == 0
        assert any("'created.retry' was not read" in warning for warning in report["warnings"])
    finally:
        _, said = changing.communicate(timeout=HANGS_AFTER)
    assert changing.returncode == 0, said
    assert management.queue("created.delay")["arguments"]["x-message-ttl"] == 2000
    team.await_depth("created", 10)
    assert old.run("drain", *changed, *policy).code == 0
    team.await_depth("created", 20)
