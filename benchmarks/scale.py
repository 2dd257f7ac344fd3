"""Many drains and many retry queues: what a consistent-hash exchange in front of several retry queues brings.

Usage: scripts/bench scale [--rounds N] [--messages N] [--shapes 1x1,1x4,4x4] [--types classic,quorum] [--size BYTES]
                           [--json FILE] [--write [PAGE]]
A shape is the number of retry queues and the number of drains on all of them. The failures come through one exchange,
which spreads them by their message_id. The shapes take turns in each round, so that a busy minute is everybody's; the
load of the machine is written down. --write puts the results into docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pika
from contest import broker_process, busy
from page import machine, put, sentence, table
from scaling import depth, drains, expect, settings_for
from workload import connect, properties

from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    import subprocess

    import psutil
    from pika.adapters.blocking_connection import BlockingChannel

PAGE: Final = Path(__file__).parent.parent / "docs" / "scale.md"
SHARDS: Final = "retry-shards"
PATIENCE: Final = 60.0
"""Seconds for the last confirmed message to be counted by its queue."""
NAMES: Final = ("retry_exchange", "retry_queue", "delay_exchange", "delay_queue", "dlq_exchange", "dlq_queue")


class Shape(NamedTuple):
    kind: str
    queues: int
    drains: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.queues} x {self.drains}"


def names(kind: str, shard: int) -> dict[str, str]:
    """The settings of one retry queue and its delays."""
    return {name: f"{kind}-{shard}-{name.replace('_', '-')}" for name in NAMES} | {"queue_type": kind}


def declare(channel: BlockingChannel, url: str, shape: Shape) -> str:
    """The exchange whose retry queues are those of a shape."""
    exchange = f"{SHARDS}-{shape.kind}-{shape.queues}"
    channel.exchange_declare(exchange, "x-consistent-hash", durable=True, arguments={"hash-property": "message_id"})
    for shard in range(shape.queues):
        settings = settings_for(url, 1, names(shape.kind, shard))
        apply_topology(settings)
        channel.queue_bind(settings.retry_queue, exchange, "1")  # of the same weight
    return exchange


def once(
    channel: BlockingChannel,
    broker: psutil.Process,
    exchange: str,
    shape: Shape,
    workers: list[subprocess.Popen[str]],
    options: argparse.Namespace,
) -> dict[str, float]:
    """All messages through the drains of a shape; every one of them has to be there afterwards, once."""
    body = b"x" * options.size
    for number in range(options.messages):
        channel.basic_publish(exchange, "failed", body, properties(number))
    queues = [names(shape.kind, shard) for shard in range(shape.queues)]
    arrived, deadline = 0, time.monotonic() + PATIENCE
    while arrived != options.messages and time.monotonic() < deadline:
        arrived = sum(depth(channel, queue["retry_queue"], 0, seconds=0) for queue in queues)
    before, began = busy(broker), time.time()
    for each in workers:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    told = [json.loads(expect(each)) for each in workers]
    elapsed, of_broker = max(each["ended"] for each in told) - began, busy(broker) - before
    moved = sum(each["delayed"] for each in told)
    there = sum(int(channel.queue_purge(f"{queue['delay_queue']}.1").method.message_count) for queue in queues)
    if (arrived, moved, there) != (options.messages,) * 3:
        raise SystemExit(f"{shape}: {options.messages} went in; {arrived} arrived, {moved} moved, {there} came out")
    return {
        "per_second": options.messages / elapsed,
        "drain_microseconds": sum(each["cpu"] for each in told) / options.messages * 1e6,
        "broker_microseconds": of_broker / options.messages * 1e6,
        "load": os.getloadavg()[0],
    }


def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    connection = connect(url)
    channel, broker = connection.channel(), broker_process(url)
    version = connection._impl.server_properties["version"]  # noqa: SLF001  (pika shows it nowhere else)
    shapes = [Shape(kind, *shape) for kind in options.types for shape in options.shapes]
    rounds: dict[Shape, list[dict[str, float]]] = {shape: [] for shape in shapes}
    with ExitStack() as stack:
        exchanges = {shape: declare(channel, url, shape) for shape in shapes}
        processes = {
            shape: [
                process
                for number in range(shape.drains)
                for process in stack.enter_context(
                    drains(1, url, options.messages, names(shape.kind, number % shape.queues))
                )
            ]
            for shape in shapes
        }
        for turn in range(options.rounds):
            for shape in random.sample(shapes, len(shapes)):
                found = once(channel, broker, exchanges[shape], shape, processes[shape], options)
                rounds[shape].append(found)
                sys.stderr.write(f"round {turn + 1}: {shape}: {found['per_second']:,.0f}/s\n")
    connection.close()
    medians = {
        str(shape): {name: round(statistics.median(each[name] for each in told), 2) for name in told[0]}
        for shape, told in rounds.items()
    }
    loads = [each["load"] for told in rounds.values() for each in told]
    return {
        "benchmark": "scale",
        **machine(RabbitMQ=version, pika=pika.__version__),
        "messages": options.messages,
        "body_bytes": options.size,
        "rounds": options.rounds,
        "shapes": medians,
        "load": [round(min(loads), 1), round(max(loads), 1)],
    }


def shown(result: dict[str, Any]) -> list[str]:
    ones = {name.partition(",")[0]: each["per_second"] for name, each in reversed(result["shapes"].items())}
    rows = [
        (
            name,
            f"{each['per_second']:,.0f}",
            f"{each['per_second'] / ones[name.partition(',')[0]]:.2f}",
            f"{each['drain_microseconds']:.0f} µs",
            f"{each['broker_microseconds']:.0f} µs",
        )
        for name, each in result["shapes"].items()
    ]
    about = {name: result[name] for name in ("date", "machine", "python", "RabbitMQ", "pika")}
    how = (
        f"{result['messages']:,} messages of {result['body_bytes']:,} bytes, medians of {result['rounds']} rounds at a "
        f"load of {result['load'][0]} to {result['load'][1]}; none lost and none doubled."
    )
    head = ("retry queues x drains", "messages a second", "against the first", "CPU per message: drain", "broker")
    return [f"{sentence(about)}.", how, "", *table(head, rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument(
        "--shapes",
        type=lambda text: [tuple(map(int, each.split("x"))) for each in text.split(",")],
        default=[(1, 1), (1, 2), (2, 2), (1, 4), (4, 4)],
    )
    parser.add_argument("--types", type=lambda text: text.split(","), default=["classic", "quorum"])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, metavar="PAGE")
    options = parser.parse_args()
    result = measure(options, os.environ["DLQBATCH_TEST_BROKER_URL"])
    lines = shown(result)
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.write:
        put("scale", lines, options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
