"""A drain of a queue that is deep: its rate beside the limit's at the same depth, and its memory when it takes all.

Usage: scripts/bench depth [--depths N,…] [--messages N] [--rounds N] [--queue-type NAME] [--json FILE]
At each depth the limit and the drain take turns: each takes --messages off the front, and as many are put behind them.
At last a drain in a process of its own takes everything in one run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contenders
from contest import keep, machine, show, spread, summary, take_turns
from drain import DRAIN, EXCHANGE, KEY, LIMIT, PREFIX, SOURCE, TARGET, settings_for
from memory import drained, drainer, seen
from workload import connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import logs
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from contest import Sample, Turns
    from pika.adapters.blocking_connection import BlockingChannel


def turns_at(channel: BlockingChannel, url: str, depth: int, options: argparse.Namespace, folder: Path) -> Turns:
    """Of a queue that holds so many, and does again after each turn."""
    number = min(options.messages, depth)
    settings = settings_for(url, folder, messages=number, policy_rows=1000, queue_type=options.queue_type)
    quorum = options.queue_type == "quorum"
    way = (url, SOURCE, EXCHANGE, KEY, number, options.size)
    contend: dict[str, Callable[[], Sample]] = {
        LIMIT: partial(contenders.raw, *way, consuming=quorum),
        DRAIN: partial(contenders.drain, settings, number),
    }

    def turn(contender: Callable[[], Sample]) -> Sample:
        sample = contender()
        came = channel.queue_purge(TARGET).method.message_count
        if came != number:
            raise SystemExit(f"{number} messages were taken, and {came} came out")
        fill(channel, SOURCE, number, options.size, there=depth - number)
        return sample

    depths = list(map(int, options.depths.split(",")))
    left = len(depths) - depths.index(depth)
    return take_turns({name: partial(turn, each) for name, each in contend.items()}, options.rounds, courses_left=left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="10000,100000,1000000")
    parser.add_argument("--messages", type=int, default=50_000, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queue-type", default="classic", choices=["classic", "quorum"])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    url, api = os.environ[f"{PREFIX}BROKER_URL"], os.environ[f"{PREFIX}MANAGEMENT_URL"]
    logs.configure("warning")
    cases: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dlqbatch-bench-") as folder, connect(url) as connection:
        channel = connection.channel()
        apply_topology(settings_for(url, Path(folder), messages=1, policy_rows=1000, queue_type=options.queue_type))
        for depth in map(int, options.depths.split(",")):
            with drainer(channel, url, depth, options.queue_type, Path(folder)) as process:
                fill(channel, SOURCE, depth, options.size)
                turns = turns_at(channel, url, depth, options, Path(folder))
                title = f"{options.queue_type} queue of {depth:,} messages, {min(options.messages, depth):,} in a turn"
                about = {"queue_type": options.queue_type, "depth": depth, "messages": min(options.messages, depth)}
                cases[title] = {"of": DRAIN, **about, "contenders": summary(turns, DRAIN)}
                show(title, cases[title]["contenders"], DRAIN)
                found = drained(process, channel, depth)
            whole[f"{depth:,} messages"] = {"per_second": spread([found.per_second], 0), **seen([found])}
            print(f"  all in one run: {found.per_second:,.0f}/s, {found.over_idle_mb:.1f} MB over the idle process")
    contenders.remove_all(api)
    result = {"benchmark": "depth", "machine": machine(), "body_bytes": options.size, "cases": cases, "whole": whole}
    keep("depth", result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
