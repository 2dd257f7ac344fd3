"""The way back to each origin: found, made, refused or gone, and never at the cost of a working channel."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from broker_client import Side, body_of, connected, move, publish, transfer

from dlqbatch.amqp.delivery import AwaitOrigin, Hold, Route
from dlqbatch.amqp.retry_headers import Origin, return_exchange
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.transfer import Take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlqbatch.amqp.delivery import Delivery, Instruction
    from dlqbatch.broker.connection import Connection
    from scripts.servers.management import Management

SOURCE, ORDERS = "source", "orders"
ORIGIN = Origin(ORDERS, "shop", "order.created")
ALL = ".*"


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    side.queue(SOURCE)
    side.queue("sink")
    yield side
    side.close()


@pytest.fixture
def login(broker_url: str, management: Management) -> Iterator[Callable[..., str]]:
    """Make a user with these permissions; the answer is the address to connect to as that user."""
    users: list[str] = []

    def make(*, configure: str = ALL, write: str = ALL, read: str = ALL) -> str:
        name = f"user-{secrets.token_hex(4)}"
        management.put(f"users/{name}", {"password": name, "tags": ""})
        rights = {"configure": configure, "write": write, "read": read}
        management.put(f"permissions/{management.vhost}/{name}", rights)
        users.append(name)
        return broker_url.replace("guest:guest", f"{name}:{name}")

    yield make
    for name in users:
        management.delete(f"users/{name}")


def prepared(connection: Connection, origin: Origin, *, touch: bool = True) -> Origins:
    """Asked for, with the connection and its other channels as good as before."""
    working = connection.open_channel()
    origins = Origins(connection, touch=touch)
    origins.prepare(origin)
    assert working.is_open
    assert not connection.is_lost
    return origins


def back(origins: Origins, origin: Origin) -> Callable[[Delivery], Instruction]:
    def handle(delivery: Delivery) -> Instruction:
        route = origins.route(origin)
        if route is not None:
            return publish(delivery, route, login=b"", origin=origin)
        if origins.is_gone(origin):
            return publish(delivery, Route("", "sink"))
        return Hold("left", "unclear") if origins.is_unclear(origin) else AwaitOrigin(origin)

    return handle


def test_a_return_reaches_the_one_queue_with_the_original_key_and_no_other_subscriber(
    side: Side, broker_url: str
) -> None:
    side.channel.exchange_declare("shop", "topic")
    for queue in (ORDERS, "invoices"):
        side.channel.queue_bind(side.queue(queue), "shop", "order.*")
    side.fill(SOURCE, [b"1", b"2"])
    with connected(broker_url) as connection:
        origins = Origins(connection)
        tally = transfer(connection, [Take(SOURCE, 2)], back(origins, ORIGIN), origins=origins)
    assert tally.results == {("moved", None): 2}
    arrived = side.empty(ORDERS)
    assert [message.body for message in arrived] == [b"1", b"2"]
    assert {(message.exchange, message.routing_key) for message in arrived} == {
        (return_exchange(ORDERS), "order.created")
    }
    assert side.depth("invoices") == 0
    assert origins.warnings == {}


def test_preparing_twice_asks_the_broker_once(side: Side, broker_url: str) -> None:
    side.queue(ORDERS)
    with connected(broker_url) as connection:
        origins = prepared(connection, ORIGIN)
        sent = connection.wire.frames_sent
        origins.prepare(ORIGIN._replace(key="another.key"))
        assert connection.wire.frames_sent == sent
        assert origins.route(ORIGIN._replace(key="another.key")) == Route(return_exchange(ORDERS), "another.key")


def test_a_queue_that_is_not_there_is_gone_and_nothing_is_made_for_it(
    side: Side, broker_url: str, management: Management
) -> None:
    with connected(broker_url) as connection:
        origins = prepared(connection, ORIGIN)
        assert origins.is_gone(ORIGIN)
        assert not origins.is_unclear(ORIGIN)
        assert origins.route(ORIGIN) is None
    assert management.exchanges() == []


def test_a_dry_run_looks_and_makes_nothing(side: Side, broker_url: str, management: Management) -> None:
    side.queue(ORDERS)
    with connected(broker_url) as connection:
        assert prepared(connection, ORIGIN, touch=False).route(ORIGIN) == Route(return_exchange(ORDERS), ORIGIN.key)
        assert prepared(connection, Origin("none", None, "k"), touch=False).is_gone(Origin("none", None, "k"))
    assert management.exchanges() == []


def test_a_queue_deleted_and_declared_again_during_the_run_is_bound_again(side: Side, broker_url: str) -> None:
    side.queue(ORDERS)
    side.fill(SOURCE, [b"%d" % number for number in range(200)])
    with connected(broker_url) as connection:
        origins = Origins(connection)
        handle = back(origins, ORIGIN)

        def delete_in_the_middle(delivery: Delivery) -> Instruction:
            if body_of(delivery) == b"100" and not delivery.resent and origins.route(ORIGIN) is not None:
                side.channel.queue_delete(ORDERS)
                side.queue(ORDERS)
            return handle(delivery)

        origins.prepare(ORIGIN)
        tally = transfer(connection, [Take(SOURCE, 200)], delete_in_the_middle, origins=origins)
    assert tally.results == {("moved", None): 200}
    # What went in before the deletion went away with the queue; what came after is there.
    assert {b"%d" % number for number in range(100, 200)} <= {message.body for message in side.empty(ORDERS)}
    assert side.empty(SOURCE) == []


def test_a_queue_deleted_during_the_run_is_found_to_be_gone(side: Side, broker_url: str) -> None:
    side.queue(ORDERS)
    side.fill(SOURCE, [b"%d" % number for number in range(200)])
    with connected(broker_url) as connection:
        origins = Origins(connection)
        handle = back(origins, ORIGIN)

        def delete_in_the_middle(delivery: Delivery) -> Instruction:
            if body_of(delivery) == b"100" and origins.route(ORIGIN) is not None:
                side.channel.queue_delete(ORDERS)
            return handle(delivery)

        origins.prepare(ORIGIN)
        tally = transfer(connection, [Take(SOURCE, 200)], delete_in_the_middle, origins=origins)
    assert tally.results == {("moved", None): 200}
    assert {b"%d" % number for number in range(100, 200)} <= {message.body for message in side.empty("sink")}


def test_an_exclusive_queue_is_reached_through_the_default_exchange(side: Side, broker_url: str) -> None:
    side.channel.queue_declare("mine", exclusive=True)
    origin = Origin("mine", "shop", "order.created")
    side.fill(SOURCE, [b"1"])
    with connected(broker_url) as connection:
        origins = prepared(connection, origin)
        assert origins.route(origin) == Route("", "mine")
        assert len(origins.warnings) == 1
        transfer(connection, [Take(SOURCE, 1)], back(origins, origin), origins=origins)
    assert side.channel.basic_get("mine", auto_ack=True)[2] == b"1"


@pytest.mark.parametrize(
    "rights",
    [
        {"configure": r"^(?!dlqbatch\.return\.)"},
        {"write": r"^(?!dlqbatch\.return\.)"},
        {"read": r"^(?!dlqbatch\.return\.)"},
    ],
    ids=lambda rights: next(iter(rights)),
)
def test_without_rights_on_return_exchanges_the_default_exchange_serves(
    side: Side, broker_url: str, login: Callable[..., str], rights: dict[str, str]
) -> None:
    side.queue(ORDERS)
    side.fill(SOURCE, [b"1"])
    with connected(login(**rights)) as connection:
        origins = prepared(connection, ORIGIN)
        assert origins.route(ORIGIN) == Route("", ORDERS)
        assert len(origins.warnings) == 1
        assert ORDERS in next(iter(origins.warnings))
        tally = transfer(connection, [Take(SOURCE, 1)], back(origins, ORIGIN), origins=origins)
    assert tally.results == {("moved", None): 1}
    assert [message.body for message in side.empty(ORDERS)] == [b"1"]


def test_rights_on_one_return_exchange_say_nothing_of_another(
    side: Side, broker_url: str, login: Callable[..., str]
) -> None:
    """Write permission is a pattern: it may hold for one queue's exchange and not for the next."""
    side.queue("a")
    side.queue("b")
    with connected(login(write=r"^(?!dlqbatch\.return\.b$)")) as connection:
        origins = prepared(connection, Origin("a", None, "k"))
        origins.prepare(Origin("b", None, "k"))
        assert origins.route(Origin("a", None, "k")) == Route(return_exchange("a"), "k")
        assert origins.route(Origin("b", None, "k")) == Route("", "b")


