from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import Envelope, open_envelope
from dlqbatch.amqp.origin import Trust
from dlqbatch.amqp.retry_headers import Journey, Origin, return_exchange
from dlqbatch.amqp.stamp import stamp
from dlqbatch.drain.event_delays import DelayQueues, EventDelays
from dlqbatch.drain.retry_decision import DeadLetter, Decision, Delay, Return, Rules, decide, origin_gone
from dlqbatch.topology.kinds import Ladder

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_800_000_000
LADDER = Ladder()
TRUST = Trust(LADDER.queue_names, LADDER.exchange_names)
ORDERS = Origin("orders", "shop", "orders.created")
DIED = messages.x_death(messages.death())
STAMPED: dict[str, Any] = {"login": b"guest", "limit": 100_000, "digest": ""}
DIGEST = "0123456789abcdef"
BY_TIER = messages.x_death(messages.death("queue.delay.1", "route-delay", "binding.orders.created.1", "expired"))


@dataclass(frozen=True)
class Events:
    configured: dict[str, int] = field(default_factory=dict)
    otherwise: int | None = None

    def max_retries(self, event: str) -> int | None:
        return self.configured.get(event, self.otherwise)


def ids() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"new-{next(numbers)}"


def decided(
    *entries: messages.Entry,
    events: Events | None = None,
    first_stage: bool = True,
    exchange: str = "retry-exchange",
    key: str = "retry-routing-key",
    trust: Trust = TRUST,
    max_trips: int = 100,
    return_to_queue: bool = True,
    digest: str = DIGEST,
    **properties: bytes,
) -> Decision:
    return decide(
        open_envelope(exchange, key, False, 0, messages.with_headers(*entries, **properties)),
        events or Events({"orders.created": 3}),
        Rules(LADDER.tiers, trust, max_trips, return_to_queue),
        first_stage=first_stage,
        now=NOW,
        new_id=ids(),
        digest=lambda: digest,
    )


def envelope_of(*entries: messages.Entry) -> Envelope:
    return open_envelope("retry-exchange", "retry-routing-key", False, 0, messages.with_headers(*entries))


def delayed(*entries: messages.Entry, **options: object) -> Delay:
    decision = decided(*entries, **options)  # type: ignore[arg-type]
    assert isinstance(decision, Delay), decision
    return decision


def dead(*entries: messages.Entry, **options: object) -> DeadLetter:
    decision = decided(*entries, **options)  # type: ignore[arg-type]
    assert isinstance(decision, DeadLetter), decision
    return decision


def returned(*entries: messages.Entry, **options: object) -> Return:
    decision = decided(*entries, first_stage=False, **options)  # type: ignore[arg-type]
    assert isinstance(decision, Return), decision
    return decision


def ours(*, origin: Origin | None = ORDERS, **headers: int | str | messages.Value) -> list[messages.Entry]:
    """Our headers, by the part of the name after the prefix."""
    entries: list[messages.Entry] = []
    written: dict[str, int | str | messages.Value] = {"id": "id-1", "retries": 1, "trips": 1, **headers}
    for part, value in written.items():
        name = b"dlqbatch-" + part.replace("_", "-").encode()
        if isinstance(value, int):
            entries.append((name, messages.long(value)))
        else:
            entries.append((name, messages.text(value) if isinstance(value, str) else value))
    for place, kind in zip(origin or (), ("queue", "exchange", "key"), strict=False):
        if place is not None:
            entries.append((b"dlqbatch-origin-" + kind.encode(), messages.text(place)))
    return entries


# --- The contract's table, row by row


