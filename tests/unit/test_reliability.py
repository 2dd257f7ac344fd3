"""The page on reliability says what the longer runs found, and no promise of it was broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from endurance import page as endurance
from matrix import page
from matrix.scenario import RELEASES, Count, faults
from mutations import run as mutations

RESULTS: dict[str, Any] = json.loads(page.RESULTS.read_text())


@pytest.mark.parametrize(
    ("lines", "begin", "end"),
    [
        (page.table(), page.BEGIN, page.END),
        (endurance.summary(json.loads(endurance.RESULT.read_text())), endurance.BEGIN, endurance.END),
        (mutations.summary(), mutations.BEGINS, mutations.ENDS),
    ],
    ids=["faults", "endurance", "mutations"],
)
def test_the_page_is_of_the_last_results(lines: list[str], begin: str, end: str) -> None:
    text = page.PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert text.strip().splitlines() == "\n".join(lines).strip().splitlines()


def test_the_summary_counts_every_result_once() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.table() if line.startswith("| ")]
    head, *parts, whole = rows
    for place in range(2, 8):
        assert sum(int(row[place].replace(",", "")) for row in parts) == int(whole[place].replace(",", "")), head[place]
    keys = ("runs", "messages", "lost", "changed", "doubled")
    sums = [len(RESULTS), *(sum(one[key] for one in RESULTS.values()) for key in keys)]
    assert [f"{figure:,}" for figure in sums] == whole[2:8]


def test_a_last_long_run_lost_nothing_and_found_no_problem() -> None:
    result = json.loads(endurance.RESULT.read_text())
    messages = result["messages"]
    assert (messages["lost"], messages["changed"], result["problems"]) == (0, 0, [])
    assert messages["doubled"] <= messages["doubles that the faults explain"]


def test_every_deliberate_fault_was_noticed() -> None:
    kept = json.loads(mutations.RESULTS.read_text())
    assert [each["name"] for each in kept["mutations"] if not each["caught"]] == []
    assert kept["caught"] == kept["faults"] == len(kept["mutations"])


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
