"""Which messages have failed too often, what they record of it, and where they go."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import rawamqp
from hypothesis import given
from hypothesis import strategies as some
from rawamqp import array, number, table, text, timestamp

from dlqbatch.amqp.delivery import Envelope, open_envelope
from dlqbatch.amqp.origin import Trust
from dlqbatch.amqp.patterns import ANY
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.check.rules import BY_DEATHS, BY_RETRIES, Count, TargetNames, failures, journey_of
from dlqbatch.errors import SettingsError

if TYPE_CHECKING:
    from dlqbatch.amqp.headers import Headers


def opened(*entries: tuple[bytes, bytes]) -> tuple[Envelope, Headers]:
    envelope = open_envelope("dlx", "key", False, 0, rawamqp.properties(entries))
    assert envelope.headers is not None
    return envelope, envelope.headers


def deaths(*counts: int | bytes, queue: str = "work") -> tuple[bytes, bytes]:
    return b"x-death", array(
        *(
            table(
                [
                    (b"count", number(count) if isinstance(count, int) else count),
                    (b"reason", text("expired")),
                    (b"queue", text(queue)),
                    (b"time", timestamp(1_700_000_000)),
                    (b"exchange", text("orders")),
                    (b"routing-keys", array(text("order.placed"))),
                    (b"original-expiration", text("60000")),
                ]
            )
            for count in counts
        )
    )


@given(some.lists(some.integers(0, 2**62), max_size=5), some.integers(0, 2**62))
def test_the_highest_count_decides_and_our_own_only_if_it_is_larger(counts: list[int], retries: int) -> None:
    _, headers = opened(deaths(*counts), (b"dlqbatch-retries", number(retries)))
    highest = max(counts, default=0)
    assert failures(headers) == (Count(retries, BY_RETRIES) if retries > highest else Count(highest, BY_DEATHS))


@pytest.mark.parametrize("odd", [text("9"), b"t\1", b"V", number(-3)])
def test_a_count_that_is_none_counts_nothing(odd: bytes) -> None:
    assert failures(opened(deaths(odd))[1]).failures <= 0
    assert failures(opened((b"x-death", odd))[1]) == Count(0, BY_DEATHS)
    assert failures(opened((b"dlqbatch-retries", odd))[1]) == Count(0, BY_DEATHS)


def test_one_that_never_died_has_not_failed() -> None:
    assert failures(opened()[1]) == Count(0, BY_DEATHS)


def test_what_moves_keeps_its_origin_when_the_brokers_headers_go() -> None:
    journey = journey_of(*opened(deaths(9)), Trust(), lambda: "new", lambda: "")
    assert journey.id == "new"
    assert journey.origin == Origin("work", "orders", "order.placed")
    assert (journey.first_failed_at, journey.expiration) == (1_700_000_000, "60000")


def recorded(queue: str, exchange: bytes = b"first", key: bytes = b"first.key") -> list[tuple[bytes, bytes]]:
    return [
        (b"dlqbatch-id", text("old")),
        (b"dlqbatch-retries", number(2)),
        (b"dlqbatch-trips", number(2)),
        (b"dlqbatch-attempt", number(1)),
        (b"dlqbatch-origin-queue", text(queue)),
        (b"dlqbatch-origin-exchange", text(exchange)),
        (b"dlqbatch-origin-key", text(key)),
    ]


def test_a_failure_at_the_recorded_place_is_the_same_message() -> None:
    journey = journey_of(*opened(*recorded("work", b"orders", b"order.placed"), deaths(9)), Trust(), lambda: "new", str)
    assert (journey.id, journey.retries, journey.attempt) == ("old", 2, 1)
    assert journey.origin == Origin("work", "orders", "order.placed")


@pytest.mark.parametrize("queue", ["elsewhere", "work"])
def test_a_failure_at_another_place_or_by_another_way_is_another_message_with_the_first_as_its_parent(
    queue: str,
) -> None:
    journey = journey_of(*opened(*recorded(queue), deaths(9)), Trust(), lambda: "new", lambda: "")
    assert (journey.id, journey.parent, journey.retries, journey.attempt) == ("new", "old", 0, None)
    assert journey.origin == Origin("work", "orders", "order.placed")


def test_a_message_whose_own_headers_are_not_valid_keeps_its_id_and_them() -> None:
    wrong = [(b"dlqbatch-id", text("old")), (b"dlqbatch-trips", text("many")), deaths(9)]
    journey = journey_of(*opened(*wrong), Trust(), lambda: "new", lambda: "")
    assert (journey.id, journey.retries) == ("old", None)
    assert journey.origin == Origin("work", "orders", "order.placed")


@pytest.mark.parametrize(
    ("sources", "target", "queue", "expected"),
    [
        (("dlq.*",), "dead.*", "dlq.orders", "dead.orders"),
        (("dlq.*",), "dead.*", "dlq.", "dead."),
        (("*.dlq",), "*.dead", "a.b.dlq", "a.b.dead"),
        (("*.dlq.*",), "dead.*.*", "eu.dlq.orders", "dead.eu.orders"),
        (("dlq.*", "x"), "grave", "x", "grave"),
        (("dlq.b*", "dlq.*"), "dead.*", "dlq.books", "dead.ooks"),
        (("d[l]q.*",), "dead.*", "d[l]q.a", "dead.a"),
        (("app_*_v?_dlq",), "dead_*_v?", "app_shop_v2_dlq", "dead_shop_v2"),
    ],
)
def test_a_template_takes_what_the_wildcard_stood_for(
    sources: tuple[str, ...], target: str, queue: str, expected: str
) -> None:
    targets = TargetNames(sources, target)
    assert list(targets.problems()) == []
    assert targets.of([queue]) == {queue: expected}


@given(some.text(max_size=20), some.text(max_size=20), some.text(max_size=20))
def test_a_queue_is_moved_to_a_target_or_refused_and_never_to_a_source(before: str, name: str, after: str) -> None:
    source, target = (ANY.sub("", part) + "*" for part in (f"dlq.{before}", after))
    queue = source.replace("*", name)
    try:
        found = TargetNames((source,), target).of([queue])[queue]
    except SettingsError:
        return
    assert not re.fullmatch(re.escape(source[:-1]) + ".*", found, re.DOTALL)
    assert found.endswith(name)


@pytest.mark.parametrize(
    ("sources", "target", "why"),
    [
        (("dlq.a",), "dlq.a", "is a source itself"),
        (("a", "dlq.*"), "dlq.dead", "is a source itself"),
        (("*",), "grave", "is a source itself"),
        (("dlq.a",), "dead.*", "has 0"),
        (("*.dlq.*",), "dead.*", "has 2"),
    ],
)
def test_what_can_never_work_is_said_before_anything_is_asked(sources: tuple[str, ...], target: str, why: str) -> None:
    [problem] = TargetNames(sources, target).problems()
    assert why in problem


@pytest.mark.parametrize("name", ["dead." + "x" * 300, "amq.dead"])
def test_a_target_that_no_queue_can_be_is_refused(name: str) -> None:
    prefix, _, rest = name.partition(".")
    with pytest.raises(SettingsError, match="cannot be a queue"):
        TargetNames(("dlq.*",), f"{prefix}.*").of([f"dlq.{rest}"])


def test_a_question_mark_of_a_target_is_one_of_the_source_as_well() -> None:
    assert list(TargetNames(("dlq_?",), "dlq_*").problems()) == []
    with pytest.raises(SettingsError, match="is a source itself"):
        TargetNames(("dlq_?",), "dlq_?").of(["dlq_1"])
