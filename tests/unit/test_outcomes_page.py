"""The table of docs/outcomes.md is of the last results, every situation was played, and nothing false was claimed."""

from __future__ import annotations

import json
from typing import Any

from outcomes import page
from outcomes.situations import CLASSIC, NEW, OLD, QUORUM, RESOLVED, SITUATIONS

RESULTS: dict[str, Any] = json.loads(page.RESULTS.read_text())


def test_the_table_is_of_the_last_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8").partition(page.BEGIN)[2].partition(page.END)[0]
    assert text.strip().splitlines() == "\n".join(page.table()).strip().splitlines()


def test_every_situation_was_played_on_every_broker_that_has_it() -> None:
    wanted = {
        f"{one.name} {kind} {release}"
        for one in SITUATIONS
        for kind in (CLASSIC, QUORUM)
        for release in (OLD, NEW)
        if one.runs_on(kind, release)
    }
    assert wanted == RESULTS.keys()


def test_nothing_false_was_claimed() -> None:
    assert {name: found["problems"] for name, found in RESULTS.items() if found["problems"]} == {}


def test_where_the_broker_cannot_tell_the_page_says_so() -> None:
    remarks = {one.name: one.remark for one in SITUATIONS}
    untrue = {name.split(maxsplit=1)[0] for name, found in RESULTS.items() if found["untrue"]}
    assert all(remarks[name] for name in untrue)


def test_a_good_retry_is_resolved_within_30_seconds_of_its_acknowledgement() -> None:
    good = {one.name for one in SITUATIONS if one.expected == (RESOLVED,)}
    took = {
        name: found["after_acknowledgement"] for name, found in RESULTS.items() if name.split(maxsplit=1)[0] in good
    }
    assert len(took) >= 4 * 10
    assert {name: seconds for name, seconds in took.items() if not 0 <= seconds <= 30} == {}


def test_a_retry_is_proven_on_a_queue_that_never_empties_too() -> None:
    busy = ("backlog-1 ", "backlog-10 ", "backlog-parallel ")
    assert {found["last"] for name, found in RESULTS.items() if name.startswith(busy)} == {RESOLVED}
