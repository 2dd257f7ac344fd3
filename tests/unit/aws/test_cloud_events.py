from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.aws.events import Ignored, Request, understand
from dlqbatch.errors import SettingsError

STATES = st.sampled_from(["ALARM", "OK", "INSUFFICIENT_DATA"]) | st.text()
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KNOWN = st.sampled_from(
    ["Records", "Sns", "Message", "alarmData", "state", "value", "detail-type", "detail", "job", "alarmName"]
)
NEARLY = st.recursive(
    ANYTHING | st.sampled_from(["Scheduled Event", "CloudWatch Alarm State Change", "ALARM", '{"NewStateValue": 1}']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KNOWN, inner, max_size=4),
    max_leaves=12,
)


def wrapped(name: object, state: object) -> list[dict[str, Any]]:
    return [
        {"alarmData": {"alarmName": name, "state": {"value": state}}},
        {"detail-type": "CloudWatch Alarm State Change", "detail": {"alarmName": name, "state": {"value": state}}},
        {"Records": [{"Sns": {"Message": json.dumps({"AlarmName": name, "NewStateValue": state})}}]},
    ]


@given(NEARLY)
def test_whatever_comes_is_a_request_or_ignored_or_a_settings_error(event: object) -> None:
    try:
        understood: object = understand(event)
    except SettingsError as error:
        understood = error
    assert isinstance(understood, (Request, Ignored, SettingsError))


@given(st.text(), STATES)
def test_the_three_wrappings_of_an_alarm_mean_the_same(name: str, state: str) -> None:
    first, second, third = (understand(event) for event in wrapped(name, state))
    assert first == second == third
    assert isinstance(first, Request if state == "ALARM" else Ignored)


@pytest.mark.parametrize("state", [None, 1, {"value": "ALARM"}])
def test_an_alarm_without_a_state_is_not_taken_for_one_that_is_over(state: object) -> None:
    for event in wrapped("deep", state):
        with pytest.raises(SettingsError, match="state"):
            understand(event)


def test_nothing_and_a_schedule_ask_for_the_job_of_the_settings() -> None:
    assert understand(None) == understand({}) == understand({"detail-type": "Scheduled Event"}) == Request()


def test_a_request_of_ours_keeps_its_options_and_the_event_is_not_changed() -> None:
    event = {"job": "drain", "max_messages": 10, "dry_run": True}
    assert understand(event) == Request("drain", {"max_messages": 10, "dry_run": True})
    assert event["job"] == "drain"


@pytest.mark.parametrize("job", ["", " ", "\t\n"])
def test_a_job_without_a_name_starts_no_drain(job: str) -> None:
    with pytest.raises(SettingsError, match="job is empty"):
        understand({"job": job})


def test_a_notification_that_is_nested_without_an_end_is_no_alarm() -> None:
    with pytest.raises(SettingsError, match="no CloudWatch alarm"):
        understand({"Records": [{"Sns": {"Message": "[" * 100_000}}]})


@pytest.mark.parametrize("kind", ["Scheduled Event", "CloudWatch Alarm State Change", "of our own"])
def test_a_job_in_an_event_of_the_bus_decides_with_its_options(kind: str) -> None:
    event = {"detail-type": kind, "source": "aws.events", "detail": {"state": {"value": "ALARM"}}, "version": "0"}
    assert understand(event | {"job": "ingest", "max_messages": 5}) == Request("ingest", {"max_messages": 5})
    # What nobody knows is still told, by who knows the options.
    assert understand(event | {"job": "ingest", "max_mesages": 5}) == Request("ingest", {"max_mesages": 5})


@given(STATES)
def test_a_job_makes_no_run_of_an_alarm_that_is_over(state: str) -> None:
    for event in wrapped("deep", state):
        assert understand(event | {"job": "ingest"}) == (Request("ingest") if state == "ALARM" else understand(event))
