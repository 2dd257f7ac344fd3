from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.broker.session import share

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


@given(BOUNDS, DEPTHS, st.integers(0, 255))
def test_whose_turn_it_is_changes_no_share_by_more_than_one(bound: int, depths: dict[str, int], turn: int) -> None:
    shares, in_order = share(bound, depths, turn), share(bound, depths)
    assert list(shares) == list(depths)
    assert sum(shares.values()) == sum(in_order.values())
    assert all(abs(shares[queue] - in_order[queue]) <= 1 for queue in depths)


def test_a_bound_below_the_number_of_queues_comes_to_each_of_them_in_turn() -> None:
    depths = {"retry-queue": 9, "retry-queue-1": 0, "retry-queue-2": 9, "retry-queue-3": 9}
    chosen = [[queue for queue, limit in share(1, depths, turn).items() if limit] for turn in range(4)]
    assert chosen == [["retry-queue"], ["retry-queue-2"], ["retry-queue-3"], ["retry-queue"]]
