"""Figures as Prometheus reads them: the lines of its text format, and a file for its textfile collector."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from dlqbatch import __version__
from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import plain
from dlqbatch.monitor.alert_rules import Notice
from dlqbatch.monitor.metrics import QUEUES_NAMED, Metrics, QueueDepth

_MODE: Final = 0o644
_LONGEST_LABEL: Final = 120
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class FileNotWritten(DlqbatchError):
    def __init__(self, path: Path, why: str) -> None:
        self.path = path
        super().__init__(
            f"the metrics could not be written to {path}: {why}. Its folder has to be there, and writable: the file "
            "is made beside the old one and takes its place."
        )


def render(metrics: Metrics, active: Sequence[Notice]) -> str:
    """Every number is a gauge; what is not known is left out."""
    return text(_metrics_lines(metrics, active))


def text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def build_info() -> Iterator[str]:
    yield from by_label("build_info", "The version that runs.", "version", {__version__: 1})


def queue_depth_lines(queues: Sequence[QueueDepth]) -> Iterator[str]:
    """The deepest queues first, and only so many of them."""
    named = queues[:QUEUES_NAMED]
    depths = {one.queue: one.depth for one in named}
    meaning = "Messages in the queues that drain and ingest serve, as seen last."
    yield from by_label("queue_depth", meaning, "queue", depths)
    # The depths of names that are equal after the cut are added up, with the time of the deepest.
    times = {plain(one.queue, _LONGEST_LABEL): one.at.timestamp() for one in reversed(named)}
    yield from by_label("queue_depth_timestamp_seconds", "When that was seen.", "queue", times)


def by_label(name: str, meaning: str, label: str, numbers: Mapping[str, float], kind: str = "gauge") -> Iterator[str]:
    """A sample for each value of a label; the numbers of values that are equal after the cut are added up."""
    together: dict[str, float] = {}
    for value, number in numbers.items():
        shown = plain(value, _LONGEST_LABEL)
        together[shown] = together.get(shown, 0) + number
    yield from _head(name, meaning, kind)
    yield from (_sample(name, {label: value}, number) for value, number in together.items())


def counters(
    name: str, meaning: str, numbers: Mapping[str, Mapping[str, int]], label: str = "decision"
) -> Iterator[str]:
    """A counter for each job and value of the label."""
    yield from _head(name, meaning, "counter")
    for job, by_value in numbers.items():
        yield from (_sample(name, {"job": job, label: value}, number) for value, number in by_value.items())


def histogram(name: str, meaning: str, times: Mapping[str, tuple[Mapping[float, int], float, int]]) -> Iterator[str]:
    """For each job how many were no longer than each bound, the sum, and the number of all."""
    yield from _head(name, meaning, "histogram")
    for job, (buckets, total, number) in times.items():
        yield from (_sample(f"{name}_bucket", {"job": job, "le": f"{le:g}"}, n) for le, n in buckets.items())
        yield _sample(f"{name}_bucket", {"job": job, "le": "+Inf"}, number)
        yield _sample(f"{name}_sum", {"job": job}, total)
        yield _sample(f"{name}_count", {"job": job}, number)


def single(name: str, meaning: str, number: float | None) -> Iterator[str]:
    if number is not None:
        yield from _head(name, meaning)
        yield _sample(name, {}, number)


def write(path: Path, content: str) -> None:
    """Replace the file as a whole, so that no reader sees a part of it; after FileNotWritten the old one is there."""
    temporary = None
    try:
        # A name that does not end in .prom, so that the collector does not read it.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), _MODE)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except (OSError, ValueError) as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise FileNotWritten(path, getattr(error, "strerror", None) or str(error)) from error


def _head(name: str, meaning: str, kind: str = "gauge") -> Iterator[str]:
    yield f"# HELP dlqbatch_{name} {meaning}"
    yield f"# TYPE dlqbatch_{name} {kind}"


def _sample(name: str, labels: Mapping[str, str], number: float) -> str:
    shown = ",".join(f'{label}="{plain(value, _LONGEST_LABEL).translate(_ESCAPES)}"' for label, value in labels.items())
    return f"dlqbatch_{name}{'{' + shown + '}' if shown else ''} {number!r}"


def _metrics_lines(metrics: Metrics, active: Sequence[Notice]) -> Iterator[str]:
    yield from by_label("messages", "Messages in the dead store by state.", "state", metrics.states)
    yield from single("backlog", "Messages that are pending, processing, manual or failed.", metrics.backlog)
    yield from single("due", "Pending messages whose time has come.", metrics.due)
    yield from by_label("overdue", "Messages that retain should have taken long ago.", "state", metrics.overdue)
    yield from single(
        "ingested_per_minute", "New dead messages a minute, since the monitor looked last.", metrics.ingested_per_minute
    )
    yield from single("ingested_last_minute", "New dead messages in the last minute.", metrics.ingested_last_minute)
    yield from single("ingested_last_hour", "New dead messages in the last hour.", metrics.ingested_last_hour)
    yield from by_label("outcomes_last_hour", "What was decided in the last hour.", "outcome", metrics.outcomes)
    yield from single("resolution_ratio", "Share of those outcomes that are resolved.", metrics.resolution_rate)
    yield from single(
        "seconds_in_store", "Mean time in the store of what ended in the last hour.", metrics.seconds_in_store
    )
    errors = metrics.errors.as_dict()
    yield from by_label("errors_last_day", "Dead messages of the last day by error type.", "error_type", errors)
    dead = {one.event: one.dead for one in metrics.events}
    retries = {one.event: one.retries for one in metrics.events}
    yield from by_label("dead_last_day", "Dead messages of the last day by event.", "event", dead)
    yield from by_label("retries_before_death_last_day", "How often those had been retried.", "event", retries)
    yield from by_label("attempts_last_hour", "Retries from the store that ended.", "outcome", metrics.attempts)
    yield from single("retry_success_ratio", "Share of those retries that succeeded.", metrics.retry_success)
    yield from by_label("replay_retries", "Retries of the newest replay plans.", "outcome", metrics.replays)
    yield from single(
        "replay_success_ratio", "Share of those retries that succeeded, of those that ended.", metrics.replay_success
    )
    yield from single(
        "oldest_waiting_timestamp_seconds", "When the oldest of the backlog came in.", _seconds(metrics.oldest_waiting)
    )
    yield from by_label("breakers", "Circuit breakers that are not closed.", "phase", metrics.breakers)
    yield from single("groups_for_a_person", "Groups that wait for a person.", metrics.groups_for_a_person)
    yield from single("sent", "Retries that are sent, and neither resolved nor back.", metrics.sent)
    yield from single(
        "oldest_sent_timestamp_seconds", "When the first of them was sent.", _seconds(metrics.oldest_sent)
    )
    named = metrics.unproven[:QUEUES_NAMED]
    waiting = {one.place: one.retries for one in named}
    yield from by_label(
        "sent_unproven", "Of those, by origin, as the newest lifecycle run found them.", "origin", waiting
    )
    for figure in ("ready", "unacknowledged", "delayed", "consumers"):
        known = {one.place: number for one in named if (number := getattr(one, figure)) is not None}
        yield from by_label(f"sent_unproven_{figure}", f"The queue that holds them: {figure}.", "origin", known)
    alerts = Counter(notice.name for notice in active)
    yield from by_label("alerts_active", "Alerts that stand.", "alert", alerts)
    yield from single(
        "dead_letter_ratio",
        "What drains dead-lettered in the last hour, of what they delayed or dead-lettered.",
        metrics.dead_letter_rate,
    )
    counted = {(job, count): number for job, counts in metrics.runs.items() for count, number in counts.items()}
    yield from _head("runs_last_hour", "Counts of the reports of the last hour, added up; runs is how many.")
    yield from (_sample("runs_last_hour", {"job": j, "count": c}, n) for (j, c), n in sorted(counted.items()))
    last = metrics.last_runs
    ended = {run.job: run.ended_at.timestamp() for run in last}
    yield from by_label("last_run_timestamp_seconds", "When the last run of a job ended.", "job", ended)
    took = {run.job: (run.ended_at - run.started_at).total_seconds() for run in last}
    yield from by_label("last_run_duration_seconds", "How long it took.", "job", took)
    ok = {run.job: int(run.outcome == "ok") for run in last}
    yield from by_label("last_run_ok", "Whether its outcome was ok: 1, or 0.", "job", ok)
    yield from by_label(
        "runs_at_bound_in_a_row",
        "Runs that ended at their bound since the last that did not.",
        "job",
        metrics.bounds_in_a_row,
    )
    yield from queue_depth_lines(metrics.queues)
    yield from single("measured_timestamp_seconds", "When all of this was measured.", metrics.at.timestamp())


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()
