"""The pages of the console over many dead messages: the time of the server, and the weight of each page.

Usage: scripts/bench console [--rows N] [--requests N] [--json FILE]
       scripts/bench console --open N [--seconds N]
The rows are made by the database; then every page is asked for in turns. The database server is
DLQBATCH_TEST_DATABASE_URL, else a private one that ends with this command.
With --open so many pages of a console of its own listen to what is live, for an hour or --seconds, while every page is
asked for in turns; printed are the console's memory and the transactions at the database. It fails if the memory
grows by a tenth after the first fifth of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2
from sqlalchemy import text

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from console_client import as_role, opened
from dead_rows import fill
from dead_store import database
from program import HANDLER, Program, environment

from dlqbatch.console.app import Console
from dlqbatch.console.logins import logins_of
from dlqbatch.console.rights import Role
from dlqbatch.settings import load
from dlqbatch.store.engine import create_engine_for

if TYPE_CHECKING:
    from sqlalchemy import Engine

GROUP = "0000000000000007"
_SHOWN = 10
_GROWS = 1.1
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
    parser.add_argument("--open", type=int)
    parser.add_argument("--seconds", type=float, default=3_600.0)
    options = parser.parse_args()
    if options.open:
        with database() as engine:
            return stay_open(engine, options.open, options.seconds)
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


def stay_open(engine: Engine, pages: int, seconds: float) -> int:
    fill(engine, 1_000, due=10)
    url = engine.url.render_as_string(hide_password=False)
    program = Program({"database_url": url, "console_address": "127.0.0.1:0"}, (sys.executable, HANDLER))
    process = subprocess.Popen(
        [*program.command, "console", "--json"], env=environment(**program.settings), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        with httpx2.Client(timeout=60) as browser:
            browser.get(said["open"])
            cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
            return _watch(engine, process.pid, browser, said["address"], cookie, pages, seconds)
    finally:
        process.terminate()
        process.wait()


def _watch(
    engine: Engine, pid: int, browser: httpx2.Client, address: str, cookie: str, pages: int, seconds: float
) -> int:
    streams = [_listen(address, cookie) for _ in range(pages)]
    began, requests, sizes = time.monotonic(), 0, []
    print(f"{pages:,} open pages, {seconds:g} s; load {os.getloadavg()[0]:.1f}")
    for place in range(1, _SHOWN + 1):
        before, since = _transactions(engine), time.monotonic()
        while time.monotonic() - began < seconds * place / _SHOWN:
            for page in PAGES.values():
                browser.get(address + page)
                requests += 1
            streams = [each if _is_alive(each) else _listen(address, cookie) for each in streams]
        sizes.append(_megabytes(pid))
        rate = (_transactions(engine) - before) / (time.monotonic() - since)
        print(f"  {requests:>8,} requests   {sizes[-1]:>6.1f} MB   {rate:>6.1f} transactions a second", flush=True)
    for each in streams:
        each.close()
    return int(sizes[-1] > sizes[_SHOWN // 5 - 1] * _GROWS)


def _listen(address: str, cookie: str) -> socket.socket:
    """A page that listens; what it is sent is read when somebody looks whether it is still open."""
    host, port = urlsplit(address).netloc.split(":")
    stream = socket.create_connection((host, int(port)), timeout=60)
    stream.sendall(f"GET /live/now HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\n\r\n".encode())
    stream.setblocking(False)
    return stream


def _is_alive(stream: socket.socket) -> bool:
    try:
        while said := stream.recv(65_536):
            if said.endswith(b"0\r\n\r\n"):
                break
    except BlockingIOError:
        return True
    stream.close()
    return False


def _transactions(engine: Engine) -> int:
    with engine.connect() as connection:
        query = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        return int(connection.execute(query).scalar_one())


def _megabytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main())
