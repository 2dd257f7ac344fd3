from __future__ import annotations

import messages
import pytest
from hypothesis import given

from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.identity import Identity
from dlqbatch.amqp.origin import Found, Trust, Unknown, find_origin, is_addressable
from dlqbatch.amqp.retry_headers import UNMARKED, Journey, Origin, journey_so_far, return_exchange
from dlqbatch.topology.kinds import Ladder

ORDERS = Origin("orders", "shop", "orders.created")
DIGEST = "0123456789abcdef"
TRUST = Trust(Ladder().queue_names, Ladder().exchange_names)
SAME, COPY, OTHER = Identity.SAME, Identity.COPY, Identity.OTHER
SPRING = [(b"x-original-exchange", messages.text("shop")), (b"x-original-routingKey", messages.text("orders.created"))]


def allowing(*patterns: str) -> Trust:
    return Trust(TRUST.own_queues, TRUST.own_exchanges, patterns)


def find(
    *entries: messages.Entry,
    recorded: Origin | None = None,
    trust: Trust = TRUST,
    exchange: str = "retry-exchange",
    key: str = "retry-routing-key",
    digest: str | None = None,
) -> Found | Unknown:
    envelope = open_envelope(exchange, key, False, 0, messages.with_headers(*entries))
    assert envelope.headers is not None
    journey = UNMARKED if recorded is None else Journey(id="id-1", origin=recorded, digest=digest)
    return find_origin(envelope, envelope.headers, journey, trust, lambda: DIGEST)


def origin(*entries: messages.Entry, recorded: Origin | None = None, trust: Trust = TRUST) -> tuple[Origin, Identity]:
    found = find(*entries, recorded=recorded, trust=trust)
    assert isinstance(found, Found), found
    return found.origin, found.identity


def why(*entries: messages.Entry, recorded: Origin | None = None, trust: Trust = TRUST) -> str:
    found = find(*entries, recorded=recorded, trust=trust)
    assert isinstance(found, Unknown), found
    return found.why


def test_the_newest_death_is_the_origin_and_overrides_a_recorded_one() -> None:
    died = messages.x_death(messages.death("orders", "shop", "orders.created"))
    assert origin(died) == (ORDERS, SAME)
    assert origin(died, recorded=Origin("mail", "shop", "mail.sent")) == (ORDERS, OTHER)
    assert origin(died, *SPRING, trust=allowing("*")) == (ORDERS, SAME)


def test_deaths_in_our_own_queues_are_passed_over() -> None:
    assert origin(messages.x_death(messages.death("queue.delay.2"), messages.death())) == (ORDERS, SAME)
    assert isinstance(find(messages.x_death(messages.death("retry-queue"))), Unknown)


def test_the_recorded_key_and_exchange_survive_a_death_in_the_same_queue() -> None:
    through_return = messages.x_death(messages.death("orders", "dlqbatch.return.orders", "orders.created"))
    by_default_exchange = messages.x_death(messages.death("orders", "", "orders"))
    for died in (through_return, by_default_exchange):
        assert origin(died, recorded=ORDERS) == (ORDERS, SAME)


def test_a_queue_found_behind_the_recorded_exchange_completes_the_origin() -> None:
    recorded = Origin(None, "shop", "orders.created")
    assert origin(messages.x_death(messages.death()), recorded=recorded) == (ORDERS, SAME)
    for exchange, key in (("another", "orders.created"), ("shop", "another.key")):
        elsewhere = messages.x_death(messages.death("orders", exchange, key))
        assert origin(elsewhere, recorded=recorded) == (Origin("orders", exchange, key), OTHER)


def test_a_return_exchange_is_never_an_origin() -> None:
    died = messages.x_death(messages.death("orders", "dlqbatch.return.orders"))
    assert origin(died) == (Origin("orders", None, "orders.created"), SAME)
    claimed = [(b"x-original-exchange", messages.text("dlqbatch.return.orders"))]
    assert why(*claimed, trust=allowing("*")) == "'dlqbatch.return.orders' belongs to dlqbatch itself"
    assert isinstance(find(exchange="dlqbatch.return.orders", key="orders.created"), Unknown)


@pytest.mark.parametrize(
    ("queue", "exchange", "key"),
    [("ö" * 128, "shop", "k"), ("q" * 256, "shop", "k"), ("orders", "x" * 256, "k"), ("orders", "shop", "k" * 256)],
)
def test_names_that_no_broker_holds_are_no_origin(queue: str, exchange: str, key: str) -> None:
    assert why(messages.x_death(messages.death(queue, exchange, key))) == "no queue or exchange can have such a name"


