"""What a dead message carries on its way back, and where it goes; the origins are answered for by the test."""

from __future__ import annotations

from dataclasses import dataclass, field

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import AwaitOrigin, Delivery, Hold, Instruction, Publish, Route
from dlqbatch.amqp.origin import Trust
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.lifecycle.resend import Resend
from dlqbatch.topology.kinds import Ladder

LADDER = Ladder()
TRUST = Trust(LADDER.queue_names, LADDER.exchange_names)
ORDERS = Origin("orders", "shop", "orders.created")
RECORDED = [
    (b"dlqbatch-id", messages.text("id-1")),
    (b"dlqbatch-retries", messages.long(3)),
    (b"dlqbatch-trips", messages.long(4)),
    (b"dlqbatch-origin-queue", messages.text("orders")),
    (b"dlqbatch-origin-exchange", messages.text("shop")),
    (b"dlqbatch-origin-key", messages.text("orders.created")),
    (b"dlqbatch-reason", messages.text("retries-exhausted")),
    (b"dlqbatch-dead-at", messages.timestamp(1_700_000_100)),
]
DIED = messages.x_death(messages.death())


class Nowhere:
    queue = ""

    def settle(self, tag: int) -> None:
        raise AssertionError(tag)

    hold = settle


@dataclass(frozen=True)
class Row:
    properties: bytes
    row_id: int = 7
    identity: str = "id-1"
    parent: str | None = None
    attempt: int = 2
    exchange: str = "dlq-exchange"
    routing_key: str = "dlq-routing-key"
    body: bytes = b"body"
    to_queue: str | None = None


@dataclass
class Known:
    """Every origin is there unless it is named."""

    gone: frozenset[str] = frozenset()
    unclear: frozenset[str] = frozenset()
    unasked: frozenset[str] = frozenset()
    asked: list[Origin] = field(default_factory=list)

    def route(self, origin: Origin) -> Route | None:
        self.asked.append(origin)
        away = self.gone | self.unclear | self.unasked
        return None if origin.name in away else Route(f"to {origin.name}", origin.key)

    def is_gone(self, origin: Origin) -> bool:
        return origin.name in self.gone

    def is_unclear(self, origin: Origin) -> bool:
        return origin.name in self.unclear


def resent(
    row: Row, origins: Known | None = None, *, limit: int = 100_000, return_to_queue: bool = True, trust: Trust = TRUST
) -> Instruction:
    resend = Resend(origins or Known(), trust, b"login", limit, return_to_queue)
    (offer,) = resend.offers([row])
    delivery = Delivery(Nowhere(), offer.tag, offer.exchange, offer.routing_key, redelivered=False)
    delivery.properties, delivery.body_size = offer.properties, len(offer.body)
    return resend.handle(delivery)


def published(row: Row, **options: object) -> tuple[Publish, dict[bytes, messages.Value]]:
    instruction = resent(row, **options)  # type: ignore[arg-type]
    assert isinstance(instruction, Publish), instruction
    return instruction, dict(messages.headers_of(instruction.properties))


def test_it_goes_to_its_origin_with_its_id_and_attempt_and_without_why_it_died() -> None:
    publish, headers = published(Row(messages.with_headers(*RECORDED, (b"theirs", messages.text("kept")))))
    assert publish == Publish("id-1", Route("to orders", "orders.created"), publish.properties, "sent", None, ORDERS)
    assert headers[b"dlqbatch-attempt"] == messages.long(2)
    assert headers[b"dlqbatch-origin-exchange"] == messages.text("shop")
    assert headers[b"dlqbatch-retries"] == messages.long(3)
    assert headers[b"theirs"] == messages.text("kept")
    assert not {b"dlqbatch-reason", b"dlqbatch-dead-at", b"dlqbatch-parent"} & headers.keys()


def test_a_row_with_a_name_of_its_own_travels_under_that_and_names_its_parent() -> None:
    _, headers = published(Row(messages.with_headers(*RECORDED), identity="own", parent="id-1"))
    assert headers[b"dlqbatch-id"] == messages.text("own")
    assert headers[b"dlqbatch-parent"] == messages.text("id-1")


def test_an_id_that_is_cut_in_the_row_goes_out_as_it_came() -> None:
    identity = "\0" * 200
    cut = "\\x00" * 40 + "…" + "é" * 80  # more bytes than a header of ours may have
    entries = [(b"dlqbatch-id", messages.text(identity)), *RECORDED[1:]]
    _, headers = published(Row(messages.with_headers(*entries), identity=cut, parent=cut))
    assert headers[b"dlqbatch-id"] == messages.text(identity)
    assert b"dlqbatch-parent" not in headers


