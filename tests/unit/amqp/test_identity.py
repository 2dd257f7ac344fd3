"""Which message is which: generated lives of messages beside a plain oracle that knows every one of them.

The broker's x-death is kept here as releases 3.x and 4.x keep it: 3.x goes on with what a client sent, 4.x does not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import messages
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dlqbatch.amqp.delivery import Delivery, Publish, Route, open_envelope
from dlqbatch.amqp.identity import Identity, digest_for, identity_of, own_journey
from dlqbatch.amqp.origin import Trust
from dlqbatch.amqp.retry_headers import Journey, Origin, return_exchange
from dlqbatch.amqp.stamp import stamp
from dlqbatch.consumer.message import Message
from dlqbatch.drain.retry_decision import DeadLetter, Delay, Return, Rules, decide
from dlqbatch.ingest.examine import examine
from dlqbatch.lifecycle.resend import Resend
from dlqbatch.topology.kinds import Ladder

NOW = 1_800_000_000
LADDER = Ladder()
TRUST = Trust(LADDER.queue_names, LADDER.exchange_names)
MOST_RETRIES = 2
PLACES = [("shop", "order.created"), ("shop", "order.paid"), ("", "orders"), ("shop", "orders")]
ELSEWHERE = [*PLACES[:3], ("shop", "ship.sent")]
ORDERS = Origin("orders", "shop", "order.created")
DIGEST = "0123456789abcdef"


# --- The rule, case by case


@pytest.mark.parametrize("digest", [None, "", DIGEST, "another"])
@pytest.mark.parametrize(
    ("recorded", "seen", "way"),
    [
        (ORDERS, ("orders", "dlqbatch.return.orders", "order.created"), "ours alone"),
        (ORDERS, ("orders", "dlqbatch.return.orders", "order.paid"), None),
        (ORDERS, ("ship", "dlqbatch.return.orders", "order.created"), None),
        (ORDERS, ("orders", "dlqbatch.return.ship", "order.created"), None),
        (Origin("q" * 250, "shop", "k"), ("q" * 250, return_exchange("q" * 250), "k"), "ours alone"),
        (ORDERS, ("orders", "", "orders"), "open"),
        (ORDERS, ("orders", "shop", "orders"), "open"),
        (ORDERS, ("orders", "shop", "order.created"), "open"),
        (ORDERS, ("orders", "shop", "order.paid"), None),
        (ORDERS, ("orders", "mall", "order.created"), None),
        (ORDERS, ("ship", "", "ship"), None),
        (ORDERS, ("ship", "shop", "order.created"), "open to a copy"),
        (ORDERS, (None, "dlqbatch.return.orders", "order.created"), "ours alone"),
        (ORDERS, (None, "shop", "order.created"), "open"),
        (ORDERS, ("orders", None, ""), "not told"),
        (ORDERS, ("ship", None, ""), None),
        (Origin(None, "shop", "k"), ("orders", "shop", "k"), "open"),
        (Origin(None, "shop", "k"), ("orders", "shop", "l"), None),
        (None, ("orders", "shop", "order.created"), "open"),
    ],
)
def test_a_message_is_the_same_if_it_came_by_a_way_of_ours_and_the_digest_agrees_where_that_is_open(
    recorded: Origin | None, seen: tuple[Any, Any, Any], way: str | None, digest: str | None
) -> None:
    agrees = {
        None: False,
        "ours alone": True,
        "open": digest in (None, DIGEST),
        "open to a copy": digest in (None, DIGEST),
        "not told": digest in (None, "", DIGEST),
    }[way]
    expected = (Identity.COPY if way == "open to a copy" else Identity.SAME) if agrees else Identity.OTHER
    journey = Journey("id-1", "id-0", 2, 3, recorded, 5, 4, "60000", digest)
    assert identity_of(journey, Origin(*seen), lambda: DIGEST) is expected
    own = own_journey(journey, expected)
    assert own == (journey if agrees else Journey(parent="id-1", trips=3, is_new=True))


def test_the_digest_is_made_only_where_it_decides() -> None:
    def never() -> str:
        raise AssertionError("the digest was made")

    for digest, seen in ((DIGEST, Origin("orders", "dlqbatch.return.orders", "order.created")), ("", ORDERS)):
        identity_of(Journey("id-1", origin=ORDERS, digest=digest), seen, never)


# --- Lives of messages


class Content(NamedTuple):
    body: bytes
    message_id: bytes


@dataclass(eq=False)
class Truth:
    """What is so of one message, whatever its headers say."""

    queue: str
    exchange: str
    key: str
    """What its publisher sent it with."""
    content: Content
    identity: str | None = None
    parent: str | None = None
    """The id in the headers that its publisher passed on."""
    retries: int = 0
    attempt: int | None = None
    copied: Truth | None = None
    """The message that this one is a copy of, to the last byte."""

    def open_ways(self) -> set[tuple[str, str]]:
        """Where nobody could tell a copy with all headers from the message itself, or from what that is a copy of."""
        ways = {("", self.queue), ("shop", self.queue), (self.exchange, self.key)}
        return ways | self.copied.open_ways() if self.copied is not None else ways


@dataclass(eq=False)
class Copy:
    """One message where it is now."""

    truth: Truth
    exchange: str
    key: str
    """What it was delivered with."""
    headers: list[messages.Entry]
    by_broker: list[messages.Value] = field(default_factory=list)
    """The deaths since its last publish, newest first."""

    def properties(self) -> bytes:
        deaths = [(b"x-death", messages.array(*self.by_broker))] if self.by_broker else []
        if self.by_broker:
            queue, reason = (dict(messages.decode_table(self.by_broker[0].content))[name] for name in _LAST)
            deaths += [(b"x-last-death-queue", queue), (b"x-last-death-reason", reason)]
        return messages.with_headers(*deaths, *self.headers, message_id=self.truth.content.message_id)

    def delivery(self, queue: str) -> Delivery:
        class Receipt:
            def __init__(self) -> None:
                self.queue = queue

        delivery = Delivery(Receipt(), 1, self.exchange, self.key, redelivered=False)  # type: ignore[arg-type]
        body = self.truth.content.body
        delivery.properties, delivery.body_size = self.properties(), len(body)
        delivery.chunks = [body[:3] + b"\xce", body[3:] + b"\xce"]
        return delivery


_LAST = (b"queue", b"reason")


class Row(NamedTuple):
    properties: bytes
    body: bytes
    identity: str
    parent: str | None
    attempt: int
    exchange: str
    routing_key: str
    row_id: int = 1
    to_queue: str | None = None


def queue_of(exchange: str, key: str) -> str:
    if exchange.startswith("dlqbatch.return."):
        return exchange.removeprefix("dlqbatch.return.")
    return key if exchange == "" else key.replace("order.", "orders.").split(".")[0]


class Lives(RuleBasedStateMachine):
    """Clients, the drain, the dead store and a person with a shovel, in any order."""

    @initialize(release=st.sampled_from([3, 4]), way=st.sampled_from(["return", "direct", "exchange", "per-queue"]))
    def begin(self, release: int, way: str) -> None:
        self.release, self.way = release, way
        self.trust = Trust(TRUST.own_queues | {"orders.retry", "orders.delay"}, TRUST.own_exchanges)
        self.trust = Trust(self.trust.own_queues, self.trust.own_exchanges, last_death=release > 3)
        home = "orders" if way == "per-queue" else None
        self.rules = Rules(3, self.trust, 10_000, return_to_queue=way != "exchange", home=home)
        self.queued: list[Copy] = []
        self.dead: list[Copy] = []
        self.direct: list[Copy] = []
        """Dead letters that no drain has seen: their queue dead-letters there."""
        self.numbers = itertools.count(1)
        self.known: set[str] = set()

    # What clients do.

    @rule(place=st.sampled_from(PLACES))
    def publish(self, place: tuple[str, str]) -> None:
        self.send(Truth(queue_of(*place), *place, self.content()), [])

    @precondition(lambda self: self.queued)
    @rule(
        data=st.data(),
        place=st.sampled_from(ELSEWHERE),
        change=st.sampled_from(["body", "message_id", "nothing"]),
        succeeds=st.booleans(),
    )
    def pass_on(self, data: st.DataObject, place: tuple[str, str], change: str, succeeds: bool) -> None:
        """A follow-up, a poll or a copy, with all headers that the worker received."""
        received = self.choose(data, self.queued)
        if self.way == "per-queue" and place == ("shop", "ship.sent"):
            return
        content, fresh = received.truth.content, self.content()
        was = received.truth
        if change == "nothing" and place in was.open_ways() and not received.exchange.startswith("dlqbatch.return."):
            change = "body"
        content = Content(
            fresh.body if change == "body" else content.body,
            fresh.message_id if change == "message_id" else content.message_id,
        )
        if succeeds:
            self.queued.remove(received)
        parent = next((value.content.decode() for name, value in received.headers if name == b"dlqbatch-id"), None)
        copied = was if change == "nothing" else None
        self.send(Truth(queue_of(*place), *place, content, parent=parent, copied=copied), list(received.headers))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def move_by_hand(self, data: st.DataObject) -> None:
        """The management UI's "Move messages": by the default exchange, with the queue's name as key."""
        copy = self.choose(data, self.dead)
        self.dead.remove(copy)
        self.send(copy.truth, copy.headers, Route("", copy.truth.queue))

    # What the broker and dlqbatch do.

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        copy = self.choose(data, self.queued)
        self.queued.remove(copy)
        self.die(copy, copy.truth.queue, "rejected")
        delivery, truth = copy.delivery("retry-queue"), copy.truth
        envelope = open_envelope("retry-exchange", "retry-routing-key", False, 3, delivery.properties)
        decision = decide(
            envelope, self, self.rules, first_stage=True, now=NOW, new_id=self.new_id, digest=delivery.digest
        )
        self.check(decision.journey, truth)
        if isinstance(decision, DeadLetter):
            why = "attempt-failed" if truth.attempt is not None else "retries-exhausted"
            assert decision.reason == why
            assert truth.attempt is not None or truth.retries == MOST_RETRIES
            self.dead.append(self.stamped(copy, decision.journey, delivery.digest(), reason=why))
            return
        assert isinstance(decision, Delay)
        assert decision.event == truth.key
        truth.retries += 1
        assert decision.journey.retries == truth.retries <= MOST_RETRIES
        if self.way == "per-queue":
            waits = self.stamped(copy, decision.journey, delivery.digest())
            self.send(truth, waits.headers, Route("shop", "orders"))
            return
        waits = self.stamped(copy, decision.journey, None)
        waits.exchange, waits.key = "route-delay", "binding.1"
        self.die(waits, "queue.delay.1", "expired")
        delivery = waits.delivery("retry-queue-1")
        envelope = open_envelope("retry-exchange-1", "retry.#.1", False, 3, delivery.properties)
        back = decide(
            envelope, self, self.rules, first_stage=False, now=NOW, new_id=self.new_id, digest=delivery.digest
        )
        assert isinstance(back, Return)
        route = self.route(back.origin)
        digest = digest_for(route.exchange, None, delivery.digest)
        self.send(truth, self.stamped(waits, back.journey, digest).headers, route)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def fail_into_a_dead_letter_queue(self, data: st.DataObject) -> None:
        copy = self.choose(data, self.queued)
        self.queued.remove(copy)
        self.die(copy, copy.truth.queue, "rejected")
        self.direct.append(copy)

    @precondition(lambda self: self.dead or self.direct)
    @rule(data=st.data())
    def ingest_and_replay(self, data: st.DataObject) -> None:
        copy = self.choose(data, self.dead + self.direct)
        found = examine(copy.delivery("dlq-queue"), self.trust, datetime.fromtimestamp(NOW, UTC))
        truth = copy.truth
        assert (found.id or None, found.attempt, found.retries) == (truth.identity, truth.attempt, truth.retries)
        assert found.origin is not None
        assert (found.origin.queue, found.origin.key) == (truth.queue, truth.key)
        assert found.parent == truth.parent
        truth.identity = truth.identity or self.new_id()
        self.known.add(truth.identity)
        truth.attempt = (truth.attempt or 0) + 1
        row = Row(
            copy.properties(),
            truth.content.body,
            truth.identity,
            truth.parent,
            truth.attempt,
            copy.exchange,
            copy.key,
        )
        resend = Resend(self, self.trust, b"guest", 100_000, self.rules.return_to_queue)
        (offer,) = resend.offers([row])
        delivery = copy.delivery("")
        delivery.tag = offer.tag
        sent = resend.handle(delivery)
        assert isinstance(sent, Publish), sent
        (self.dead if copy in self.dead else self.direct).remove(copy)
        self.send(truth, messages.headers_of(sent.properties), sent.route)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def a_consumer_of_ours_looks(self, data: st.DataObject) -> None:
        copy = self.choose(data, self.queued)
        truth = copy.truth
        seen = Message.of(copy.delivery(truth.queue), truth.queue, counts_itself=False)
        assert seen.key == truth.key
        if truth.identity is not None:
            assert (seen.journey.id, seen.journey.attempt) == (truth.identity, truth.attempt)
        else:
            assert seen.journey.id not in self.known
            assert (seen.journey.parent, seen.journey.attempt) == (truth.parent, None)
        assert not [name for name in seen.context.headers if name.startswith(("dlqbatch-", "x-death"))]

    # How the world works.

    def check(self, journey: Journey, truth: Truth) -> None:
        if truth.identity is None:
            assert journey.id not in self.known, "another message's id"
            self.known.add(journey.id)
            truth.identity = journey.id
        assert journey.id == truth.identity
        assert journey.parent == truth.parent
        assert journey.attempt == truth.attempt
        assert journey.origin is not None
        assert (journey.origin.queue, journey.origin.key) == (truth.queue, truth.key)

    def send(self, truth: Truth, headers: list[messages.Entry], route: Route | None = None) -> None:
        exchange, key = route or (truth.exchange, truth.key)
        assert queue_of(exchange, key) == truth.queue
        # 4.x takes no notice of the deaths that a client sends.
        deaths = [value for name, value in headers if name == b"x-death"] if self.release == 3 else []
        broker = messages.decode_array(deaths[0].content) if deaths else []
        kept = [entry for entry in headers if not entry[0].startswith((b"x-death", b"x-last"))]
        self.queued.append(Copy(truth, exchange, key, kept, broker))

    def die(self, copy: Copy, queue: str, reason: str) -> None:
        named = {b"queue": messages.text(queue), b"reason": messages.text(reason)}
        for death in copy.by_broker:
            if named.items() <= dict(messages.decode_table(death.content)).items():
                copy.by_broker.remove(death)
                copy.by_broker.insert(0, death)
                return
        copy.by_broker.insert(0, messages.death(queue, copy.exchange, copy.key, reason))

    def stamped(self, copy: Copy, journey: Journey, digest: str | None, reason: str | None = None) -> Copy:
        envelope = open_envelope("", "", False, 3, copy.properties())
        dead_at = None if reason is None else NOW
        encoded = stamp(envelope, journey, login=b"guest", limit=100_000, digest=digest, reason=reason, dead_at=dead_at)
        assert encoded is not None
        return Copy(copy.truth, "dlq-exchange", "dlq-routing-key", messages.headers_of(encoded))

    def route(self, origin: Origin) -> Route:
        queue = origin.queue
        if queue is None:
            return Route(origin.exchange or "", origin.key)
        if self.way == "direct" or (origin.exchange == "" and origin.key == queue):
            return Route("", queue)
        return Route(return_exchange(queue), origin.key)

    def is_gone(self, origin: Origin) -> bool:
        return False

    is_unclear = is_gone

    def max_retries(self, event: str) -> int:
        return MOST_RETRIES

    def new_id(self) -> str:
        return f"id-{next(self.numbers)}"

    def content(self) -> Content:
        number = next(self.numbers)
        return Content(b"body %d" % number, b"m-%d" % number)

    def choose(self, data: st.DataObject, copies: list[Copy]) -> Copy:
        return copies[data.draw(st.integers(0, len(copies) - 1))]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


@given(messages.valid_properties, st.binary(max_size=20), st.binary(max_size=20))
def test_a_digest_is_of_message_id_and_body_alone(properties: bytes, body: bytes, other: bytes) -> None:
    def digest(content: bytes, cut: int) -> str:
        delivery = Delivery(None, 1, "", "", False)  # type: ignore[arg-type]
        delivery.properties, delivery.body_size = properties, len(content)
        delivery.chunks = [content[:cut] + b"\xce", content[cut:] + b"\xce"]
        return delivery.digest()

    assert digest(body, 0) == digest(body, 7)
    assert (digest(body, 0) == digest(other, 0)) == (body == other)