@pytest.mark.parametrize("queue", ["q" * 256, "two\nlines"])
def test_a_client_that_names_an_impossible_queue_is_told_so_in_the_reason(queue: str) -> None:
    claimed = (b"NServiceBus.FailedQ", messages.text(queue))
    assert why(claimed, trust=allowing("*")) == "no queue or exchange can have such a name"


def test_a_queue_whose_name_is_not_utf_8_is_no_origin() -> None:
    died = messages.x_death(messages.nested((b"queue", messages.text(b"\xff"))))
    assert why(died) == "no queue or exchange can have such a name"
    assert not is_addressable(Origin(None, "\udcff", "k"))
    assert is_addressable(Origin("ö" * 127, "", "\udcff" * 255))


def test_what_only_a_client_says_is_not_believed_and_the_reason_says_so() -> None:
    told = "'shop' is named by headers that a client wrote, and dlqbatch.origins.allowed does not list it"
    assert why(*SPRING) == told
    assert why(*SPRING, trust=allowing("shopping", "hop", "sho")) == told
    assert why(recorded=ORDERS) == told.replace("shop", "orders")


@pytest.mark.parametrize("pattern", ["shop", "sh*", "*op", "*", "s*p", "*h*", "shop*", "*shop"])
def test_what_a_client_says_is_believed_of_the_origins_allowed(pattern: str) -> None:
    assert origin(*SPRING, trust=allowing("mail", pattern)) == (Origin(None, "shop", "orders.created"), SAME)


def test_only_the_asterisk_is_special_in_an_allowed_name() -> None:
    assert not allowing("a?", "[ab]", "a.c", "").allows(Origin("ab", None, ""))
    assert allowing("a?[b].c").allows(Origin("a?[b].c", None, ""))
    assert allowing("a*c").allows(Origin("a\nc", None, ""))


def test_behind_the_default_exchange_it_is_the_queue_that_has_to_be_allowed() -> None:
    claimed = [(b"x-original-exchange", messages.text("")), (b"x-original-routingKey", messages.text("orders"))]
    assert origin(*claimed, trust=allowing("orders")) == (Origin("orders", "", "orders"), SAME)
    assert not allowing("orders").allows(Origin(None, "", "mail"))
    ours = [(b"x-original-exchange", messages.text("")), (b"x-original-routingKey", messages.text("retry-queue"))]
    assert why(*ours, trust=allowing("*")) == "'retry-queue' belongs to dlqbatch itself"


def test_our_own_queues_and_exchanges_are_no_origin_whoever_says_so() -> None:
    for name in ("retry-exchange", "route-delay"):
        claimed = (b"x-original-exchange", messages.text(name))
        assert why(claimed, trust=allowing("*")) == f"'{name}' belongs to dlqbatch itself"
    failed = (b"NServiceBus.FailedQ", messages.text("dlq-queue"))
    assert why(failed, trust=allowing("*")) == "'dlq-queue' belongs to dlqbatch itself"


@pytest.mark.parametrize(
    ("header", "value", "queue"),
    [
        (b"NServiceBus.FailedQ", "orders", "orders"),
        (b"NServiceBus.FailedQ", "orders@machine", "orders"),
        (b"MT-Fault-InputAddress", "rabbitmq://broker/shop/orders?bind=true", "orders"),
        (b"MT-Fault-InputAddress", "rabbitmq://broker/orders", "orders"),
        (b"MT-Fault-InputAddress", "queue:orders", "orders"),
        (b"MT-Fault-InputAddress", "rabbitmq://broker/" + "v" * 300 + "/or%20ders", "or ders"),
    ],
)
def test_other_libraries_name_a_queue(header: bytes, value: str, queue: str) -> None:
    assert origin((header, messages.text(value)), trust=allowing("*")) == (Origin(queue, None, queue), SAME)


@pytest.mark.parametrize(
    "entry",
    [
        (b"MT-Fault-InputAddress", messages.text("rabbitmq://[broker/orders")),
        (b"MT-Fault-InputAddress", messages.text("rabbitmq://broker/")),
        (b"NServiceBus.FailedQ", messages.text("@machine")),
        (b"NServiceBus.FailedQ", messages.long(1)),
        (b"x-original-exchange", messages.text("")),
        (b"x-original-routingKey", messages.text("orders.created")),
        (b"NServiceBus.FailedQ", messages.text("q" * 256)),
        (b"NServiceBus.FailedQ", messages.text(b"\xff")),
    ],
)
def test_a_claim_that_names_nothing_is_no_origin(entry: messages.Entry) -> None:
    assert isinstance(find(entry, trust=allowing("*")), Unknown)


