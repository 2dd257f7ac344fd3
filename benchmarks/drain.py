"""The drain beside a naive loop, the shovel plugin and the limit: same messages, same broker, taking turns.

Usage: scripts/bench drain [--queue-type classic|quorum] [--sizes BYTES,…] [--depths N,…] [--policy-rows N,…]
                           [--rounds N] [--messages N] [--naive-messages N] [--bytes N] [--without NAME,…]
                           [--json FILE] [--release 4.3] (another RabbitMQ than the installed one)
                           [--require N] (exit 1 if the drain is not so many times as fast as the naive loop)
The drain does its whole work: a policy of 1,000 rows, all headers, a report. The limit and the shovel do none of it.
With large bodies there are fewer messages in a turn, so that all of them are at most --bytes.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contenders
from contest import Turns, broker_process, busy, keep, machine, show, summary, take_turns
from workload import EVENTS, connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import logs
from dlqbatch.broker.transfer import MEMORY, WINDOW
from dlqbatch.settings import Settings, load
from dlqbatch.store import migrate
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from contest import Sample

SOURCE, TARGET = "retry-queue", "queue.delay.1"
EXCHANGE, KEY = "route-delay", "binding.orders.1"
NAIVE, SHOVEL, LIMIT, DRAIN = "naive loop", "shovel plugin", "limit", "dlqbatch drain"
CONSUMING = "limit, consuming"
"""The same limit with a consumer in place of gets: what a client could win by that on a classic queue."""
BOUNDED = "limit, in as much memory"
"""The same limit with no more bodies under way than the drain's memory holds, where that is fewer messages."""
SHORT = {NAIVE: "naive", SHOVEL: "shovel", LIMIT: "limit", CONSUMING: "consuming", BOUNDED: "bounded", DRAIN: "drain"}
PREFIX = "DLQBATCH_TEST_"
OF_A_WARM_UP = 10
"""One of so many messages of a turn."""


def settings_for(url: str, folder: Path, *, messages: int, policy_rows: int, queue_type: str) -> Settings:
    settings = load(
        {
            "broker_url": url,
            "database_url": f"sqlite:///{folder / f'policy-{policy_rows}.sqlite3'}",
            "max_messages": str(messages),
            "max_bytes": "64GiB",
            "max_seconds": "600",
            "tier_ttls": "1h,2h,3h",
            "queue_type": queue_type,
            "log_level": "warning",
        },
        environ={"DLQBATCH_CONFIG": str(Path(__file__).parent / "benchmark.properties")},
    )
    write_policy(settings, policy_rows)
    return settings


def write_policy(settings: Settings, rows: int) -> None:
    """One event in ten is a pattern; those of the messages are among them."""
    migrate.upgrade(settings.database_url.get_secret_value())
    names = [*EVENTS, *(f"event.{n}" + (".#" if n % 10 == 0 else "") for n in range(max(rows - len(EVENTS), 0)))]
    path = settings.database_url.get_secret_value().removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        if not connection.execute("SELECT count(*) FROM dlq_event_config").fetchone()[0]:
            connection.executemany(
                "INSERT INTO dlq_event_config (id, name, max_retries) VALUES (?, ?, 3)", list(enumerate(names, 1))
            )
    connection.close()


