"""What the jobs and people ask the dead store, with few rows and with many, on PostgreSQL.

Usage: scripts/bench dead_store [--rows N[,N]] [--rounds N] [--json FILE] [--require FACTOR]
The rows have the proportions of a store that has been in use for long; 10,000,000 of them take 25 GB of disk.
The database server is DLQBATCH_TEST_DATABASE_URL, else a private one that ends with this command.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from dead_rows import NOW, add, row, store_at
from many_rows import fill_many

from dlqbatch.groups.inbox import inbox
from dlqbatch.lifecycle.leases import claim, give_back, take_over
from dlqbatch.lifecycle.strategy import Back
from dlqbatch.messages.queries import find, groups
from dlqbatch.monitor.measure import arrivals_by_hour
from dlqbatch.monitor.measure import measure as figures_of_store
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.store.count_changes import merge
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters, Place
from dlqbatch.store.states import Status
from scripts import services

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

FEW = 1_000
DAYS = timedelta(days=90)
LATER = NOW + timedelta(hours=2)


@contextmanager
def database() -> Iterator[Engine]:
    given = os.environ.get("DLQBATCH_TEST_DATABASE_URL")
    if given is None:
        with services.private_servers(rabbitmq=False, postgres=True) as addresses:
            yield store_at(addresses["DATABASE_URL"])
        return
    server, name = given.replace("+psycopg", ""), f"bench_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield store_at(f"{server.rpartition('/')[0]}/{name}")
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def milliseconds(query: Callable[[], Any], rounds: int) -> float:
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        query()
        took.append(time.perf_counter() - started)
    return round(statistics.median(took) * 1000, 1)


def claim_full(engine: Engine) -> None:
    """A claim of 20, and what was claimed given back, which another figure would meet as processing."""
    rows = claim(engine, "benchmark", LATER, limit=20)
    if len(rows) != 20:
        raise SystemExit(f"a claim found {len(rows)} due rows")
    give_back(engine, {each.row_id: Back(each.token, Status.PENDING, "", LATER) for each in rows}, LATER)


def measure(engine: Engine, rows: int, rounds: int) -> dict[str, float]:
    started = time.perf_counter()
    fill_many(engine, rows)
    merge(engine, seconds=60)  # as a monitor does
    figures = {"fill, s": round(time.perf_counter() - started, 1)}

    def ask(query: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        def run() -> None:
            with reading(engine) as connection:
                query(connection, *arguments)

        return run

    before = NOW - DAYS / 2
    overdue = dict.fromkeys((Status.RESOLVED, Status.FAILED, Status.ARCHIVED), NOW - DAYS)
    for name, query in {
        "claim of 20, and back": lambda: claim_full(engine),
        "claim, nothing due": lambda: claim(engine, "benchmark", NOW - DAYS),
        "arrival of 100": lambda: add(engine, *(row() for _ in range(100))),
        "look for ended leases": lambda: take_over(engine, "benchmark", NOW),
        "list": ask(find, Filters()),
        "list far behind": ask(find, Filters(), 50, Place(before, 0)),
        "list by status": ask(find, Filters(statuses=(Status.FAILED,))),
        "list by event": ask(find, Filters.parse(event="orders.created.3")),
        "list by origin and status": ask(find, Filters.parse(origin="queue-30", statuses=(Status.MANUAL,))),
        "text that is nowhere": ask(find, Filters.parse(text="nowhere")),
        "groups": ask(groups, Filters()),
        "groups by queue": lambda: inbox(engine, Filters(), now=NOW),
        "groups of failed": ask(groups, Filters(statuses=(Status.FAILED,))),
        "groups by event": ask(groups, Filters.parse(event="orders.created.3")),
        "groups since": ask(groups, Filters(since=before)),
        "figures of status and monitor": ask(figures_of_store, NOW, overdue),
        "arrivals of 24 hours": ask(arrivals_by_hour, NOW),
        "plan of 10,000": lambda: plan(engine, Selection(everything=True, limit=10_000)),
        "plan of a group": lambda: plan(engine, Selection(Filters.parse(group="0" * 15 + "7"))),
    }.items():
        figures[name] = milliseconds(query, rounds)
        print(f"{rows:>12,} {name:32} {figures[name]:10,.1f} ms", file=sys.stderr)
    return figures


def plan(engine: Engine, selection: Selection) -> None:
    freeze(engine, selection, actor="benchmark", reason="benchmark", now=NOW, dry_run=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000000")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--require", type=float, help="fail if a claim takes more than so many times as long")
    options = parser.parse_args()
    with database() as engine:
        sizes = [FEW, *map(int, options.rows.split(","))]
        found = {rows: measure(engine, rows, options.rounds) for rows in sizes}
    print(f"{'ms, median':24}" + "".join(f"{rows:>14,}" for rows in found))
    for name in found[FEW]:
        print(f"{name:24}" + "".join(f"{figures[name]:14}" for figures in found.values()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    factor = found[sizes[-1]]["claim of 20, and back"] / found[FEW]["claim of 20, and back"]
    print(f"A claim takes {factor:.2f} times as long.")
    return int(options.require is not None and factor > options.require)


if __name__ == "__main__":
    sys.exit(main())
