"""The dead store's claim and lists with few rows and with many, on PostgreSQL.

Usage: scripts/bench dead_store [--rows N] [--rounds N] [--json FILE] [--require FACTOR]
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from dead_rows import NOW, add, fill, row, store_at
from sqlalchemy import text

from dlqbatch.lifecycle.leases import claim
from dlqbatch.messages.queries import find, groups
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, Place
from dlqbatch.store.states import Status
from scripts import services

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

FEW = 1_000


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
    if len(claim(engine, "benchmark", NOW, limit=100)) != 100:
        raise SystemExit("a claim found fewer than 100 due rows")


def measure(engine: Engine, rows: int, rounds: int) -> dict[str, float]:
    with writing(engine) as connection:
        connection.execute(text("TRUNCATE dlq_messages CASCADE"))
    started = time.perf_counter()
    fill(engine, rows, due=min(rows, FEW))
    figures = {"fill, s": round(time.perf_counter() - started, 1)}
    figures["claim of 100"] = milliseconds(lambda: claim_full(engine), min(rounds, FEW // 100 - 1))
    figures["claim, nothing due"] = milliseconds(
        lambda: claim(engine, "benchmark", NOW - NOW.resolution * 10**15), rounds
    )
    figures["arrival of 100"] = milliseconds(lambda: add(engine, *(row() for _ in range(100))), rounds)

    def ask(query: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        def run() -> None:
            with reading(engine) as connection:
                query(connection, *arguments)

        return run

    for name, query in {
        "list": ask(find, Filters()),
        "list far behind": ask(find, Filters(), 50, Place(NOW - NOW.resolution * 10**6 * rows // 2, 0)),
        "list by status": ask(find, Filters(statuses=(Status.FAILED,))),
        "list by event": ask(find, Filters.parse(event="event-3")),
        "text that is nowhere": ask(find, Filters.parse(text="nowhere")),
        "event and text": ask(find, Filters.parse(event="event-3", text="nowhere")),
        "groups": ask(groups, Filters()),
        "groups of failed": ask(groups, Filters(statuses=(Status.FAILED,))),
        "groups by event": ask(groups, Filters.parse(event="event-3")),
        "groups since": ask(groups, Filters(since=NOW - NOW.resolution * 10**6 * rows // 2)),
    }.items():
        figures[name] = milliseconds(query, max(1, rounds // 3))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--require", type=float, help="fail if a claim takes more than so many times as long")
    options = parser.parse_args()
    with database() as engine:
        found = {rows: measure(engine, rows, options.rounds) for rows in (FEW, options.rows)}
    print(f"{'ms, median':24}" + "".join(f"{rows:>14,}" for rows in found))
    for name in found[FEW]:
        print(f"{name:24}" + "".join(f"{figures[name]:14}" for figures in found.values()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    factor = found[options.rows]["claim of 100"] / found[FEW]["claim of 100"]
    print(f"A claim takes {factor:.2f} times as long.")
    return int(options.require is not None and factor > options.require)


if __name__ == "__main__":
    sys.exit(main())
