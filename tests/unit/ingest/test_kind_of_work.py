"""Where nobody told an error, messages are grouped by what they ask for."""

from __future__ import annotations

import pytest
from messages import encode_table, text

from dlqbatch.ingest.dialects import Failure, kind_of_work, read_dramatiq
from dlqbatch.ingest.fingerprint import fingerprint

REJECTED = Failure("rejected", "a consumer of 'orders' rejected it")


def kind(
    headers: dict[bytes, str] | None = None, message_type: bytes | None = None, body: bytes = b"", event: str = ""
) -> str:
    foreign = encode_table([(name, text(value)) for name, value in (headers or {}).items()])
    return kind_of_work(foreign, message_type, read_dramatiq(body), body, event)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"headers": {b"task": "payments.charge", b"__TypeId__": "x"}, "event": "e"}, "task payments.charge"),
        ({"body": b'{"actor_name": "charge", "options": {}}', "event": "e"}, "actor charge"),
        ({"headers": {b"__TypeId__": "com.acme.Order"}, "message_type": b"other"}, "type com.acme.Order"),
        ({"message_type": b"order.created", "event": "e"}, "type order.created"),
        ({"body": b'{"pattern": "orders.create", "data": {}}', "event": "e"}, "pattern orders.create"),
        ({"body": b'{"pattern": {"cmd": 1}}', "event": "orders.created"}, "event orders.created"),
        ({"body": b'{"pattern', "event": "orders.created"}, "event orders.created"),
        ({"body": b'{"pattern": ' + b"[" * 50_000, "event": "orders.created"}, "event orders.created"),
        ({"body": b'{"actor_name": 7}', "event": "orders.created"}, "event orders.created"),
        ({"message_type": b"\xff", "event": "e"}, "type \ufffd"),
        ({}, ""),
    ],
)
def test_what_a_message_asks_for(given: dict[str, object], expected: str) -> None:
    assert kind(**given) == expected  # type: ignore[arg-type]  # each case names what it needs


def test_what_a_queue_rejects_is_a_group_for_each_kind_and_numbers_are_no_kind() -> None:
    groups = {fingerprint(REJECTED, "orders", each) for each in ("event orders.created", "event orders.paid", "task a")}
    assert len(groups) == 3
    assert fingerprint(REJECTED, "orders", "event orders.4711.paid") == fingerprint(
        REJECTED, "orders", "event orders.12.paid"
    )
    assert fingerprint(REJECTED, "orders", "task a") != fingerprint(REJECTED, "mails", "task a")
    assert fingerprint(REJECTED, "orders") == fingerprint(REJECTED, "orders", "")
