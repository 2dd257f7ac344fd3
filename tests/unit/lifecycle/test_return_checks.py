"""Whether a message can be where its framework lets what it tries again wait: beside an oracle that knows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.broker.facts import QueueCounters, QueueReading
from dlqbatch.lifecycle.proof import Sighting
from dlqbatch.lifecycle.return_checks import left_both

BEGAN = datetime(2026, 2, 11, 12, tzinfo=UTC)
LAG = timedelta(seconds=12)
LONGEST = 400


def at(second: float) -> datetime:
    return BEGAN + timedelta(seconds=second)


def sighting(second: float, depth: int, published: int | None = 0, counted_from: float = 0) -> Sighting:
    counters = None if published is None else QueueCounters(published, 0, 0)
    reading = QueueReading("q", at(second), True, total=depth, counters=counters, by_management=True)
    return Sighting(reading, at(counted_from))


def test_a_delay_that_took_nothing_since_before_the_send_cannot_hold_it_whatever_it_holds() -> None:
    delay = [sighting(second, 7, 3) for second in (0, 40, 60)]
    assert left_both([], delay, at(1), at(30), LAG) == at(30)
    assert left_both([], delay[:2], at(1), at(30), LAG) is None
    assert left_both([], [sighting(0, 7, 2), *delay[1:]], at(1), at(30), LAG) is None
    assert left_both([], [sighting(0, 7, 3, -9), *delay[1:]], at(1), at(30), LAG) is None
    assert left_both([], [sighting(second, 0, None) for second in (0, 40, 60)], at(1), at(30), LAG) is None


def test_else_both_are_seen_empty_while_nothing_is_published() -> None:
    delay = [sighting(second, 0, 5) for second in range(20, 81, 12)]
    assert left_both([sighting(50, 0)], delay, at(1), at(10), LAG) == at(50)
    assert left_both([sighting(43, 0)], delay, at(1), at(10), LAG) is None
    assert left_both([sighting(50, 1)], delay, at(1), at(10), LAG) is None
    assert left_both([sighting(75, 0)], delay, at(1), at(10), LAG) is None


moves = st.lists(st.integers(1, 60), min_size=1, max_size=8)
"""Seconds in which the message is in the queue, in the delay, in the queue, and so on."""


@given(moves, st.lists(st.tuples(st.integers(-30, LONGEST), *[st.floats(0, 12)] * 3), max_size=60), st.booleans())
def test_whatever_the_figures_lag_behind_it_is_never_claimed_too_early(
    stays: list[int], looks: list[tuple[int, float, float, float]], others: bool
) -> None:
    """One message that goes to and fro, every figure of every reading from an instant of its own."""
    edges = [sum(stays[:number]) for number in range(len(stays) + 1)]
    entered = edges[1:-1:2]  # it is published into the delay at the end of its first stay in the queue, its third, …

    def place(second: float) -> str:
        index = next((number for number, edge in enumerate(edges[1:]) if second < edge), None)
        return "nowhere" if second < 0 or index is None else ("queue", "delay")[index % 2]

    queue, delay = [], []
    count = -1
    for second, late, later, latest in sorted(looks):
        count = max(count, sum(1 for edge in entered if edge <= second - latest))
        queue.append(sighting(second, int(place(second - late) == "queue")))
        delay.append(sighting(second, int(others or place(second - later) == "delay"), count))
    # It counts as acknowledged as soon as it has left the queue for the first time.
    found = left_both(queue, delay, at(0), at(edges[1]), LAG)
    assert found is None or found >= at(edges[-1])