@pytest.mark.parametrize("name", [b"retries", b"trips"])
@pytest.mark.parametrize(
    "value",
    [
        messages.long(-1),
        messages.text("three"),
        messages.text("3"),
        messages.Value(b"t", b"\x01"),
        messages.Value(b"d", b"\x3f\xf0\x00\x00\x00\x00\x00\x00"),
        messages.Value(b"f", b"\x3f\x80\x00\x00"),
        messages.Value(b"V", b""),
        messages.Value(b"L", b"\xff" * 8),
        messages.array(messages.long(1)),
        messages.nested(),
    ],
)
@pytest.mark.parametrize("first_stage", [True, False])
def test_a_count_that_is_not_a_whole_number_is_malformed_wherever_it_comes_from(
    name: bytes, value: messages.Value, first_stage: bool
) -> None:
    decision = dead(DIED, (b"dlqbatch-" + name, value), first_stage=first_stage)
    assert (decision.reason, decision.detail) == ("malformed", "dlqbatch-" + name.decode())
    assert decision.text == "malformed"
    assert decision.journey.origin == ORDERS
    assert decision.journey.retries is None
    assert decision.journey.trips == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", messages.long(1)),
        ("id", messages.text("i" * 256)),
        ("parent", messages.long(1)),
        ("origin-queue", messages.long(1)),
        ("origin-key", messages.text("k" * 256)),
        ("first-failed-at", messages.long(1)),
        ("first-failed-at", messages.timestamp(253402300800)),
        ("history", messages.text("none")),
        ("attempt", messages.long(0)),
        ("attempt", messages.text("1")),
        ("first-failed-at", messages.text("2026-11-19T12:00:00+00:00")),
        ("expiration", messages.long(1)),
        ("user-id", messages.long(1)),
    ],
)
@pytest.mark.parametrize("came_back", [True, False])
def test_any_other_header_of_ours_that_is_not_valid_is_dropped(
    name: str, value: messages.Value, came_back: bool
) -> None:
    through = messages.x_death(messages.death("orders", "dlqbatch.return.orders" if came_back else "shop"))
    entries = [entry for entry in ours(digest="") if entry[0] != b"dlqbatch-" + name.encode()]
    decision = delayed(through, *entries, (b"dlqbatch-" + name.encode(), value))
    written = stamp(envelope_of(*entries, (b"dlqbatch-" + name.encode(), value)), decision.journey, **STAMPED)
    assert written is not None
    assert (b"dlqbatch-" + name.encode(), value) not in messages.headers_of(written)
    # Without its recorded origin nobody can say that it came back.
    is_same = came_back and not name.startswith("origin")
    assert decision.journey.retries == (2 if is_same else 1)
    assert decision.journey.trips == 2
    assert (decision.journey.id == "id-1") is (is_same and name != "id")


@pytest.mark.parametrize("name", ["retries", "trips"])
def test_a_count_that_a_client_passed_on_spoilt_does_not_condemn_another_message(name: str) -> None:
    headers: dict[str, messages.Value] = {name: messages.text("2026-11-19T12:00:00")}
    decision = delayed(DIED, *ours(digest="", **headers))
    assert (decision.journey.id, decision.journey.parent, decision.journey.retries) == ("new-1", "id-1", 1)
    returned = messages.x_death(messages.death("orders", "dlqbatch.return.orders"))
    assert dead(returned, *ours(digest="", **headers)).reason == "malformed"


def test_a_malformed_message_keeps_its_id_and_its_trips() -> None:
    journey = dead(DIED, *ours(retries=-1, trips=7)).journey
    assert (journey.id, journey.trips) == ("id-1", 8)
    returned_once = messages.x_death(messages.death("orders", "dlqbatch.return.orders"))
    assert dead(returned_once, *ours(retries=-1)).journey.origin == Origin("orders", None, "orders.created")
    too_long = messages.x_death(messages.death("q" * 256))
    assert dead(too_long, *ours(retries=-1)).journey.origin is None


def test_headers_that_cannot_be_read_are_malformed() -> None:
    envelope = open_envelope("shop", "k", False, 0, b"\x20\x00\x00\x00\x00\x03\x01aU")
    for first_stage in (True, False):
        decision = decide(
            envelope, Events(), Rules(3), first_stage=first_stage, now=NOW, new_id=ids(), digest=lambda: DIGEST
        )
        assert decision == DeadLetter(
            Journey("new-1", retries=None, trips=1), "malformed", "its headers cannot be read"
        )


def test_an_origin_that_nothing_tells_is_unknown() -> None:
    assert dead() == DeadLetter(Journey("new-1", trips=1), "origin-unknown")
    assert dead(BY_TIER, first_stage=False).reason == "origin-unknown"
    for name in ("retry-queue", "queue.delay.1"):
        assert dead(BY_TIER, *ours(origin=Origin(name, "shop", "k")), first_stage=False).reason == "origin-unknown"
    assert dead(BY_TIER, *ours(origin=Origin("\udcff", "shop", "k")), first_stage=False).reason == "origin-unknown"


