"""The metrics as a file for the textfile collector of Prometheus' node exporter, replaced in one step."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from dlqbatch.policy.alerts import Notice
    from dlqbatch.policy.metrics import Metrics

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
    return "".join(f"{line}\n" for line in _lines(metrics, active))


def write(path: Path, text: str) -> None:
    """Whoever reads sees the old file or the new one, never a part; FileNotWritten leaves the old one."""
    temporary = None
    try:
        # Not *.prom: the collector must not read it.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), _MODE)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except (OSError, ValueError) as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise FileNotWritten(path, getattr(error, "strerror", None) or str(error)) from error


def _lines(metrics: Metrics, active: Sequence[Notice]) -> Iterator[str]:
    yield from _by("messages", "Messages in the dead store by state.", "state", metrics.states)
    yield from _one("backlog", "Messages that are pending, processing, manual or failed.", metrics.backlog)
    yield from _one("due", "Pending messages whose time has come.", metrics.due)
    yield from _one("ingested_last_minute", "New dead messages in the last minute.", metrics.ingested_last_minute)
    yield from _one("ingested_last_hour", "New dead messages in the last hour.", metrics.ingested_last_hour)
    yield from _by("outcomes_last_hour", "What was decided in the last hour.", "outcome", metrics.outcomes)
    yield from _one("resolution_ratio", "Share of those outcomes that are resolved.", metrics.resolution_rate)
    yield from _one(
        "seconds_in_store", "Mean time in the store of what ended in the last hour.", metrics.seconds_in_store
    )
    errors = metrics.errors.as_dict()
    yield from _by("errors_last_day", "Dead messages of the last day by error type.", "error_type", errors)
    dead = {one.event: one.dead for one in metrics.events}
    retries = {one.event: one.retries for one in metrics.events}
    yield from _by("dead_last_day", "Dead messages of the last day by event.", "event", dead)
    yield from _by("retries_before_death_last_day", "How often those had been retried.", "event", retries)
    yield from _by("attempts_last_hour", "Retries from the store that ended.", "outcome", metrics.attempts)
    yield from _one("retry_success_ratio", "Share of those retries that succeeded.", metrics.retry_success)
    yield from _by("replay_retries", "Retries of the newest replay plans that ended.", "outcome", metrics.replays)
    yield from _one("replay_success_ratio", "Share of those retries that succeeded.", metrics.replay_success)
    yield from _one(
        "oldest_waiting_timestamp_seconds", "When the oldest of the backlog came in.", _seconds(metrics.oldest_waiting)
    )
    yield from _by("breakers", "Circuit breakers that are not closed.", "phase", metrics.breakers)
    yield from _one("groups_for_a_person", "Groups that wait for a person.", metrics.groups_for_a_person)
    alerts = Counter(notice.name for notice in active)
    yield from _by("alerts_active", "Alerts that stand.", "alert", alerts)
    yield from _one(
        "dead_letter_ratio",
        "What drains dead-lettered in the last hour, of what they delayed or dead-lettered.",
        metrics.dead_letter_rate,
    )
    counted = {(job, count): number for job, counts in metrics.runs.items() for count, number in counts.items()}
    yield from _head("runs_last_hour", "Counts of the reports of the last hour, added up; runs is how many.")
    yield from (_sample("runs_last_hour", {"job": j, "count": c}, n) for (j, c), n in sorted(counted.items()))
    last = metrics.last_runs
    ended = {run.job: run.ended_at.timestamp() for run in last}
    yield from _by("last_run_timestamp_seconds", "When the last run of a job ended.", "job", ended)
    took = {run.job: (run.ended_at - run.started_at).total_seconds() for run in last}
    yield from _by("last_run_duration_seconds", "How long it took.", "job", took)
    ok = {run.job: int(run.outcome == "ok") for run in last}
    yield from _by("last_run_ok", "Whether its outcome was ok: 1, or 0.", "job", ok)
    yield from _one("measured_timestamp_seconds", "When all of this was measured.", metrics.at.timestamp())


def _one(name: str, help_text: str, number: float | None) -> Iterator[str]:
    if number is not None:
        yield from _head(name, help_text)
        yield _sample(name, {}, number)


def _by(name: str, help_text: str, label: str, numbers: Mapping[str, float]) -> Iterator[str]:
    yield from _head(name, help_text)
    # Two values may look the same once they are cut, and Prometheus refuses a file that says a thing twice.
    together: dict[str, float] = {}
    for value, number in numbers.items():
        shown = plain(value, _LONGEST_LABEL)
        together[shown] = together.get(shown, 0) + number
    yield from (_sample(name, {label: value}, number) for value, number in together.items())


def _head(name: str, help_text: str) -> Iterator[str]:
    yield f"# HELP dlqbatch_{name} {help_text}"
    yield f"# TYPE dlqbatch_{name} gauge"


def _sample(name: str, labels: Mapping[str, str], number: float) -> str:
    shown = ",".join(f'{label}="{plain(value, _LONGEST_LABEL).translate(_ESCAPES)}"' for label, value in labels.items())
    return f"dlqbatch_{name}{'{' + shown + '}' if shown else ''} {number!r}"


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()
