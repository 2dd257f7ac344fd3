"""The pages of the console over many dead messages: the time of the server, and the weight of each page.

Usage: scripts/bench console [--rows N] [--requests N] [--json FILE]
The rows are made by the database; then every page is asked for in turns. The database server is
DLQBATCH_TEST_DATABASE_URL, else a private one that ends with this command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from console_client import as_role, opened
from dead_rows import fill
from dead_store import database

from dlqbatch.console.app import Console
from dlqbatch.console.logins import logins_of
from dlqbatch.console.rights import Role
from dlqbatch.settings import load
from dlqbatch.store.engine import create_engine_for

GROUP = "0000000000000007"
_FILLS_WITHIN = 3_600.0
PAGES = {
    "Now": "/",
    "Messages": "/messages",
    "Messages, one status": "/messages?status=manual",
    "Messages, one queue": "/messages?origin=queue-7",
    "Messages, a pattern": "/messages?event=event-1%23&status=failed",
    "Messages, a text": "/messages?text=attempt+4711",
    "Message": "/messages/4711",
    "Group": f"/groups/{GROUP}",
    "Replays": "/plans",
    "Actions": "/actions",
    "Events": "/events",
    "Rules": "/rules",
    "Runs": "/runs",
    "Alerts": "/alerts",
    "Journal": "/journal",
    "Settings": "/settings",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with database() as engine:
        url = engine.url.render_as_string(hide_password=False)
        fill(create_engine_for(url, connect_timeout=30, statement_timeout=_FILLS_WITHIN), options.rows, due=1_000)
        settings = load({"database_url": url}, {"DLQBATCH_CONFIG": "/dev/null"})
        console = Console(settings, engine, logins_of(settings, "bench", Role.ADMIN))
        times: dict[str, list[float]] = {name: [] for name in PAGES}
        weights = {}
        with opened(console) as browser:
            as_role(browser, console, Role.ADMIN)
            for _ in range(options.requests):
                for name, place in PAGES.items():
                    began = time.perf_counter()
                    answer = browser.get(place)
                    times[name].append((time.perf_counter() - began) * 1_000)
                    if answer.status_code != 200:
                        raise SystemExit(f"{place}: {answer.status_code}")
                    weights[name] = len(answer.content)
    found = {
        name: {
            "p50": round(statistics.median(each), 1),
            "p95": round(sorted(each)[int(len(each) * 0.95) - 1], 1),
            "first": round(each[0], 1),
            "bytes": weights[name],
        }
        for name, each in times.items()
    }
    print(f"{options.rows:,} rows, {options.requests} requests for each page, in turns")
    for name, each in found.items():
        print(f"  {name:<24}p50 {each['p50']:>7} ms   p95 {each['p95']:>7} ms   {each['bytes'] / 1024:>6.1f} KiB")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
