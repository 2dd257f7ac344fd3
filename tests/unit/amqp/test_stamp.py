from __future__ import annotations

import messages
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.retry_headers import Journey, Origin, journey_so_far
from dlqbatch.amqp.stamp import HISTORY_LIMIT, stamp

ROOMY = 1_000_000
JOURNEY = Journey(id="0123", retries=1, trips=2, origin=Origin("orders", "shop", "orders.created"))

names = st.one_of(st.none(), st.sampled_from(["", "shop", "ö", "\udcff"]))
journeys = st.builds(
    Journey,
    id=st.text(max_size=8),
    parent=st.none() | st.text(max_size=8),
    retries=st.none() | st.integers(0, 2**63 - 1),
    trips=st.integers(0, 2**63 - 1),
    origin=st.none() | st.builds(Origin, names, names, st.sampled_from(["", "orders.created", "\udcff"])),
    first_failed_at=st.none() | st.integers(0, 253402300799),
    attempt=st.none() | st.integers(1, 10),
    expiration=st.none() | st.text(max_size=8),
    is_new=st.booleans(),
)


def stamped(data: bytes, journey: Journey = JOURNEY, login: bytes = b"guest", limit: int = ROOMY) -> bytes:
    encoded = stamp(open_envelope("", "", False, 0, data), journey, login=login, limit=limit, digest="")
    assert encoded is not None
    return encoded


def ours(data: bytes) -> dict[bytes, messages.Value]:
    return {name: value for name, value in messages.headers_of(data) if name in messages.OURS}


def foreign(data: bytes) -> list[messages.Entry]:
    skipped = {*messages.OURS, *messages.BROKERS}
    return [entry for entry in messages.headers_of(data) if entry[0] not in skipped]


def test_a_message_that_only_carries_our_headers_takes_none_of_them_along() -> None:
    brought = [
        (b"dlqbatch-expiration", messages.text("60000")),
        (b"dlqbatch-user-id", messages.text("shop")),
        (b"dlqbatch-reason", messages.text("retries-exhausted")),
        (b"dlqbatch-history", messages.array(messages.death("another"))),
        (b"dlqbatch-worker-retries", messages.long(2)),
        (b"tenant", messages.text("acme")),
        messages.x_death(messages.death()),
    ]
    journey = Journey("new", "old", 1, 5, Origin("orders", "shop", "orders.created"), is_new=True)
    encoded = stamped(messages.with_headers(*brought), journey)
    after = dict(messages.headers_of(encoded))
    assert after[b"dlqbatch-history"] == messages.array(messages.death())
    assert after[b"tenant"] == messages.text("acme")
    assert not after.keys() & {name for name, _ in brought[:3]} | ({b"dlqbatch-worker-retries"} & after.keys())


@given(messages.other_properties, messages.tables, journeys, st.sampled_from([b"", b"guest"]), st.none() | st.text())
def test_only_our_headers_and_the_brokers_change(
    others: dict[str, bytes], table: list[messages.Entry], journey: Journey, login: bytes, reason: str | None
) -> None:
    assume(reason is None or reason.isprintable())
    data = messages.encode_properties({**others, "headers": messages.encode_table(table)})
    envelope = open_envelope("", "", False, 0, data)
    encoded = stamp(
        envelope, journey, login=login, limit=ROOMY, digest="", reason=reason, dead_at=None if reason is None else 9
    )
    assert encoded is not None

    after = messages.decode_properties(encoded)
    kept = {name: value for name, value in others.items() if name not in ("expiration", "delivery_mode", "user_id")}
    if others.get("user_id") == login:
        kept["user_id"] = login
    after_table = after.pop("headers")
    assert after == kept | {"delivery_mode": b"\x02"}

    entries = messages.decode_table(after_table)
    expected = [entry for entry in foreign(data) if not (journey.is_new and entry[0] == b"dlqbatch-worker-retries")]
    assert foreign(encoded) == expected == entries[: len(expected)]
    ours_after = [name for name, _ in entries[len(expected) :]]
    assert set(ours_after) <= set(messages.OURS)
    assert len(ours_after) == len(set(ours_after))
    assert (b"dlqbatch-reason" in ours_after) == (b"dlqbatch-dead-at" in ours_after) == (reason is not None)
    moved = ours(encoded)
    if "expiration" in others:
        assert moved[b"dlqbatch-expiration"] == messages.text(others["expiration"])
    if others.get("user_id", login) != login:
        assert moved[b"dlqbatch-user-id"] == messages.text(others["user_id"])


@given(messages.valid_properties, journeys)
def test_a_stamped_message_can_be_read_and_stamped_again(data: bytes, journey: Journey) -> None:
    once = stamped(data, journey)
    envelope = open_envelope("", "", False, 0, once)
    assert envelope.headers is not None
    assert not envelope.headers.brokers
    if journey.retries is not None:
        read = journey_so_far(envelope.headers)
        same = ("id", "parent", "retries", "trips", "first_failed_at", "attempt")
        assert [getattr(read, name) for name in same] == [getattr(journey, name) for name in same]
        assert (read.digest, read.invalid_count) == ("", "")
    assert foreign(stamped(once, journey)) == foreign(once)


@given(messages.any_properties, journeys, st.integers(0, 400))
def test_no_message_makes_it_raise_or_outgrow_the_limit(data: bytes, journey: Journey, limit: int) -> None:
    encoded = stamp(
        open_envelope("", "", False, 0, data), journey, login=b"guest", limit=limit, digest="", reason="x", dead_at=1
    )
    assert encoded is None or len(encoded) <= limit


