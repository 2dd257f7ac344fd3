"""What the looks at a queue say against going on with a replay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.replay.guard import MOST_REDELIVERIES, STANDS_STILL, Look, harm

NOW = datetime(2030, 6, 1, tzinfo=UTC)


def look(second: float, ready: int = 0, consumers: int = 2, channels: str | None = None, **counters: int) -> Look:
    shown = None if channels is None else frozenset(channels)
    return Look("orders", NOW + timedelta(seconds=second), ready, consumers, shown, **counters)


def why(*looks: Look) -> str:
    found = harm(looks)
    return "" if found is None else found.why


def test_consumers_that_go_away_are_harm_and_those_that_come_are_none() -> None:
    assert why(look(0), look(1, consumers=1)) == "1 of 2 consumer(s) of 'orders' went away"
    assert why(look(0, consumers=0), look(1, consumers=3)) == ""
    assert why() == why(look(0)) == ""


def test_a_consumer_that_another_one_replaced_at_once_went_away_too() -> None:
    assert "came" not in why(look(0, channels="ab"), look(1), look(2, channels="abc"))
    assert "others may have come" in why(look(0, channels="ab"), look(1), look(2, channels="ac"))


def test_redeliveries_without_acknowledgements_are_harm() -> None:
    before = look(0, redelivered=7, acknowledged=100)
    again = look(1, redelivered=7 + MOST_REDELIVERIES + 1, acknowledged=100)
    assert "delivered again 6 times, and 0 were acknowledged" in why(before, again)
    assert why(before, look(1, redelivered=7 + MOST_REDELIVERIES, acknowledged=100)) == ""
    assert why(before, look(1, redelivered=27, acknowledged=120)) == ""
    assert why(look(0), again) == "", "one count alone says nothing"


def test_consumers_that_take_nothing_for_a_minute_are_harm() -> None:
    still = [look(second, ready=9) for second in range(0, 61, 10)]
    assert "have taken none for 60 s" in why(*still)
    assert why(*still[:-1]) == ""
    assert why(*still[:3], look(35, ready=8), *still[4:]) == "", "one was taken"
    polled = [look(second, 9, acknowledged=second // 30) for second in range(0, 61, 10)]
    assert why(*polled) == "", "as many come as are taken"
    assert why(*[look(second, ready=9, consumers=0) for second in range(0, 61, 10)]) == "", "there is nobody"
    assert why(*[look(second) for second in range(0, 61, 10)]) == "", "there is nothing"


LOOKS = st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 5), st.integers(0, 3)), max_size=60)


@given(LOOKS)
def test_a_queue_that_works_is_never_harmed(found: list[tuple[float, int, int]]) -> None:
    """Consumers come and stay; of every redelivery something is acknowledged; what waits is taken."""
    second, consumers, count = 0.0, 1, 0
    looks: list[Look] = []
    for seconds, ready, more in found:
        second, consumers, count = second + seconds, consumers + more, count + 1
        looks.append(look(second, ready, consumers, "a", redelivered=count, acknowledged=count))
    assert harm(looks) is None


@given(LOOKS, st.integers(0, 59))
def test_the_first_consumer_that_goes_is_found_whatever_else_happens(
    found: list[tuple[float, int, int]], place: int
) -> None:
    second = 0.0
    looks: list[Look] = []
    for number, (seconds, ready, _) in enumerate(found):
        second += seconds
        looks.append(look(second, ready, 3 if number <= place else 2))
    assert (harm(looks) is not None) >= (len(looks) > place + 1)
    assert timedelta(seconds=5) < STANDS_STILL, "a slow consumer is no dead one"