def test_a_claim_of_the_way_back_means_the_recorded_origin() -> None:
    long_queue = "q" * 250
    for queue in ("orders", long_queue):
        recorded = Origin(queue, "shop", "orders.created")
        through = [(b"x-original-exchange", messages.text(return_exchange(queue))), SPRING[1]]
        by_name = [(b"NServiceBus.FailedQ", messages.text(queue))]
        for entries in (through, by_name):
            assert origin(*entries, recorded=recorded, trust=allowing(queue)) == (recorded, SAME)
        another = [through[0], (b"x-original-routingKey", messages.text("k"))]
        assert origin(*another, recorded=recorded, trust=allowing(queue)) == (Origin(queue, None, "k"), OTHER)
    by_exchange = Origin(None, "shop", "orders.created")
    assert origin(*SPRING, recorded=by_exchange, trust=allowing("shop")) == (by_exchange, SAME)
    elsewhere = by_exchange._replace(key="orders.paid")
    assert origin(*SPRING, recorded=elsewhere, trust=allowing("shop")) == (by_exchange, OTHER)


def handed_over(queue: str, exchange: str, key: str) -> list[messages.Entry]:
    said = {b"queue": queue, b"exchange": exchange, b"key": key}
    return [(b"dlqbatch-failed-" + name, messages.text(value)) for name, value in said.items()]


def test_a_failure_that_a_client_hands_over_is_returned_to_its_one_queue() -> None:
    trust = allowing("orders")
    assert origin(*handed_over(*ORDERS), trust=trust) == (ORDERS, SAME)
    assert origin(*handed_over("orders", "", "orders"), trust=trust) == (Origin("orders", "", "orders"), SAME)
    assert "origins.allowed" in why(*handed_over(*ORDERS), trust=allowing("shop"))
    died = messages.x_death(messages.death("mail", "shop", "mail.sent"))
    assert origin(died, *handed_over(*ORDERS), trust=trust) == (Origin("mail", "shop", "mail.sent"), SAME)


def test_what_is_handed_over_is_the_same_message_only_if_it_came_back_by_our_way() -> None:
    trust = allowing("*")
    back = handed_over("orders", "dlqbatch.return.orders", "orders.created")
    assert origin(*back, recorded=ORDERS, trust=trust) == (ORDERS, SAME)
    # A worker's follow-up in the same queue, and one in another queue, with the headers that it had received.
    assert origin(*handed_over("orders", "shop", "orders.paid"), recorded=ORDERS, trust=trust) == (
        Origin("orders", "shop", "orders.paid"),
        OTHER,
    )
    assert origin(*handed_over("mail", "shop", "mail.sent"), recorded=ORDERS, trust=trust) == (
        Origin("mail", "shop", "mail.sent"),
        OTHER,
    )
    assert origin(*back, trust=trust) == (Origin("orders", None, "orders.created"), SAME)
    odd = handed_over("mail", "dlqbatch.return.orders", "orders.created")
    assert origin(*odd, recorded=ORDERS, trust=trust) == (Origin("mail", None, "orders.created"), OTHER)


def rascals(**said: str) -> messages.Entry:
    return b"rascal", messages.nested(*((name.encode(), messages.text(value)) for name, value in said.items()))


def test_what_rascal_published_anew_failed_as_it_was_published_at_first() -> None:
    first = rascals(originalQueue="orders", originalExchange="shop", originalRoutingKey="orders.created")
    died = messages.x_death(messages.death("orders", "", "orders"))
    assert origin(died, first) == (ORDERS, SAME)
    assert origin(died, first, trust=allowing("*")) == (ORDERS, SAME)
    assert origin(first, trust=allowing("orders")) == (ORDERS, SAME)
    elsewhere = messages.x_death(messages.death("mail", "", "mail"))
    assert origin(elsewhere, first) == (Origin("mail", "", "mail"), SAME)
    by_name = messages.x_death(messages.death("orders", "mall", "orders.paid"))
    assert origin(by_name, first) == (Origin("orders", "mall", "orders.paid"), SAME)


def test_an_exchange_that_rascal_names_is_not_vouched_for() -> None:
    first = rascals(originalQueue="orders", originalExchange="secret", originalRoutingKey="orders.created")
    found = find(messages.x_death(messages.death("orders", "", "orders")), first)
    assert isinstance(found, Found)
    assert TRUST.vouched(found).exchange is None
    assert allowing("secret").vouched(found).exchange == "secret"


