"""The page on reliability says what the longer runs found, and no promise of it was broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from matrix import page
from matrix.scenario import RELEASES, Count, faults

RESULTS: dict[str, Any] = json.loads(page.RESULTS.read_text())


def test_the_table_is_of_the_last_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8").partition(page.BEGIN)[2].partition(page.END)[0]
    assert text.strip().splitlines() == "\n".join(page.table()).strip().splitlines()


def test_every_result_is_of_a_fault_that_there_is() -> None:
    known = {f"{one.name} {kind} {release}" for one in faults().values() for kind in one.kinds for release in RELEASES}
    assert RESULTS.keys() <= known


@pytest.mark.parametrize("name", RESULTS)
def test_nothing_was_lost_or_changed_or_doubled_without_need(name: str) -> None:
    one = RESULTS[name]
    assert (one["lost"], one["changed"], one["failed"]) == (0, 0, 0)
    assert one["hits"] > 0
    assert one["allowed"] is None or one["doubled"] <= one["allowed"]


@pytest.mark.parametrize(
    ("count", "is_good"),
    [
        (Count(10, allowed=0), True),
        (Count(10, doubled=3, allowed=3), True),
        (Count(10, doubled=4, allowed=3), False),
        (Count(10, doubled=4, allowed=None), True),
        (Count(10, lost=1, allowed=None), False),
        (Count(10, changed=1, allowed=9), False),
    ],
)
def test_a_round_is_good_if_nothing_is_lost_or_changed_and_no_more_doubled_than_may_be(
    count: Count, is_good: bool
) -> None:
    assert count.is_good == is_good
