"""What a lifecycle claims of retries to real queues, with the management API that tells of them."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pika
import pytest
import rawamqp
from broker_client import Side
from dead_rows import NOW, add, store_at
from lifecycle_rows import due, properties
from program import HANGS_AFTER
from sqlalchemy import select

from dlqbatch import jobs as all_jobs
from dlqbatch import settings
from dlqbatch.messages.queries import get
from dlqbatch.store.engine import reading
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, UNPROVEN_RETRIES

if TYPE_CHECKING:
    from collections.abc import Iterator


class Jobs:
    """The jobs as a scheduler runs them, every second or so."""

    def __init__(self, broker_url: str, management_url: str, database_url: str) -> None:
        self.engine = store_at(database_url)
        self.given = {
            "broker_url": broker_url,
            "database_url": database_url,
            "management_url": management_url,
            "ingest_queues": "dlq-queue",
            "origins_allowed": "*",
        }

    def run(self, job: str) -> dict[str, Any]:
        loaded = settings.load(self.given, {"DLQBATCH_CONFIG": "/dev/null"})
        return all_jobs.run(job, loaded, all_jobs.RunOptions()).as_dict()

    def round(self) -> None:
        for job in ("drain", "ingest", "lifecycle"):
            self.run(job)

    def statuses(self) -> dict[str, str]:
        with reading(self.engine) as connection:
            origin = (MESSAGES.c.origin_queue, MESSAGES.c.origin_exchange)
            return {
                queue or exchange: str(status)
                for queue, exchange, status in connection.execute(select(*origin, MESSAGES.c.status))
            }

    def missing(self) -> dict[str, Any]:
        with reading(self.engine) as connection:
            return {row.place: row for row in connection.execute(select(UNPROVEN_RETRIES))}


def behind_exchange(identity: str, exchange: str) -> bytes:
    """An error handler published it, and named no queue."""
    names = [(b"dlqbatch-id", identity), (b"dlqbatch-origin-exchange", exchange), (b"dlqbatch-origin-key", "k")]
    return rawamqp.properties([(name, rawamqp.text(value)) for name, value in names], delivery_mode=2)


@contextmanager
def worker(broker_url: str, queues: list[str], *, acknowledges: bool = True) -> Iterator[None]:
    """It takes one at a time, and is hung if it does not acknowledge."""
    connection = pika.BlockingConnection(pika.URLParameters(broker_url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=1)

    def take(_: Any, method: Any, *__: Any) -> None:
        if acknowledges:
            channel.basic_ack(method.delivery_tag)

    for queue in queues:
        channel.basic_consume(queue, take)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            connection.process_data_events(time_limit=0.1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        connection.close()


@pytest.fixture
def jobs(request: pytest.FixtureRequest, broker_release: str, broker_url: str, database_url: str) -> Jobs:
    _, api = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    return Jobs(broker_url, api, database_url)


@pytest.mark.usefixtures("on_every_broker")
def test_only_what_a_consumer_acknowledged_is_resolved(broker_url: str, jobs: Jobs) -> None:
    side = Side(broker_url)
    jobs.run("drain")
    for name in ("classic", "hung", "idle", "idle too", "held"):
        side.queue(name)
    side.queue("quorum", "quorum")
    for exchange, behind in (("good", ["classic", "quorum"]), ("half", ["classic", "idle too"])):
        side.channel.exchange_declare(exchange, "fanout", durable=True)
        for queue in behind:
            side.channel.queue_bind(queue, exchange)
    rows = [
        due(number, origin_queue=name, properties=properties(f"due-{number}", name))
        for number, name in enumerate(("classic", "quorum", "hung", "idle"))
    ]
    rows += [
        due(number, origin_queue=None, origin_exchange=name, properties=behind_exchange(f"due-{number}", name))
        for number, name in enumerate(("good", "half"), len(rows))
    ]
    add(jobs.engine, *rows, at=NOW.replace(year=2020))
    with worker(broker_url, ["classic", "quorum"]), worker(broker_url, ["hung"], acknowledges=False):
        began = time.monotonic()
        jobs.run("lifecycle")
        assert set(jobs.statuses().values()) == {"processing"}
        good = {"classic", "quorum", "good"}
        while {name for name, status in jobs.statuses().items() if status == "resolved"} != good:
            assert time.monotonic() - began < HANGS_AFTER, [row.missing for row in jobs.missing().values()]
            time.sleep(0.5)
            jobs.round()
        for _ in range(3):
            jobs.round()
        missing = jobs.missing()
    assert {name for name, status in jobs.statuses().items() if status == "processing"} == {"hung", "idle", "half"}
    assert missing.keys() == {"hung", "idle", "exchange half"}
    assert (missing["hung"].unacknowledged, missing["hung"].consumers) == (1, 1)
    assert (missing["idle"].ready, missing["idle"].consumers) == (1, 0)
    assert missing["exchange half"].queue == "idle too"
    assert "it has no consumer" in missing["exchange half"].missing
    with reading(jobs.engine) as connection:
        attempts = connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.outcome == "succeeded")).all()
        detail = get(connection, attempts[0].message_id)
    assert all(each.proof.startswith("queue '") and each.acknowledged_at > each.sent_at for each in attempts)
    assert detail is not None
    assert detail.attempts[0].acknowledged_at == attempts[0].acknowledged_at
    side.close()
