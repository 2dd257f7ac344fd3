"""Alerts fire when a threshold is exceeded, once, and end when it no longer is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta

import pytest
from empty_metrics import NOW, QUIET
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.lifecycle.return_checks import UnprovenRetries
from dlqbatch.monitor.alert_rules import (
    BACKLOG,
    HIGH_INGESTION,
    LOW_RESOLUTION,
    QUEUE_DEEP,
    RETENTION,
    RETRIES_UNPROVEN,
    RUNS_BOUNDED,
    NewGroup,
    Sample,
    Severity,
    Thresholds,
    changes,
    of_group,
    standing,
)
from dlqbatch.monitor.metrics import (
    EventFigures,
    LastRun,
    Metrics,
    Reported,
    Tops,
    bounds_in_a_row,
    queue_depths,
    report_of_depths,
)
from dlqbatch.store.states import NEW_GROUP


@pytest.mark.parametrize(
    ("changed", "name", "severity"),
    [
        ({"ingested_per_minute": 101}, HIGH_INGESTION, Severity.WARNING),
        ({"backlog": 10_001}, BACKLOG, Severity.CRITICAL),
        ({"outcomes": {"resolved": 49, "failed": 50, "manual": 1}}, LOW_RESOLUTION, Severity.WARNING),
        ({"outcomes": {"resolved": 2, "failed": 1, "manual": 2}}, LOW_RESOLUTION, Severity.WARNING),
        ({"overdue": {"resolved": 0, "failed": 1}}, RETENTION, Severity.WARNING),
    ],
)
def test_exceeding_a_default_threshold_is_wrong(changed: dict[str, object], name: str, severity: Severity) -> None:
    (alert,) = standing(replace(QUIET, **changed), Thresholds())
    assert (alert.name, alert.subject, alert.severity) == (name, "", severity)
    assert "Look: dlqbatch " in alert.summary


def test_meeting_the_thresholds_is_not_wrong() -> None:
    met = replace(QUIET, ingested_per_minute=100, backlog=10_000, outcomes={"resolved": 1, "failed": 1, "manual": 0})
    assert standing(met, Thresholds()) == ()


def test_no_outcomes_no_alert_and_neither_for_a_few() -> None:
    assert standing(QUIET, Thresholds(resolution_rate=1)) == ()
    assert standing(replace(QUIET, outcomes={"resolved": 0, "failed": 3, "manual": 1}), Thresholds()) == ()


def test_what_is_overdue_is_told_by_state_with_what_to_do() -> None:
    (alert,) = standing(replace(QUIET, overdue={"resolved": 7_000, "failed": 12, "archived": 0}), Thresholds())
    assert "7,012 messages are kept longer than the settings say (7,000 resolved, 12 failed)" in alert.summary
    assert "cold_storage" in alert.summary
    (alert,) = standing(replace(QUIET, overdue={"resolved": 1}), Thresholds())
    assert "cold_storage" not in alert.summary


def test_the_thresholds_are_settings() -> None:
    busy = replace(QUIET, ingested_per_minute=3, backlog=3, outcomes={"resolved": 9, "failed": 1})
    found = standing(busy, Thresholds(2.5, 2, 0.95))
    assert [(alert.value, alert.threshold) for alert in found] == [(3, 2.5), (3, 2), (0.9, 0.95)]


MINUTE = timedelta(minutes=1)


def seen(*depths: int, every: timedelta = MINUTE, age: timedelta = timedelta(), queue: str = "retry-queue") -> Metrics:
    """Reported by runs, the newest first; the last of them ended so long ago."""
    reports = [report_of_depths(NOW - age - number * every, {queue: depth}) for number, depth in enumerate(depths)]
    return replace(QUIET, queues=queue_depths(reports))


def test_a_queue_is_deep_once_nobody_has_seen_it_otherwise_for_so_long() -> None:
    (alert,) = standing(seen(*[7_000] * 16), Thresholds())
    assert (alert.name, alert.subject, alert.severity) == (QUEUE_DEEP, "retry-queue", Severity.CRITICAL)
    assert (alert.value, alert.threshold) == (7_000, 5_000)
    assert "'retry-queue' held 7,000 messages at 2030-06-01 12:00 UTC" in alert.summary
    assert "since 2030-06-01 11:45" in alert.summary
    for quiet in (
        seen(*[7_000] * 15),  # for fourteen minutes
        seen(*[5_000] * 60),  # at the threshold, and not above it
        seen(*[7_000] * 8, 5_000, *[7_000] * 60),  # it was empty enough in between
        seen(0, *[7_000] * 60),
        QUIET,
    ):
        assert standing(quiet, Thresholds()) == ()
    assert standing(seen(*[7_000] * 16), Thresholds(queue_depth=0)) == ()
    assert standing(seen(11, 12, every=10 * MINUTE), Thresholds(queue_depth=10, queue_deep_for=10 * MINUTE))


def test_a_queue_that_nobody_has_looked_at_since_is_as_it_was_seen_last() -> None:
    """Where no drain runs any more, the last of them has left what nobody takes."""
    (alert,) = standing(seen(7_000, age=20 * MINUTE), Thresholds())
    assert "at 2030-06-01 11:40 UTC" in alert.summary
    assert standing(seen(0, age=20 * MINUTE), Thresholds()) == ()


def test_runs_that_keep_ending_at_their_bound_do_not_keep_up() -> None:
    behind = replace(QUIET, bounds_in_a_row={"drain": 3, "ingest": 2})
    (alert,) = standing(behind, Thresholds())
    assert (alert.name, alert.subject, alert.severity) == (RUNS_BOUNDED, "drain", Severity.WARNING)
    assert [one.subject for one in standing(behind, Thresholds(bounded_runs=2))] == ["drain", "ingest"]
    assert standing(behind, Thresholds(bounded_runs=0)) == ()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9), st.booleans()), max_size=12),
    st.integers(0, 8),
)
def test_depths_and_bounds_are_those_of_the_reports(runs: list[tuple[int, int | None, bool]], threshold: int) -> None:
    reports = [
        Reported(
            NOW - number * 2 * MINUTE - MINUTE,
            NOW - number * 2 * MINUTE,
            {"queues": {"q": {"found": found, "left": left}}, "hit_bound": bound},
        )
        for number, (found, left, bound) in enumerate(runs)
    ]
    assert bounds_in_a_row(reports) == len(list(itertools.takewhile(lambda run: run[2], runs)))
    # In any order, with some twice, and with what another version has written in between.
    odd = [Reported(NOW, NOW, report) for report in (None, [], {"queues": []}, {"queues": {"q": 3}}, {"hit_bound": 1})]
    found = queue_depths([*reversed(reports), *reports, *odd])
    if not runs:
        assert found == ()
        return
    (one,) = found
    values = [found if left is None else left for found, left, _ in runs]
    assert one.depth == values[0]
    deep = len(list(itertools.takewhile(lambda depth: depth > threshold, values)))
    since = one.deep_since(threshold)
    if not deep:
        assert since is None
    else:
        assert since in (NOW - (deep - 1) * 2 * MINUTE, NOW - (deep - 1) * 2 * MINUTE - MINUTE)


def test_the_deepest_queues_come_first() -> None:
    found = queue_depths([report_of_depths(NOW, {"a": 1, "b": 3, "c": 3}), report_of_depths(NOW - MINUTE, {"a": 9})])
    assert [(one.queue, one.depth) for one in found] == [("b", 3), ("c", 3), ("a", 1)]


def test_only_what_does_not_stand_fires_and_only_what_is_over_ends() -> None:
    wrong = standing(replace(QUIET, backlog=20_000, ingested_per_minute=500), Thresholds())
    active = {(BACKLOG, ""), (LOW_RESOLUTION, ""), (NEW_GROUP, "f" * 16)}
    fire, over = changes(wrong, active)
    assert [alert.name for alert in fire] == [HIGH_INGESTION]
    assert over == {(LOW_RESOLUTION, "")}
    assert changes((), ()) == ((), frozenset())


def test_a_new_group_is_told_with_a_sample_and_the_command_to_look_at_it() -> None:
    alert = of_group(NewGroup("f" * 16, 1_200, Sample(7, "TimeoutError", "no answer")))
    assert alert.summary == (
        "new group ffffffffffffffff: 1,200 messages need a person, such as message 7: TimeoutError: no answer. "
        "Look: dlqbatch messages list --group ffffffffffffffff"
    )
    assert (alert.name, alert.subject, alert.value) == (NEW_GROUP, "f" * 16, 1_200)
    assert (
        "1 message needs a person, such as message 7: nobody knows why."
        in of_group(NewGroup("f" * 16, 1, Sample(7, None, None))).summary
    )
    assert "2 messages need a person. Look" in of_group(NewGroup("f" * 16, 2)).summary


def test_rates_are_shares_of_what_is_known() -> None:
    assert (QUIET.resolution_rate, QUIET.retry_success, QUIET.replay_success, QUIET.dead_letter_rate) == (None,) * 4
    some = replace(
        QUIET,
        outcomes={"resolved": 1, "failed": 1, "manual": 2},
        attempts={"succeeded": 3, "failed": 1},
        replays={"succeeded": 0, "failed": 2},
        runs={"drain": {"runs": 2, "dead_lettered": 1, "delayed": 4}, "ingest": {"recorded": 9}},
    )
    assert (some.resolution_rate, some.retry_success, some.replay_success, some.dead_letter_rate) == (
        0.25,
        0.75,
        0,
        0.2,
    )


def test_metrics_as_json() -> None:
    told = replace(
        QUIET,
        errors=Tops((("other", 2), ("E", 1)), 5),
        events=(EventFigures("orders.created", 2, 6),),
        last_runs=(LastRun("drain", NOW, NOW, "ok", "empty", {"got": 1}),),
        oldest_waiting=NOW,
    ).as_dict()
    assert told["errors_last_day"] == {"other": 7, "E": 1}
    assert told["events_last_day"] == {"orders.created": {"dead": 2, "retries": 6}}
    assert told["oldest_waiting"] == "2030-06-01T12:00:00+00:00"
    assert told["last_runs"] == [
        {
            "job": "drain",
            "started_at": "2030-06-01T12:00:00+00:00",
            "ended_at": "2030-06-01T12:00:00+00:00",
            "outcome": "ok",
            "stopped_by": "empty",
            "counts": {"got": 1},
        }
    ]


def test_retries_of_which_nobody_knows_for_long_are_told_with_what_is_missing() -> None:
    def sent(minutes: int, place: str) -> UnprovenRetries:
        at = NOW - timedelta(minutes=minutes)
        return UnprovenRetries(place, minutes, at, False, "it has no consumer", "q", 1, 0, 0, 0, NOW)

    found = (sent(45, "a"), sent(44, "b"), sent(43, "c"), sent(42, "d"), sent(30, "new"))
    late = replace(QUIET, sent=204, oldest_sent=found[0].sent_at, unproven=found)
    (alert,) = standing(late, Thresholds())
    assert (alert.name, alert.severity, alert.value, alert.threshold) == (RETRIES_UNPROVEN, Severity.WARNING, 174, 30)
    assert "sent up to 45 min ago" in alert.summary
    assert "45 to 'a': it has no consumer; 44 to 'b'" in alert.summary
    assert "and 1 more places" in alert.summary
    assert "'new'" not in alert.summary
    assert not standing(replace(late, oldest_sent=found[-1].sent_at), Thresholds())
    assert not standing(replace(late, oldest_sent=None), Thresholds())
    (silent,) = standing(replace(late, unproven=()), Thresholds())
    assert "no lifecycle has looked since" in silent.summary
