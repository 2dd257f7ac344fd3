"""What the broker shows of queues whose content is known, and the queues behind an origin; on both releases."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pika
import pytest
from broker_client import Side, connected
from program import HANGS_AFTER

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.management import Api
from dlqbatch.broker.readings import Readings
from scripts.servers.management import Management, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlqbatch.broker.facts import QueueReading, Target

pytestmark = pytest.mark.usefixtures("on_every_broker")
NOW = datetime(2026, 7, 1, tzinfo=UTC)
KINDS = ("classic", "quorum")
DELAYS = {"delayed_retry_type": "all", "delayed_retry_min": 600_000, "delayed_retry_max": 600_000}


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    opened = Side(broker_url)
    yield opened
    opened.close()


class Reader:
    """Every look is a run of its own."""

    def __init__(self, broker_url: str, management: Management) -> None:
        self.url = broker_url
        self.api = "http://guest:guest@{}:{}".format(*management._address)

    def read(self, *queues: str, api: str | None = None) -> dict[str, QueueReading]:
        with connected(self.url) as connection:
            return Readings(Api(self.url, api or self.api), connection).read(queues, NOW)

    def target(self, origin: Origin, api: str | None = None) -> Target:
        with connected(self.url) as connection:
            return Readings(Api(self.url, api or self.api), connection).target(origin)

    def behind(self, exchange: str, key: str) -> tuple[str, ...]:
        return self.target(Origin(None, exchange, key)).queues


@pytest.fixture
def reader(broker_url: str, management: Management) -> Reader:
    return Reader(broker_url, management)


@pytest.fixture
def user(management: Management, broker_url: str) -> Iterator[str]:
    """The broker's address for a login of its own with the tag that docs/permissions.md names."""
    name = f"user-{management.vhost}"
    management.put(f"users/{quoted(name)}", {"password": "p", "tags": "management"})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.put(f"permissions/{quoted(management.vhost)}/{quoted(name)}", everything)
    yield broker_url.replace("guest:guest@", f"{name}:p@")
    management.delete(f"users/{quoted(name)}")


def name_of(url: str) -> str:
    return url.partition("://")[2].partition(":")[0]