class Course:
    """One case: the queue filled anew before every turn, the target emptied after it."""

    def __init__(self, url: str, api: str, settings: Settings, size: int, options: argparse.Namespace) -> None:
        self.url, self.api, self.settings, self.size = url, api, settings, size
        self.number = settings.max_messages
        self.naive_number = min(options.naive_messages, self.number)
        self.quorum = settings.queue_type == "quorum"
        self.without = set(options.without.split(","))
        self.rounds = options.rounds
        self.broker = broker_process(url)

    def run(self, courses_left: int) -> Turns:
        apply_topology(self.settings)
        few = max(self.number // OF_A_WARM_UP, 1)
        try:
            return take_turns(
                self._contenders(self.number, self.naive_number),
                self.rounds,
                self._contenders(few, min(self.naive_number, few)),
                courses_left,
            )
        finally:
            contenders.remove_all(self.api)

    def _contenders(self, number: int, naive_number: int) -> dict[str, Callable[[], Sample]]:
        way = (self.url, SOURCE, EXCHANGE, KEY)
        everyone: dict[str, Callable[[], Sample]] = {
            NAIVE: self._on(naive_number, partial(contenders.naive, *way, naive_number)),
            SHOVEL: self._on(
                number, partial(contenders.shovel, self.api, self.url, SOURCE, EXCHANGE, KEY, TARGET, number)
            ),
            LIMIT: self._on(number, partial(contenders.raw, *way, number, self.size, consuming=self.quorum)),
            CONSUMING: self._on(number, partial(contenders.raw, *way, number, self.size, consuming=True)),
            BOUNDED: self._on(
                number,
                partial(
                    contenders.raw, *way, number, self.size, consuming=self.quorum, window=max(MEMORY // self.size, 1)
                ),
            ),
            DRAIN: self._on(number, partial(contenders.drain, self.settings, number)),
        }
        if self.quorum:
            del everyone[CONSUMING]  # there the limit consumes anyway
        if MEMORY // self.size >= WINDOW:
            del everyone[BOUNDED]
        return {name: contend for name, contend in everyone.items() if SHORT[name] not in self.without}

    def _on(self, number: int, contend: Callable[[], Sample]) -> Callable[[], Sample]:
        def turn() -> Sample:
            with connect(self.url) as connection:
                channel = connection.channel()
                fill(channel, SOURCE, number, self.size)
                before = busy(self.broker)
                sample = contend()
                sample = replace(sample, broker_microseconds=(busy(self.broker) - before) / number * 1e6)
                came = channel.queue_purge(TARGET).method.message_count
            if came != number:
                raise SystemExit(f"{number} messages went in, and {came} came out")
            return sample

        return turn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue-type", default="classic", choices=["classic", "quorum"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--naive-messages", type=int, default=3_000)
    parser.add_argument("--sizes", default="1024")
    parser.add_argument("--depths", default="")
    parser.add_argument("--policy-rows", default="1000")
    parser.add_argument("--bytes", type=int, default=1 << 40, help="of all bodies of a turn")
    parser.add_argument("--without", default="", help="naive, shovel, limit, consuming, bounded")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--require", type=float, help="exit 1 if the median ratio to the naive loop is below")
    options = parser.parse_args()
    url, api = os.environ[f"{PREFIX}BROKER_URL"], os.environ[f"{PREFIX}MANAGEMENT_URL"]
    logs.configure("warning")
    wanted = [
        (size, min(depth, max(options.bytes // size, 1)), rows)
        for size in map(int, options.sizes.split(","))
        for depth in map(int, (options.depths or str(options.messages)).split(","))
        for rows in map(int, options.policy_rows.split(","))
    ]
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dlqbatch-bench-") as folder:
        for number, (size, depth, rows) in enumerate(wanted):
            settings = settings_for(url, Path(folder), messages=depth, policy_rows=rows, queue_type=options.queue_type)
            title = f"{options.queue_type} queues, {depth:,} messages of {size:,} bytes, {rows:,} events"
            turns = Course(url, api, settings, size, options).run(len(wanted) - number)
            about = {"queue_type": options.queue_type, "messages": depth, "body_bytes": size, "events": rows}
            cases[title] = {"of": DRAIN, **about, "contenders": summary(turns, DRAIN)}
            show(title, cases[title]["contenders"], DRAIN)
    name = "drain" if options.queue_type == "classic" else "drain-quorum"
    keep(name, {"benchmark": "drain", "machine": machine(), "cases": cases}, options.json)
    if options.require is None:
        return 0
    ratios = [case["contenders"][NAIVE]["ratio"]["median"] for case in cases.values()]
    return int(min(ratios) < options.require)


if __name__ == "__main__":
    sys.exit(main())
