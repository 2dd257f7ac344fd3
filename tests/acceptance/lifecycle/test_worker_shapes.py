"""Workers of six shapes that pass on what they received, driven through the drain, the dead store and the consumer.

Whatever a worker publishes beside its message is a message of its own. An oracle that only watches publishes, rejects
and acknowledgements says which key, how many retries and which id each of them has to have.
"""

from __future__ import annotations

import base64
import json
import random
import secrets
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pika
import pytest
from program import DLQ, HANGS_AFTER, RETRY_QUEUE, Client, Program, eventually

from dlqbatch.consumer import Consumer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_every_broker")]

SHAPES = ("passes-on", "polls", "follows-up", "follows-up-elsewhere", "copies-and-rejects", "retries-itself")
WAYS = ("exchange", "default-exchange", "per-queue", "via-exchange")
TRACELESS = ("default-exchange", "per-queue", "via-exchange")
"""Ways back that leave no exchange of ours in the next death.

A copy with the same body and the same key cannot be told there from the message that it copies, and counts as it.
"""
TOPIC, OTHER = "shop", "elsewhere"
MAX_RETRIES: Final = 2
ROUNDS = 5
TTL = "50ms"
LADDER = (RETRY_QUEUE, *(f"{name}{tier}" for name in ("queue.delay.", "retry-queue-") for tier in (1, 2, 3)))

Name = tuple[str, int]
"""A number in the body, and which copy of it."""


@dataclass
class Known:
    """One message as the oracle knows it."""

    queue: str
    key: str
    parent: str | None = None
    """The id that the message had whose headers this one got."""
    id: str | None = None
    base: int = 0
    """Retries that a copy has from the start, where it counts as what it copies."""
    fails: int = 0
    failed_attempts: int = 0
    has_failed: bool = False


@dataclass
class World:
    """A team's exchange, the queues of its workers, and what is true of every message."""

    team: Client
    way: str
    random: random.Random
    settings: Mapping[str, str]
    messages: dict[Name, Known] = field(default_factory=dict)
    alive: set[Name] = field(default_factory=set)
    dead: dict[Name, str] = field(default_factory=dict)
    """Dead letters, by the queue they failed in."""
    number: int = 0

    def declare(self) -> None:
        channel = self.team.channel
        channel.exchange_declare(TOPIC, "topic", durable=True)
        ladder = {"x-dead-letter-exchange": RETRY_QUEUE.replace("queue", "exchange")}
        ladder["x-dead-letter-routing-key"] = "retry-routing-key"
        for queue in self.queues():
            if self.way != "per-queue":
                channel.queue_declare(queue, durable=True, arguments=ladder)
                channel.queue_bind(queue, TOPIC, f"{queue}.*")
            else:
                channel.queue_bind(queue, TOPIC, f"{queue}.#")

    def queues(self) -> list[str]:
        return [*SHAPES, OTHER]

    def key_of(self, queue: str, event: str) -> str:
        if self.way == "default-exchange" or (self.way == "per-queue" and event == "created"):
            return queue
        return f"{queue}.{event}"

    def publish(
        self, queue: str, event: str, properties: pika.BasicProperties | None = None, copy_of: Name | None = None
    ) -> None:
        """A new message; with the properties of another one it is what a worker publishes that passes them on."""
        if copy_of is None:
            self.number += 1
            name = (str(self.number), 0)
        else:
            self.number += 1
            name = (copy_of[0], self.number)
        headers = dict((properties.headers if properties is not None else None) or {})
        headers["copy"] = name[1]
        known = Known(queue, self.key_of(queue, event), parent=headers.get("dlqbatch-id"))
        if copy_of is not None and self.way in TRACELESS and headers.get("dlqbatch-digest"):
            known.id, known.parent, known.base = known.parent, None, headers.get("dlqbatch-retries", 0)
        self.messages[name] = known
        self.alive.add(name)
        written = pika.BasicProperties(headers=headers, delivery_mode=2, correlation_id="kept")
        body = json.dumps({"message": name[0]}).encode()
        exchange = "" if self.way == "default-exchange" else TOPIC
        self.team.channel.basic_publish(exchange, known.key, body, written, mandatory=True)

    def everywhere(self) -> int:
        homes = [f"{queue}{end}" for queue in self.queues() for end in (".retry", ".delay")]
        queues = [*self.queues(), DLQ, *(homes if self.way == "per-queue" else LADDER)]
        return sum(self.team.depth(queue) for queue in queues)

    def await_all(self) -> None:
        """Nothing is lost, and nothing is doubled: as many messages stand in queues as there are."""
        wanted = len(self.alive) + len(self.dead)
        assert eventually(lambda: self.everywhere() == wanted), f"{self.everywhere()} messages, not {wanted}"

    def work(self, *, may_fail: bool = True) -> None:
        """Every worker handles what stands in its queue at the start."""
        for queue in self.queues():
            for _ in range(self.team.depth(queue)):
                method, properties, body = self.team.channel.basic_get(queue)
                assert method is not None
                name = (json.loads(body)["message"], (properties.headers or {}).get("copy", 0))
                self.check(name, queue, method, properties)
                self.handle(name, queue, method.delivery_tag, properties, may_fail=may_fail)

    def check(self, name: Name, queue: str, method: Any, properties: Any) -> None:
        known = self.messages[name]
        headers = properties.headers or {}
        assert name in self.alive, f"{name} was done with, and comes again"
        assert queue == known.queue, f"{name} of {known.queue} came to {queue}"
        # The delay queue gives it the queue's name as key; a retry from the store has its own.
        after_return = known.has_failed and self.way == "per-queue" and "dlqbatch-attempt" not in headers
        assert method.routing_key == (queue if after_return else known.key), name
        assert properties.correlation_id == "kept"
        if known.has_failed:
            assert headers["dlqbatch-origin-key"] == known.key, (name, headers)
            if "dlqbatch-attempt" not in headers:
                assert headers["dlqbatch-retries"] == known.base + known.fails, (name, known, headers)
            self.identify(name, headers["dlqbatch-id"], headers.get("dlqbatch-parent"))

    def identify(self, name: Name, identity: str, parent: str | None) -> None:
        known = self.messages[name]
        if known.id is None:
            known.id = identity
            assert parent == known.parent, (name, known, parent)
        assert identity == known.id, (name, known, identity)

    def handle(self, name: Name, queue: str, tag: int, properties: Any, *, may_fail: bool) -> None:
        fails = may_fail and self.random.random() < 0.55
        channel = self.team.channel
        if fails and queue == "copies-and-rejects" and self.random.random() < 0.5:
            # It retries by a copy, and rejects the original: both must not be had, but what comes of it must be true.
            self.publish(queue, "created", properties, copy_of=name)
        if fails and queue == "retries-itself" and self.random.random() < 0.5:
            self.publish(queue, "created", properties, copy_of=name)
            fails = False
        if fails:
            channel.basic_reject(tag, requeue=False)
            self.failed(name, properties.headers or {})
            return
        if may_fail and self.random.random() < 0.6:
            if queue == "passes-on":
                self.publish(OTHER, "traced", properties)
            elif queue == "polls":
                self.publish("polls", "created", properties)
            elif queue == "follows-up":
                self.publish("follows-up", "paid", properties)
            elif queue == "follows-up-elsewhere":
                self.publish("passes-on", "shipped", properties)
        channel.basic_ack(tag)
        self.alive.discard(name)

    def failed(self, name: Name, headers: Mapping[str, Any]) -> None:
        known = self.messages[name]
        is_attempt = "dlqbatch-attempt" in headers and known.id is not None and headers["dlqbatch-id"] == known.id
        known.has_failed = True
        if is_attempt:
            known.failed_attempts += 1
        elif known.base + known.fails < MAX_RETRIES:
            known.fails += 1
            return
        self.alive.discard(name)
        self.dead[name] = known.queue


