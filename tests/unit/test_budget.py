from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.runs.budget import share

DEPTHS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50), min_size=1)
BOUNDS = st.integers(1, 300)


@given(BOUNDS, DEPTHS)
def test_no_more_than_the_bound_and_no_more_than_there_is(bound: int, depths: dict[str, int]) -> None:
    shares = share(bound, depths)
    assert shares.keys() == depths.keys()
    assert all(0 <= shares[queue] <= depth for queue, depth in depths.items())
    assert sum(shares.values()) == min(bound, sum(depths.values()))


@given(BOUNDS, DEPTHS)
def test_a_queue_gets_less_than_another_only_if_it_holds_no_more(bound: int, depths: dict[str, int]) -> None:
    shares = share(bound, depths)
    for queue, depth in depths.items():
        if shares[queue] < depth:
            # One message more or less is what does not divide evenly.
            assert shares[queue] >= max(shares.values()) - 1


def test_a_deep_queue_leaves_room_for_the_others() -> None:
    assert share(10, {"deep": 1000, "small": 2, "empty": 0}) == {"deep": 8, "small": 2, "empty": 0}
