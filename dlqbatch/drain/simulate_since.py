"""What would have become of what failed since a time, had some events other numbers of retries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlqbatch.drain.died_rows import Tried, tried
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock, store_for
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import parse_time


@dataclass(frozen=True, slots=True)
class SimulatedSince:
    since: str
    tried: Tried

    def as_dict(self) -> dict[str, Any]:
        rows = [each.as_dict() for each in self.tried.events]
        return {"since": self.since, "is_complete": self.tried.is_complete, "events": rows}


def simulate_since(settings: Settings, numbers: Mapping[str, int], since: str) -> SimulatedSince:
    """`since` is a time as a person writes it, by the clock of the database."""
    engine = store_for(settings)
    begin = parse_time(since, StoreClock(engine)())
    with reading(engine) as connection:
        return SimulatedSince(begin.isoformat(), tried(connection, numbers, begin, settings))
