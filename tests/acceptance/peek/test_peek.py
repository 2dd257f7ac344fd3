"""A look into a live queue shows what is there, and leaves it there in its order, whatever cuts the look."""

from __future__ import annotations

import gzip
import json
from base64 import b64decode
from typing import TYPE_CHECKING

import pika
import pytest
from broker_client import Side, connected
from planted_secrets import PLAIN, leaks
from program import Program

from dlqbatch.broker.look import look_at_head
from dlqbatch.errors import BrokerLost, SettingsError
from dlqbatch.peek.rules import Wanted
from dlqbatch.peek.run import NoSuchQueue, peek
from dlqbatch.settings import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.amqp.delivery import Delivery
    from dlqbatch.settings import Settings
    from scripts.servers.management import Management

QUEUE = "orders"
NUMBERED = [b"%03d" % number for number in range(150)]
KINDS = ["classic", "priorities", "quorum", "quorum without limit"]
pytestmark = pytest.mark.usefixtures("on_every_broker")


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    yield side
    side.close()


@pytest.fixture
def options(broker_url: str, management: Management) -> dict[str, str]:
    return {"broker_url": broker_url, "management_url": "http://guest:guest@{}:{}".format(*management._address)}


@pytest.fixture
def settings(options: dict[str, str]) -> Settings:
    return load(options, {"DLQBATCH_CONFIG": "/dev/null"})


def fill(side: Side, kind: str) -> list[bytes]:
    """A queue with messages, and the order in which they will be delivered."""
    arguments: dict[str, object] = {"max_priority": 5} if kind == "priorities" else {}
    if kind == "quorum":
        arguments["delivery_limit"] = 50
    side.queue(QUEUE, "quorum" if "quorum" in kind else "classic", **arguments)
    for number, body in enumerate(NUMBERED):
        properties = pika.BasicProperties(delivery_mode=2, priority=number % 3 if kind == "priorities" else None)
        side.channel.basic_publish("", QUEUE, body, properties)
    side.wait(lambda: side.depth(QUEUE) == len(NUMBERED))
    if kind == "priorities":
        return [body for priority in (2, 1, 0) for body in NUMBERED[priority::3]]
    return NUMBERED


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_looked_at_is_there_in_its_order(side: Side, settings: Settings, kind: str) -> None:
    wanted = fill(side, kind)
    look = peek(settings, QUEUE, 100, Wanted(), allows_cost=True)
    assert (look.ready, look.looked_at) == (150, 100)
    assert [each.content.unpacked.body for each in look.messages] == wanted[:100]
    side.wait(lambda: side.depth(QUEUE) == 150)
    found = side.empty(QUEUE)
    assert [each.body for each in found] == wanted
    assert [each.redelivered for each in found] == [True] * 100 + [False] * 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_that_is_cut_leaves_everything_in_its_order(side: Side, broker_url: str, kind: str) -> None:
    wanted = fill(side, kind)
    seen: list[bytes] = []
    with connected(broker_url) as connection:

        def cut(delivery: Delivery) -> None:
            seen.append(delivery.body())
            if len(seen) == 60:
                connection.wire.abort()

        with pytest.raises(BrokerLost):
            look_at_head(connection, QUEUE, "quorum" if "quorum" in kind else "classic", 100, cut, lambda: False)
    assert seen[:60] == wanted[:60]
    side.wait(lambda: side.depth(QUEUE) == 150)
    assert [each.body for each in side.empty(QUEUE)] == wanted


def test_a_look_that_would_cost_a_delivery_is_refused_where_it_does(
    side: Side, settings: Settings, broker_release: str
) -> None:
    side.queue(QUEUE, "quorum", delivery_limit=3)
    side.fill(QUEUE, [b"1"])
    if broker_release == "4.3":
        for _ in range(8):
            side.wait(lambda: side.depth(QUEUE) == 1)
            look = peek(settings, QUEUE, 10, Wanted())
            assert any("of 3 deliveries" in note for note in look.notes)
    else:
        with pytest.raises(SettingsError, match="one of 3 deliveries"):
            peek(settings, QUEUE, 10, Wanted())
        peek(settings, QUEUE, 10, Wanted(), allows_cost=True)
    side.wait(lambda: side.depth(QUEUE) == 1)
    [left] = side.empty(QUEUE)
    assert (left.properties.headers or {}).get("x-delivery-count", 0) == (0 if broker_release == "4.3" else 1)


