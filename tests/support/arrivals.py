"""A dead message as ingest has examined it, before it is a row."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

from dead_rows import NOW

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.examine import Examined


def arrival(identity: str = "", attempt: int | None = None, body: bytes = b"body", **changes: Any) -> Examined:
    return replace(
        Examined(
            source_queue="dlq-queue",
            exchange="dlq-exchange",
            routing_key="dlq-routing-key",
            redelivered=False,
            properties=b"\0\0",
            body=body,
            id=identity,
            parent=None,
            attempt=attempt,
            digest=hashlib.sha256(body).digest(),
            full_digest=hashlib.sha256(b"full" + body).digest(),
            message_id=b"m-1",
            app_id=b"shop",
            priority=3,
            origin=Origin("orders", "shop", "orders.created"),
            reason="retries-exhausted",
            failure=Failure("ValueError", "no stock", None),
            fingerprint="f" * 16,
            retries=3,
            first_failed_at=NOW - timedelta(hours=2),
            last_failed_at=NOW - timedelta(hours=1),
        ),
        **changes,
    )
