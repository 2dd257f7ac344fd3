"""Metrics as CloudWatch reads them out of a log: one line of the embedded metric format, and no call to anybody."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from dlqbatch.cloud.aws import INSTALL
from dlqbatch.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE: Final = "dlqbatch"
MOST: Final = 99
"""A line holds 100 metrics; the library writes one of its own accord when it is full."""

Figures = dict[str, tuple[float, str]]
"""By name, the value and CloudWatch's name of its unit."""

_COUNT: Final = "Count"
_SECONDS: Final = "Seconds"
_NO_UNIT: Final = "None"
_MEASURED: Final = {
    "backlog": _COUNT,
    "due": _COUNT,
    "groups_for_a_person": _COUNT,
    "ingested_last_minute": _COUNT,
    "ingested_last_hour": _COUNT,
    "seconds_in_store": _SECONDS,
    "resolution_rate": _NO_UNIT,
    "retry_success": _NO_UNIT,
    "replay_success": _NO_UNIT,
    "dead_letter_rate": _NO_UNIT,
}
_BY_NAME: Final = {"states": "state", "outcomes_last_hour": "outcome", "breakers": "breaker"}
"""Figures with a small, closed set of names below them. Those by event or error have no end, and each would be paid."""


def figures(report: Mapping[str, Any]) -> Figures:
    """What a report says in numbers; of a run that ended in an error, `{"outcome": "failed"}` is all there is."""
    measured = report.get("metrics")
    found: dict[str, tuple[Any, str]] = {}
    if measured is None:
        found |= {name: (number, _COUNT) for name, number in report.get("counts", {}).items()}
    else:
        found |= _of_the_store(measured)
    if "elapsed_seconds" in report:
        found["elapsed_seconds"] = (report["elapsed_seconds"], _SECONDS)
    for outcome in ("failed", "partial"):
        found[outcome] = (int(report["outcome"] == outcome), _COUNT)
    return {name: (value, unit) for name, (value, unit) in found.items() if _is_number(value)}


def _of_the_store(measured: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {name: (measured.get(name), unit) for name, unit in _MEASURED.items()}
    for group, word in _BY_NAME.items():
        found |= {f"{word}_{name}": (number, _COUNT) for name, number in measured.get(group, {}).items()}
    at, oldest = measured.get("at"), measured.get("oldest_waiting")
    waited = (datetime.fromisoformat(at) - datetime.fromisoformat(oldest)).total_seconds() if at and oldest else 0.0
    found["oldest_waiting_seconds"] = (max(waited, 0.0), _SECONDS)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def line(namespace: str, job: str, found: Figures) -> str:
    """The figures of one run, with the dimensions `service` and `job`."""
    try:
        from aws_lambda_powertools.metrics import EphemeralMetrics  # noqa: PLC0415  (only for those who want metrics)
    except ImportError:
        raise SettingsError(
            f"dlqbatch.metrics_namespace needs aws-lambda-powertools, which is not installed: {INSTALL}"
        ) from None
    metrics = EphemeralMetrics(namespace=namespace, service=SERVICE)
    metrics.add_dimension("job", job)
    for name, (value, unit) in list(found.items())[:MOST]:
        metrics.add_metric(name, unit, value)
    return json.dumps(metrics.serialize_metric_set(), allow_nan=False)
