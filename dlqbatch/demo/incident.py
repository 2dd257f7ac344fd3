"""A night to be looked at in the console: messages of four causes fail on a real broker and reach a dead store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from pika import BasicProperties

from dlqbatch import jobs
from dlqbatch.demo.run import connected, own_settings, standing
from dlqbatch.demo.scenario import REAL_TTLS
from dlqbatch.settings import Settings
from dlqbatch.settings.topologies import default_ladder
from dlqbatch.topology.model import Queue, Topology


class Cause(NamedTuple):
    queue: str
    error: str
    text: str
    messages: int


CAUSES: Final = (
    Cause("orders", "TimeoutError", "inventory-service timed out after 3000 ms", 180),
    Cause("payments", "com.shop.ValidationError", "currency missing", 90),
    Cause("emails", "handlers.RateLimited", "429 Too Many Requests", 50),
    Cause("orders", "KeyError", "'sku'", 9),
)


def settings_of(prefix: str, folder: Path) -> dict[str, object]:
    """As those of the demo; the ingest takes the messages of the demo alone."""
    own = own_settings(prefix, folder, REAL_TTLS)
    return own | {"ingest_queues": own["dlq_queue"], "origins_allowed": f"{prefix}*"}


@contextmanager
def incident(settings: Settings, prefix: str) -> Iterator[int]:
    """The number of messages that are dead now; at the end everything is deleted from the broker."""
    from dlqbatch.store import migrate  # noqa: PLC0415  (Alembic, which only the demo itself needs)

    migrate.upgrade(settings.database_url.get_secret_value())
    origins = Topology((), tuple(Queue(prefix + name) for name in sorted({cause.queue for cause in CAUSES})), ())
    with standing(settings, prefix, origins):
        _fail(settings, prefix)
        yield jobs.run("ingest", settings, jobs.RunOptions()).counts["recorded"]


def _fail(settings: Settings, prefix: str) -> None:
    """Do as a consumer that hands its failures over, with the error, and wants no retry of them."""
    ladder = default_ladder(settings)
    with connected(settings) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for cause in CAUSES:
            queue = prefix + cause.queue
            channel.queue_declare(queue, durable=True)
            for number in range(cause.messages):
                headers = {
                    "dlqbatch-failed-queue": queue,
                    "dlqbatch-failed-exchange": "",
                    "dlqbatch-failed-key": queue,
                    "MT-Fault-ExceptionType": cause.error,
                    "MT-Fault-Message": cause.text,
                    "MT-Fault-StackTrace": f"{cause.error}: {cause.text}\n  at {cause.queue}.handle({cause.queue}:41)",
                    "MT-Fault-Timestamp": datetime.now(UTC).isoformat(),
                }
                lines = [{"n": 2}] if cause.error == "KeyError" else [{"sku": "A-1", "n": 2}]
                body = {"id": f"P-{number:06}", "lines": lines, "amount": 474.6, "currency": None}
                properties = BasicProperties(
                    message_id=f"{cause.queue}-{cause.error}-{number}",
                    content_type="application/json",
                    app_id="checkout",
                    delivery_mode=2,
                    headers=headers,
                )
                channel.basic_publish(
                    ladder.dlq_exchange, ladder.dlq_routing_key, json.dumps(body).encode(), properties, mandatory=True
                )
