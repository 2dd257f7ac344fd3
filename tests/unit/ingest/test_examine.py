from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import Delivery
from dlqbatch.amqp.headers import HISTORY
from dlqbatch.amqp.origin import Trust
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.ingest.examine import Examined, examine
from dlqbatch.topology.kinds import Ladder

LADDER = Ladder()
TRUST = Trust(LADDER.queue_names, LADDER.exchange_names)
NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
DIED_AT = datetime.fromtimestamp(1_700_000_000, UTC)
ORDERS = Origin("orders", "shop", "orders.created")
FAR = 2**64 - 1


class Queue:
    queue = "dlq-queue"

    def settle(self, tag: int) -> None:
        raise AssertionError(tag)

    hold = settle


def delivered(properties: bytes, body: bytes = b"body", exchange: str = "dlq-exchange", key: str = "dlq") -> Delivery:
    delivery = Delivery(Queue(), 1, exchange, key, redelivered=False)
    delivery.properties = properties
    delivery.body_size = len(body)
    delivery.chunks = [body[:2] + b"\xce", body[2:] + b"\xce"]
    return delivery


def examined(*entries: messages.Entry, body: bytes = b"body", **properties: bytes) -> Examined:
    return examine(delivered(messages.with_headers(*entries, **properties), body), TRUST, NOW)


def drained(**changed: messages.Value | None) -> list[messages.Entry]:
    """As a drain writes it when it dead-letters."""
    said: dict[str, messages.Value | None] = {
        "id": messages.text("id-1"),
        "parent": messages.text("id-0"),
        "retries": messages.long(3),
        "trips": messages.long(4),
        "origin_queue": messages.text("orders"),
        "origin_exchange": messages.text("shop"),
        "origin_key": messages.text("orders.created"),
        "first_failed_at": messages.timestamp(1_600_000_000),
        "history": messages.array(messages.death()),
        "reason": messages.text("retries-exhausted"),
        "dead_at": messages.timestamp(1_700_000_100),
    } | changed
    return [(b"dlqbatch-" + k.replace("_", "-").encode(), v) for k, v in said.items() if v is not None]


@given(messages.any_properties, st.binary(max_size=40), st.booleans(), st.sampled_from(messages.ODD_TEXTS))
def test_no_message_raises_and_every_value_is_within_its_bounds(
    properties: bytes, body: bytes, last_death: bool, name: bytes
) -> None:
    odd = name.decode("utf-8", "surrogateescape")
    trust = Trust(LADDER.queue_names, LADDER.exchange_names, last_death=last_death)
    found = examine(delivered(properties, body, odd, odd), trust, NOW)
    assert (found.properties, found.body) == (properties, body)
    assert found.first_failed_at <= found.last_failed_at <= NOW
    assert 0 <= found.retries < 2**31
    assert 0 <= found.priority < 256
    assert found.attempt is None or found.attempt > 0
    assert (len(found.digest), len(found.full_digest), len(found.fingerprint)) == (32, 32, 16)
    assert found == examine(delivered(properties, body, odd, odd), trust, NOW)


def test_what_a_drain_wrote_is_read_back() -> None:
    found = examined(*drained(), message_id=b"m-1", app_id=b"shop", priority=b"\x07")
    assert (found.id, found.parent, found.attempt, found.retries) == ("id-1", "id-0", None, 3)
    assert (found.origin, found.reason) == (ORDERS, "retries-exhausted")
    assert (found.message_id, found.app_id, found.priority) == (b"m-1", b"shop", 7)
    assert found.failure[:2] == ("rejected", "a consumer of 'orders' rejected it")
    assert (found.first_failed_at, found.last_failed_at) == (datetime.fromtimestamp(1_600_000_000, UTC), DIED_AT)
    assert (found.source_queue, found.body) == ("dlq-queue", b"body")


def test_a_queue_that_dead_letters_directly_tells_origin_failure_and_time() -> None:
    found = examined(messages.x_death(messages.death(reason="maxlen")))
    assert (found.id, found.parent, found.attempt, found.retries, found.reason) == ("", None, None, 0, None)
    assert found.origin == ORDERS
    assert found.failure[:2] == ("maxlen", "'orders' was full")
    assert (found.first_failed_at, found.last_failed_at) == (DIED_AT, DIED_AT)