def test_an_origin_that_only_a_client_names_is_unknown_and_the_reason_says_why() -> None:
    decision = dead(*ours())
    assert decision.reason == "origin-unknown"
    assert "'orders' is named by headers that a client wrote" in decision.text
    allowed = Trust(TRUST.own_queues, TRUST.own_exchanges, ("ord*",))
    assert delayed(*ours(), trust=allowed).journey.retries == 2


def test_more_trips_than_the_cap_are_too_many() -> None:
    assert isinstance(decided(DIED, *ours(trips=99)), Delay)
    assert dead(DIED, *ours(trips=100)).reason == "too-many-trips"
    assert dead(DIED, *ours(trips=10**18)).reason == "too-many-trips"
    assert dead(DIED, *ours(trips=2, attempt=1), max_trips=2).reason == "too-many-trips"
    assert dead(BY_TIER, *ours(trips=101), first_stage=False).reason == "too-many-trips"
    assert isinstance(decided(BY_TIER, *ours(trips=100), first_stage=False), Return)


def test_an_attempt_of_the_store_does_not_climb_the_ladder_again() -> None:
    decision = dead(DIED, *ours(attempt=2, retries=0))
    assert decision.reason == "attempt-failed"
    assert decision.journey.attempt == 2
    elsewhere = messages.x_death(messages.death("mail", "shop", "orders.created"))
    assert delayed(elsewhere, *ours(attempt=2)).journey.attempt is None


@pytest.mark.parametrize(("retries", "tier"), [(0, 1), (1, 2), (2, 3), (3, 3), (8, 3)])
def test_each_retry_waits_one_tier_longer_up_to_the_last(retries: int, tier: int) -> None:
    decision = delayed(DIED, *ours(retries=retries), events=Events({"orders.created": 9}))
    assert (decision.event, decision.tier, decision.journey.retries) == ("orders.created", tier, retries + 1)


def test_used_up_retries_are_exhausted() -> None:
    for retries in (3, 4, 10**18):
        decision = dead(DIED, *ours(retries=retries))
        assert decision.reason == "retries-exhausted"
        assert decision.journey.retries == retries
    assert dead(DIED, events=Events({"orders.created": 0})).reason == "retries-exhausted"


def test_an_event_that_is_not_configured_is_dead_lettered() -> None:
    assert dead(DIED, events=Events({"mail.sent": 3})).reason == "not-configured"


def test_after_a_tier_a_message_returns_to_its_queue() -> None:
    decision = returned(BY_TIER, *ours())
    assert decision.origin == decision.journey.origin == ORDERS
    assert (decision.journey.id, decision.journey.retries, decision.journey.trips) == ("id-1", 1, 1)


def test_an_origin_without_a_queue_is_returned_through_its_exchange() -> None:
    recorded = Origin(None, "shop", "orders.created")
    assert returned(BY_TIER, *ours(origin=recorded)).origin == recorded


def test_an_origin_that_is_gone_is_dead_lettered_with_all_that_is_known() -> None:
    decision = returned(BY_TIER, *ours())
    assert origin_gone(decision) == DeadLetter(decision.journey, "origin-gone")


# --- The journey


def test_a_first_failure_begins_the_journey() -> None:
    expired = messages.nested(
        (b"queue", messages.text("orders")),
        (b"exchange", messages.text("shop")),
        (b"routing-keys", messages.array(messages.text("orders.created"), messages.text("copy"))),
        (b"time", messages.timestamp(77)),
        (b"original-expiration", messages.text("60000")),
    )
    journey = delayed(messages.x_death(expired)).journey
    assert journey == Journey("new-1", None, 1, 1, ORDERS, first_failed_at=77, expiration="60000")
    assert delayed(messages.x_death(messages.death()), *ours(id="")).journey.id == "new-1"


def test_without_a_time_of_death_it_failed_now() -> None:
    died = messages.nested(
        (b"queue", messages.text("orders")), (b"routing-keys", messages.array(messages.text("orders.created")))
    )
    assert delayed(messages.x_death(died)).journey.first_failed_at == NOW


def test_a_second_failure_in_the_same_queue_goes_on() -> None:
    again = messages.x_death(messages.death("orders", "dlqbatch.return.orders", "orders.created"))
    journey = delayed(again, *ours(first_failed_at=messages.timestamp(5), parent="p", expiration="1")).journey
    assert journey == Journey("id-1", "p", 2, 2, ORDERS, first_failed_at=5, expiration="1")


