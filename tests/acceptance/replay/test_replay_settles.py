"""An apply sends all of a plan and proves by itself what became of it; nobody else runs a drain or an ingest."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pika
import pytest
from program import HANGS_AFTER, Client, Program, eventually
from replay_rows import ORIGIN, fill
from sqlalchemy import select, update

from dlqbatch.amqp.identity import digest_of
from dlqbatch.store.engine import create_engine_for, writing
from dlqbatch.store.tables import MESSAGES

pytestmark = pytest.mark.usefixtures("on_every_broker")

FAILED, PARTIAL = 1, 3
LADDER = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}


class Worker:
    """Acknowledges so many messages, but not those with these bodies; it rejects the others."""

    def __init__(self, url: str, rejects: set[bytes], most: float = math.inf) -> None:
        self.handled: list[int] = []
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()

        def take(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            if body in rejects or len(self.handled) >= most:
                channel.basic_reject(method.delivery_tag, requeue=False)
            else:
                self.handled.append(int(body))
                channel.basic_ack(method.delivery_tag)

        self._channel.basic_consume(ORIGIN, take)
        self._thread = threading.Thread(target=self._channel.start_consuming)
        self._thread.start()

    def stop(self) -> None:
        self._connection.add_callback_threadsafe(self._channel.stop_consuming)
        self._thread.join(HANGS_AFTER)
        self._connection.close()


@pytest.fixture
def settled(request: pytest.FixtureRequest, program: Program, team: Client, broker_release: str) -> Program:
    _, api = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    team.channel.queue_declare(ORIGIN, durable=True, arguments=LADDER)
    return program.but(management_url=api, statistics_delay="2s")


def stored(settled: Program, numbers: range) -> None:
    """Dead messages that an ingest recognises when they come back."""
    engine = create_engine_for(settled.settings["database_url"], connect_timeout=30)
    fill(engine, numbers)
    with writing(engine) as connection:
        for row_id, body in connection.execute(select(MESSAGES.c.id, MESSAGES.c.body)).all():
            digest = digest_of(bytes(body), b"")
            connection.execute(update(MESSAGES).where(MESSAGES.c.id == row_id).values(digest=digest))


def test_an_apply_alone_sends_all_and_proves_it(settled: Program) -> None:
    stored(settled, range(30))
    name = settled.run("replay", "plan", "--all", "--json").told["hash"]
    worker = Worker(settled.settings["broker_url"], set())
    try:
        done = settled.run("replay", "apply", name, "--json")
    finally:
        worker.stop()
    assert done.code == 0, done.said
    assert done.told["plan"]["outcomes"] == {"failed": 0, "succeeded": 30, "open": 0}, done.said
    assert sorted(worker.handled) == list(range(30))
    assert len(done.told["waited"]) == 3, "for each step of 4, 20 and 30"
    assert all("sent are not proven yet" in each["for"] for each in done.told["waited"])


def test_what_comes_back_stops_it_within_the_step(settled: Program) -> None:
    """The worker rejects the largest message, which is in the first step."""
    stored(settled, range(5, 105))
    name = settled.run("replay", "plan", "--all", "--json").told["hash"]
    worker = Worker(settled.settings["broker_url"], {b"100"})
    try:
        done = settled.run("replay", "apply", name, "--json")
    finally:
        worker.stop()
    assert done.code == FAILED, done.said
    assert (done.told["plan"]["state"], done.told["plan"]["sent"]) == ("stopped", 4)
    assert "1 of 4 came back" in done.told["plan"]["stopped_why"]
    assert len(worker.handled) == 3


def test_an_apply_whose_last_step_comes_back_has_failed(settled: Program) -> None:
    """All of it is sent; of five messages the last one is rejected."""
    stored(settled, range(5))
    name = settled.run("replay", "plan", "--all", "--json").told["hash"]
    worker = Worker(settled.settings["broker_url"], set(), most=4)
    try:
        done = settled.run("replay", "apply", name, "--json")
    finally:
        worker.stop()
    assert (done.code, done.told["outcome"]) == (FAILED, "failed"), done.said
    assert (done.told["plan"]["state"], done.told["plan"]["sent"]) == ("done", 5)
    assert "1 of 5 came back, which is 20% and more than 10%" in done.told["warnings"]


def test_it_says_what_it_waits_for_and_since_when(settled: Program) -> None:
    """Nobody consumes."""
    stored(settled, range(9))
    name = settled.run("replay", "plan", "--all", "--json").told["hash"]
    process = settled.start("replay", "apply", name, "--wait", "3600", "--json")
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    reader.start()
    assert eventually(lambda: any("waiting since " in line for line in said))
    assert any("4 of 4 sent are not proven yet" in line for line in said)
    process.terminate()
    out = process.stdout.read() if process.stdout is not None else ""
    process.wait(HANGS_AFTER)
    reader.join(HANGS_AFTER)
    assert json.loads(out)["stopped_by"] == "signal"


def test_messages_of_one_key_go_one_by_one_and_one_that_came_back_holds_the_rest(settled: Program) -> None:
    """All of them have one value in the header `shop`; the worker rejects the second one."""
    stored(settled, range(4))
    planned = settled.run("replay", "plan", "--all", "--in-order", "header:shop", "--json")
    worker = Worker(settled.settings["broker_url"], {b"1"})
    try:
        done = settled.run(
            "replay", "apply", planned.told["hash"], "--max-failure-rate", "1", "--wait", "100", "--json"
        )
    finally:
        worker.stop()
    assert (done.code, worker.handled) == (PARTIAL, [0]), done.said
    assert (done.told["plan"]["sent"], done.told["plan"]["waiting"]) == (2, 2), done.said
    (said,) = [warning for warning in done.told["warnings"] if "'kept' by message" in warning]
    assert "1 key(s) with 2 waiting message(s) are held" in said
