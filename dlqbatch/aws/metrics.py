"""The figures of a run as CloudWatch reads them out of a log: one line of its embedded metric format (EMF)."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from dlqbatch import __version__, logs

log = logs.get(__name__)

SERVICE: Final = "dlqbatch"
# The format allows 100 metrics in a line.
MOST: Final = 100

# By the name of a metric: its value, and CloudWatch's name of its unit.
Figures = dict[str, tuple[float, str]]

_COUNT: Final = "Count"
_SECONDS: Final = "Seconds"
_NO_UNIT: Final = "None"
_MEASURED: Final = {
    "backlog": _COUNT,
    "due": _COUNT,
    "sent": _COUNT,
    "groups_for_a_person": _COUNT,
    "ingested_per_minute": _COUNT,
    "ingested_last_minute": _COUNT,
    "ingested_last_hour": _COUNT,
    "seconds_in_store": _SECONDS,
    "resolution_rate": _NO_UNIT,
    "retry_success": _NO_UNIT,
    "replay_success": _NO_UNIT,
    "dead_letter_rate": _NO_UNIT,
}
# Figures with a small, closed set of names below them. Events and errors have no end, and each metric has to be paid.
_BY_NAME: Final = {"states": "state", "outcomes_last_hour": "outcome", "breakers": "breaker", "overdue": "overdue"}


def print_metrics(namespace: str, job: str, report: Mapping[str, Any]) -> None:
    """Print the line; whatever goes wrong with it is logged, because it says nothing about the run."""
    try:
        printed = line(namespace, job, figures(report))
    except Exception as error:  # noqa: BLE001  (a run is not judged by how it is measured)
        log.warning("the metrics of this run were not printed", why=str(error))
        return
    with suppress(OSError, ValueError, AttributeError):  # no stdout, or one that nobody reads
        sys.stdout.write(printed + "\n")
        sys.stdout.flush()


def line(namespace: str, job: str, found: Figures) -> str:
    """The figures of one run, with the dimensions `service` and `job`."""
    shown = dict(list(found.items())[:MOST])
    directive = {
        "Namespace": namespace,
        "Dimensions": [["service", "job"]],
        "Metrics": [{"Name": name, "Unit": unit} for name, (_, unit) in shown.items()],
    }
    values = {name: [float(value)] for name, (value, _) in shown.items()}
    about = {"_aws": {"Timestamp": int(time.time() * 1000), "CloudWatchMetrics": [directive]}}
    dimensions = {"service": SERVICE, "job": job}
    return json.dumps({**values, **about, **dimensions, "version": __version__}, allow_nan=False)


def figures(report: Mapping[str, Any]) -> Figures:
    """The numbers of a report; the report of a run that ended in an error is `{"outcome": "failed"}` and no more."""
    measured = report.get("metrics")
    found: dict[str, tuple[Any, str]] = {}
    if measured is None:
        found |= {name: (number, _COUNT) for name, number in report.get("counts", {}).items()}
    else:
        found |= _store_figures(measured)
    if queues := report.get("queues"):
        found |= _queue_figures(queues)
        if measured is None:
            found["hit_bound"] = (int(report["hit_bound"]), _COUNT)
        else:
            found.pop("depth_found", None)  # a monitor takes nothing, so that it leaves what it found
    if "elapsed_seconds" in report:
        found["elapsed_seconds"] = (report["elapsed_seconds"], _SECONDS)
    for outcome in ("failed", "partial"):
        found[outcome] = (int(report["outcome"] == outcome), _COUNT)
    return {name: (value, unit) for name, (value, unit) in found.items() if _is_number(value)}


def _queue_figures(queues: Mapping[str, Mapping[str, int | None]]) -> dict[str, tuple[Any, str]]:
    """Sums over the queues of a run whose depths are known; a metric for each queue would have to be paid."""
    found = {}
    for name in ("found", "left"):
        known = [depth[name] for depth in queues.values() if depth[name] is not None]
        if known:
            found[f"depth_{name}"] = (sum(number for number in known if number is not None), _COUNT)
    return found


def _store_figures(measured: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {name: (measured.get(name), unit) for name, unit in _MEASURED.items()}
    for group, word in _BY_NAME.items():
        found |= {f"{word}_{name}": (number, _COUNT) for name, number in measured.get(group, {}).items()}
    at = measured.get("at")
    for name in ("oldest_waiting", "oldest_sent"):
        since = measured.get(name)
        age = (datetime.fromisoformat(at) - datetime.fromisoformat(since)).total_seconds() if at and since else 0.0
        found[f"{name}_seconds"] = (max(age, 0.0), _SECONDS)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
