"""A worker of the night, as a process: what it cannot handle goes among the dead letters, in one of two dialects.

Usage: worker.py BROKER_URL QUEUE FOLDER. What is mended is a file in FOLDER; each message that is handled becomes a
line of FOLDER/handled. One order kills it, as soon as the inventory answers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pika

PREFETCH = 10
LINES = 60
"""An order with more of them kills the worker."""


class Unhandled(Exception):
    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text
        super().__init__(text)


def handle(queue: str, work: dict[str, Any], folder: Path) -> None:
    if queue == "orders":
        if "sku" not in work:
            raise Unhandled("KeyError", "'sku'")
        if not (folder / "inventory-is-back").exists():
            raise Unhandled("TimeoutError", f"inventory-service timed out after {work['waits']} ms")
        if len(work["lines"]) > LINES:
            os._exit(1)
    if queue == "payments" and "currency" not in work:
        raise Unhandled("ValidationError", "currency missing")
    if queue == "emails" and not (folder / "limit-is-over").exists():
        raise Unhandled("RateLimited", "429 Too Many Requests")


def spring(method: Any, _queue: str, error: Unhandled) -> dict[str, str]:
    return {
        "x-exception-message": error.text,
        "x-exception-stacktrace": f"com.shop.errors.{error.kind}: {error.text}\n\tat com.shop.Work.run(Work.java:41)",
        "x-original-exchange": method.exchange,
        "x-original-routingKey": method.routing_key,
    }


def by_contract(method: Any, queue: str, error: Unhandled) -> dict[str, str]:
    """As docs/failure-contract.md says."""
    return {
        "dlqbatch-failed-queue": queue,
        "dlqbatch-failed-exchange": method.exchange,
        "dlqbatch-failed-key": method.routing_key,
        "MT-Fault-ExceptionType": error.kind,
        "MT-Fault-Message": error.text,
    }


def main(url: str, queue: str, folder: Path) -> None:
    channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
    channel.basic_qos(prefetch_count=PREFETCH)
    handled = os.open(folder / "handled", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def take(_: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        work = json.loads(body)
        try:
            handle(queue, work, folder)
        except Unhandled as error:
            dialect = spring if work["id"] % 2 else by_contract
            properties.headers = (properties.headers or {}) | dialect(method, queue, error)
            channel.basic_publish("dlq-exchange", "dlq-routing-key", body, properties)
        else:
            os.write(handled, json.dumps([queue, work["id"], work.get("currency")]).encode() + b"\n")
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(queue, take)
    channel.start_consuming()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