def test_the_newest_death_says_where_it_failed_unless_it_is_the_recorded_queue() -> None:
    died_elsewhere = messages.x_death(messages.death("stock", "depot", "stock.low"))
    publish, headers = published(Row(messages.with_headers(*RECORDED, died_elsewhere)))
    assert publish.origin == Origin("stock", "depot", "stock.low")
    assert headers[b"dlqbatch-origin-queue"] == messages.text("stock")
    by_return = messages.x_death(messages.death("orders", "dlqbatch.return.orders"))
    assert published(Row(messages.with_headers(*RECORDED, by_return)))[0].origin == ORDERS


@pytest.mark.parametrize("spoilt", [b"dlqbatch-retries", b"dlqbatch-trips", b"dlqbatch-attempt"])
def test_a_header_of_ours_that_is_not_valid_does_not_stop_it(spoilt: bytes) -> None:
    entries = [*(entry for entry in RECORDED if entry[0] != spoilt), (spoilt, messages.text("nonsense"))]
    publish, headers = published(Row(messages.with_headers(*entries)))
    assert publish.origin == ORDERS
    assert headers[b"dlqbatch-attempt"] == messages.long(2)


@pytest.mark.parametrize("with_origin", [True, False])
def test_to_another_queue_under_the_same_event(with_origin: bool) -> None:
    properties = messages.with_headers(*(RECORDED if with_origin else []))
    origins = Known(gone=frozenset({"orders"}))
    publish, headers = published(Row(properties, to_queue="new-orders"), origins=origins)
    key = "orders.created" if with_origin else "dlq-routing-key"
    assert publish.route == Route("to new-orders", key)
    assert headers[b"dlqbatch-origin-queue"] == messages.text("new-orders")
    assert headers[b"dlqbatch-origin-key"] == messages.text(key)


@pytest.mark.parametrize(
    ("entries", "origins", "expected"),
    [
        (RECORDED, Known(gone=frozenset({"orders"})), Hold("manual", "origin-gone")),
        (RECORDED, Known(unclear=frozenset({"orders"})), Hold("left", "origin-check-failed")),
        (RECORDED, Known(unasked=frozenset({"orders"})), AwaitOrigin(ORDERS)),
        ([], Known(), Hold("manual", "origin-unknown")),
        ([messages.x_death(messages.death("retry-queue"))], Known(), Hold("manual", "origin-unknown")),
        (
            [(b"dlqbatch-origin-queue", messages.text("retry-queue-1")), RECORDED[5]],
            Known(),
            Hold("manual", "origin-unknown"),
        ),
        (
            [(b"dlqbatch-origin-exchange", messages.text("dlqbatch.return.x")), RECORDED[5]],
            Known(),
            Hold("manual", "origin-unknown"),
        ),
    ],
)
def test_where_it_cannot_go(entries: list[messages.Entry], origins: Known, expected: Instruction) -> None:
    assert resent(Row(messages.with_headers(*entries)), origins) == expected


def test_headers_that_do_not_fit_need_a_person() -> None:
    large = messages.with_headers(*RECORDED, (b"theirs", messages.text("x" * 500)))
    assert resent(Row(large), limit=400) == Hold("manual", "headers-too-large")


def test_through_its_exchange_the_queue_stays_known() -> None:
    publish, headers = published(Row(messages.with_headers(*RECORDED)), return_to_queue=False)
    assert publish.origin == Origin(None, "shop", "orders.created")
    assert headers[b"dlqbatch-origin-queue"] == messages.text("orders")


def test_an_exchange_that_only_a_client_names_is_not_returned_through() -> None:
    """Who may publish may write any header."""
    forged = [
        (name, messages.text("admin") if name == b"dlqbatch-origin-exchange" else value) for name, value in RECORDED
    ]
    by_shop = Row(messages.with_headers(*forged, DIED))
    assert published(by_shop, return_to_queue=False)[0].origin == Origin(None, "shop", "orders.created")
    by_name = Row(messages.with_headers(*forged, messages.x_death(messages.death("orders", "", "orders"))))
    publish, headers = published(by_name, return_to_queue=False)
    assert publish.origin == Origin("orders", None, "orders.created")
    assert b"dlqbatch-origin-exchange" not in headers
    allowed = Trust(LADDER.queue_names, LADDER.exchange_names, origins_allowed=("admin",))
    assert published(Row(messages.with_headers(*forged)), return_to_queue=False, trust=allowed)[0].origin == Origin(
        None, "admin", "orders.created"
    )


def test_what_was_answered_is_forgotten() -> None:
    resend = Resend(Known(), TRUST, b"login", 1000)
    resend.offers([Row(b"\0\0"), Row(b"\0\0", row_id=8)])
    assert resend.answered(7) is not None
    assert resend.answered(7) is None
    assert list(resend.unanswered) == [8]


@given(st.one_of(st.binary(max_size=60), messages.mutated_properties()))
def test_no_bytes_stop_the_others(properties: bytes) -> None:
    instruction = resent(Row(properties))
    assert isinstance(instruction, Publish) or instruction.counts_as in {"manual", "left"}  # type: ignore[union-attr]
