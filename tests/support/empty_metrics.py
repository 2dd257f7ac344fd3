"""What a dead store measures in which nothing happens."""

from __future__ import annotations

from datetime import UTC, datetime

from dlqbatch.monitor.metrics import Metrics, Tops

NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
QUIET = Metrics(
    at=NOW,
    states={"pending": 0},
    backlog=0,
    ingested_per_minute=0.0,
    ingested_lately=0,
    ingested_last_minute=0,
    ingested_last_hour=0,
    outcomes={"resolved": 0, "failed": 0, "manual": 0},
    seconds_in_store=None,
    errors=Tops(),
    events=(),
    attempts={"succeeded": 0, "failed": 0},
    replays={"succeeded": 0, "failed": 0},
    oldest_waiting=None,
    overdue={},
    due=0,
    next_due=None,
    breakers={"open": 0},
    origins_held=(),
    groups_for_a_person=0,
    runs={},
    last_runs=(),
)
