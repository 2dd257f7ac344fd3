"""The events of AWS Lambda that start a run: our own, a schedule's, and a CloudWatch alarm's in its three forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dlqbatch.errors import SettingsError

_ALARM: Final = "ALARM"
# What AWS puts into an event that is no option of a run.
_AWS_KEYS: Final = (
    *("version", "id", "detail-type", "source", "account", "time", "region", "resources", "detail"),
    *("Records", "alarmData", "alarmArn", "accountId"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """The run for which an event asks; without a job, it is the job that the settings name."""

    job: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ignored:
    """An event after which there is nothing to do."""

    why: str


def understand(event: object) -> Request | Ignored:
    """The run that the event asks for; SettingsError if it has none of the known forms."""
    if event is None:
        return Request()
    if not isinstance(event, dict):
        raise SettingsError(f'the event is {type(event).__name__}, not an object; send {{}} or {{"job": "drain"}}')
    options = dict(event)
    job = options.pop("job", None)
    if job is not None and not isinstance(job, str):
        raise SettingsError("the event's job is not a text")
    if job is not None and not job.strip():
        raise SettingsError("the event's job is empty; name one, or leave it out for the one that the settings name")
    if "Records" in event:
        request = _from_notification(event)
    elif "alarmData" in event:
        alarm = _object(event["alarmData"])
        request = _from_alarm(alarm.get("alarmName"), _object(alarm.get("state")).get("value"))
    elif "detail-type" in event:
        request = _from_bus(event, is_ours=job is not None)
    else:
        return Request(job, options)
    if job is None or isinstance(request, Ignored):
        return request
    return Request(job, {option: value for option, value in options.items() if option not in _AWS_KEYS})


def _from_bus(event: Mapping[str, Any], *, is_ours: bool) -> Request | Ignored:
    kind, detail = event["detail-type"], _object(event.get("detail"))
    if kind == "CloudWatch Alarm State Change":
        return _from_alarm(detail.get("alarmName"), _object(detail.get("state")).get("value"))
    if kind == "Scheduled Event" or is_ours:
        return Request()
    raise SettingsError(f"an event of the kind '{kind}' starts nothing here; a schedule or a CloudWatch alarm does")


def _from_notification(event: Mapping[str, Any]) -> Request | Ignored:
    """SNS sends one record, with the alarm as text in it."""
    records = event["Records"]
    sns = _object(_object(records[0]).get("Sns")) if isinstance(records, list) and records else {}
    try:
        message = _object(json.loads(sns.get("Message", "")))
    except (TypeError, ValueError, RecursionError):
        message = {}
    if "NewStateValue" not in message:
        raise SettingsError("the notification holds no CloudWatch alarm, and nothing else starts a run")
    return _from_alarm(message.get("AlarmName"), message["NewStateValue"])


def _from_alarm(name: object, state: object) -> Request | Ignored:
    if state == _ALARM:
        return Request()
    if not isinstance(state, str):
        # A form of alarm that is not known here must not be taken for "not in alarm": no run would start, silently.
        raise SettingsError("the event is of a CloudWatch alarm, but it does not say the alarm's state")
    return Ignored(f"alarm '{name}' is in state {state}, and only {_ALARM} starts a run")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
