"""A drain with a policy of few events and of many: its rate once the policy is loaded, and how long loading takes.

Usage: scripts/bench policies [--rows N,…] [--messages N] [--rounds N] [--size BYTES] [--json FILE]
One event in ten is a pattern, and every message has a routing key of its own that only a pattern matches, so that no
answer can be remembered. The drains read their policy from SQLite; loading is measured from PostgreSQL as well.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import contenders
import jobs
import psycopg
from contest import Sample, keep, machine, show, spread, summary, take_turns
from drain import PREFIX, SOURCE, TARGET, settings_for
from workload import connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import logs
from dlqbatch.drain import job as wiring_of_drain
from dlqbatch.drain.event_config import load_policy
from dlqbatch.store import migrate
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlqbatch.drain.event_policy import Policy
    from dlqbatch.settings import Settings

PATTERN: Final = "*.orders.created"
"""What decides about every message."""
INSERT: Final = "INSERT INTO dlq_event_config (id, name, max_retries) VALUES ({0}, {0}, 3)"


def rows_of(number: int) -> list[tuple[int, str]]:
    """Ids and names; one in ten is a pattern."""
    others = (f"area-{each}.{'#' if each % 10 == 0 else 'orders.deleted'}" for each in range(1, number))
    return list(enumerate([PATTERN, *others], 1))


def into_sqlite(settings: Settings, rows: Sequence[tuple[int, str]]) -> None:
    connection = sqlite3.connect(settings.database_url.get_secret_value().removeprefix("sqlite:///"))
    with connection:
        connection.execute("DELETE FROM dlq_event_config")
        connection.executemany(INSERT.format("?"), rows)
    connection.close()


def into_postgresql(url: str, rows: Sequence[tuple[int, str]]) -> None:
    migrate.upgrade(url)
    with psycopg.connect(jobs.plain(url)) as connection:
        connection.cursor().executemany(INSERT.format("%s").encode(), rows)


@contextmanager
def timed_loading() -> Iterator[list[float]]:
    """How long each run took to load its policy."""
    took: list[float] = []

    def load(settings: Settings) -> Policy:
        began = time.perf_counter()
        policy = load_policy(settings)
        took.append(time.perf_counter() - began)
        return policy

    with mock.patch.object(wiring_of_drain, "load_policy", load):
        yield took


class Course:
    """Drains that differ in their policy alone."""

    def __init__(self, url: str, options: argparse.Namespace, folder: Path) -> None:
        self.url, self.folder, self.number, self.size = url, folder, options.messages, options.size
        self.keys = [f"shop-{number}.orders.created" for number in range(self.number)]
        self.loading: dict[str, list[float]] = {}

    def settings(self, rows: int) -> Settings:
        found = settings_for(self.url, self.folder, messages=self.number, policy_rows=rows, queue_type="classic")
        into_sqlite(found, rows_of(rows))
        return found

    def turn(self, title: str, settings: Settings) -> Sample:
        with connect(self.url) as connection:
            channel = connection.channel()
            fill(channel, SOURCE, self.number, self.size, events=self.keys)
            with timed_loading() as took:
                sample = contenders.drain(settings, self.number)
            channel.queue_purge(TARGET)
        self.loading.setdefault(title, []).append(took[0])
        return Sample(self.number / (self.number / sample.per_second - took[0]))


def loading_from_postgresql(settings: Settings, rows: int, rounds: int) -> list[float]:
    took = []
    with jobs.server_of_databases() as server, jobs.database(server) as url:
        into_postgresql(url, rows_of(rows))
        there = settings.model_copy(update={"database_url": type(settings.database_url)(url)})
        for turn in range(rounds + 1):
            began = time.perf_counter()
            load_policy(there)
            if turn:
                took.append(time.perf_counter() - began)
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10,1000,100000")
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    url, api = os.environ[f"{PREFIX}BROKER_URL"], os.environ[f"{PREFIX}MANAGEMENT_URL"]
    logs.configure("warning")
    numbers = list(map(int, options.rows.split(",")))
    titles = {rows: f"{rows:,} events" for rows in numbers}
    with tempfile.TemporaryDirectory(prefix="dlqbatch-bench-") as folder:
        course = Course(url, options, Path(folder))
        settings = {rows: course.settings(rows) for rows in numbers}
        apply_topology(settings[numbers[0]])
        turns = take_turns(
            {titles[rows]: partial(course.turn, titles[rows], settings[rows]) for rows in numbers}, options.rounds
        )
        from_postgresql = loading_from_postgresql(settings[numbers[0]], numbers[-1], options.rounds)
    contenders.remove_all(api)
    of = titles[numbers[-1]]
    loading: dict[str, Any] = {f"{title}, SQLite": spread(took[1:], 4) for title, took in course.loading.items()}
    loading[f"{of}, PostgreSQL"] = spread(from_postgresql, 4)
    title = f"{options.messages:,} messages with as many routing keys, after loading"
    case = {"of": of, "messages": options.messages, "contenders": summary(turns, of)}
    show(title, case["contenders"], of)
    for what, took in loading.items():
        print(f"  loading {what}: {took['median']:.3f} s ({took['least']:.3f} to {took['most']:.3f})")
    keep("policies", {"benchmark": "policies", "machine": machine(), "cases": {title: case}, "loading": loading},
         options.json)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
