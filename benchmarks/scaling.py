"""1, 2 and 4 drains at once on the same queue: how many messages a second all of them move, and at what cost.

Usage: scripts/bench scaling [--rounds N] [--messages N] [--drains 1,2,4] [--size BYTES] [--json FILE] [--write PAGE]
Each drain is a process that is warm already, as a scheduler's or a function's is. The numbers of drains take turns in
each round, so that a busy minute of the machine is everybody's. --write puts the results between the marks of a page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pika
from contest import broker_process, busy, keep
from contest import machine as about_machine
from page import machine, put, sentence, table
from workload import connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import jobs, logs
from dlqbatch.settings import Settings, load
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import psutil
    from pika.adapters.blocking_connection import BlockingChannel

SOURCE: Final = "retry-queue"
DELAYED: Final = "queue.delay.1"


def settings_for(url: str, messages: int, names: Mapping[str, str] | None = None) -> Settings:
    """`names` are settings of other queues than the usual ones."""
    return load(
        {
            "broker_url": url,
            "database_url": "sqlite:////nonexistent/dlqbatch.sqlite3",
            "allow_empty_policy": "true",
            "max_messages": str(messages),
            "tier_ttls": "1h,2h,3h",
            "log_level": "error",
            **(names or {}),
        },
        environ={"DLQBATCH_CONFIG": str(Path(__file__).parent / "benchmark.properties")},
    )


def work(url: str, messages: int, names: Mapping[str, str]) -> int:
    """One drain: warm up on what is there, then for each line that comes run until nothing is left."""
    settings = settings_for(url, messages, names)
    logs.configure("error")
    jobs.run("drain", settings, jobs.RunOptions())
    print("ready", flush=True)
    for _ in sys.stdin:
        delayed, ended, busy = 0, 0.0, time.process_time()
        while True:
            report = jobs.run("drain", settings, jobs.RunOptions())
            if report.outcome != "ok":
                raise SystemExit(f"a drain did not do its work: {report.as_dict()}")
            if not report.counts["got"]:
                break
            # The look that finds nothing any more keeps no message waiting.
            delayed, ended = delayed + report.counts["delayed"], time.time()
        told = {"delayed": delayed, "ended": ended, "cpu": time.process_time() - busy}
        print(json.dumps(told), flush=True)
    return 0


@contextmanager
def drains(
    number: int, url: str, messages: int, names: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, __file__, "--work", url, "--messages", str(messages), "--names", json.dumps(names or {})]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(number)]
    try:
        for each in started:
            expect(each)
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()


def expect(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a drain ended before it had told what it did")
    return line


def once(
    channel: BlockingChannel, broker: psutil.Process, workers: Sequence[subprocess.Popen[str]], options: Any
) -> dict[str, float]:
    """All messages through so many drains; every one of them has to be there afterwards, once."""
    fill(channel, SOURCE, options.messages, options.size)
    before, began = busy(broker), time.time()
    for each in workers:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    told = [json.loads(expect(each)) for each in workers]
    elapsed, of_broker = max(each["ended"] for each in told) - began, busy(broker) - before
    there, left = depth(channel, DELAYED, options.messages), depth(channel, SOURCE, 0)
    moved = sum(each["delayed"] for each in told)
    if (there, left, moved) != (options.messages, 0, options.messages):
        raise SystemExit(f"{options.messages} went in; {there} came out, {left} are left, {moved} were reported")
    channel.queue_purge(DELAYED)
    of_drains = sum(each["cpu"] for each in told)
    return {
        "per_second": options.messages / elapsed,
        "drain_microseconds": of_drains / options.messages * 1e6,
        "broker_microseconds": of_broker / options.messages * 1e6,
        "drain_cores": of_drains / elapsed,
        "broker_cores": of_broker / elapsed,
        "least_share": min(each["delayed"] for each in told) / options.messages * len(told),
    }


def depth(channel: BlockingChannel, queue: str, wanted: int, seconds: float = 10) -> int:
    """A queue counts on its own time: what it says when it says what is wanted, or at last."""
    deadline = time.monotonic() + seconds
    while True:
        found = int(channel.queue_declare(queue, passive=True).method.message_count)
        if found == wanted or time.monotonic() > deadline:
            return found
        channel.connection.process_data_events(0.01)


def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    connection = connect(url)
    channel, broker = connection.channel(), broker_process(url)
    version = connection._impl.server_properties["version"]  # noqa: SLF001  (pika shows it nowhere else)
    apply_topology(settings_for(url, options.messages))
    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in options.drains}
    deadline = time.monotonic() + options.seconds
    with drains(max(options.drains), url, options.messages) as workers:
        once(channel, broker, workers[:1], options)  # the first is of a broker that is not warm yet
        for turn in range(options.rounds):
            for number in random.sample(options.drains, len(options.drains)):
                rounds[number].append(once(channel, broker, workers[:number], options))
                sys.stderr.write(f"round {turn + 1}: {number} drains {rounds[number][-1]['per_second']:,.0f}/s\n")
            if time.monotonic() > deadline:
                sys.stderr.write(f"{options.seconds:g} s are over after {turn + 1} rounds\n")
                break
    connection.close()
    found = {
        str(number): {name: round(statistics.median(each[name] for each in told), 2) for name in told[0]}
        | {
            "least": round(min(each["per_second"] for each in told)),
            "most": round(max(each["per_second"] for each in told)),
        }
        for number, told in rounds.items()
    }
    about = machine(RabbitMQ=version, pika=pika.__version__)
    rounds_done = min(map(len, rounds.values()))
    return {"benchmark": "scaling", **about, "messages": options.messages, "body_bytes": options.size,
            "rounds": rounds_done, "drains": found}  # fmt: skip


def shown(result: dict[str, Any]) -> list[str]:
    one = next(iter(result["drains"].values()))["per_second"]
    head = ("drains at once", "messages a second", "against one", "least to most", "CPU per message: drain", "broker",
            "cores busy: drains", "broker")  # fmt: skip
    rows = [
        (
            number,
            f"{each['per_second']:,.0f}",
            f"{each['per_second'] / one:.2f}",
            f"{each['least']:,} to {each['most']:,}",
            f"{each['drain_microseconds']:.0f} µs",
            f"{each['broker_microseconds']:.0f} µs",
            f"{each['drain_cores']:.2f}",
            f"{each['broker_cores']:.2f}",
        )
        for number, each in result["drains"].items()
    ]
    about = {name: result[name] for name in ("date", "machine", "python", "RabbitMQ", "pika")}
    how = (
        f"Broker and drains on one machine; {result['messages']:,} messages of {result['body_bytes']:,} bytes, "
        f"medians of {result['rounds']} rounds, none lost and none doubled."
    )
    return [f"{sentence(about)}.", how, "", *table(head, rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument(
        "--drains", type=lambda text: sorted({int(each) for each in text.split(",")}), default=[1, 2, 4]
    )
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no round after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="put the results between the marks of this page",
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--names", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.messages, options.names)
    result = measure(options, os.environ["DLQBATCH_TEST_BROKER_URL"])
    lines = shown(result)
    sys.stdout.write("\n".join(lines) + "\n")
    keep("scaling", {**result, "about": about_machine()}, options.json)
    if options.write:
        put("scaling", lines, options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
