"""What a worker cannot publish is neither lost, nor handled again and again, nor in the way of the others."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
import rawamqp
from broker_client import Side
from program import eventually
from rawamqp import Message, Peer
from workers import DEAD, EVENT, KINDS, QUEUE, STEP, make_step, publish, working

from dlqbatch.broker import access
from dlqbatch.broker.publisher import Publisher
from dlqbatch.consumer import Consumer, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rawamqp import Entry

    from scripts.servers.management import Management

TOPIC = "dead.topic"
HELD, AGAIN = "a message cannot be published, and is held", "publishes again what it holds"
pytestmark = pytest.mark.usefixtures("on_every_broker")


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    opened = Side(broker_url)
    yield opened
    opened.close()


def worker(url: str, calls: list[bytes], **options: Any) -> Consumer:
    """Fails over everything whose body says that it is bad."""
    consumer = Consumer(url, queue=QUEUE, **options)

    @consumer.on(EVENT)
    def settle(body: bytes, _: object) -> None:
        calls.append(body)
        if body.startswith(b"bad"):
            raise RuntimeError("é" * 1_000)

    return consumer


def full_but_for(room: int, *headers: Entry) -> bytes:
    """Properties that leave so many bytes of a frame."""
    taken = len(rawamqp.properties([*headers, (b"big", rawamqp.text(""))], delivery_mode=2))
    size = rawamqp.PROPERTIES_MAX - room - taken
    return rawamqp.properties([*headers, (b"big", rawamqp.text("x" * size))], delivery_mode=2)


@KINDS
def test_where_our_headers_have_no_room_it_is_dead_lettered_as_it_came(broker_url: str, side: Side, kind: str) -> None:
    make_step(side, kind)
    calls: list[bytes] = []
    full = full_but_for(10, (b"MT-Fault-Message", rawamqp.text("of another place")))
    with Peer(broker_url) as peer:
        peer.publish([Message(STEP, EVENT.encode(), full, b"bad"), Message(STEP, EVENT.encode(), full, b"good")])
        with working(worker(broker_url, calls, max_retries=2)):
            assert eventually(lambda: peer.depth(DEAD) == 1 and b"good" in calls)
        # A classic queue does not count it.
        assert calls.count(b"bad") == (3 if kind == "quorum" else 1)
        [dead] = peer.read(DEAD)
        assert (dead.properties, dead.body, dead.key) == (full, b"bad", EVENT.encode())
        assert peer.read(QUEUE) == []


def test_as_it_came_it_is_still_known_when_no_queue_takes_it(
    broker_url: str, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(side, "classic")
    side.channel.queue_unbind(DEAD, DEAD)
    before = {b"id": "of another place", b"origin-queue": "elsewhere", b"origin-key": EVENT}
    full = full_but_for(10, *((b"dlqbatch-" + name, rawamqp.text(value)) for name, value in before.items()))
    with Peer(broker_url) as peer:
        peer.publish([Message(STEP, EVENT.encode(), full, b"bad")])
        with working(worker(broker_url, [], max_retries=0)):
            assert eventually(lambda: HELD in caplog.messages)
            side.channel.queue_bind(DEAD, DEAD)
            peer.wait_for(lambda: peer.depth(DEAD) == 1, "the dead letter")
        [dead] = peer.read(DEAD)
        assert sorted(rawamqp.headers_of(dead.properties)) == sorted(rawamqp.headers_of(full))
        assert peer.read(QUEUE) == []


def test_a_stack_takes_what_room_is_left_and_no_more(broker_url: str, side: Side) -> None:
    make_step(side, "classic")
    crowded = full_but_for(4_000, rawamqp.death("elsewhere", b"key"), (b"MT-Fault-StackTrace", rawamqp.text("old")))
    with Peer(broker_url) as peer:
        peer.publish([Message(STEP, EVENT.encode(), crowded, b"bad")])
        with working(worker(broker_url, [], max_retries=1)):
            peer.wait_for(lambda: peer.depth(DEAD) == 1, "the dead letter")
        [dead] = peer.read(DEAD)
    headers = dict(rawamqp.headers_of(dead.properties))
    assert headers[b"MT-Fault-Message"] == rawamqp.text("é" * 1_000)
    assert headers[b"MT-Fault-StackTrace"].endswith("é\n".encode())
    assert b"dlqbatch-history" in headers
    assert rawamqp.PROPERTIES_MAX - 1 <= len(dead.properties) <= rawamqp.PROPERTIES_MAX


@KINDS
def test_what_fits_into_no_frame_of_ours_is_held_and_stays_in_its_queue(
    broker_url: str, side: Side, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker may allow others larger frames than ours, and passes on to us what it took from them."""
    wide = access.parameters

    def narrow(*arguments: Any) -> Any:
        wanted = wide(*arguments)
        wanted.frame_max = 8_192
        return wanted

    monkeypatch.setattr(access, "parameters", narrow)
    make_step(side, kind)
    calls: list[bytes] = []
    large = rawamqp.properties([(b"big", rawamqp.text("x" * 10_000))], delivery_mode=2)
    with Peer(broker_url) as peer:
        peer.publish([Message(STEP, EVENT.encode(), large, b"bad")])
        publish(side, b"good")
        with working(worker(broker_url, calls, max_retries=0)):
            assert eventually(lambda: b"good" in calls)
        assert calls == [b"bad", b"good"]
        assert HELD in caplog.messages
        peer.wait_for(lambda: peer.depth(QUEUE) == 1, "the message that was held")
        [left] = peer.read(QUEUE)
        assert left.body == b"bad"
        assert dict(rawamqp.headers_of(left.properties))[b"big"] == rawamqp.text("x" * 10_000)