def test_the_event_is_the_recorded_key_while_the_queue_is_the_same() -> None:
    by_default_exchange = messages.x_death(messages.death("orders", "", "orders"))
    assert delayed(by_default_exchange, *ours()).event == "orders.created"


def test_a_failure_elsewhere_starts_anew_with_a_new_id_and_the_old_trips() -> None:
    elsewhere = messages.x_death(messages.death("mail", "post", "mail.sent"))
    decision = delayed(
        elsewhere, *ours(retries=3, trips=7, first_failed_at=messages.timestamp(5)), events=Events({"mail.sent": 3})
    )
    assert decision.event == "mail.sent"
    assert decision.journey == Journey(
        "new-1", "id-1", 1, 8, Origin("mail", "post", "mail.sent"), first_failed_at=1_700_000_000, is_new=True
    )


def test_returned_via_its_exchange_a_message_never_gets_its_retries_back() -> None:
    elsewhere = messages.x_death(messages.death("mail", "shop", "orders.created"))
    decision = delayed(elsewhere, *ours(retries=2, first_failed_at=messages.timestamp(5)), return_to_queue=False)
    assert (decision.journey.id, decision.journey.parent) == ("new-1", "id-1")
    assert (decision.journey.retries, decision.journey.first_failed_at) == (3, 5)
    assert dead(elsewhere, *ours(retries=3), return_to_queue=False).reason == "retries-exhausted"


def test_returned_via_its_exchange_a_message_goes_to_all_subscribers() -> None:
    decision = returned(BY_TIER, *ours(), return_to_queue=False)
    assert decision.origin == ORDERS._replace(queue=None)
    assert decision.journey.origin == ORDERS


@pytest.mark.parametrize("exchange", [None, "", "retry-exchange", "dlqbatch.return.orders"])
def test_without_an_exchange_of_its_own_a_message_goes_to_its_queue_either_way(exchange: str | None) -> None:
    decision = returned(BY_TIER, *ours(origin=Origin("orders", exchange, "k")), return_to_queue=False)
    assert decision.origin.queue == "orders"


def test_nobody_is_led_through_an_exchange_by_headers_that_a_client_may_have_written() -> None:
    forged = ours(origin=Origin("orders", "payments", "orders.created"))
    by_name = messages.x_death(messages.death("orders", "", "orders"))
    assert delayed(by_name, *forged).journey.origin == Origin("orders", "payments", "orders.created")
    assert delayed(by_name, *forged, return_to_queue=False).journey.origin == Origin("orders", None, "orders.created")
    assert delayed(DIED, *forged, return_to_queue=False).journey.origin == ORDERS


def test_a_recorded_return_exchange_is_forgotten() -> None:
    forged = ours(origin=Origin("orders", "dlqbatch.return.mail", "orders.created"))
    assert delayed(DIED, *forged).journey.origin == ORDERS
    assert dead(*forged).journey.origin == Origin("orders", None, "orders.created")
    by_exchange = ours(origin=Origin(None, "dlqbatch.return.mail", "orders.created"))
    assert dead(BY_TIER, *by_exchange, first_stage=False).reason == "origin-unknown"


def test_an_empty_recorded_queue_is_no_queue() -> None:
    assert returned(BY_TIER, *ours(origin=Origin("", "shop", "k"))).origin == Origin(None, "shop", "k")
    assert returned(BY_TIER, *ours(origin=Origin("", "", "orders"))).origin == Origin("orders", "", "orders")
    assert dead(BY_TIER, *ours(origin=Origin("", "", "")), first_stage=False).reason == "origin-unknown"


@pytest.mark.parametrize(
    "shortcut",
    [
        [],
        [DIED],
        [messages.x_death(messages.death("orders"), messages.death("queue.delay.1"))],
        [messages.x_death(messages.death("queue.delay.1"), messages.death("orders"))],
    ],
)
def test_a_message_that_came_round_the_delay_queues_has_its_trip_counted_on_the_way_back(
    shortcut: list[messages.Entry],
) -> None:
    assert returned(*shortcut, *ours(trips=4)).journey.trips == 5
    assert dead(*shortcut, *ours(trips=100), first_stage=False).reason == "too-many-trips"