def test_an_auto_delete_queue_outlives_the_look(side: Side, settings: Settings) -> None:
    side.channel.queue_declare(QUEUE, auto_delete=True)
    side.fill(QUEUE, [b"1"])
    assert peek(settings, QUEUE, 10, Wanted()).looked_at == 1
    side.wait(lambda: side.depth(QUEUE) == 1)


def test_what_has_expired_is_not_shown_and_a_missing_queue_is_told(side: Side, settings: Settings) -> None:
    side.queue(QUEUE)
    side.channel.basic_publish("", QUEUE, b"gone", pika.BasicProperties(expiration="1"))
    side.channel.basic_publish("", QUEUE, b"there")
    side.wait(lambda: side.depth(QUEUE) == 1)
    assert [each.content.unpacked.body for each in peek(settings, QUEUE, 10, Wanted()).messages] == [b"there"]
    with pytest.raises(NoSuchQueue, match="no queue 'nowhere' in this virtual host"):
        peek(settings, "nowhere", 10, Wanted())


def test_consumers_beside_are_named_and_lose_nothing(side: Side, settings: Settings, broker_url: str) -> None:
    side.queue(QUEUE)
    other = Side(broker_url)
    other.channel.basic_qos(prefetch_count=1)
    other.channel.basic_consume(QUEUE, lambda *_: None)
    for body in (b"held", b"1", b"2"):
        side.channel.basic_publish("", QUEUE, body)
    side.wait(lambda: side.depth(QUEUE) == 2)
    look = peek(settings, QUEUE, 10, Wanted())
    assert (look.looked_at, look.consumers) == (2, 1)
    assert any("1 consumer(s) are connected" in note for note in look.notes)
    other.close()
    side.wait(lambda: side.depth(QUEUE) == 3)
    assert [each.body for each in side.empty(QUEUE)] == [b"held", b"1", b"2"]


def test_a_stream_is_looked_at_from_its_oldest_message_and_costs_nothing(side: Side, settings: Settings) -> None:
    side.queue(QUEUE, "stream")
    side.channel.confirm_delivery()
    for body in NUMBERED[:5]:
        side.channel.basic_publish("", QUEUE, body)
    for _ in range(2):
        look = peek(settings, QUEUE, 3, Wanted())
        found = [(each.content.unpacked.body, each.facts["offset"]) for each in look.messages]
        assert found == [(body, number) for number, body in enumerate(NUMBERED[:3])]
    assert look.notes == ["a stream keeps what is read from it: the look costs nothing"]


def test_the_command_shows_what_is_wanted_masked_and_unpacked(side: Side, options: dict[str, str]) -> None:
    side.queue(QUEUE)
    document = gzip.compress(json.dumps({"order": 4711, "password": PLAIN}).encode(), mtime=0)
    properties = pika.BasicProperties(app_id="shop", headers={"tenant": "a", "x-api-key": PLAIN})
    side.channel.basic_publish("", QUEUE, document, properties)
    side.channel.basic_publish("", QUEUE, b"other", pika.BasicProperties(app_id="stock"))
    side.wait(lambda: side.depth(QUEUE) == 2)
    program = Program(options)
    for number, *option in (
        (0, "--event", "ord*"),
        (2, "--event", QUEUE),
        (1, "--source", "shop"),
        (1, "--header", "tenant=a"),
        (1, "--text", "4711"),
        (0, "--text", PLAIN),
    ):
        done = program.run("peek", QUEUE, *map(str, option), "--json")
        assert (done.code, len(done.told["messages"])) == (0 if number else 1, number), done.said
        assert not leaks(done.out)
        side.wait(lambda: side.depth(QUEUE) == 2)
    said = program.run("peek", QUEUE, "--count", "1")
    assert said.code == 0
    assert '"order": 4711' in said.out
    assert "unpacked from gzip" in said.out
    assert "'redelivered'" in said.err
    assert not leaks(said.out)