@pytest.mark.parametrize("touch", [True, False])
def test_what_came_by_the_default_exchange_goes_back_that_way_where_the_login_may(
    side: Side, broker_url: str, login: Callable[..., str], management: Management, touch: bool
) -> None:
    side.queue(ORDERS)
    by_name, by_shop = Origin(ORDERS, "", ORDERS), Origin(ORDERS, "shop", ORDERS)
    with connected(broker_url) as connection:
        origins = prepared(connection, by_name, touch=touch)
        assert origins.route(by_name) == Route("", ORDERS)
        assert origins.warnings == {}
        assert management.exchanges() == []
        origins.prepare(by_shop)
        assert origins.route(by_shop) == Route(return_exchange(ORDERS), ORDERS)
        assert prepared(connection, Origin("none", "", "none"), touch=touch).is_gone(Origin("none", "", "none"))
    with connected(login(write=r"^(?!amq\.default$)")) as connection:
        origins = prepared(connection, by_name, touch=touch)
        assert origins.route(by_name) == Route(return_exchange(ORDERS), ORDERS)
        assert origins.warnings == {}


def test_without_any_right_to_publish_the_origin_is_unclear_and_the_message_stays(
    side: Side, broker_url: str, login: Callable[..., str]
) -> None:
    side.queue(ORDERS)
    side.fill(SOURCE, [b"1", b"2"])
    with connected(login(configure="^$", write="^sink$")) as connection:
        origins = prepared(connection, ORIGIN)
        assert origins.is_unclear(ORIGIN)
        assert not origins.is_gone(ORIGIN)
        tally = transfer(connection, [Take(SOURCE, 2)], back(origins, ORIGIN), origins=origins)
    assert tally.results == {("left", "unclear"): 2}
    assert [message.body for message in side.empty(SOURCE)] == [b"1", b"2"]


