from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.errors import DlqbatchError
from dlqbatch.jobs import DECISIONS, Report, count, cut_off, depths_of, ending

RESULTS = st.dictionaries(
    st.tuples(st.sampled_from(DECISIONS), st.none() | st.text(min_size=1, max_size=5)), st.integers(0, 1000), max_size=8
)


@dataclass
class Taken:
    """What a transfer tells of itself."""

    taken: dict[str, int]
    results: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    stopped_by: str | None = None
    lost: str | None = None
    failure: DlqbatchError | None = None
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def got(self) -> int:
        return sum(self.taken.values())


@given(RESULTS)
def test_got_is_the_sum_of_the_decisions_and_every_reason_is_kept(results: dict[tuple[str, str | None], int]) -> None:
    got = sum(results.values())
    counts, reasons = count(results, got)
    assert list(counts) == ["got", *DECISIONS]
    assert counts["got"] == sum(counts[decision] for decision in DECISIONS) == got
    assert sum(reasons.values()) == sum(number for (_, reason), number in results.items() if reason is not None)


@given(RESULTS, st.integers(-3, 3).filter(bool))
def test_a_message_counted_twice_or_never_is_an_error(
    results: dict[tuple[str, str | None], int], difference: int
) -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        count(results, sum(results.values()) + difference)


def test_a_decision_that_no_report_knows_is_an_error() -> None:
    with pytest.raises(KeyError):
        count(Counter({("lost", None): 1}), 1)


def test_a_report_is_json_in_the_order_people_read_it() -> None:
    counts, reasons = count({("delayed", None): 2, ("dead_lettered", "malformed"): 1}, 3)
    report = Report("drain", "ok", "empty", counts, reasons, elapsed_seconds=1.5)
    assert json.loads(json.dumps(report.as_dict())) == {
        "job": "drain",
        "outcome": "ok",
        "stopped_by": "empty",
        "hit_bound": False,
        "counts": {"got": 3, "delayed": 2, "returned": 0, "dead_lettered": 1, "recorded": 0, "moved": 0, "left": 0},
        "reasons": {"malformed": 1},
        "elapsed_seconds": 1.5,
        "per_second": 2.0,
    }
    assert list(report.as_dict())[:3] == ["job", "outcome", "stopped_by"]


def test_a_run_that_took_no_time_has_a_rate_all_the_same() -> None:
    assert Report("drain", "ok", "empty", count({}, 0)[0]).per_second == 0.0


@pytest.mark.parametrize(
    ("tally", "stopped_by", "hit_bound"),
    [
        (Taken({}), "empty", False),
        (Taken({"a": 5}), "messages", True),
        (Taken({"a": 5}, stopped_by="bytes"), "bytes", True),
        (Taken({"a": 5}, stopped_by="time"), "time", True),
        (Taken({"a": 5}, stopped_by="signal"), "signal", False),
        # It had reached its bound before the connection went away.
        (Taken({"a": 5}, stopped_by="bytes", lost="reset"), "bytes", True),
        (Taken({"a": 5}, lost="reset"), "time", False),
        (Taken({"a": 5}, failure=DlqbatchError("the database is away")), "messages", False),
    ],
)
def test_a_run_hit_its_bound_only_if_it_reached_one(tally: Taken, stopped_by: str, *, hit_bound: bool) -> None:
    counts, _ = count({("recorded", None): tally.got}, tally.got)
    assert ending({"a": 9}, {"a": 5} if tally.taken else {}, tally, 0, {})[0] == stopped_by or not tally.taken
    report = Report("ingest", "ok", stopped_by, counts, was_cut_off=cut_off(tally))
    assert report.as_dict()["hit_bound"] is hit_bound


def test_a_report_has_the_depth_of_each_queue_as_found_and_as_left() -> None:
    queues = depths_of({"a": 9, "b": 0, "c": 0, "d": 5}, {"a": 4, "b": 0, "c": 1}, unknown={"c"})
    told = Report("drain", "ok", "messages", count({}, 0)[0], queues=queues).as_dict()
    assert json.loads(json.dumps(told["queues"])) == {
        "a": {"found": 9, "left": 4},
        "b": {"found": 0, "left": 0},
        "d": {"found": 5, "left": None},
    }


def test_what_only_some_runs_have_is_only_in_their_reports() -> None:
    counts, _ = count({}, 0)
    assert {"dry_run", "warnings", "preview", "queues"}.isdisjoint(Report("drain", "ok", "empty", counts).as_dict())
    told = Report("drain", "ok", "empty", counts, dry_run=True, warnings=("w",), preview=({"queue": "q"},)).as_dict()
    assert (told["dry_run"], told["warnings"], told["preview"]) == (True, ["w"], [{"queue": "q"}])


@pytest.mark.parametrize(
    ("depths", "takes", "tally", "spare", "stopped_by", "emptied"),
    [
        # all that was there
        ({"a": 3, "b": 0}, {"a": 3}, Taken({"a": 3}), 7, "empty", ("a", "b")),
        # another run was faster, so that the queue ended before the bound
        ({"a": 6000}, {"a": 5000}, Taken({"a": 3000}), 0, "empty", ("a",)),
        # the bound
        ({"a": 6000}, {"a": 5000}, Taken({"a": 5000}), 0, "messages", ()),
        # one of two queues was cut by its share
        ({"a": 9, "b": 1}, {"a": 4, "b": 1}, Taken({"a": 4, "b": 1}), 0, "messages", ("b",)),
        # what had been put back meanwhile was taken as well, up to the bound
        ({"a": 3}, {"a": 3}, Taken({"a": 10}), 7, "messages", ()),
        # the clock
        ({"a": 3}, {"a": 3}, Taken({"a": 2}, stopped_by="time"), 7, "time", ()),
        # the connection went away: no bound was reached, and nothing was seen to its end
        ({"a": 3}, {"a": 3}, Taken({"a": 2}, lost="reset"), 7, "time", ()),
        ({"a": 3}, {"a": 3}, Taken({"a": 3}, stopped_by="bytes", lost="reset"), 7, "bytes", ()),
        # something had to stay: nobody knows in which queue
        ({"a": 3, "b": 0}, {"a": 3}, Taken({"a": 3}, Counter({("left", "unroutable"): 1})), 7, "empty", ("b",)),
    ],
)
def test_a_run_says_why_it_stopped_and_which_queues_it_saw_empty(
    depths: dict[str, int], takes: dict[str, int], tally: Taken, spare: int, stopped_by: str, emptied: tuple[str, ...]
) -> None:
    assert ending(depths, takes, tally, spare, {}) == (stopped_by, emptied)


def test_a_queue_that_was_not_read_was_not_seen_empty() -> None:
    assert ending({"a": 0, "b": 2}, {"b": 2}, Taken({"b": 2}), 1, {"a": "no leader"}) == ("failure", ("b",))
