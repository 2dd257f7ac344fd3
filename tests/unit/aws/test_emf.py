"""The line that CloudWatch reads, held against the specification of the embedded metric format."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from empty_metrics import NOW, QUIET
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch import __version__
from dlqbatch.aws.metrics import figures, line
from dlqbatch.jobs import Depth, Report, count

NAMESPACE = "dlqbatch/prod"
COUNTS, REASONS = count({("delayed", None): 3, ("dead_lettered", "not-configured"): 1}, 4)
QUEUES = {"a": Depth(9, 5), "b": Depth(0, None)}
REPORT = Report("drain", "partial", "messages", COUNTS, REASONS, elapsed_seconds=1.25, queues=QUEUES).as_dict()
UNITS = {"Seconds", "Count", "None"}


def read(text: str) -> dict[str, Any]:
    """The metrics of a line by name and unit, once it is proved to be one of the embedded metric format."""
    assert "\n" not in text
    assert len(text.encode()) < 256 * 1024
    root: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert isinstance(root["_aws"]["Timestamp"], int)
    assert abs(root["_aws"]["Timestamp"] / 1000 - time.time()) < 60
    (directive,) = root["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == NAMESPACE
    (dimensions,) = directive["Dimensions"]
    assert sorted(dimensions) == ["job", "service"]
    assert all(isinstance(root[name], str) and 0 < len(root[name]) <= 1024 for name in dimensions)
    assert 0 < len(directive["Metrics"]) <= 100
    found = {}
    for metric in directive["Metrics"]:
        assert 0 < len(metric["Name"]) <= 1024
        assert metric["Unit"] in UNITS
        value = root[metric["Name"]]
        values = value if isinstance(value, list) else [value]
        assert len(values) == 1
        assert all(isinstance(number, float) and math.isfinite(number) for number in values)
        found[metric["Name"], metric["Unit"]] = values[0]
    assert len(found) == len(directive["Metrics"])
    assert root["version"] == __version__, "a property: it costs nothing, and can be searched"
    assert root.keys() == {"_aws", "version", *dimensions, *(name for name, _ in found)}
    return {"service": root["service"], "job": root["job"], **{name: number for (name, _), number in found.items()}}


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no number of JSON")


def test_a_run_prints_its_counts_its_time_and_its_outcome() -> None:
    assert read(line(NAMESPACE, "drain", figures(REPORT))) == {
        "service": "dlqbatch",
        "job": "drain",
        "got": 4,
        "delayed": 3,
        "returned": 0,
        "dead_lettered": 1,
        "recorded": 0,
        "moved": 0,
        "left": 0,
        "depth_found": 9,
        "depth_left": 5,
        "hit_bound": 1,
        "elapsed_seconds": 1.25,
        "failed": 0,
        "partial": 1,
    }


def test_a_monitor_prints_how_deep_it_has_seen_the_queues_to_be() -> None:
    report = {"outcome": "ok", "hit_bound": False, "queues": {"a": {"found": 4, "left": 4}}, "metrics": QUIET.as_dict()}
    told = read(line(NAMESPACE, "monitor", figures(report)))
    assert told["depth_left"] == 4
    assert {"depth_found", "hit_bound"}.isdisjoint(told)


def test_a_depth_that_nobody_knows_is_not_there() -> None:
    told = read(line(NAMESPACE, "drain", figures({**REPORT, "queues": {"a": {"found": 4, "left": None}}})))
    assert told["depth_found"] == 4
    assert "depth_left" not in told


def test_a_run_that_ended_in_an_error_prints_that_it_failed() -> None:
    told = read(line(NAMESPACE, "ingest", figures({"outcome": "failed"})))
    assert told == {"service": "dlqbatch", "job": "ingest", "failed": 1, "partial": 0}


def test_a_monitor_prints_what_it_measured() -> None:
    busy = replace(
        QUIET,
        states={"pending": 2, "manual": 5},
        backlog=7,
        outcomes={"resolved": 3, "failed": 1, "manual": 0},
        ingested_per_minute=4.5,
        ingested_last_minute=4,
        oldest_waiting=NOW - timedelta(minutes=2),
        breakers={"open": 1, "half_open": 0},
    )
    report = Report("monitor", "ok", "empty", count({}, 0)[0], details={"metrics": busy.as_dict()}).as_dict()
    told = read(line(NAMESPACE, "monitor", figures(report)))
    expected = {"backlog": 7, "state_pending": 2, "state_manual": 5, "outcome_resolved": 3, "resolution_rate": 0.75}
    expected |= {
        "breaker_open": 1,
        "ingested_last_minute": 4,
        "ingested_per_minute": 4.5,
        "oldest_waiting_seconds": 120,
        "failed": 0,
    }
    assert {name: told[name] for name in expected} == expected
    assert "retry_success" not in told, "nothing was retried, so that there is no rate"
    assert "got" not in told


def test_an_empty_store_has_waited_no_time() -> None:
    assert figures({"outcome": "ok", "metrics": QUIET.as_dict()})["oldest_waiting_seconds"] == (0.0, "Seconds")


def test_one_run_says_nothing_of_the_run_before_it() -> None:
    line(NAMESPACE, "monitor", figures({"outcome": "ok", "metrics": QUIET.as_dict()}))
    assert "backlog" not in read(line(NAMESPACE, "drain", figures(REPORT)))


@given(
    st.dictionaries(st.text("abc_", min_size=1), st.integers(-(2**60), 2**60) | st.floats() | st.none(), max_size=120),
    st.floats(),
)
def test_only_finite_numbers_and_at_most_a_hundred_are_printed(counts: dict[str, Any], seconds: float) -> None:
    read(line(NAMESPACE, "drain", figures({"outcome": "ok", "counts": counts, "elapsed_seconds": seconds})))
