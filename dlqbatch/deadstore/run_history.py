"""What the log of runs tells: the last runs of each job, and pruning of the old."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import delete, select

from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.run_log import RunRecord
from dlqbatch.deadstore.tables import RUNS

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

_PRUNED_AT_ONCE = 1_000


def recent(engine: Engine, job: str | None = None, limit: int = 100) -> list[RunRecord]:
    """The newest first; without a job, of all."""
    columns = (RUNS.c[name] for name in RunRecord.__slots__)
    asking = select(*columns).order_by(RUNS.c.started_at.desc(), RUNS.c.id.desc()).limit(limit)
    if job is not None:
        asking = asking.where(RUNS.c.job == job)
    with reading(engine) as connection:
        return [RunRecord(*row) for row in connection.execute(asking)]


def prune(engine: Engine, before: datetime, limit: int = _PRUNED_AT_ONCE) -> int:
    """Delete runs that began before that time, the oldest first, at most `limit`; says how many."""
    old = select(RUNS.c.id).where(RUNS.c.started_at < before).order_by(RUNS.c.started_at).limit(limit)
    with writing(engine) as connection:
        return connection.execute(delete(RUNS).where(RUNS.c.id.in_(old))).rowcount