def test_what_rascal_published_anew_came_back_if_the_digest_agrees() -> None:
    first = rascals(originalQueue="orders", originalExchange="shop", originalRoutingKey="orders.created")
    died = messages.x_death(messages.death("orders", "", "orders"))
    for digest, identity in ((DIGEST, SAME), ("another", OTHER), ("", OTHER)):
        found = find(died, first, recorded=ORDERS, digest=digest)
        assert isinstance(found, Found)
        assert found.identity is identity


def test_moleculer_names_a_channel_and_a_group() -> None:
    said = [(b"x-original-channel", messages.text("order.created")), (b"x-original-group", messages.text("mail"))]
    assert origin(*said, trust=allowing("mail.*")) == (Origin("mail.order.created", None, "order.created"), SAME)


@pytest.mark.parametrize(
    ("key", "event"),
    [
        ("0." * 26 + "1.1.payments", "payments"),
        ("0." * 27 + "1.shop.payments.failed", "shop.payments.failed"),
        ("0." * 27 + "payments", "0." * 27 + "payments"),
        ("0." * 27 + "2.payments", "0." * 27 + "2.payments"),
        ("0." * 28, ""),
        ("0.payments", "0.payments"),
        ("payments", "payments"),
        ("", ""),
    ],
)
def test_the_bits_of_a_delay_are_part_of_the_key_and_not_of_the_event(key: str, event: str) -> None:
    found, _ = origin(messages.x_death(messages.death("payments", "celery_delayed_delivery", key)))
    assert (found.key, found.event) == (key, event)


def test_a_message_from_an_alternate_exchange_failed_at_its_own_exchange() -> None:
    unroutable = find(exchange="shop", key="orders.created")
    assert unroutable == Found(Origin(None, "shop", "orders.created"), SAME)
    recorded = Origin(None, "shop", "k")
    assert find(exchange="shop", key="k", recorded=recorded) == Found(recorded, SAME)
    forged = recorded._replace(key="another.key")
    assert find(exchange="shop", key="k", recorded=forged) == Found(recorded, OTHER)
    assert find(exchange="mall", key="k", recorded=recorded) == Found(Origin(None, "mall", "k"), OTHER)
    # The same exchange by the client's word, or an error handler's exchange that leads here.
    assert find(*SPRING, exchange="shop", key="k") == Found(Origin(None, "shop", "k"), SAME)
    assert isinstance(find(*SPRING, exchange="errors"), Unknown)


@pytest.mark.parametrize("exchange", ["", "retry-exchange", "retry-exchange-1", "dlq-exchange"])
def test_a_message_published_straight_to_us_has_no_origin(exchange: str) -> None:
    assert find(exchange=exchange) == Unknown()


def test_an_exchange_that_only_our_own_headers_name_is_not_vouched_for() -> None:
    forged = Origin("orders", "payments", "orders.created")
    for exchange, key in (("payments", "orders.created"), ("", "orders")):
        found = find(messages.x_death(messages.death("orders", exchange, key)), recorded=forged)
        assert isinstance(found, Found)
        assert found[:2] == (forged, SAME)
        assert TRUST.vouched(found) == (forged if exchange else forged._replace(exchange=None))
        assert allowing("payments").vouched(found) == forged
    by_shop = find(messages.x_death(messages.death("orders", "shop", "orders.created")), recorded=forged)
    assert isinstance(by_shop, Found)
    assert TRUST.vouched(by_shop) == ORDERS
    by_claim = Found(forged, SAME)
    assert allowing("orders").vouched(by_claim).exchange is None
    assert allowing("orders", "payments").vouched(by_claim) == forged
    assert TRUST.vouched(Found(Origin(None, "shop", "k"), SAME)).exchange == "shop"


def test_an_exchange_that_came_back_with_a_message_through_our_own_is_kept() -> None:
    """As after a change of return-via, while messages are on their way."""
    through_return = messages.x_death(messages.death("orders", "dlqbatch.return.orders"))
    found = find(through_return, recorded=ORDERS, digest="")
    assert isinstance(found, Found)
    assert TRUST.vouched(found) == ORDERS
    another = find(through_return, recorded=ORDERS._replace(key="another.key"), digest="")
    assert isinstance(another, Found)
    assert TRUST.vouched(another) == Origin("orders", None, "orders.created")


@given(messages.valid_properties)
def test_any_headers_lead_somewhere_the_broker_can_be_asked_for(data: bytes) -> None:
    envelope = open_envelope("shop", "k", False, 0, data)
    if envelope.headers is None:
        return
    journey = journey_so_far(envelope.headers)
    for trust in (TRUST, allowing("*")):
        found = find_origin(envelope, envelope.headers, journey, trust, lambda: DIGEST)
        if isinstance(found, Found):
            assert is_addressable(found.origin)
            assert not trust.is_ours(found.origin)
