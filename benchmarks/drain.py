"""The drain beside a naive loop of get, confirmed publish and ack: same messages, same broker, taking turns.

Usage: scripts/bench drain [--rounds N] [--messages N] [--naive-messages N] [--size BYTES] [--json FILE] [--require N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pika
from workload import connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import logs, wiring
from dlqbatch.settings import Settings, load

if TYPE_CHECKING:
    from collections.abc import Sequence

RETRY_QUEUE, DELAYED = "retry-queue", "queue.delay.1"


def naive(url: str, number: int) -> float:
    """What most people write first; it knows no policy and changes no header."""
    connection = connect(url)
    taking, giving = connection.channel(), connection.channel()
    giving.confirm_delivery()
    started = time.perf_counter()
    for _ in range(number):
        method, properties, body = taking.basic_get(RETRY_QUEUE)
        giving.basic_publish("route-delay", "binding.orders.1", body, properties, mandatory=True)
        taking.basic_ack(method.delivery_tag)
    elapsed = time.perf_counter() - started
    connection.close()
    return number / elapsed


def drain(settings: Settings, number: int) -> tuple[float, float]:
    """Messages per second of the whole run, connecting and all, and microseconds of our CPU for each."""
    started, busy = time.perf_counter(), time.process_time()
    report = wiring.run("drain", settings, wiring.Occasion())
    elapsed, busy = time.perf_counter() - started, time.process_time() - busy
    if report.counts["delayed"] != number or report.outcome != "ok":
        raise SystemExit(f"the drain did not do its work: {report.as_dict()}")
    return number / elapsed, busy / number * 1e6


def measure(options: argparse.Namespace, url: str, settings: Settings) -> dict[str, object]:
    connection = connect(url)
    channel = connection.channel()
    naive_rates, drain_rates, cpu = [], [], []
    for turn in range(options.rounds + 1):
        fill(channel, RETRY_QUEUE, options.naive_messages, options.size)
        slow = naive(url, options.naive_messages)
        fill(channel, RETRY_QUEUE, options.messages, options.size)
        fast, each = drain(settings, options.messages)
        channel.queue_purge(DELAYED)
        if turn == 0:
            continue  # the first turn warms up both
        naive_rates.append(slow)
        drain_rates.append(fast)
        cpu.append(each)
        sys.stderr.write(f"round {turn}: naive {slow:,.0f}/s, drain {fast:,.0f}/s\n")
    version = connection._impl.server_properties["version"]  # noqa: SLF001  (pika shows it nowhere else)
    connection.close()
    ratios = [fast / slow for fast, slow in zip(drain_rates, naive_rates, strict=True)]
    return {
        "benchmark": "drain",
        "rabbitmq": version,
        "python": platform.python_version(),
        "pika": pika.__version__,
        "cores": os.cpu_count(),
        "body_bytes": options.size,
        "naive_per_second": spread(naive_rates),
        "drain_per_second": spread(drain_rates),
        "drain_to_naive": spread(ratios),
        "drain_cpu_microseconds": spread(cpu),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "least": round(min(values), 2),
        "most": round(max(values), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--naive-messages", type=int, default=3_000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--require", type=float, help="exit 1 if the median ratio is below")
    options = parser.parse_args()
    url = os.environ["DLQBATCH_TEST_BROKER_URL"]
    settings = load(
        {
            "broker_url": url,
            "database_url": "sqlite:////nonexistent/dlqbatch.sqlite3",
            "allow_empty_policy": "true",
            "max_messages": str(options.messages),
            "tier_ttls": "1h,2h,3h",
            "log_level": "warning",
        },
        environ={"DLQBATCH_CONFIG": str(Path(__file__).parent / "benchmark.properties")},
    )
    logs.configure("warning")
    wiring.apply_topology(settings)
    result = measure(options, url, settings)
    for name, value in result.items():
        shown = "{median:,} ({least:,} to {most:,})".format_map(value) if isinstance(value, dict) else value
        sys.stdout.write(f"{name:<24}{shown}\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    ratio = result["drain_to_naive"]["median"]  # type: ignore[index]  # a dict, as built above
    return 1 if options.require and ratio < options.require else 0


if __name__ == "__main__":
    sys.exit(main())