@contextlib.contextmanager
def answering(content: bytes) -> Iterator[str]:
    """A web server that has one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name it has there)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wait(side: Side, done: Callable[[], object], shown: Callable[[], object]) -> None:
    """Statistics are some seconds late; asked for gently meanwhile, and the connection is served."""
    deadline = time.monotonic() + HANGS_AFTER
    while not done():
        assert time.monotonic() < deadline, shown()
        side.channel.connection.process_data_events(0)
        time.sleep(0.3)


def test_a_queue_is_read_with_all_that_it_holds(
    side: Side, reader: Reader, broker_release: str, management: Management, user: str
) -> None:
    is_newer = broker_release == "4.3"
    for kind in KINDS:
        side.fill(side.queue(f"held-{kind}", kind), [b"x"] * 6)
        side.fill(side.queue(f"polled-{kind}", kind), [b"x"] * 4)
        side.fill(side.queue(f"auto-{kind}", kind), [b"x"] * 3)
        side.queue(f"idle-{kind}", kind)
    once = {"dead_letter_strategy": "at-least-once", "overflow": "reject-publish", "dead_letter_exchange": ""}
    side.fill(side.queue("full", max_length=1, overflow="reject-publish"), [b"x"])
    side.fill(side.queue("stuck", "quorum", dead_letter_routing_key="full", **once), [b"x"] * 5)
    side.fill(side.queue("delaying", "quorum", **(DELAYS if is_newer else {})), [b"x"] * 5)
    with contextlib.ExitStack() as stack:
        others = {kind: stack.enter_context(contextlib.closing(Side(reader.url))) for kind in KINDS}
        for kind, other in others.items():
            received: list[int] = []
            other.channel.basic_qos(prefetch_count=2)
            other.channel.basic_consume(f"held-{kind}", lambda _, method, *__: received.append(method.delivery_tag))  # noqa: B023
            other.wait(lambda: len(received) == 2)  # noqa: B023
            other.channel.basic_ack(received[0])
            other.wait(lambda: len(received) == 3)  # noqa: B023
            taking = other.channel.connection.channel()
            taking.basic_consume(f"auto-{kind}", lambda *_: None, auto_ack=True)
            for settle in (side.channel.basic_ack, side.channel.basic_nack):
                settle(side.channel.basic_get(f"polled-{kind}")[0].delivery_tag)
            side.channel.basic_get(f"polled-{kind}", auto_ack=True)
        side.channel.basic_reject(side.channel.basic_get("stuck")[0].delivery_tag, requeue=False)
        side.channel.basic_nack(side.channel.basic_get("delaying")[0].delivery_tag)

        # ready, unacknowledged, delayed, total, consumers; acknowledged, published
        wanted: dict[str, tuple[object, ...]] = {"stuck": (4, 0, 0, 5, 0, 0, 5), "full": (1, 0, 0, 1, 0, 0, 1)}
        wanted["delaying"] = (4, 0, 1, 5, 0, 0, 5) if is_newer else (5, 0, 0, 5, 0, 0, 5)
        for kind in KINDS:
            wanted[f"held-{kind}"] = (3, 2, 0, 5, 1, 1, 6)
            wanted[f"polled-{kind}"] = (2, 0, 0, 2, 0, 2, 4)
            wanted[f"auto-{kind}"] = (0, 0, 0, 0, 1, 3, 3)
            wanted[f"idle-{kind}"] = (0, 0, 0, 0, 0, 0, 0)
        found: dict[str, QueueReading] = {}

        def are_right() -> bool:
            for other in others.values():
                other.channel.connection.process_data_events(0)
            found.update(reader.read(*wanted))
            return {name: counts(one) for name, one in found.items()} == wanted

        wait(
            side, are_right, lambda: [(one, wanted[name]) for name, one in found.items() if counts(one) != wanted[name]]
        )
        assert all(one.by_management and one.is_there and not one.missing for one in found.values())
        for kind in KINDS:
            held, auto = found[f"held-{kind}"].channels, found[f"auto-{kind}"].channels
            assert [(one.unacknowledged, one.prefetch, one.acknowledged) for one in held] == [(2, 2, 1)]
            assert [(one.unacknowledged, one.prefetch, one.acknowledged) for one in auto] == [(0, 0, 3)]
            assert found[f"held-{kind}"].in_order
        assert found["delaying"].in_order is not is_newer
        # The tag 'management' shows queues, and only the user's own channels.
        with connected(user) as connection:
            lesser = Readings(Api(user, reader.api.replace("guest:guest", f"{name_of(user)}:p")), connection)
            one = lesser.read(["held-classic"], NOW)["held-classic"]
        assert counts(one) == wanted["held-classic"]
        assert not one.channels
        assert "monitoring" in one.missing


def counts(one: QueueReading) -> tuple[object, ...]:
    counted = () if one.counters is None else (one.counters.acknowledged, one.counters.published)
    return (one.ready, one.unacknowledged, one.delayed, one.total, one.consumers, *counted)


def test_a_queue_whose_waiting_messages_have_several_priorities_is_not_in_order(
    side: Side, reader: Reader, broker_release: str
) -> None:
    side.queue("ranked", max_priority=5)
    for kind in KINDS:
        side.queue(kind, kind)
        for priority in (1, 7):
            side.fill(kind, [b"x"], pika.BasicProperties(delivery_mode=2, priority=priority))
    found: dict[str, QueueReading] = {}

    def are_right() -> bool:
        """Of 4.3 the messages by priority come later than their number."""
        found.update(reader.read("ranked", *KINDS))
        right = {"ranked": False, "classic": True, "quorum": broker_release != "4.3"}
        return (
            all(one.by_management for one in found.values())
            and [found[kind].ready for kind in KINDS] == [2, 2]
            and {name: one.in_order for name, one in found.items()} == right
        )

    wait(side, are_right, lambda: found)


DROPS = {
    "kept": ({"dead_letter_exchange": "", "dead_letter_routing_key": "letters"}, ""),
    "bare": ({}, ""),
    "brief": ({"message_ttl": 3_600_000}, "after 3600000 ms.*no dead-letter exchange"),
    "short": ({"max_length": 10}, "beyond max-length 10"),
    "refusing": ({"max_length": 10, "overflow": "reject-publish"}, ""),
    "gone": ({"dead_letter_exchange": "nowhere", "max_length": 10}, "'nowhere' is not there"),
    "lost": (
        {"dead_letter_exchange": "amq.direct", "dead_letter_routing_key": "k", "max_length": 10},
        "key 'k' to no queue",
    ),
    "homeless": (
        {"dead_letter_exchange": "", "dead_letter_routing_key": "missing", "max_length": 10},
        "'missing', which is not there",
    ),
    "expiring": ({"expires": 3_600_000, "dead_letter_exchange": "amq.fanout"}, "deletes it"),
    "looping": ({"dead_letter_exchange": "", "dead_letter_routing_key": "waiting"}, "back to it through 'waiting'"),
    "by-policy": ({"dead_letter_exchange": "", "dead_letter_routing_key": "letters"}, "deletes it"),
}


def test_why_a_queue_may_drop_what_it_holds(
    side: Side, reader: Reader, management: Management, broker_release: str
) -> None:
    side.queue("letters")
    side.queue("waiting", message_ttl=3_600_000, dead_letter_exchange="", dead_letter_routing_key="looping")
    for name, (arguments, _) in DROPS.items():
        side.queue(name, "classic", **arguments)
    side.queue("limited", "quorum", delivery_limit=7)
    side.queue("kept-limited", "quorum", delivery_limit=7, dead_letter_exchange="", dead_letter_routing_key="letters")
    side.queue("quorum", "quorum")
    body = {"pattern": "^by-policy$", "definition": {"expires": 3_600_000}, "apply-to": "queues"}
    management.put(f"policies/{quoted(management.vhost)}/expiry", body)
    found: dict[str, QueueReading] = {}

    def are_right() -> bool:
        found.update(reader.read(*DROPS, "limited", "kept-limited", "quorum"))
        return all(one.by_management for one in found.values())

    wait(side, are_right, lambda: found)
    assert [(found[name].may_drop, found[name].drops_after) for name in ("limited", "kept-limited")] == [
        ("", 7),
        ("", None),
    ]
    assert found["quorum"].drops_after == (20 if broker_release == "4.3" else None)
    for name, (_, why) in DROPS.items():
        text = found[name].may_drop
        assert re.search(why, text) if why else not text, (name, text)


def test_without_the_management_api_amqp_tells_what_it_can(side: Side, reader: Reader, broker_release: str) -> None:
    side.fill(side.queue("orders"), [b"x"] * 3)
    side.channel.queue_bind("orders", "amq.topic", "a.#")
    nothing = "http://127.0.0.1:1"
    found = reader.read("orders", "missing", api=nothing)
    orders, missing = found["orders"], found["missing"]
    assert (orders.ready, orders.total, orders.consumers, orders.counters) == (3, 3, 0, None)
    assert (orders.by_management, orders.may_hide_delayed) == (False, broker_release == "4.3")
    assert "127.0.0.1:1" in orders.missing
    assert "dlqbatch.management-url" in orders.missing
    assert (missing.is_there, missing.by_management) == (False, False)
    assert reader.target(Origin("orders", None, "k"), nothing) == (("orders",), "", False, None, (), None)
    behind = reader.target(Origin(None, "amq.topic", "a.b"), nothing)
    assert (behind.queues, behind.is_gone) == ((), False)
    assert "dlqbatch.management-url" in behind.unknown
    for origin in (Origin("missing", None, "k"), Origin(None, "missing", "k"), Origin(None, "", "missing")):
        assert reader.target(origin, nothing).is_gone


def test_a_management_api_of_another_broker_is_not_believed(
    side: Side, reader: Reader, request: pytest.FixtureRequest, broker_release: str
) -> None:
    """It may answer for a virtual host and a queue of the same names."""
    other = request.getfixturevalue("broker_addresses" if broker_release == "4.3" else "broker43_addresses")[1]
    side.fill(side.queue("orders"), [b"x"])
    one = reader.read("orders", api=other)["orders"]
    assert (one.ready, one.by_management) == (1, False)
    assert "is of another broker" in one.missing
    assert "dlqbatch.management-url" in one.missing


def test_a_user_whom_the_api_does_not_let_in_is_told_the_tag(side: Side, reader: Reader) -> None:
    side.queue("orders")
    one = reader.read("orders", api=reader.api.replace("guest:guest", "guest:wrong"))["orders"]
    assert not one.by_management
    assert "set_user_tags" in one.missing


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"state": 7, "arguments": []}', b"null", b"<html>"])
def test_what_is_no_management_api_is_not_believed(side: Side, reader: Reader, answer: bytes) -> None:
    side.fill(side.queue("orders"), [b"x"])
    with answering(answer) as api:
        one = reader.read("orders", api=api)["orders"]
        target = reader.target(Origin(None, "amq.topic", "k"), api)
    assert (one.ready, one.by_management) == (1, False)
    assert one.missing
    assert not target.queues
    assert target.unknown


def test_an_exchange_is_followed_to_every_queue_that_its_bindings_may_lead_to(
    side: Side, reader: Reader, management: Management
) -> None:
    make, bind = side.channel.exchange_declare, side.channel.queue_bind
    for name in ("a", "b", "c", "caught", "also-caught", "far"):
        side.queue(name)
    make("direct", "direct", arguments={"alternate-exchange": "caught"})
    make("caught", "fanout")
    bind("caught", "caught")
    bind("a", "direct", "k")
    bind("b", "direct", "k")
    bind("c", "direct", "other")
    make("topic", "topic")
    bind("a", "topic", "orders.*.created")
    bind("b", "topic", "orders.#")
    side.channel.exchange_bind("caught", "topic", "far.#")
    make("headers", "headers")
    bind("a", "headers", arguments={"x-match": "all", "kind": "order"})
    bind("c", "headers", arguments={"x-match": "any", "kind": "refund"})
    # Round and round, and the alternate exchange by a policy.
    make("one", "fanout")
    make("two", "fanout")
    side.channel.exchange_bind("two", "one")
    side.channel.exchange_bind("one", "two")
    bind("far", "two")
    make("unbound", "direct")
    body = {"pattern": "^unbound$", "definition": {"alternate-exchange": "one"}, "apply-to": "exchanges"}
    management.put(f"policies/{quoted(management.vhost)}/alternate", body)
    make("empty", "topic")

    assert reader.behind("direct", "k") == ("a", "b")
    assert reader.behind("direct", "nobody") == ("caught",)
    assert reader.behind("topic", "orders.eu.created") == ("a", "b")
    assert reader.behind("topic", "orders.eu.gone") == ("b",)
    assert reader.behind("topic", "far.away") == ("caught",)
    assert reader.behind("headers", "whatever") == ("a", "c")
    assert reader.behind("one", "k") == ("far",)
    assert reader.behind("unbound", "k") == ("far",)
    assert reader.behind("", "a") == ("a",)
    empty = reader.target(Origin(None, "empty", "k"))
    assert (empty.queues, empty.is_gone) == ((), False)
    assert "to a queue any more" in empty.unknown
    assert reader.target(Origin(None, "missing", "k")).is_gone
    assert reader.target(Origin("missing", "direct", "k")).is_gone
    # A queue is its own target, whatever exchange it was reached through.
    assert reader.target(Origin("a", "direct", "k")).queues == ("a",)


def test_dead_letters_are_followed_to_where_they_can_end(side: Side, reader: Reader) -> None:
    side.channel.exchange_declare("dlx", "direct")
    for name in ("letters", "more-letters", "elsewhere"):
        side.queue(name)
    side.channel.queue_bind("letters", "dlx", "orders.created")
    side.channel.queue_bind("more-letters", "dlx", "orders.gone")
    side.queue("orders", dead_letter_exchange="dlx")
    # Two waits of ten minutes, then back: what they hold is on its way.
    side.queue("slow", dead_letter_exchange="", dead_letter_routing_key="wait-1")
    side.queue("wait-1", message_ttl=600_000, dead_letter_exchange="", dead_letter_routing_key="wait-2")
    side.queue("wait-2", message_ttl=600_000, dead_letter_exchange="", dead_letter_routing_key="slow-failed")
    side.queue("slow-failed", dead_letter_exchange="", dead_letter_routing_key="elsewhere")
    side.channel.exchange_declare("both", "fanout")
    for name in ("orders", "slow"):
        side.channel.queue_bind(name, "both")
    made = reader.target(Origin("orders", None, "orders.created"))
    assert (made.comes_back_through, made.delays) == (("letters",), ())
    any_key = reader.target(Origin("orders", None, ""))
    assert any_key.comes_back_through == ("letters", "more-letters")
    slow = reader.target(Origin("slow", None, "k"))
    assert (slow.comes_back_through, slow.delays) == (("elsewhere", "slow-failed"), ("wait-1", "wait-2"))
    both = reader.target(Origin(None, "both", "orders.gone"))
    assert both.comes_back_through == ("elsewhere", "more-letters", "slow-failed")
    # A copy for an audit comes back to nobody, where another one goes to a queue that a job reads.
    side.channel.exchange_declare("copies", "fanout")
    for name in ("audit", "dlq.orders", "maybe"):
        side.channel.queue_bind(side.queue(name), "copies")
    side.channel.exchange_declare("unsure", "headers")
    side.channel.queue_bind("dlq.orders", "unsure", arguments={"x-match": "all", "kind": "order"})
    side.channel.queue_bind("audit", "unsure")
    side.queue("copied", dead_letter_exchange="copies")
    side.queue("doubtful", dead_letter_exchange="unsure")
    with connected(reader.url) as connection:
        watching = Readings(Api(reader.url, reader.api), connection, is_watched=lambda queue: queue.startswith("dlq."))
        assert watching.target(Origin("copied", None, "k")).comes_back_through == ("dlq.orders",)
        assert watching.target(Origin("doubtful", None, "k")).comes_back_through == ("audit", "dlq.orders")
    assert reader.target(Origin("copied", None, "k")).comes_back_through == ("audit", "dlq.orders", "maybe")
    side.queue("log", "stream")
    assert "stream" in reader.target(Origin("log", None, "k")).unknown


def test_reading_ends_when_its_time_is_over(side: Side, reader: Reader) -> None:
    for name in ("a", "b", "c"):
        side.fill(side.queue(name), [b"x"])
    with connected(reader.url) as connection:
        found = Readings(Api(reader.url, reader.api), connection, seconds=0).read(["a", "b", "c"], NOW)
    assert [one.ready for one in found.values()] == [1, 1, 1]
    assert all("too slowly" in one.missing for one in found.values())
