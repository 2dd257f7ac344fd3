"""Every question that jobs and people ask the dead store, at a thousand, a million and ten million messages.

Usage: scripts/bench rows [--rows N[,N]] [--groups N] [--rounds N] [--write] [--json FILE] [--database URL]
The messages are made by PostgreSQL, in bounded sets; 10,000,000 take 25 GB of disk. The server is a private one in /tmp
that ends with this command. It is volatile (fsync is off, which reading does not notice), and works without parallel
queries, so that a query has one process whose CPU time is its own. --database measures what is there and fills nothing.
All queries take turns, beside a plain one that counts to 1,000,000: what that one takes shows how busy the machine was.
--write keeps the figures of these numbers of messages in benchmarks/results/rows.json, beside those of others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from console_client import as_role, opened
from dead_rows import store_at
from many_rows import GROUPS, fill_many
from sections import queries_of
from sqlalchemy import text
from store_queries import GROUP, queries

from dlqbatch.console.app import Console
from dlqbatch.console.logins import logins_of
from dlqbatch.console.rights import Role
from dlqbatch.settings import load
from dlqbatch.store.engine import create_engine_for, keeping, reading
from scripts import services
from scripts.servers.postgres import PostgresCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from starlette.testclient import TestClient

KEPT: Final = Path(__file__).parent / "results" / "rows.json"
REFERENCE: Final = "the plain query beside"
SLOW: Final = 3_000.0
"""A query that takes so many milliseconds at first is asked five times."""
PAGES: Final = {
    "page Now": "/",
    "page Messages": "/messages",
    "page Messages, one status": "/messages?status=manual",
    "page Messages, one queue": "/messages?origin=queue-7",
    "page Messages, a pattern": "/messages?event=orders.created.3.%23&status=failed",
    "page Group": f"/groups/{GROUP}",
    "page Message": "/messages/700",
    "page Journal": "/journal",
    "page Actions": "/actions",
}


def pages(console: Console, browser: TestClient) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, place in PAGES.items():

        def show(place: str = place) -> None:
            console.snapshots.forget()  # or it would be the picture of up to 20 seconds ago
            answer = browser.get(place)
            if answer.status_code != 200:
                raise SystemExit(f"{place}: {answer.status_code}")

        yield name, show


class Backends:
    """The CPU time of the server's processes that answer this program."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._known: list[int] = []

    def look(self) -> None:
        found = self._connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' "
            "AND pid <> pg_backend_pid()"
        )
        self._known = [pid for (pid,) in found]

    def milliseconds(self) -> float:
        return sum(map(_on_cpu, self._known)) / 1e6


def _on_cpu(pid: int) -> int:
    """Nanoseconds; 0 of a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    except OSError:
        return 0


def measured(engine: Engine, url: str, rounds: int) -> dict[str, Any]:
    with engine.begin() as connection:
        name = engine.url.database
        connection.execute(text(f"ALTER DATABASE {name} SET max_parallel_workers_per_gather = 0"))
        # As if the newest message had arrived this second, however long ago the messages were made.
        now = connection.scalar(text("SELECT max(created_at) + interval '1 second' FROM dlq_messages"))
        number = connection.scalar(text("SELECT count(*) FROM dlq_messages"))
        pairs = connection.scalar(text("SELECT count(*) FROM dlq_counts WHERE scope_id <> 0"))
        size = connection.scalar(text("SELECT pg_database_size(current_database())"))
    engine = create_engine_for(url, connect_timeout=30, statement_timeout=600)
    settings = load({"database_url": url}, {"DLQBATCH_CONFIG": "/dev/null"})
    console = Console(settings, engine, logins_of(settings, "bench", Role.ADMIN))
    backends = Backends(url)
    began, loads = datetime.now(UTC), [os.getloadavg()[0]]
    seen: dict[str, list[tuple[float, float, float]]] = {}
    with keeping(engine), opened(console) as browser:
        as_role(browser, console, Role.ADMIN)
        asked = {REFERENCE: lambda: _reference(engine)} | queries(engine, now) | dict(pages(console, browser))
        first = {name: _timed(ask, backends) for name, ask in asked.items()}
        for round_ in range(rounds):
            for name, ask in asked.items():
                if sum(first[name][1:]) < SLOW or round_ < 5:
                    seen.setdefault(name, []).append(_timed(ask, backends))
            loads.append(os.getloadavg()[0])
            sys.stderr.write(f"{number:,} messages: round {round_ + 1} of {rounds}, load {loads[-1]:.1f}\n")
    return {
        "messages": number,
        "groups and queues": pairs,
        "bytes": size,
        "at": f"{began:%Y-%m-%d %H:%M}",
        "rounds": rounds,
        "load": [round(min(loads), 1), round(statistics.median(loads), 1), round(max(loads), 1)],
        "milliseconds": {name: _figures(each) for name, each in seen.items()},
    }


def _reference(engine: Engine) -> None:
    with reading(engine) as connection:
        connection.execute(text("SELECT count(*) FROM generate_series(1, 1000000)")).one()


def _timed(ask: Callable[[], Any], backends: Backends) -> tuple[float, float, float]:
    backends.look()
    server, ours, began = backends.milliseconds(), time.process_time(), time.perf_counter()
    ask()
    took = (time.perf_counter() - began) * 1_000
    return took, backends.milliseconds() - server, (time.process_time() - ours) * 1_000


def _figures(seen: list[tuple[float, float, float]]) -> dict[str, float]:
    took = sorted(each[0] for each in seen)
    return {
        "median": round(statistics.median(took), 1),
        "p95": round(took[min(len(took) - 1, int(len(took) * 0.95))], 1),
        "server": round(statistics.median(each[1] for each in seen), 1),
        "ours": round(statistics.median(each[2] for each in seen), 1),
    }


def filled(rows: int, groups: int, rounds: int) -> dict[str, Any]:
    with services.work_folder() as folder:
        server = PostgresCluster(folder / "postgres", fsync=False)
        try:
            server.launch()
            server.wait_ready()
            url = f"{server.url.rpartition('/')[0]}/rows"
            with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute("CREATE DATABASE rows")
            engine = store_at(url)
            fill_many(
                engine,
                rows,
                now=datetime.now(UTC),
                groups=groups,
                progress=lambda said: print(said, file=sys.stderr),
            )
            return measured(engine, url.replace("+psycopg", ""), rounds)
        finally:
            server.abandon()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000,1000000")
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--database", help="a store that fill_many has filled")
    options = parser.parse_args()
    if options.database:
        found = [measured(create_engine_for(options.database, connect_timeout=30), options.database, options.rounds)]
    else:
        found = [filled(int(rows), options.groups, options.rounds) for rows in options.rows.split(",")]
    sizes = {str(each["messages"]): each for each in found}
    print("\n".join(queries_of(sorted(sizes.values(), key=lambda each: each["messages"]))))
    for file, kept in ((options.json, {}), (KEPT if options.write else None, _kept())):
        if file is not None:
            file.write_text(json.dumps({"benchmark": "rows", "sizes": kept | sizes}, indent=1) + "\n", encoding="utf-8")
    return 0


def _kept() -> dict[str, Any]:
    return dict(json.loads(KEPT.read_text(encoding="utf-8"))["sizes"]) if KEPT.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
