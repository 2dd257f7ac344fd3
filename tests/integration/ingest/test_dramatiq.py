"""A worker that does what Dramatiq 2 does: its queues are NAME, NAME.DQ for its retries, and NAME.XQ for its dead."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pika
import pytest
from program import HANGS_AFTER, eventually
from sqlalchemy import select, update

from dlqbatch import jobs as all_jobs
from dlqbatch import settings
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import create_engine_for, reading, writing
from dlqbatch.store.migrate import upgrade
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, TRANSITIONS, UNPROVEN_RETRIES

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME, DELAYED, DEAD = "default", "default.DQ", "default.XQ"
ID = "2f0b7c1e-dramatiq"
_DEAD_FOR = 604_800_000


def failed(retries: int) -> dict[str, Any]:
    told = f'Traceback (most recent call last):\n  File "a.py", line 1, in take\n    do()\nConnectionError: {retries}\n'
    return {"retries": retries, "traceback": told}


def _enqueue(channel: Any, queue: str, message: dict[str, Any]) -> None:
    body = json.dumps({**message, "message_id": ID}, separators=(",", ":")).encode()
    channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))


class Dramatiq:
    """`plans` says what becomes of each delivery in NAME: ok, retry, or fail (no retry is left, or none is wanted)."""

    def __init__(self, url: str) -> None:
        self.plans: deque[str] = deque()
        self.may_go_on = threading.Event()
        """What waits in NAME.DQ is due."""
        self.handled: list[str] = []
        self._url = url
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
        for queue in (NAME, DELAYED):
            self._channel.queue_declare(queue, durable=True, arguments=arguments)
        self._channel.queue_declare(DEAD, durable=True, arguments={"x-message-ttl": _DEAD_FOR})
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self._channel.basic_consume(NAME, self._work)
        self._channel.basic_consume(DELAYED, lambda _, method, __, body: self._wait(method.delivery_tag, body))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def send(self) -> None:
        """It was retried once."""
        connection = pika.BlockingConnection(pika.URLParameters(self._url))
        message = {"queue_name": NAME, "actor_name": "take", "args": [7], "options": failed(1)}
        _enqueue(connection.channel(), NAME, message)
        connection.close()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(HANGS_AFTER)
        self._connection.close()

    def _work(self, _: Any, method: Any, __: Any, body: bytes) -> None:
        plan = self.plans.popleft() if self.plans else "ok"
        self.handled.append(plan)
        if plan == "fail":
            self._channel.basic_nack(method.delivery_tag, requeue=False)
            return
        if plan == "retry":
            message = json.loads(body)
            options = message["options"]
            retries = options.get("retries", 0) + 1
            message["options"] = {**failed(retries), "eta": 1}
            _enqueue(self._channel, DELAYED, {**message, "queue_name": DELAYED})
        self._channel.basic_ack(method.delivery_tag)

    def _wait(self, tag: int, body: bytes) -> None:
        self._waiting.append((tag, json.loads(body)))

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self._connection.process_data_events(time_limit=0.1)
            while self._waiting and self.may_go_on.is_set():
                tag, message = self._waiting.popleft()
                options = {name: value for name, value in message["options"].items() if name != "eta"}
                _enqueue(self._channel, NAME, {**message, "queue_name": NAME, "options": options})
                self._channel.basic_ack(tag)


class Jobs:
    def __init__(self, broker_url: str, management_url: str, database_url: str) -> None:
        upgrade(database_url)
        self.engine = create_engine_for(database_url, connect_timeout=30)
        self.given = {
            "broker_url": broker_url,
            "database_url": database_url,
            "management_url": management_url,
            "ingest_queues": f"{DEAD},dlq-queue",
        }

    def run(self, *jobs: str) -> None:
        loaded = settings.load(self.given, {"DLQBATCH_CONFIG": "/dev/null"})
        for job in jobs:
            all_jobs.run(job, loaded, all_jobs.RunOptions())

    def round(self) -> None:
        self.run("drain", "ingest", "lifecycle")

    def send(self) -> None:
        """What is pending is due."""
        with writing(self.engine) as connection:
            past = StoreClock(self.engine)() - timedelta(minutes=1)
            connection.execute(update(MESSAGES).where(MESSAGES.c.status == "pending").values(next_retry_at=past))
        self.run("lifecycle")

    def rows(self) -> list[Any]:
        with reading(self.engine) as connection:
            return list(connection.execute(select(MESSAGES).order_by(MESSAGES.c.id)))

    def statuses(self) -> list[str]:
        return [str(row.status) for row in self.rows()]

    def journal(self) -> list[tuple[str, str]]:
        with reading(self.engine) as connection:
            asked = select(TRANSITIONS.c.to_status, TRANSITIONS.c.reason).order_by(TRANSITIONS.c.id)
            return [(str(status), why) for status, why in connection.execute(asked)]

    def outcomes(self) -> list[str | None]:
        with reading(self.engine) as connection:
            return list(connection.scalars(select(ATTEMPTS.c.outcome).order_by(ATTEMPTS.c.id)))

    def missing(self) -> str:
        with reading(self.engine) as connection:
            return " ".join(connection.scalars(select(UNPROVEN_RETRIES.c.missing)))


@pytest.fixture
def jobs(request: pytest.FixtureRequest, broker_release: str, broker_url: str, database_url: str) -> Jobs:
    _, api = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    return Jobs(broker_url, api, database_url)


@pytest.fixture
def dramatiq(broker_url: str) -> Iterator[Dramatiq]:
    made = Dramatiq(broker_url)
    made.start()
    yield made
    made.stop()


def until(reached: Any, jobs: Jobs) -> None:
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < HANGS_AFTER, (jobs.journal(), jobs.outcomes(), jobs.missing())
        time.sleep(0.5)
        jobs.round()


@pytest.mark.usefixtures("on_every_broker")
def test_a_retry_that_the_framework_tries_again_is_no_success_until_it_has_given_up_or_succeeded(
    jobs: Jobs, dramatiq: Dramatiq
) -> None:
    jobs.run("drain")
    dramatiq.plans += ["fail"]
    dramatiq.send()
    until(lambda: jobs.statuses() == ["pending"], jobs)

    # It fails, waits in NAME.DQ, which nothing but its count of messages that are not acknowledged shows, and dies.
    dramatiq.plans += ["retry", "fail"]
    jobs.send()
    until(lambda: f"'{DELAYED}'" in jobs.missing(), jobs)
    assert "1 unacknowledged" in jobs.missing()
    assert (jobs.statuses(), jobs.outcomes()) == (["processing"], [None])
    dramatiq.may_go_on.set()
    until(lambda: jobs.outcomes() == ["failed"], jobs)
    (row,) = jobs.rows()
    assert (row.status, row.dlq_retry_count, row.error_message, row.retry_count) == ("pending", 1, "2", 1)
    assert json.loads(row.body)["options"] == failed(1)

    # The next one succeeds.
    jobs.send()
    until(lambda: jobs.statuses() == ["resolved"], jobs)
    assert jobs.outcomes() == ["failed", "succeeded"]
    assert eventually(lambda: dramatiq.handled == ["fail", "retry", "fail", "ok"])
