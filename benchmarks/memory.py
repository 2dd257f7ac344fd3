"""How much memory a drain takes over what its process has anyway, with bodies of 1 KiB, 1 MiB and 16 MiB.

Usage: scripts/bench memory [--rounds N] [--sizes BYTES,…] [--queue-types NAME,…] [--bytes N] [--json FILE]
Each drain is a process of its own. Idle is what it has after it has drained one small message, with everything
loaded; the peak is the most that the kernel has seen while it then drains (VmHWM). Messages: as many as --bytes hold,
not less than 8 and not more than 5,000.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import contenders
from contest import keep, machine, spread
from drain import PREFIX, SOURCE, TARGET, settings_for
from workload import connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import jobs, logs
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel

LEAST_MESSAGES: Final = 8
MOST_MESSAGES: Final = 5_000
MOST_MB: Final = {1 << 20: 40.0, 16 << 20: 5 * (16 << 20) / 1e6}
"""By body size, what is aimed at: 40 MB, and five bodies of 16 MiB."""


def work(url: str, messages: int, queue_type: str, folder: str) -> int:
    """A process that drains what is there, says what it has, and drains once more when a line comes."""
    logs.configure("error")
    settings = settings_for(url, Path(folder), messages=messages, policy_rows=1000, queue_type=queue_type)
    jobs.run("drain", settings, jobs.RunOptions())
    print(_kilobytes("VmRSS"), flush=True)
    sys.stdin.readline()
    idle = _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began = time.perf_counter()
    report = jobs.run("drain", settings, jobs.RunOptions())
    told = {"seconds": time.perf_counter() - began, "idle": idle, "peak": _kilobytes("VmHWM")}
    print(json.dumps(told | {"delayed": report.counts["delayed"]}), flush=True)
    return 0


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


class Drained:
    """What one drain, in a process of its own, took."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.messages = int(told["delayed"])
        self.per_second = self.messages / told["seconds"]
        self.idle_mb = told["idle"] * 1024 / 1e6
        self.over_idle_mb = (told["peak"] - told["idle"]) * 1024 / 1e6


@contextmanager
def drainer(
    channel: BlockingChannel, url: str, messages: int, queue_type: str, folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to drain; the queue is still empty."""
    fill(channel, SOURCE, 1, 1024)
    command = [sys.executable, str(Path(__file__)), "--work", url, str(messages), queue_type, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            _line(process)
            channel.queue_purge(TARGET)
            yield process
        finally:
            process.kill()


def drained(process: subprocess.Popen[str], channel: BlockingChannel, messages: int) -> Drained:
    """What it takes to drain what is there now."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    found = Drained(json.loads(_line(process)))
    came = channel.queue_purge(TARGET).method.message_count
    if not messages == found.messages == came:
        raise SystemExit(f"{messages} went in; {found.messages} were reported, and {came} came out")
    return found


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a drain ended before it had told what it took")
    return line


def seen(drains: list[Drained]) -> dict[str, Any]:
    return {
        "messages": drains[0].messages,
        "idle_mb": spread([each.idle_mb for each in drains], 1),
        "over_idle_mb": spread([each.over_idle_mb for each in drains], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default=f"1024,{1 << 20},{16 << 20}")
    parser.add_argument("--queue-types", default="classic,quorum")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="of all bodies of a drain (%(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        url, messages, queue_type, folder = options.work
        return work(url, int(messages), queue_type, folder)
    url, api = os.environ[f"{PREFIX}BROKER_URL"], os.environ[f"{PREFIX}MANAGEMENT_URL"]
    logs.configure("warning")
    sizes = list(map(int, options.sizes.split(",")))
    cases: dict[str, Any] = {f"bodies of {size:,} bytes": _case(size) for size in sizes}
    with tempfile.TemporaryDirectory(prefix="dlqbatch-bench-") as folder, connect(url) as connection:
        channel = connection.channel()
        for queue_type in options.queue_types.split(","):
            apply_topology(settings_for(url, Path(folder), messages=1, policy_rows=1000, queue_type=queue_type))
            for case in cases.values():
                size = case["body_bytes"]
                messages = min(max(options.bytes // size, LEAST_MESSAGES), MOST_MESSAGES)
                drains = []
                for _ in range(options.rounds):
                    with drainer(channel, url, messages, queue_type, Path(folder)) as process:
                        fill(channel, SOURCE, messages, size)
                        drains.append(drained(process, channel, messages))
                case["drains"][queue_type] = seen(drains)
                took = case["drains"][queue_type]["over_idle_mb"]
                print(
                    f"{queue_type:<8} {messages:>6,} messages of {size:>10,} bytes: {took['median']:>6.1f} MB over the "
                    f"idle process ({took['least']:.1f} to {took['most']:.1f})",
                    flush=True,
                )
            contenders.remove_all(api)
    keep(
        "memory", {"benchmark": "memory", "machine": machine(), "rounds": options.rounds, "cases": cases}, options.json
    )
    return 0


def _case(size: int) -> dict[str, Any]:
    return {"body_bytes": size, "drains": {}} | ({"most_mb": MOST_MB[size]} if size in MOST_MB else {})


if __name__ == "__main__":
    sys.exit(main())
