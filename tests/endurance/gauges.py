"""What must not grow: measured again and again, and judged by a straight line through the second half."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import psutil
import psycopg
from endurance.faults import rss_of
from endurance.world import temporary_files

from scripts.servers.management import ManagementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from endurance.world import World

MEBIBYTE = 1024 * 1024
ALLOWED = {
    "memory": 3.0 * MEBIBYTE,
    "threads": 3.0,
    "descriptors": 6.0,
    "connections": 4.0,
    "channels": 8.0,
    "sessions": 4.0,
    "locks": 60.0,
    "temporary_files": 4.0,
}
"""Growth over the second half that is no growth: what is at work at the first and at the last look differs."""
ODD = {
    "processing, and its lease is long over": (
        (
            "status = 'processing' AND lease_until < now() - interval '60 s' AND NOT EXISTS "
            "(SELECT FROM dlq_attempts a WHERE a.message_id = dlq_messages.id "
            "AND a.closed_at IS NULL AND a.sent_at IS NOT NULL)"
        ),
        "dlq_messages",
    ),
    "locked, and not processing": ("lock_token IS NOT NULL AND status <> 'processing'", "dlq_messages"),
    "pending without a time": ("status = 'pending' AND next_retry_at IS NULL AND NOT is_due", "dlq_messages"),
    "reserved by no plan": (
        "plan_id IS NOT NULL AND NOT EXISTS (SELECT FROM dlq_plans p WHERE p.id = plan_id)",
        "dlq_messages",
    ),
    "an open attempt of a row that is over": (
        "closed_at IS NULL AND message_id IN (SELECT id FROM dlq_messages WHERE status IN ('resolved', 'archived'))",
        "dlq_attempts",
    ),
}


class Sample(NamedTuple):
    at: float
    values: dict[str, float]


def look(world: World, at: float) -> Sample:
    """Without what cannot be asked at this moment: the broker may be starting."""
    values: dict[str, float] = {}
    with suppress(psutil.NoSuchProcess, OSError):
        process = psutil.Process(world.pid)
        values["memory"] = rss_of(world.pid)
        values["threads"] = process.num_threads()
        values["descriptors"] = process.num_fds()
    with suppress(ManagementError, OSError):
        connections = world.connections()
        values["connections"] = len(connections)
        values["channels"] = sum(one.get("channels", 0) for one in connections)
    with suppress(psycopg.OperationalError), psycopg.connect(world.database, autocommit=True) as connection:
        ours = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        values["sessions"] = _count(connection, f"SELECT count(*) FROM pg_stat_activity WHERE {ours}")
        values["locks"] = _count(
            connection,
            f"SELECT count(*) FROM pg_locks WHERE pid IN (SELECT pid FROM pg_stat_activity WHERE {ours})",
        )
    values["temporary_files"] = temporary_files(world.temporary)
    return Sample(at, values)


def odd_rows(world: World) -> dict[str, int]:
    with psycopg.connect(world.database, autocommit=True) as connection:
        found = {
            name: _count(connection, f"SELECT count(*) FROM {table} WHERE {condition}")
            for name, (condition, table) in ODD.items()
        }
    return {name: number for name, number in found.items() if number}


def _count(connection: psycopg.Connection, question: str) -> int:
    found = connection.execute(question).fetchone()  # type: ignore[call-overload]
    return int(found[0]) if found else 0


class Growth(NamedTuple):
    first: float
    last: float
    """Where the line through the second half begins and ends."""
    most: float
    allowed: float

    @property
    def is_kept(self) -> bool:
        return self.last - self.first <= self.allowed


def growth(samples: Sequence[Sample], name: str) -> Growth:
    half = samples[-1].at / 2 if samples else 0.0
    points = [(one.at, one.values[name]) for one in samples if one.at >= half and name in one.values]
    most = max((one.values[name] for one in samples if name in one.values), default=0.0)
    if len(points) < 3:
        return Growth(most, most, most, ALLOWED[name])
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return Growth(
        mean_y + slope * (points[0][0] - mean_x), mean_y + slope * (points[-1][0] - mean_x), most, ALLOWED[name]
    )
