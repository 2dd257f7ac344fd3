"""Which run has seen a queue empty: found by the queue, however many runs of other queues came after it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, store_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, insert

from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.store.engine import writing
from dlqbatch.store.tables import RUNS

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

MINUTE = timedelta(minutes=1)
QUEUES = ("q", "q2", 'odd "name"', "50%", "żółw", "")


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def log(engine: Engine, *runs: tuple[str, int, list[str]]) -> None:
    """Runs of half a minute: the job, the minute of its start, and the queues that it saw empty."""
    rows = [
        {
            "job": job,
            "started_at": NOW + minute * MINUTE,
            "ended_at": NOW + (minute + 0.5) * MINUTE,
            "outcome": "ok",
            "stopped_by": "empty",
            "emptied": emptied,
            "report": {},
        }
        for job, minute, emptied in runs
    ]
    with writing(engine) as connection:
        connection.execute(delete(RUNS))
        if rows:
            connection.execute(insert(RUNS), rows)


def test_a_thousand_runs_of_other_queues_hide_nothing(engine: Engine) -> None:
    log(engine, ("ingest", 1, ["q"]), *(("ingest", 2 + each, ["other"]) for each in range(1_000)))
    found = SentAttempts(engine).newest_ingests({"q", "unseen"}, NOW)
    assert found["unseen"] is None
    assert found["q"] is not None
    assert found["q"].started_at == NOW + MINUTE


JOBS = st.sampled_from(["ingest", "drain", "check"])
SOME_RUNS = st.lists(st.tuples(JOBS, st.integers(0, 20), st.lists(st.sampled_from(QUEUES), max_size=4)), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(runs=SOME_RUNS, since=st.integers(-1, 20), before=st.integers(0, 22), wanted=st.sets(st.sampled_from(QUEUES)))
def test_the_newest_run_that_saw_them_empty_is_found(
    engine: Engine, runs: list[tuple[str, int, list[str]]], since: int, before: int, wanted: set[str]
) -> None:
    log(engine, *runs)
    rows = SentAttempts(engine)

    def newest(job: str, queues: set[str], before: float) -> datetime | None:
        minutes = [
            minute
            for name, minute, emptied in runs
            if name == job and since < minute and minute + 0.5 < before and queues <= set(emptied)
        ]
        return NOW + max(minutes) * MINUTE if minutes else None

    for queue, run in rows.newest_ingests(wanted, NOW + since * MINUTE).items():
        assert (run.started_at if run is not None else None) == newest("ingest", {queue}, 100)
    drain = rows.newest_drain(wanted, NOW + since * MINUTE, NOW + before * MINUTE)
    assert (drain.started_at if drain is not None else None) == newest("drain", wanted, before)