def test_what_dramatiq_writes_into_the_body_is_read_and_our_own_count_comes_first() -> None:
    body = b'{"queue_name":"orders","actor_name":"take","options":{"retries":2},"message_id":"m-1"}'
    found = examined(messages.x_death(messages.death()), body=body)
    assert (found.id, found.message_id, found.framework_id, found.retries) == ("", None, "m-1", 2)
    assert (found.failure.type, found.failure.stack) == ("rejected", None)
    assert examined(*drained(), body=body).retries == 3
    assert examined(messages.x_death(messages.death())).framework_id is None


def test_deaths_in_the_ladders_own_queues_are_no_failure() -> None:
    delay = messages.death("queue.delay.1", "route-delay", "binding.orders.created.1", "expired")
    assert examined(messages.x_death(delay, messages.death())).origin == ORDERS
    assert examined(messages.x_death(delay)).origin is None


def test_the_brokers_newest_death_overrides_another_recorded_queue_and_not_the_same_one() -> None:
    elsewhere = messages.x_death(messages.death("mail", "post", "mail.sent"))
    assert examined(*drained(), elsewhere).origin == Origin("mail", "post", "mail.sent")
    returned = messages.x_death(messages.death("orders", "dlqbatch.return.orders"))
    assert examined(*drained(), returned).origin == ORDERS


def test_an_attempt_is_read() -> None:
    assert examined(*drained(attempt=messages.long(2))).attempt == 2


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({"x-original-exchange": "shop", "x-original-routingKey": "orders"}, Origin(None, "shop", "orders")),
        ({"x-original-exchange": "", "x-original-routingKey": "orders"}, Origin("orders", "", "orders")),
        ({"MT-Fault-InputAddress": "rabbitmq://host/vhost/orders?x=1"}, Origin("orders", None, "orders")),
        ({"NServiceBus.FailedQ": "orders@machine"}, Origin("orders", None, "orders")),
    ],
)
def test_what_another_dialect_names_is_the_origin_where_it_is_allowed(headers: dict[str, str], origin: Origin) -> None:
    """Its error queue is ingested as it is: no death, and no drain that would have recorded the origin."""
    entries = [(name.encode(), messages.text(value)) for name, value in headers.items()]
    allowed = replace(TRUST, origins_allowed=("orders", "shop"))
    error_queue = delivered(messages.with_headers(*entries), exchange="orders_error")
    assert examine(error_queue, allowed, NOW).origin == origin
    assert examine(error_queue, TRUST, NOW).origin is None
    assert examine(delivered(messages.with_headers(*entries, *drained())), allowed, NOW).origin == ORDERS


@pytest.mark.parametrize("spoilt", ["retries", "trips", "first_failed_at", "history", "parent", "origin_queue"])
@pytest.mark.parametrize("value", [messages.Value(b"t", b"\x01"), messages.long(-1), messages.Value(b"V", b"")])
def test_a_header_that_somebody_spoilt_costs_neither_id_nor_attempt(spoilt: str, value: messages.Value) -> None:
    found = examined(*drained(attempt=messages.long(2), **{spoilt: value}))
    assert (found.id, found.attempt) == ("id-1", 2)


def test_an_id_that_is_too_long_is_none() -> None:
    assert examined(*drained(id=messages.text("x" * 256))).id == ""


@pytest.mark.parametrize("count", [-(2**63), -1, 10**18, 2**63 - 1])
def test_an_absurd_count_is_bounded(count: int) -> None:
    assert 0 <= examined(*drained(retries=messages.long(count))).retries < 2**31


@pytest.mark.parametrize("seconds", [FAR, 253402300799, 4_000_000_000])
def test_no_time_is_after_now(seconds: int) -> None:
    absurd = messages.timestamp(seconds)
    died = messages.nested((b"queue", messages.text("orders")), (b"time", absurd))
    found = examined(*drained(first_failed_at=absurd, dead_at=absurd, history=messages.array(died)))
    assert found.first_failed_at <= found.last_failed_at <= NOW


def test_without_a_death_the_time_of_dead_lettering_counts_else_now() -> None:
    assert examined(*drained(history=None)).last_failed_at == datetime.fromtimestamp(1_700_000_100, UTC)
    assert examined().last_failed_at == NOW


def test_a_message_with_nothing_and_one_whose_table_cannot_be_read_are_kept_as_they_are() -> None:
    for properties in (b"\0\0", b"", b"\x20\x00\x00\x00\x00\x05\x02ab?x"):
        found = examine(delivered(properties), TRUST, NOW)
        assert (found.properties, found.body, found.id, found.origin) == (properties, b"body", "", None)