def drain(program: Program, world: World) -> None:
    """Until nothing waits for it, nor in a delay."""
    waiting = [f"{queue}{end}" for queue in world.queues() for end in (".retry", ".delay")]
    waiting = waiting if world.way == "per-queue" else list(LADDER)

    def is_quiet() -> bool:
        done = program.run("drain", "--json")
        assert done.code == 0, done.said
        assert not done.told["reasons"].keys() - {"retries-exhausted", "attempt-failed"}, done.told
        return not any(world.team.depth(queue) for queue in waiting)

    world.await_all()
    assert eventually(is_quiet)
    world.await_all()


@pytest.fixture
def seed() -> int:
    """A failed test shows it among its arguments."""
    return secrets.randbits(32)


def world_of(program: Program, team: Client, way: str, seed: int, folder: Path) -> tuple[Program, World]:
    lines = [f"dlqbatch.events.#={MAX_RETRIES}"]
    if way == "per-queue":
        for queue in (*SHAPES, OTHER):
            name = queue.replace("-", "")
            lines += [f"dlqbatch.topology.{name}.kind=per-queue", f"dlqbatch.topology.{name}.queue={queue}"]
            lines += [f"dlqbatch.topology.{name}.exchange={TOPIC}", f"dlqbatch.topology.{name}.ttl={TTL}"]
    config = folder / "application.properties"
    config.write_text("\n".join(lines) + "\n")
    database = {"database_url": f"sqlite:///{folder / 'shapes.sqlite3'}", "tier_ttls": ",".join([TTL] * 3)}
    program = program.but(config=str(config), **database)
    if way == "via-exchange":
        program = program.but(return_via="exchange")
    for call in (("db", "upgrade"), ("topology", "apply")):
        done = program.run(*call)
        assert done.code == 0, done.said
    world = World(team, way, random.Random(seed), program.settings)
    world.declare()
    return program, world


