"""What of a report is pushed as metrics; the names are those of /metrics, as OpenTelemetry writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

RUN_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 120.0, 300.0, 900.0)
"""The bounds of the histogram of run times."""
_NOT_DECISIONS: Final = frozenset({"got"})


class Sample(NamedTuple):
    name: str
    value: float
    attributes: Mapping[str, str]


class Figures(NamedTuple):
    counters: tuple[Sample, ...]
    gauges: tuple[Sample, ...]
    seconds: float | None
    """How long the run took; None for one that ended with an error."""


def figures(job: str, report: Mapping[str, Any]) -> Figures:
    """The figures of one run; the report of a run that ended with an error is `{"outcome": "failed"}`."""
    counters = [Sample("dlqbatch.runs", 1, {"job": job, "outcome": str(report["outcome"])})]
    counts = report.get("counts", {}) if job != "monitor" else {}
    for decision, number in counts.items():
        if number and decision not in _NOT_DECISIONS:
            counters.append(Sample("dlqbatch.messages", number, {"job": job, "decision": decision}))
    for reason, number in report.get("reasons", {}).items():
        counters.append(Sample("dlqbatch.message_reasons", number, {"job": job, "reason": reason}))
    gauges = [Sample(f"dlqbatch.{name}", number, {}) for name, number in _measured(report.get("metrics") or {})]
    states = (report.get("metrics") or {}).get("states", {})
    # A counter has the name that the gauge of the states has in /metrics.
    gauges += [Sample("dlqbatch.stored_messages", number, {"state": state}) for state, number in states.items()]
    for queue, depth in report.get("queues", {}).items():
        known = depth["found"] if depth["left"] is None else depth["left"]
        gauges.append(Sample("dlqbatch.queue_depth", known, {"queue": queue}))
    return Figures(tuple(counters), tuple(gauges), report.get("elapsed_seconds"))


def _measured(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The single numbers that a monitor measured, by the names that they have in /metrics."""
    ratios = {"resolution_rate": "resolution_ratio", "retry_success": "retry_success_ratio"}
    ratios |= {"replay_success": "replay_success_ratio", "dead_letter_rate": "dead_letter_ratio"}
    found = ((ratios.get(name, name), value) for name, value in metrics.items())
    return [(name, value) for name, value in found if isinstance(value, int | float) and not isinstance(value, bool)]
