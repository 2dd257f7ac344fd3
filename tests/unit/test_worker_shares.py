"""Which tests each worker of pytest-xdist begins with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worker_shares import spread


def items(count: int, slow: set[int], per_file: int) -> list[Any]:
    def marker(number: int) -> Any:
        return lambda name: name if name == "slow" and number in slow else None

    return [
        SimpleNamespace(number=number, path=Path(f"test_{number // per_file}.py"), get_closest_marker=marker(number))
        for number in range(count)
    ]


def test_slow_tests_come_first_in_two_shares_of_three_and_the_others_keep_their_order() -> None:
    slow = {3, 17, 18, 29}
    found = [item.number for item in spread(items(30, slow, per_file=5), 3)]
    # The slow ones of one file stay together: what they share is started once.
    assert found[:3] == [3, 29, 0]
    assert found[10:13] == [17, 18, 9]
    assert not slow & set(found[20:])
    assert [number for number in found if number not in slow] == [each for each in range(30) if each not in slow]


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 50])
@pytest.mark.parametrize("slow", [set(), {0}, {*range(8)}, {*range(20)}], ids=["none", "one", "some", "all"])
def test_no_test_is_lost_or_doubled(slow: set[int], workers: int) -> None:
    assert sorted(item.number for item in spread(items(20, slow, per_file=3), workers)) == [*range(20)]


def test_alone_the_order_is_as_it_was() -> None:
    assert [item.number for item in spread(items(20, {11, 12}, per_file=3), 1)] == [*range(20)]
