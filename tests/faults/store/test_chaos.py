"""A quarter of a minute of what `scripts/endurance chaos` does for ten minutes, on each database."""

from __future__ import annotations

import secrets
import sys

import pytest
from endurance.chaos import chaos

SECONDS = 15.0


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_with_runs_replays_people_and_kills_at_once_no_message_is_lost_or_left_half_done(
    request: pytest.FixtureRequest, broker_url: str, database: str
) -> None:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[database]))
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
    found = chaos(broker_url, url, SECONDS, seed)
    sys.stdout.write(f"{found}\n")
    assert found["problems"] == []
    assert found["published"] > 0
