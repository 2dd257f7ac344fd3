"""A night as the console shows it: four causes, runs of the jobs, an action, and messages that attack the page."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from dead_rows import add, row
from messages import text as value
from messages import with_headers
from sqlalchemy import insert

from dlqbatch.messages.actions import MessageActions
from dlqbatch.store.engine import writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ALERTS, RUNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

STACK = """Traceback (most recent call last):
  File "/app/orders/handler.py", line 41, in handle
    reservation = inventory.reserve(order)
  File "/app/orders/inventory.py", line 17, in reserve
    raise TimeoutError(f"inventory-service timed out after {ms} ms")
TimeoutError: inventory-service timed out after 3000 ms"""
TIMEOUT, CURRENCY, LIMITED, POISON = "a1c0ffee" * 2, "b2dec0de" * 2, "c3badcab" * 2, "d4facade" * 2
CAUSES: Sequence[tuple[str, str, str, str, int, Status]] = (
    (TIMEOUT, "orders", "TimeoutError", "inventory-service timed out after 3000 ms", 120, Status.MANUAL),
    (CURRENCY, "payments", "com.shop.ValidationError", "currency missing", 60, Status.MANUAL),
    (LIMITED, "emails", "handlers.RateLimited", "429 Too Many Requests", 30, Status.PENDING),
    (POISON, "orders", "KeyError", "'sku'", 9, Status.MANUAL),
)


def happens(engine: Engine, now: datetime | None = None) -> None:
    """Fill the store; ages are random, and the same each time."""
    now = datetime.now(UTC) if now is None else now
    chance = random.Random(7)
    for group, queue, error, text, number, status in CAUSES:
        for place in range(number):
            at = now - timedelta(minutes=2 + chance.expovariate(1 / 90))
            body = {
                "id": f"P-{place:06}",
                "customer": f"c{place % 31}",
                "lines": [{"sku": "A-1", "n": 2}],
                "amount": 474.6,
            }
            given: dict[str, Any] = {
                "fingerprint": group,
                "origin_queue": queue,
                "event": f"{queue}.created",
                "error_type": error,
                "error_message": text,
                "error_stack": STACK if group == TIMEOUT else None,
                "source": "checkout",
                "status": status,
                "first_failed_at": at,
                "last_failed_at": at,
                "body": json.dumps(body).encode(),
            }
            add(engine, row(**given), at=at)
    MessageActions(engine).discard([1, 2], actor="ann", reason="paid by card, ticket 4711", verified=True)
    report = {"counts": {"got": 219, "recorded": 219}, "queues": {}}
    with writing(engine) as connection:
        for place, job in enumerate(("drain", "ingest", "lifecycle", "monitor", "retain")):
            began = now - timedelta(seconds=12 + 9 * place)
            done = {"job": job, "started_at": began, "ended_at": began + timedelta(seconds=0.4)}
            connection.execute(insert(RUNS).values(**done, outcome="ok", stopped_by="empty", emptied=[], report=report))
        alert = {"name": "backlog", "subject": "", "severity": "critical", "value": 10412.0, "threshold": 10000.0}
        summary = "10,412 messages wait in the dead store"
        connection.execute(insert(ALERTS).values(**alert, summary=summary, fired_at=now - timedelta(minutes=7)))


ATTACKS = (
    "<script>window.hacked = 1</script>",
    "\"><img src=x onerror='window.hacked=1'>",
    "'><svg/onload=window.hacked=1>",
    "javascript:window.hacked=1//",
    "</pre></td></table><style>*{display:none}</style>",
    "{{ 7 * 7 }}{% for x in ().__class__.__base__.__subclasses__() %}",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "\x1b]0;pwned\x07\x00\x08",
    "=cmd|' /C calc'!A0",
    "A" * 5_000,
)


def attack(engine: Engine) -> list[int]:
    """A message for each attack, which is everywhere that a message can say something."""
    ids = []
    for place, text in enumerate(ATTACKS):
        given: dict[str, Any] = {
            "fingerprint": f"{place:016x}",
            "status": Status.MANUAL,
            "body": text.encode(),
            "properties": with_headers(
                (text[:60].encode(), value(text)), (b"traceparent", value(f"00-{text[:32]}-x-01"))
            ),
            **dict.fromkeys(
                ("origin_queue", "origin_exchange", "event", "source", "message_id"), text[:200].replace("\0", "")
            ),
            **dict.fromkeys(("error_type", "error_message", "error_stack", "reason"), text.replace("\0", "")),
        }
        ids += add(engine, row(**given), at=datetime.now(UTC))
    return ids
