"""The events that start a run: our own, a schedule's, and a CloudWatch alarm's in its three wrappings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlqbatch.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALARM = "ALARM"
_AROUND = (
    *("version", "id", "detail-type", "source", "account", "time", "region", "resources", "detail"),
    *("Records", "alarmData", "alarmArn", "accountId"),
)
"""What AWS puts into an event, which is no option of a run."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an event asks for; without a job, the one that the settings name."""

    job: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ignored:
    """An event after which there is nothing to do."""

    why: str


def understand(event: object) -> Request | Ignored:
    """SettingsError if it is none of the known forms."""
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
        asked = _from_notification(event)
    elif "alarmData" in event:
        alarm = _object(event["alarmData"])
        asked = _from_alarm(alarm.get("alarmName"), _object(alarm.get("state")).get("value"))
    elif "detail-type" in event:
        asked = _from_bus(event, is_ours=job is not None)
    else:
        return Request(job, options)
    if job is None or isinstance(asked, Ignored):
        return asked
    return Request(job, {option: value for option, value in options.items() if option not in _AROUND})


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
        # Taken for "not in alarm", a form that nobody knows yet would stop every run without a word.
        raise SettingsError("the event is of a CloudWatch alarm, but it does not say the alarm's state")
    return Ignored(f"alarm '{name}' is in state {state}, and only {_ALARM} starts a run")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