@pytest.mark.parametrize(
    ("headers", "body", "kind"),
    [
        ({"x-exception-message": "no stock", "x-exception-stacktrace": "a.B: no stock\n"}, b"", "a.B"),
        ({"MT-Fault-ExceptionType": "Shop.Fault", "MT-Fault-Message": "no stock"}, b"", "Shop.Fault"),
        ({"NServiceBus.ExceptionInfo.ExceptionType": "N.E"}, b"", "N.E"),
        (
            {},
            b'{"actor_name": "a", "options": {"traceback": "Traceback:\\n  File \\"a.py\\"\\n    x\\nValueError: no"}}',
            "ValueError",
        ),
    ],
)
def test_the_failure_is_told_in_each_dialect(headers: dict[str, str], body: bytes, kind: str) -> None:
    entries = [(name.encode(), messages.text(value)) for name, value in headers.items()]
    assert examined(*entries, messages.x_death(messages.death()), body=body).failure.type == kind


def test_the_digest_is_of_body_and_message_id_and_the_full_one_of_everything() -> None:
    one = examined(message_id=b"m")
    assert one.digest == examined((b"extra", messages.long(1)), message_id=b"m").digest
    assert one.full_digest != examined((b"extra", messages.long(1)), message_id=b"m").full_digest
    assert one.digest != examined(message_id=b"n").digest
    assert one.digest != examined(message_id=b"m", body=b"other").digest
    assert examined(message_id=b"my").digest != examined(message_id=b"m", body=b"ybody").digest


def test_only_readable_deaths_of_the_history_count() -> None:
    assert examined((HISTORY, messages.text("no array"))).failure.type is None


@pytest.mark.parametrize("entries", [(), ((b"trace", messages.text("t")), (b"n", messages.long(1)))])
def test_a_redelivery_by_a_quorum_queue_is_no_other_message(entries: tuple[messages.Entry, ...]) -> None:
    counted = (*entries, (b"x-acquired-count", messages.long(3)))
    first = examined(*entries, message_id=b"m")
    again = examined((b"x-delivery-count", messages.long(2)), *counted, message_id=b"m")
    assert again.full_digest == first.full_digest
    bare = examine(delivered(messages.encode_properties({"message_id": b"m"}), b"body"), TRUST, NOW)
    assert (bare.full_digest == again.full_digest) == (not entries)


def limited(**counts: int) -> list[messages.Entry]:
    """As a quorum queue dead-letters what has failed too often."""
    found = [(name.replace("_", "-").encode(), messages.long(count)) for name, count in counts.items()]
    return [(b"x-death", messages.array(messages.death(reason="delivery_limit"))), *found]


def retries(*entries: messages.Entry, **native: int) -> int:
    trust = replace(TRUST, native_retries=native)
    return examine(delivered(messages.with_headers(*entries)), trust, NOW).retries


def test_the_retries_that_the_broker_made_are_counted_and_not_taken_for_deaths() -> None:
    # RabbitMQ 4.3 keeps the count of failures in a second quorum queue.
    assert retries(*limited(x_acquired_count=5, x_delivery_count=4)) == 3
    # Before, a count there is of the second queue alone.
    assert retries(*limited(x_delivery_count=4)) == 0
    assert retries(*limited()) == 0
    assert retries(*limited(), orders=3) == 3
    assert retries((b"x-death", messages.array(messages.death())), orders=3) == 0


def test_the_brokers_retries_do_not_replace_those_of_a_drain() -> None:
    counts = limited(x_acquired_count=5, x_delivery_count=4)
    assert retries(*drained(retries=messages.long(2)), *counts) == 2


def test_what_nobody_tells_is_a_group_of_the_queue_it_was_taken_from() -> None:
    def taken_from(queue: str, *entries: messages.Entry) -> str:
        delivery = delivered(messages.with_headers(*entries))
        delivery.receipt.queue = queue
        return examine(delivery, TRUST, NOW).fingerprint

    assert taken_from("billing.parking") == taken_from("billing.parking") != taken_from("mail.error")
    told = (b"x-exception-message", messages.text("declined"))
    assert taken_from("billing.parking", told) == taken_from("mail.error", told)
    assert taken_from("billing.parking", *drained()) == taken_from("mail.error", *drained())
