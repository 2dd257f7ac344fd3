"""The log of runs, page by page, the newest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, func, select

from dlqbatch.store.scopes import own_runs
from dlqbatch.store.tables import RUNS

_R: Final = RUNS.c
_MOST_JOBS: Final = 50


@dataclass(frozen=True, slots=True)
class LoggedRun:
    id: int
    job: str
    started_at: datetime
    ended_at: datetime
    outcome: str
    stopped_by: str
    report: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return (self.ended_at - self.started_at).total_seconds()

    @property
    def counts(self) -> dict[str, int]:
        """What it counted and is not 0; another version of this program may have written the report."""
        found = self.report.get("counts") if isinstance(self.report, dict) else None
        known = found.items() if isinstance(found, dict) else ()
        return {str(name): number for name, number in known if isinstance(number, int) and number}


def recent(
    connection: Connection, job: str | None = None, limit: int = 50, before: int | None = None
) -> tuple[LoggedRun, ...]:
    """The newest first; `before` is the id of the run that the page before ended with."""
    query = select(_R.id, _R.job, _R.started_at, _R.ended_at, _R.outcome, _R.stopped_by, _R.report).where(
        own_runs(connection)
    )
    if job is not None:
        query = query.where(_R.job == job)
    if before is not None:
        query = query.where(_R.id < before)
    return tuple(LoggedRun(*row) for row in connection.execute(query.order_by(_R.id.desc()).limit(limit)))


def jobs(connection: Connection) -> tuple[str, ...]:
    """The names of all jobs that ran, one look at the index for each."""
    found: list[str] = []
    while len(found) < _MOST_JOBS:
        following = connection.scalar(select(func.min(_R.job)).where(_R.job > (found[-1] if found else "")))
        if following is None:
            break
        found.append(following)
    return tuple(found)