@pytest.mark.parametrize("way", WAYS)
def test_every_message_keeps_its_own_key_count_and_id(
    program: Program, team: Client, tmp_path: Path, way: str, seed: int
) -> None:
    program, world = world_of(program, team, way, seed, tmp_path)
    for shape in SHAPES:
        for _ in range(6):
            world.publish(shape, "created")
    rounds = 0
    while rounds < ROUNDS or not world.dead:
        world.work()
        drain(program, world)
        rounds += 1
    check_store(program, world)

    # What is dead is sent again from the store, and its workers go on as before.
    replay(program)
    world.alive |= world.dead.keys()
    world.dead.clear()
    for _ in range(3):
        world.work()
        drain(program, world)
    check_store(program, world)
    world.work(may_fail=False)
    assert not world.alive
    ids = Counter(known.id for known in world.messages.values() if known.id is not None)
    assert way in TRACELESS or set(ids.values()) == {1}


def check_store(program: Program, world: World) -> None:
    """One row for each dead letter, with its own event, id, count and failed attempts."""
    done = program.run("ingest", "--json")
    assert done.code == 0, done.said
    listed = program.run("messages", "list", "--limit", "1000", "--json")
    assert listed.code == 0, listed.said
    rows = {row["id"]: row for row in listed.told["messages"]}
    found: dict[Name, dict[str, Any]] = {}
    for row_id in rows:
        shown = program.run("messages", "show", str(row_id), "--json").told
        name = (json.loads(base64.b64decode(shown["body_base64"]))["message"], shown["headers"].get("copy", 0))
        assert name not in found, f"{name} has two rows"
        found[name] = shown
    by_id = {row["identity"]: name for name, row in found.items()}
    for name, known in world.messages.items():
        if name in world.dead and name not in found:
            # A copy that cannot be told from its original: the store has the two as one message.
            assert world.way in TRACELESS, name
            assert by_id[known.id] in world.messages, name
            del world.dead[name]
        elif name in world.dead:
            row = found[name]
            assert row["event"] == known.key, (name, known, row)
            assert row["dlq_retry_count"] == known.failed_attempts, (name, known, row)
            assert row["retry_count"] == known.base + known.fails, (name, known, row)
            world.identify(name, row["identity"], row["parent"])


def replay(program: Program) -> None:
    planned = program.run("replay", "plan", "--all", "--reason", "mended", "--json")
    assert planned.code == 0, planned.said
    applied = program.run("replay", "apply", planned.told["hash"], "--no-canary", "--json")
    assert applied.code == 0, applied.said


@pytest.fixture
def handled(broker_url: str) -> Iterator[list[tuple[str, str, int]]]:
    """What the handlers of a worker on `dlqbatch.consumer` were called with; the worker publishes follow-ups."""
    seen: list[tuple[str, str, int]] = []
    consumer = Consumer(broker_url, queue="steps", max_retries=1, dead_letters="dlq.steps")
    publishing = pika.BlockingConnection(pika.URLParameters(broker_url))
    publisher = publishing.channel()

    @consumer.on("order.created")
    def created(body: bytes, context: Any) -> None:
        seen.append(("created", body.decode(), context.retries))
        if context.retries == 0:
            raise ConnectionError("try again")
        if body != b"1":
            return
        headers = dict(context.headers)
        publisher.basic_publish(TOPIC, "order.paid", body + b" paid", pika.BasicProperties(headers=headers))
        publisher.basic_publish(TOPIC, "order.created", body + b" again", pika.BasicProperties(headers=headers))

    @consumer.on("order.paid")
    def paid(body: bytes, context: Any) -> None:
        seen.append(("paid", body.decode(), context.retries))

    thread = threading.Thread(target=consumer.run)
    publisher.exchange_declare(TOPIC, "topic", durable=True)
    publisher.exchange_declare("dlq.steps", "topic", durable=True)
    publisher.queue_declare("steps", durable=True)
    publisher.queue_bind("steps", TOPIC, "order.#")
    publisher.queue_declare("dead.steps", durable=True)
    publisher.queue_bind("dead.steps", "dlq.steps", "#")
    thread.start()
    try:
        yield seen
    finally:
        consumer.stop()
        thread.join(HANGS_AFTER)
        publishing.close()


def test_the_consumer_calls_the_handler_of_the_messages_own_key(
    team: Client, handled: list[tuple[str, str, int]]
) -> None:
    team.publish(TOPIC, "order.created", b"1", {"trace": "t"})
    wanted = {("created", "1", 0), ("created", "1", 1), ("paid", "1 paid", 0), ("created", "1 again", 0)}
    assert eventually(lambda: wanted <= set(handled)), handled
    assert ("created", "1 again", 1) in handled or eventually(lambda: ("created", "1 again", 1) in handled)