def test_an_origin_that_dead_letters_into_a_delay_queue_of_ours_does_not_keep_its_messages_for_ever() -> None:
    entries, visits = [*ours()], 0
    past_the_first_stage = messages.x_death(messages.death("queue.delay.1"), messages.death("orders"))
    while isinstance(decision := decided(past_the_first_stage, *entries, first_stage=False, max_trips=9), Return):
        visits += 1
        assert visits < 10
        entries = ours(trips=decision.journey.trips)
    assert (decision.reason, visits) == ("too-many-trips", 8)


def test_an_expiration_too_long_to_be_one_is_not_recorded() -> None:
    died = messages.nested((b"queue", messages.text("orders")), (b"original-expiration", messages.text("9" * 256)))
    assert dead(messages.x_death(died)).journey.expiration is None


# --- Whatever a message holds

policies = st.builds(
    Events, st.dictionaries(st.sampled_from(["orders.created", ""]), st.integers(0, 5)), st.none() | st.integers(0, 5)
)
trusts = st.builds(
    Trust,
    st.sampled_from([frozenset(), TRUST.own_queues]),
    st.sampled_from([frozenset(), TRUST.own_exchanges]),
    st.lists(st.sampled_from(["*", "orders", "o*", ""]), max_size=2).map(tuple),
    st.booleans(),
)
rules = st.builds(Rules, st.integers(1, 4), trusts, st.integers(1, 100), st.booleans())
exchanges = st.sampled_from(["", "shop", "retry-exchange", "dlqbatch.return.orders", "\udcff"])
keys = st.sampled_from(["", "orders.created", "k" * 255, "\udcff"])


@given(messages.any_properties, policies, st.integers(1, 4), st.booleans(), exchanges, keys)
def test_delays_of_events_decide_when_a_message_is_retried_and_never_whether(
    data: bytes, events: Events, tiers: int, first_stage: bool, exchange: str, key: str
) -> None:
    ladder = Ladder(tier_ttls=tuple(range(1000, 1000 + tiers)), more_delays=(5000, 60_000))
    own = EventDelays({"orders.created": (5000, 60_000), "#": (1000,)})
    queues = DelayQueues(tuple(ladder.delays.values()), ladder.tiers, own, follows=True)
    plain, delayed_by_event = (
        decide(
            open_envelope(exchange, key, False, 0, data),
            events,
            Rules(ladder.tiers, TRUST, delay_queues=each),
            first_stage=first_stage,
            now=NOW,
            new_id=ids(),
            digest=lambda: DIGEST,
        )
        for each in (None, queues)
    )
    if isinstance(plain, Delay):
        assert isinstance(delayed_by_event, Delay)
        assert delayed_by_event.tier in range(1, len(ladder.delays) + 1)
        assert delayed_by_event._replace(tier=plain.tier) == plain
    else:
        assert delayed_by_event == plain


@given(messages.any_properties, policies, rules, st.booleans(), exchanges, keys)
def test_every_message_gets_one_decision_and_always_the_same(
    data: bytes, events: Events, given_rules: Rules, first_stage: bool, exchange: str, key: str
) -> None:
    first, second = (
        decide(
            open_envelope(exchange, key, False, 0, data),
            events,
            given_rules,
            first_stage=first_stage,
            now=NOW,
            new_id=ids(),
            digest=lambda: DIGEST,
        )
        for _ in range(2)
    )
    assert first == second
    assert isinstance(first, (Delay, DeadLetter) if first_stage else (Return, DeadLetter))
    assert first.journey.id
    envelope = open_envelope(exchange, key, False, 0, data)
    if isinstance(first, Delay):
        allowed = events.max_retries(first.event)
        assert allowed is not None
        assert first.journey.retries is not None
        assert 0 < first.journey.retries <= allowed
        assert first.tier == min(first.journey.retries, given_rules.tiers)
        assert first.journey.origin is not None
        assert first.journey.trips <= given_rules.max_trips
    if isinstance(first, Return):
        assert first.origin.queue or first.origin.exchange
    # What is decided can always be written, read again, and is counted one trip higher.
    encoded = stamp(envelope, first.journey, login=b"guest", limit=1_000_000, digest="", reason="r", dead_at=NOW)
    assert encoded is not None
    if envelope.headers is not None and first_stage:
        trips = dict(messages.headers_of(encoded))[b"dlqbatch-trips"] if _is_valid(data) else None
        before = _trips(data) if _is_valid(data) else 0
        if trips is not None:
            assert int.from_bytes(trips.content, "big") == min(before + 1, 2**63 - 1)


