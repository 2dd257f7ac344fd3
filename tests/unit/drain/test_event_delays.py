"""Which delay queue a retry takes, against a search through all of them."""

from __future__ import annotations

import messages
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.headers import NONE, Headers, scan
from dlqbatch.drain.event_delays import DelayQueues, EventDelays
from dlqbatch.topology.kinds import Ladder

SECOND, MINUTE, HOUR = 1000, 60_000, 3_600_000
NOW = 1_800_000_000
WRITTEN = {
    "orders.created": (10 * SECOND, MINUTE),
    "orders.#": (HOUR,),
    "*.paid": (MINUTE, 20 * SECOND),
}
DELAYS = st.integers(1, 10**6).map(lambda hundredths: hundredths * 100)


def asking(seconds: object) -> Headers:
    table = messages.encode_table([(b"Retry-After", messages.text(str(seconds)))])
    return scan(table, 0, len(table))


def queues_of(ladder: Ladder, *, follows: bool = True, asked: tuple[int, ...] = ()) -> DelayQueues:
    events = EventDelays(WRITTEN)
    return DelayQueues(tuple(ladder.delays.values()), ladder.tiers, events, follows=follows, asked=asked)


LADDER = Ladder(more_delays=tuple(delay for delays in WRITTEN.values() for delay in delays))


def waits(event: str, retries: int, headers: Headers = NONE, queues: DelayQueues | None = None) -> int:
    """The milliseconds of the queue that it takes."""
    number = (queues or queues_of(LADDER)).number(event, retries, headers, NOW)
    return [*LADDER.delays.values()][number - 1]


def test_each_retry_takes_the_delay_of_its_event_and_the_last_one_repeats() -> None:
    assert [waits("orders.created", retries) for retries in range(4)] == [10 * SECOND, MINUTE, MINUTE, MINUTE]
    assert [waits("orders.cancelled", retries) for retries in range(2)] == [HOUR, HOUR]
    # Delays may also shrink, and another tier has the same.
    assert [waits("bills.paid", retries) for retries in range(2)] == [MINUTE, 20 * SECOND]
    assert [waits("mail", retries) for retries in range(5)] == [10_000, 15_000, 20_000, 20_000, 20_000]


def test_the_name_goes_before_a_pattern_and_the_more_specific_pattern_before_another() -> None:
    events = EventDelays({**WRITTEN, "orders.*": (SECOND,)})
    found = {
        event: events.find(event) for event in ("orders.created", "orders.eu", "orders.eu.x", "orders.paid", "mail")
    }
    assert found == {
        "orders.created": "orders.created",
        "orders.eu": "orders.*",
        "orders.eu.x": "orders.#",
        "orders.paid": "orders.*",
        "mail": None,
    }


def test_what_a_failure_asks_for_is_rounded_up_and_never_shortens_its_own_delay() -> None:
    asked = {0: 10, 1: 10, 10: 10, 11: 15, 16: 20, 21: 60, 60: 60, 61: 3600, 3600: 3600, 3601: 3600, "9" * 60: 3600}
    assert {seconds: waits("mail", 0, asking(seconds)) // SECOND for seconds in asked} == asked
    assert waits("orders.cancelled", 0, asking(30)) == HOUR
    for hostile in ("-1", "NaN", "soon", "Thu, 01 Jan 1970 00:00:00 GMT", ""):
        assert waits("mail", 0, asking(hostile)) == 10_000


def test_the_longest_that_is_allowed_is_the_most_that_it_gets() -> None:
    limited = queues_of(LADDER, asked=(20 * SECOND, MINUTE))
    assert waits("mail", 0, asking(50), limited) == MINUTE
    assert waits("mail", 0, asking(3000), limited) == MINUTE
    # Its own delay is not what it asked for.
    assert waits("orders.cancelled", 0, asking(3000), limited) == HOUR
    assert waits("mail", 0, asking(3000), queues_of(LADDER, follows=False)) == 10_000


@given(
    tiers=st.lists(DELAYS, min_size=1, max_size=5).map(tuple),
    more=st.lists(DELAYS, max_size=8).map(tuple),
    own=st.lists(st.integers(0, 100), max_size=4),
    retries=st.integers(0, 10),
    seconds=st.integers(-5, 200_000),
)
def test_it_waits_in_the_shortest_that_is_long_enough(
    tiers: tuple[int, ...], more: tuple[int, ...], own: list[int], retries: int, seconds: int
) -> None:
    ladder = Ladder(tier_ttls=tiers, more_delays=more)
    every = list(ladder.delays.values())
    mine = [every[each % len(every)] for each in own]
    events = EventDelays({"it": mine} if mine else {})
    number = DelayQueues(every, ladder.tiers, events, follows=True).number("it", retries, asking(seconds), NOW)
    its = mine or tiers
    planned = its[min(retries, len(its) - 1)]
    wanted = max(planned, min(seconds * 1000, max(every)))
    assert every[number - 1] == min(delay for delay in every if delay >= wanted)