@KINDS
def test_dead_letters_that_nobody_takes_wait_for_who_does_while_the_others_go_on(
    broker_url: str, side: Side, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A quorum queue's last delivery is the fourth: given back by us, the broker itself would drop it."""
    make_step(side, kind)
    side.channel.queue_unbind(DEAD, DEAD)
    calls: list[bytes] = []
    for body in (b"bad 1", b"bad 2", b"good"):
        publish(side, body)
    with working(worker(broker_url, calls, max_retries=3)):
        assert eventually(lambda: b"good" in calls and caplog.messages.count(HELD) == 2)
        side.channel.queue_bind(DEAD, DEAD)
        assert eventually(lambda: side.depth(DEAD) == 2)
    assert (calls.count(b"bad 1"), calls.count(b"bad 2")) == (4, 4)
    assert sorted(message.body for message in side.empty(DEAD)) == [b"bad 1", b"bad 2"]
    assert side.empty(QUEUE) == []


@KINDS
def test_an_exchange_for_dead_letters_that_is_gone_and_comes_again_is_used_again(
    broker_url: str, side: Side, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(side, kind)
    calls: list[bytes] = []
    with working(worker(broker_url, calls, max_retries=0)):
        publish(side, b"good")
        assert eventually(lambda: calls == [b"good"])
        side.channel.exchange_delete(DEAD)
        publish(side, b"bad")
        publish(side, b"good")
        assert eventually(lambda: calls == [b"good", b"bad", b"good"] and AGAIN in caplog.messages)
        side.channel.exchange_declare(DEAD, "fanout", durable=True)
        side.channel.queue_bind(DEAD, DEAD)
        assert eventually(lambda: side.depth(DEAD) == 1)
    assert calls == [b"good", b"bad", b"good"]
    assert [message.body for message in side.empty(DEAD)] == [b"bad"]
    assert side.empty(QUEUE) == []


@pytest.fixture
def user(management: Management) -> Iterator[str]:
    name = f"user-{secrets.token_hex(5)}"
    management.put(f"users/{name}", {"password": "p", "tags": ""})
    yield name
    management.delete(f"users/{name}")


def test_a_worker_without_the_way_back_holds_what_failed_until_it_has_one(
    broker_url: str, side: Side, management: Management, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    def allow(configure: str, write: str, read: str) -> None:
        rights = {"configure": configure, "write": write, "read": read}
        management.put(f"permissions/{management.vhost}/{user}", rights)

    make_step(side, "classic")
    allow("^$", f"^{DEAD}$", f"^{QUEUE}$")
    calls: list[bytes] = []
    publish(side, b"bad")
    publish(side, b"good")
    with working(worker(broker_url.replace("guest:guest@", f"{user}:p@"), calls, max_retries=1)):
        assert eventually(lambda: calls == [b"bad", b"good"])
        assert HELD in caplog.messages
        way = rf"dlqbatch\.return\.{QUEUE}"
        allow(f"^{way}$", f"^({DEAD}|{QUEUE}|{way})$", f"^({QUEUE}|{way})$")
        assert eventually(lambda: side.depth(DEAD) == 1)
    assert calls == [b"bad", b"good", b"bad"]
    assert side.empty(QUEUE) == []


@KINDS
def test_what_the_broker_refuses_again_and_again_stops_and_doubles_no_other(
    broker_url: str, side: Side, management: Management, user: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def allow(keys: str) -> None:
        rights = {"exchange": TOPIC, "write": keys, "read": ".*"}
        management.put(f"topic-permissions/{management.vhost}/{user}", rights)

    make_step(side, kind)
    side.channel.exchange_declare(TOPIC, "topic", durable=True)
    side.channel.queue_bind(DEAD, TOPIC, "#")
    management.put(f"permissions/{management.vhost}/{user}", {"configure": ".*", "write": ".*", "read": ".*"})
    allow("^allowed$")
    publish(side, b"refused", key="refused")
    sent = [b"%d" % number for number in range(200)]
    for body in sent:
        publish(side, body, key="allowed")
    consumer = Consumer(
        broker_url.replace("guest:guest@", f"{user}:p@"), queue=QUEUE, dead_letters=TOPIC, max_retries=0, prefetch=20
    )

    @consumer.on("#")
    def settle(body: bytes, _: object) -> None:
        raise RuntimeError

    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 200 and caplog.messages.count(AGAIN) >= 2)
        allow(".*")
        assert eventually(lambda: side.depth(DEAD) == 201)
    assert sorted(message.body for message in side.empty(DEAD)) == sorted([*sent, b"refused"])
    assert side.empty(QUEUE) == []


def test_a_worker_that_holds_as_many_as_it_may_takes_no_more(
    broker_url: str, side: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "_MOST_UNSETTLED", 2)
    make_step(side, "classic")
    side.channel.queue_unbind(DEAD, DEAD)
    calls: list[bytes] = []
    for body in (b"bad 1", b"bad 2", b"bad 3"):
        publish(side, body)
    with working(worker(broker_url, calls, max_retries=0)):
        assert eventually(lambda: caplog.messages.count(AGAIN) == 3)
        assert calls == [b"bad 1", b"bad 2"]
        side.channel.queue_bind(DEAD, DEAD)
        assert eventually(lambda: side.depth(DEAD) == 3)
    assert side.empty(QUEUE) == []


@KINDS
def test_a_confirm_that_never_comes_stops_neither_the_others_nor_the_end(
    broker_url: str, side: Side, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a quorum queue without its majority."""
    monkeypatch.setattr(Publisher, "_settle", lambda *_, **__: None)
    monkeypatch.setattr(run, "_ANSWERED_WITHIN", 0.5)
    make_step(side, kind)
    calls: list[bytes] = []
    publish(side, b"bad")
    publish(side, b"good")
    with working(worker(broker_url, calls, max_retries=0)):
        assert eventually(lambda: calls == [b"bad", b"good"])
    assert [message.body for message in side.empty(QUEUE)] == [b"bad"]
