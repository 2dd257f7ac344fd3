"""What becomes of messages whose publish the broker returns, refuses or does not confirm, and of their neighbours."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pika
import pytest
from broker_client import SINK, Side, body_of, connected, move, publish, transfer

from dlqbatch.amqp.delivery import Route
from dlqbatch.broker.transfer import Take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlqbatch.amqp.delivery import Delivery, Instruction
    from dlqbatch.broker.transfer import Tally
    from scripts.servers.management import Management

SOURCE = "source"


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    side.queue(SOURCE)
    side.queue(SINK)
    yield side
    side.close()


def run(url: str, limit: int, handle: Callable[[Delivery], Instruction], **bounds: object) -> Tally:
    with connected(url) as connection:
        return transfer(connection, [Take(SOURCE, limit)], handle, **bounds)  # type: ignore[arg-type]


def numbered(count: int) -> list[bytes]:
    return [b"%04d" % number for number in range(count)]


def bodies(side: Side, queue: str) -> list[bytes]:
    return sorted(message.body for message in side.empty(queue))


def test_an_unroutable_message_is_left_while_its_neighbours_move(side: Side, broker_url: str) -> None:
    side.fill(SOURCE, numbered(300))
    lost = {b"0000", b"0077", b"0150", b"0299"}

    def handle(delivery: Delivery) -> Instruction:
        return publish(delivery, Route("", "nowhere" if body_of(delivery) in lost else SINK))

    tally = run(broker_url, 300, handle)
    assert tally.results == {("left", "unroutable"): 4, ("moved", None): 296}
    assert bodies(side, SOURCE) == sorted(lost)
    assert bodies(side, SINK) == sorted(set(numbered(300)) - lost)


def test_of_two_messages_with_one_id_the_unroutable_one_is_left_and_the_other_moves(
    side: Side, broker_url: str
) -> None:
    """Copies of one message share its id, and a return says nothing but the id, the route and the content."""
    side.fill(SOURCE, numbered(100))

    def handle(delivery: Delivery) -> Instruction:
        number = int(body_of(delivery))
        return publish(delivery, Route("", "nowhere" if number % 2 else SINK), identity=f"shared-{number // 2}")

    tally = run(broker_url, 100, handle)
    assert tally.results == {("left", "unroutable"): 50, ("moved", None): 50}
    assert bodies(side, SOURCE) == numbered(100)[1::2]
    assert bodies(side, SINK) == numbered(100)[::2]


def test_copies_alike_in_id_and_route_are_never_lost(side: Side, broker_url: str) -> None:
    side.fill(SOURCE, numbered(50))
    tally = run(broker_url, 50, lambda delivery: publish(delivery, Route("", "nowhere"), identity="one and the same"))
    assert tally.results == {("left", "unroutable"): 50}
    assert bodies(side, SOURCE) == numbered(50)


def test_a_full_queue_that_rejects_leaves_the_rest_unconfirmed(side: Side, broker_url: str) -> None:
    full = side.queue("full", max_length=10, overflow="reject-publish")
    side.fill(SOURCE, numbered(60))

    def handle(delivery: Delivery) -> Instruction:
        return publish(delivery, Route("", full if int(body_of(delivery)) % 2 else SINK))

    tally = run(broker_url, 60, handle)
    taken = tally.results["moved", None] - 30
    assert 10 <= taken < 30
    assert tally.results["left", "not-confirmed"] == 30 - taken
    assert len(side.empty(full)) == taken
    assert bodies(side, SINK) == numbered(60)[::2]


def test_an_exchange_deleted_during_the_run_stops_only_what_goes_there(side: Side, broker_url: str) -> None:
    side.channel.exchange_declare("doomed", "fanout")
    side.channel.queue_bind(SINK, "doomed")
    other = side.queue("other")
    side.fill(SOURCE, numbered(3000))
    seen = 0

    def handle(delivery: Delivery) -> Instruction:
        nonlocal seen
        seen += 1
        if seen == 1000:
            side.channel.exchange_delete("doomed")
        if int(body_of(delivery)) % 2:
            return publish(delivery, Route("doomed", "key"))
        return publish(delivery, Route("", other))

    tally = run(broker_url, 3000, handle)
    assert (tally.got, tally.lost) == (3000, None)
    refused = tally.results["left", "publish-refused"]
    assert tally.results == {("moved", None): 3000 - refused, ("left", "publish-refused"): refused}
    assert 900 <= refused <= 1300
    left = bodies(side, SOURCE)
    assert len(left) == refused
    # Nothing is lost: each message is where it was, or where it was to go.
    arrived = Counter(bodies(side, SINK)) + Counter(bodies(side, other))
    assert set(left) | set(arrived) == set(numbered(3000))
    assert sum(arrived.values()) - len(arrived) <= 512


def with_expiration(properties: bytes) -> bytes:
    """An expiration that is no number; it stands behind everything these messages carry."""
    return (int.from_bytes(properties[:2], "big") | 0x0100).to_bytes(2, "big") + properties[2:] + b"\x05never"


def with_another_user(properties: bytes) -> bytes:
    return (int.from_bytes(properties[:2], "big") | 0x0010).to_bytes(2, "big") + properties[2:] + b"\x05other"


@pytest.mark.parametrize("spoil", [with_expiration, with_another_user])
def test_one_message_that_the_broker_does_not_take_is_left_in_every_run_and_stops_no_other(
    side: Side, broker_url: str, spoil: Callable[[bytes], bytes]
) -> None:
    def handle(delivery: Delivery) -> Instruction:
        made = move(delivery)
        return made._replace(properties=spoil(made.properties)) if body_of(delivery) == b"0137" else made

    side.fill(SOURCE, numbered(300))
    for _ in range(2):
        depth = side.depth(SOURCE)
        tally = run(broker_url, depth, handle)
        assert tally.results == {("left", "publish-refused"): 1, ("moved", None): depth - 1}
        assert bodies(side, SOURCE) == [b"0137"]
        # What was under way when the broker closed the channel may be doubled; nothing else, and nothing is lost.
        arrived = Counter(bodies(side, SINK))
        assert set(arrived) == set(numbered(300)) - {b"0137"}
        assert max(arrived.values()) <= 2
        side.fill(SOURCE, numbered(300))


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_one_that_is_refused_and_as_large_as_the_bound_on_bytes_keeps_none_from_moving(
    side: Side, broker_url: str, kind: str
) -> None:
    source = side.queue(f"{kind}-source", kind)
    side.fill(source, [b"refused" * 1000, *numbered(100)])

    def handle(delivery: Delivery) -> Instruction:
        made = move(delivery)
        return made._replace(properties=with_expiration(made.properties)) if delivery.body_size > 10 else made

    with connected(broker_url) as connection:
        tally = transfer(connection, [Take(source, 101, kind == "quorum")], handle, max_bytes=5000)
    assert (tally.stopped_by, tally.results) == (None, {("left", "publish-refused"): 1, ("moved", None): 100})
    assert bodies(side, source) == [b"refused" * 1000]


def test_one_that_is_taken_and_as_large_as_the_bound_on_bytes_ends_the_run(side: Side, broker_url: str) -> None:
    side.fill(SOURCE, [b"large" * 1000, *numbered(2000)])
    tally = run(broker_url, 2001, move, max_bytes=5000)
    assert tally.stopped_by == "bytes"
    assert 1 <= tally.got < 2001
    assert len(side.empty(SINK)) == tally.got
    assert len(side.empty(SOURCE)) == 2001 - tally.got


def test_a_name_too_long_for_the_protocol_is_refused_before_it_is_sent(side: Side, broker_url: str) -> None:
    side.fill(SOURCE, numbered(3))

    def handle(delivery: Delivery) -> Instruction:
        return publish(delivery, Route("", "n" * 256 if body_of(delivery) == b"0001" else SINK))

    assert run(broker_url, 3, handle).results == {("left", "publish-refused"): 1, ("moved", None): 2}


def test_confirms_in_multiples_and_out_of_order_settle_each_message_once(side: Side, broker_url: str) -> None:
    """A quorum queue confirms later than a classic one, and neither in the order of the other."""
    slow = side.queue("slow", "quorum")
    side.fill(SOURCE, numbered(2000))

    def handle(delivery: Delivery) -> Instruction:
        return publish(delivery, Route("", slow if int(body_of(delivery)) % 3 else SINK))

    assert run(broker_url, 2000, handle).results == {("moved", None): 2000}
    assert side.empty(SOURCE) == []
    assert sorted(bodies(side, slow) + bodies(side, SINK)) == numbered(2000)


def test_a_refusal_by_topic_permission_stops_only_that_key(side: Side, broker_url: str, management: Management) -> None:
    """The permission to write to an exchange may hold for some routing keys alone."""
    side.channel.exchange_declare("events", "topic")
    for key in ("open", "shut"):
        side.channel.queue_bind(SINK, "events", key)
    user, url = "half", broker_url.replace("guest:guest", "half:half")
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.put(f"users/{user}", {"password": "half", "tags": ""})
    management.put(f"permissions/{management.vhost}/{user}", everything)
    management.put(
        f"topic-permissions/{management.vhost}/{user}", {"exchange": "events", "write": "^open$", "read": ".*"}
    )
    side.fill(SOURCE, numbered(100))

    def handle(delivery: Delivery) -> Instruction:
        key = "shut" if int(body_of(delivery)) % 10 == 0 else "open"
        return publish(delivery, Route("events", key), login=b"half")

    tally = run(url, 100, handle)
    assert tally.results == {("left", "publish-refused"): 10, ("moved", None): 90}
    management.delete(f"users/{user}")


def test_the_properties_arrive_as_they_were(side: Side, broker_url: str) -> None:
    sent = pika.BasicProperties(
        content_type="text/plain",
        content_encoding="utf-8",
        headers={"a": 1},
        delivery_mode=2,
        priority=3,
        correlation_id="c",
        reply_to="r",
        message_id="m",
        timestamp=12345,
        type="t",
        user_id="guest",
        app_id="a",
    )
    side.fill(SOURCE, [b"body"], sent)
    run(broker_url, 1, lambda delivery: publish(delivery, Route("", SINK), identity="chosen"))
    arrived = side.empty(SINK)[0].properties
    sent.headers = {"dlqbatch-id": "chosen"}
    assert arrived == sent