def test_what_is_revealed_is_an_action_before_it_is_shown(side: Side, options: dict[str, str], sqlite_url: str) -> None:
    side.queue(QUEUE)
    side.fill(QUEUE, [json.dumps({"password": PLAIN}).encode()])
    program = Program({**options, "database_url": sqlite_url})
    assert program.run("db", "upgrade").code == 0
    assert program.run("peek", QUEUE, "--reveal").code == 2  # nobody says why
    assert not leaks(program.run("peek", QUEUE).out)
    shown = program.run("peek", QUEUE, "--reveal", "--reason", "ticket 7", "--actor", "ann", "--json")
    (message,) = shown.told["messages"]
    assert (json.loads(b64decode(message["body_base64"]))["password"], message["masked"]) == (PLAIN, False)
    missing = program.run("peek", "nowhere", "--reveal", "--reason", "ticket 8", "--actor", "ann")
    assert (missing.code, "topology apply" in missing.err) == (2, False)
    assert "no queue 'nowhere' in this virtual host" in missing.err
    actions = program.run("actions", "list", "--kind", "peek", "--json").told
    assert [(each["actor"], each["reason"], each["details"]["queue"]) for each in actions] == [
        ("ann", "ticket 8", "nowhere"),
        ("ann", "ticket 7", QUEUE),
    ]
    undone = program.run("undo", "A-1", "--reason", "r")
    assert (undone.code, "has been seen" in undone.err) == (1, True)


@pytest.mark.parametrize(("kind", "shown"), [("classic", [b"1", b"2"]), ("quorum", [])])
def test_a_quorum_queue_shows_nothing_beside_its_single_active_consumer(
    side: Side, settings: Settings, broker_url: str, kind: str, shown: list[bytes]
) -> None:
    side.queue(QUEUE, kind, single_active_consumer=True)
    other = Side(broker_url)
    other.channel.basic_qos(prefetch_count=1)
    other.channel.basic_consume(QUEUE, lambda *_: None)
    for body in (b"held", b"1", b"2"):
        side.channel.basic_publish("", QUEUE, body)
    side.wait(lambda: side.depth(QUEUE) == 2)
    look = peek(settings, QUEUE, 10, Wanted(), allows_cost=True)
    assert (look.ready, [each.content.unpacked.body for each in look.messages]) == (2, shown)
    assert any("is the single active one" in note for note in look.notes) == (not shown)
    side.wait(lambda: side.depth(QUEUE) == 2)
    other.close()
    side.wait(lambda: side.depth(QUEUE) == 3)
    assert len(peek(settings, QUEUE, 10, Wanted(), allows_cost=True).messages) == 3


@pytest.mark.parametrize("kind", ["all", "returned", "failed"])
def test_a_queue_whose_retries_the_broker_delays_is_not_looked_at_where_that_would_hide_it(
    side: Side, settings: Settings, broker_release: str, kind: str
) -> None:
    if broker_release != "4.3":
        return  # older brokers refuse no such argument, and delay nothing
    arguments = {"x-queue-type": "quorum", "x-delayed-retry-type": kind, "x-delayed-retry-min": 3_600_000}
    side.channel.queue_declare(QUEUE, durable=True, arguments=arguments)
    side.fill(QUEUE, [b"1"])
    if kind == "failed":  # what is put back did not fail
        assert peek(settings, QUEUE, 10, Wanted()).looked_at == 1
    else:
        with pytest.raises(SettingsError, match=f"delayed retry \\('{kind}'\\) would hide what is put back"):
            peek(settings, QUEUE, 10, Wanted())
    side.wait(lambda: side.depth(QUEUE) == 1)