def test_the_deaths_go_into_the_history_newest_first_byte_for_byte() -> None:
    first, second = messages.death("orders"), messages.death("queue.delay.1")
    cc = (b"CC", messages.array(messages.text("copy")))
    once = stamped(
        messages.with_headers(messages.x_death(first), (b"x-first-death-queue", messages.text("orders")), cc)
    )
    twice = stamped(messages.with_headers(messages.x_death(second), *messages.headers_of(once)))
    history = messages.decode_array(ours(twice)[b"dlqbatch-history"].content)
    assert history == [second, first, messages.nested(cc)]


def test_an_x_death_that_is_no_array_is_kept_as_it_was() -> None:
    for value in (messages.text("nonsense"), messages.long(1), messages.nested((b"queue", messages.text("orders")))):
        encoded = stamped(messages.with_headers((b"x-death", value)))
        history = messages.decode_array(ours(encoded)[b"dlqbatch-history"].content)
        assert history == [messages.nested((b"x-death", value))]


@pytest.mark.parametrize("name", [b"x-death", b"dlqbatch-history"])
def test_an_array_that_does_not_hold_together_cannot_spoil_the_history(name: bytes) -> None:
    for size in (1, 9000):
        broken = messages.Value(b"A", b"S\x00\x00\xff\xff" + b"a" * size)
        old = (b"dlqbatch-history", messages.array(messages.death("orders")))
        encoded = stamped(messages.with_headers((name, broken), *([old] if name == b"x-death" else [])))
        history = messages.decode_array(ours(encoded)[b"dlqbatch-history"].content)
        if size == 1:
            kept = messages.nested((name, messages.Value(b"x", broken.content)))
            assert history == [kept, *([messages.death("orders")] if name == b"x-death" else [])]


def test_the_history_is_bounded_and_loses_its_oldest_deaths() -> None:
    old = [messages.death(f"queue-{number}") for number in range(200)]
    new = messages.death("newest")
    encoded = stamped(messages.with_headers(messages.x_death(new), (b"dlqbatch-history", messages.array(*old))))
    content = ours(encoded)[b"dlqbatch-history"].content
    assert HISTORY_LIMIT - 200 < len(content) <= HISTORY_LIMIT
    history = messages.decode_array(content)
    assert history == [new, *old][: len(history)]


@pytest.mark.parametrize("size", [8000, 9000])
def test_a_long_header_of_the_brokers_does_not_cost_the_deaths(size: int) -> None:
    deaths = [messages.death("newest"), messages.death("before")]
    cc = (b"CC", messages.array(messages.text("c" * size)))
    old = (b"dlqbatch-history", messages.array(messages.death("old")))
    encoded = stamped(messages.with_headers(messages.x_death(*deaths), cc, old))
    assert messages.decode_array(ours(encoded)[b"dlqbatch-history"].content) == [*deaths, messages.death("old")]


def test_a_table_too_large_loses_the_history_then_what_is_optional_then_stays() -> None:
    journey = JOURNEY._replace(parent="9876", first_failed_at=7)
    data = messages.with_headers(messages.x_death(messages.death()), (b"blob", messages.text("b" * 500)))
    whole = stamped(data, journey)
    required = {b"dlqbatch-" + name for name in (b"id", b"retries", b"trips", b"digest")}
    required |= {b"dlqbatch-origin-" + name for name in (b"queue", b"exchange", b"key")}
    optional = {b"dlqbatch-parent", b"dlqbatch-first-failed-at"}
    assert set(ours(whole)) == required | optional | {b"dlqbatch-history"}
    without_history = stamped(data, journey, limit=len(whole) - 1)
    assert set(ours(without_history)) == required | optional
    bare = stamped(data, journey, limit=len(without_history) - 1)
    assert set(ours(bare)) == required
    assert foreign(bare) == foreign(data)
    assert stamp(open_envelope("", "", False, 0, data), journey, login=b"", limit=len(bare) - 1, digest="") is None


def test_headers_that_are_not_valid_stay_as_evidence_each_once() -> None:
    evidence = [
        (b"dlqbatch-retries", messages.text("three")),
        (b"dlqbatch-user-id", messages.long(1)),
        (b"dlqbatch-expiration", messages.long(2)),
        (b"dlqbatch-attempt", messages.long(-1)),
    ]
    encoded = stamped(messages.with_headers(*evidence), Journey(id="1", retries=None, trips=1))
    entries = messages.headers_of(encoded)
    assert sorted(entries) == sorted(
        [
            *evidence,
            *((b"dlqbatch-id", messages.text("1")), (b"dlqbatch-digest", messages.text(""))),
            (b"dlqbatch-trips", messages.long(1)),
        ]
    )


def test_headers_that_cannot_be_read_are_kept_whole() -> None:
    data = b"\x20\x00\x00\x00\x00\x03\x01aU"
    encoded = stamped(data, Journey(id="1", retries=None, trips=1))
    assert dict(messages.headers_of(encoded))[b"dlqbatch-unreadable"] == messages.Value(b"x", data)


def test_a_moved_user_id_travels_on_when_the_message_is_stamped_again() -> None:
    once = stamped(messages.with_headers(user_id=b"shop", expiration=b"60000"))
    assert ours(once)[b"dlqbatch-user-id"] == messages.text("shop")
    twice = stamped(once, JOURNEY._replace(expiration="60000"))
    assert ours(twice)[b"dlqbatch-user-id"] == messages.text("shop")
    assert ours(twice)[b"dlqbatch-expiration"] == messages.text("60000")