@pytest.mark.parametrize("character", ["q", "ß", "日"])
def test_a_name_as_long_as_the_protocol_allows_has_its_own_return_exchange(
    side: Side, broker_url: str, character: str
) -> None:
    size = len(character.encode())
    name = character * (255 // size) + "x" * (255 % size)
    side.queue(name)
    side.fill(SOURCE, [b"1"])
    origin = Origin(name, None, "key")
    with connected(broker_url) as connection:
        origins = prepared(connection, origin)
        route = origins.route(origin)
        assert route is not None
        assert route.exchange.startswith("dlqbatch.return.")
        transfer(connection, [Take(SOURCE, 1)], back(origins, origin), origins=origins)
    assert [message.routing_key for message in side.empty(name)] == ["key"]


def test_a_name_longer_than_any_queue_can_have_is_gone(broker_url: str) -> None:
    with connected(broker_url) as connection:
        assert prepared(connection, Origin("q" * 256, None, "k")).is_gone(Origin("q" * 256, None, "k"))


def test_a_name_that_is_not_text_is_unclear(broker_url: str) -> None:
    origin = Origin("caf\udce9", None, "k")
    with connected(broker_url) as connection:
        assert prepared(connection, origin).is_unclear(origin)
        assert prepared(connection, ORIGIN).is_gone(ORIGIN)


def test_a_return_exchange_of_another_type_is_unclear(side: Side, broker_url: str) -> None:
    side.queue(ORDERS)
    side.channel.exchange_declare(return_exchange(ORDERS), "direct")
    with connected(broker_url) as connection:
        assert prepared(connection, ORIGIN).is_unclear(ORIGIN)


def through(exchange: str) -> Origin:
    return Origin(None, exchange, "order.created")


def test_by_exchange_an_origin_is_its_exchange(side: Side, broker_url: str) -> None:
    side.channel.exchange_declare("shop", "topic")
    with connected(broker_url) as connection:
        origins = prepared(connection, through("shop"))
        assert origins.route(through("shop")) == Route("shop", "order.created")
        assert prepared(connection, through("gone")).is_gone(through("gone"))


def test_by_the_default_exchange_an_origin_is_the_queue_that_its_key_names(side: Side, broker_url: str) -> None:
    side.queue("order.created")
    with connected(broker_url) as connection:
        assert prepared(connection, through("")).route(through("")) == Route("", "order.created")
        missing = Origin(None, "", "missing")
        assert prepared(connection, missing).is_gone(missing)


def test_an_internal_exchange_takes_nothing_so_the_origin_is_unclear(side: Side, broker_url: str) -> None:
    side.channel.exchange_declare("inner", "topic", internal=True)
    with connected(broker_url) as connection:
        assert prepared(connection, through("inner")).is_unclear(through("inner"))


def test_an_exchange_without_a_binding_leaves_the_message(side: Side, broker_url: str) -> None:
    side.channel.exchange_declare("shop", "topic")
    side.fill(SOURCE, [b"1", b"2"])
    with connected(broker_url) as connection:
        origins = Origins(connection)
        tally = transfer(connection, [Take(SOURCE, 2)], back(origins, through("shop")), origins=origins)
    assert tally.results == {("left", "unroutable"): 2}
    assert [message.body for message in side.empty(SOURCE)] == [b"1", b"2"]


def test_of_many_origins_that_are_gone_the_log_names_the_first(
    broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(broker_url) as connection:
        origins = Origins(connection)
        for number in range(40):
            origins.prepare(Origin(f"gone-{number}", "shop", "order.created"))
    assert caplog.text.count("origin is gone") == 20


def test_many_distinct_origins_are_prepared_while_other_messages_move(side: Side, broker_url: str) -> None:
    count = 40
    names = [side.queue(f"orders-{number}") for number in range(count)]
    side.fill(SOURCE, [b"%d" % number for number in range(400)])
    with connected(broker_url) as connection:
        origins = Origins(connection)

        def handle(delivery: Delivery) -> Instruction:
            number = int(body_of(delivery))
            if number % 2:
                return move(delivery)
            return back(origins, Origin(f"orders-{number % count}", "shop", f"key-{number}"))(delivery)

        tally = transfer(connection, [Take(SOURCE, 400)], handle, origins=origins)
        # The fetch channel and the publishing channel are closed or closing; no scratch channel stays behind.
        assert len(connection.wire.readers) <= 1
    assert tally.results == {("moved", None): 400}
    assert sum(len(side.empty(name)) for name in names) == 200
