"""What serverless.yml deploys, as far as it costs: how often functions run and with what, what is paid by the month."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
DAYS_A_MONTH: Final = 30
_MINUTES: Final = {"minute": 1, "hour": 60, "day": 24 * 60}


class _Template(yaml.SafeLoader):
    """CloudFormation's own tags (!Ref and the like) say nothing of costs."""


_Template.add_multi_constructor("!", lambda _loader, _tag, _node: None)


class DeployedFunction(NamedTuple):
    job: str
    memory_mb: int
    runs_a_month: int
    max_seconds: float
    """What bounds a run: the setting, else the function's time-out."""
    is_on: bool
    """By default."""


class Fixed(NamedTuple):
    """What is paid by the month, whatever happens, if every parameter is given."""

    alarms: int
    alarms_on_metrics: int
    """Of them, those that are not there with metricsNamespace=off."""
    keys: int
    secrets: int = 1
    """Made by hand, before the stack."""


def functions() -> tuple[DeployedFunction, ...]:
    described = _read("serverless.yml")
    parameters: dict[str, Any] = described["params"]["default"]
    memory = described["provider"]["memorySize"]
    return tuple(
        DeployedFunction(
            job,
            int(_value(one.get("memorySize", memory), parameters)),
            runs_a_month((schedule := _schedule(one))["rate"]),
            float(one["environment"].get("DLQBATCH_MAX_SECONDS", one.get("timeout"))),
            str(_value(schedule.get("enabled", True), parameters)).lower() == "true",
        )
        for job, one in described["functions"].items()
    )


def runs_a_month(rate: str) -> int:
    """Of 30 days; of cron, only what runs once a day."""
    if found := re.fullmatch(r"rate\((\d+) (minute|hour|day)s?\)", rate):
        return DAYS_A_MONTH * 24 * 60 // (int(found[1]) * _MINUTES[found[2]])
    if re.fullmatch(r"cron\(\d+ \d+ \* \* \? \*\)", rate):
        return DAYS_A_MONTH
    raise ValueError(f"serverless.yml has a schedule of a kind that is not known here: {rate}")


def fixed() -> Fixed:
    found = [one for file in ("alarms", "storage") for one in _read(f"deploy/aws/{file}.yml")["Resources"].values()]
    alarms = [one for one in found if one["Type"] == "AWS::CloudWatch::Alarm"]
    return Fixed(
        alarms=len(alarms),
        alarms_on_metrics=sum(one.get("Condition") == "HasMetrics" for one in alarms),
        keys=sum(one["Type"] == "AWS::KMS::Key" for one in found),
    )


def _read(name: str) -> dict[str, Any]:
    # The loader is a safe one; it only passes over the tags.
    found: dict[str, Any] = yaml.load((ROOT / name).read_text(encoding="utf-8"), _Template)
    return found


def _schedule(one: dict[str, Any]) -> dict[str, Any]:
    (found,) = (event["schedule"] for event in one["events"] if "schedule" in event)
    schedule: dict[str, Any] = found
    return schedule


def _value(text: object, parameters: dict[str, Any]) -> object:
    """With the default of the parameter that it names."""
    named = re.search(r"\$\{param:(\w+)\}", str(text))
    return parameters[named[1]] if named else text
