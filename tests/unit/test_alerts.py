"""Alerts fire when a threshold is exceeded, once, and end when it no longer is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from figures import NOW, QUIET

from dlqbatch.policy.alerts import (
    BACKLOG,
    HIGH_INGESTION,
    LOW_RESOLUTION,
    NEW_GROUP,
    NewGroup,
    Sample,
    Severity,
    Thresholds,
    changes,
    of_group,
    standing,
)
from dlqbatch.policy.metrics import EventFigures, LastRun, Tops


@pytest.mark.parametrize(
    ("changed", "name", "severity"),
    [
        ({"ingested_last_minute": 101}, HIGH_INGESTION, Severity.WARNING),
        ({"backlog": 10_001}, BACKLOG, Severity.CRITICAL),
        ({"outcomes": {"resolved": 49, "failed": 50, "manual": 1}}, LOW_RESOLUTION, Severity.WARNING),
    ],
)
def test_exceeding_a_default_threshold_is_wrong(changed: dict[str, object], name: str, severity: Severity) -> None:
    (alert,) = standing(replace(QUIET, **changed), Thresholds())
    assert (alert.name, alert.subject, alert.severity) == (name, "", severity)
    assert "Look: dlqbatch " in alert.summary


def test_meeting_the_thresholds_is_not_wrong() -> None:
    met = replace(QUIET, ingested_last_minute=100, backlog=10_000, outcomes={"resolved": 1, "failed": 1, "manual": 0})
    assert standing(met, Thresholds()) == ()


def test_no_outcomes_no_alert() -> None:
    assert standing(QUIET, Thresholds(resolution_rate=1)) == ()


def test_the_thresholds_are_settings() -> None:
    busy = replace(QUIET, ingested_last_minute=3, backlog=3, outcomes={"resolved": 9, "failed": 1})
    found = standing(busy, Thresholds(2.5, 2, 0.95))
    assert [(alert.value, alert.threshold) for alert in found] == [(3, 2.5), (3, 2), (0.9, 0.95)]


def test_only_what_does_not_stand_fires_and_only_what_is_over_ends() -> None:
    wrong = standing(replace(QUIET, backlog=20_000, ingested_last_minute=500), Thresholds())
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
