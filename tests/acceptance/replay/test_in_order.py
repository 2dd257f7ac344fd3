"""A plan in order, with consumers that fail and an apply that is killed: what the consumer saw, in its own words.

`DLQBATCH_TEST_IN_ORDER=10000 scripts/test tests/acceptance/replay/test_in_order.py -rP` is the whole of it: 500 keys,
on both databases. It prints how long it took.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pika
import pytest
from program import HANGS_AFTER, Client, Program, eventually
from ready_store import make_tables
from replay_rows import ORIGIN, dead, end_leases

from dlqbatch.amqp.identity import digest_of
from dlqbatch.store import journal
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import create_engine_for, writing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

SIZE = int(os.environ.get("DLQBATCH_TEST_IN_ORDER", "12"))
KEYS = max(SIZE // 20, 4)
FAILING = max(SIZE // 1000, 1)
"""Keys of which one message is rejected: it holds those behind it."""
PARTIAL = 3
LADDER = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
DATABASES = ["postgresql", "sqlite"] if SIZE >= 1000 else ["postgresql"]


class Consumer:
    """Takes many at once, and acknowledges each a moment later; it writes down what came too early."""

    def __init__(self, url: str, rejects: set[int]) -> None:
        self.acknowledged: set[int] = set()
        self.delivered: list[int] = []
        self.too_early: list[tuple[int, list[int]]] = []
        self._rejects = rejects
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()
        self._channel.basic_qos(prefetch_count=200)
        self._channel.basic_consume(ORIGIN, self._take)
        self._thread = threading.Thread(target=self._channel.start_consuming)
        self._thread.start()

    def _take(self, channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        number = int(body)
        self.delivered.append(number)
        before = [each for each in range(number % KEYS, number, KEYS) if each not in self.acknowledged]
        if before:
            self.too_early.append((number, before))

        def settle() -> None:
            if number in self._rejects:
                channel.basic_reject(method.delivery_tag, requeue=False)
            else:
                self.acknowledged.add(number)
                channel.basic_ack(method.delivery_tag)

        self._connection.call_later(random.random() / 5, settle)

    def stop(self) -> None:
        self._connection.add_callback_threadsafe(self._channel.stop_consuming)
        self._thread.join(HANGS_AFTER)
        self._connection.close()


def with_key(number: int) -> dict[str, Any]:
    """The message whose body is this number; its key is the rest of it by KEYS, in the place of the routing key."""
    made = dead(number)
    digest = digest_of(made["body"], b"")
    account = b"%d" % (number % KEYS)
    return made | {"digest": digest, "properties": made["properties"].replace(b"kept", account.zfill(4))}


@pytest.fixture(params=DATABASES)
def program(request: pytest.FixtureRequest, broker_url: str, broker_addresses: tuple[str, str]) -> Program:
    fixture = {"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]
    database_url = str(request.getfixturevalue(fixture))
    make_tables(database_url)
    given = {"broker_url": broker_url, "database_url": database_url, "management_url": broker_addresses[1]}
    made = Program(given | {"statistics_delay": "2s", "tier_ttls": "50,50,50"})
    for words in (("events", "set", "#", "0"), ("topology", "apply")):
        assert made.run(*words).code == 0
    return made


@pytest.fixture
def engine(program: Program) -> Iterator[Engine]:
    made = create_engine_for(program.settings["database_url"], connect_timeout=30)
    yield made
    made.dispose()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_no_message_of_a_key_comes_before_the_one_in_front_of_it_was_acknowledged(
    program: Program, engine: Engine, team: Client
) -> None:
    team.channel.queue_declare(ORIGIN, durable=True, arguments=LADDER)
    for start in range(0, SIZE, 1000):
        now = StoreClock(engine)()
        rows = [with_key(number) for number in range(start, min(start + 1000, SIZE))]
        for number, each in enumerate(rows):
            each["created_at"] = now + timedelta(microseconds=number)
        with writing(engine) as connection:
            journal.arrive(connection, rows, now, "ingest", "test")
    name = program.run("replay", "plan", "--all", "--in-order", "header:shop", "--json").told["hash"]
    # The second message of some keys fails; those behind it wait.
    rejects = {key + KEYS for key in random.sample(range(KEYS), FAILING)}
    behind = sum(len(range(each + KEYS, SIZE, KEYS)) for each in rejects)
    words = ("replay", "apply", name, "--no-canary", "--max-failure-rate", "1", "--json")
    consumer = Consumer(program.settings["broker_url"], rejects)
    began = time.monotonic()
    try:
        killed = program.start(*words)
        assert eventually(lambda: len(consumer.acknowledged) > SIZE // 2 or killed.poll() is not None)
        killed.kill()
        killed.communicate(timeout=HANGS_AFTER)
        end_leases(engine, StoreClock(engine)())
        done = program.run(*words)
        assert eventually(lambda: len(consumer.acknowledged) == SIZE - len(rejects) - behind), done.said
    finally:
        consumer.stop()
    assert consumer.too_early == []
    assert (done.code, done.told["plan"]["waiting"]) == (PARTIAL, behind), done.said
    assert f"{FAILING:,} key(s) with {behind:,} waiting message(s) are held" in done.said
    times: defaultdict[int, int] = defaultdict(int)
    for number in consumer.delivered:
        times[number] += 1
    twice = [number for number, seen in times.items() if seen > 1]
    assert len(twice) <= KEYS, "no more than were under way when the apply was killed"
    sys.stdout.write(
        f"{SIZE:,} messages of {KEYS} keys in {time.monotonic() - began:.0f} s, {len(rejects)} keys held with "
        f"{behind} messages, {len(twice)} delivered twice after the kill\n"
    )