def _is_valid(data: bytes) -> bool:
    try:
        messages.headers_of(data)
    except (AssertionError, KeyError, IndexError):
        return False
    return True


def _trips(data: bytes) -> int:
    widths = {b"b": True, b"B": False, b"s": True, b"u": False, b"I": True, b"i": False, b"l": True, b"L": True}
    for name, value in messages.headers_of(data):
        if name == b"dlqbatch-trips":
            if value.tag not in widths:
                return 0
            return max(int.from_bytes(value.content, "big", signed=widths[value.tag]), 0)
    return 0


places = st.sampled_from(
    [Origin("orders", "shop", "orders.created"), Origin("mail", "shop", "orders.created"), Origin("mail", "", "mail")]
)


@given(
    messages.tables,
    st.lists(places, min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
)
def test_a_message_that_always_fails_ends_among_the_dead(
    table: list[messages.Entry],
    failing: list[Origin],
    max_trips: int,
    max_retries: int,
    return_to_queue: bool,
    fails_elsewhere: bool,
) -> None:
    walk_rules = Rules(LADDER.tiers, TRUST, max_trips, return_to_queue)
    events = Events(otherwise=max_retries)
    new_id = ids()
    entries = [
        messages.x_death(messages.death(failing[0].queue or "", failing[0].exchange or "", failing[0].key)),
        *(entry for entry in table if entry[0] != b"x-death"),
    ]
    for visit in range(1, max_trips + 2):
        data = messages.with_headers(*entries)
        envelope = open_envelope("retry-exchange", "retry-routing-key", False, 0, data)
        decision = decide(envelope, events, walk_rules, first_stage=True, now=NOW, new_id=new_id, digest=lambda: DIGEST)
        if isinstance(decision, DeadLetter):
            return
        assert isinstance(decision, Delay)
        encoded = stamp(envelope, decision.journey, login=b"guest", limit=100_000, digest="")
        assert encoded is not None
        waited = messages.with_headers(BY_TIER, *messages.headers_of(encoded))
        envelope = open_envelope("retry-exchange-1", "retry.#.1", False, 0, waited)
        back = decide(envelope, events, walk_rules, first_stage=False, now=NOW, new_id=new_id, digest=lambda: DIGEST)
        assert isinstance(back, Return)
        encoded = stamp(envelope, back.journey, login=b"guest", limit=100_000, digest="")
        assert encoded is not None
        if back.origin.queue is not None:
            place = failing[visit % len(failing)] if fails_elsewhere else back.origin
            through = return_exchange(back.origin.queue) if place.queue == back.origin.queue else place.exchange or ""
        else:
            place = failing[visit % len(failing)]
            through = back.origin.exchange or ""
        died = messages.x_death(messages.death(place.queue or "orders", through, back.origin.key))
        entries = [died, *messages.headers_of(encoded)]
    pytest.fail("it still circles")


@given(st.integers(0, 8), st.integers(1, 5))
def test_in_one_queue_a_message_is_retried_exactly_as_often_as_configured(max_retries: int, tiers: int) -> None:
    walk_rules = Rules(tiers, TRUST)
    entries = [DIED, (b"tenant", messages.text("acme"))]
    climbed = []
    while True:
        envelope = open_envelope("retry-exchange", "k", False, 0, messages.with_headers(*entries))
        decision = decide(
            envelope,
            Events({"orders.created": max_retries}),
            walk_rules,
            first_stage=True,
            now=NOW,
            new_id=ids(),
            digest=lambda: DIGEST,
        )
        if not isinstance(decision, Delay):
            break
        climbed.append(decision.tier)
        encoded = stamp(envelope, decision.journey, login=b"", limit=100_000, digest="")
        assert encoded is not None
        through = messages.x_death(messages.death("orders", "dlqbatch.return.orders"))
        entries = [through, *messages.headers_of(encoded)]
    assert climbed == [min(number, tiers) for number in range(1, max_retries + 1)]
    assert isinstance(decision, DeadLetter)
    assert decision.reason == "retries-exhausted"
    assert decision.journey.origin == ORDERS
