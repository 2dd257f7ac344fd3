"""Contenders take turns at the same work; medians, spread and ratios, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from charts import blocks_of
from plot import picture
from workload import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KEPT = Path(__file__).parent.parent / "build" / "benchmarks"
"""Where a benchmark keeps what it has seen; benchmarks/results is of whole runs, and shown by docs/performance.md."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contender."""

    per_second: float
    cpu_microseconds: float | None = None
    """Of the contender's own process, for each message."""
    broker_microseconds: float | None = None
    """Of the broker's, for each message."""


Turns = dict[str, list[Sample]]


_END = time.monotonic() + float(os.environ.get("BENCH_SECONDS", "inf"))


def take_turns(
    contenders: Mapping[str, Callable[[], Sample]],
    rounds: int,
    warm_up: Mapping[str, Callable[[], Sample]] | None = None,
    courses_left: int = 1,
) -> Turns:
    """Each once in every round, so that what the machine does meanwhile hits all alike; a first round warms up.

    With BENCH_SECONDS in the environment no round begins that would probably end later; one there is in any case.
    `courses_left` is how many courses, with this one, share what is left of that time.
    """
    turns: Turns = {name: [] for name in contenders}
    began, longest = time.monotonic(), 0.0
    end = began + (_END - began) / courses_left
    for contend in (contenders if warm_up is None else warm_up).values():
        contend()
    for turn in range(1, rounds + 1):
        began = time.monotonic()
        if turn > 1 and began + longest > end:
            sys.stderr.write(f"the time is over after {turn - 1} of {rounds} rounds\n")
            break
        for name, contend in contenders.items():
            turns[name].append(contend())
        longest = max(longest, time.monotonic() - began)
        shown = ", ".join(f"{name} {samples[-1].per_second:,.0f}/s" for name, samples in turns.items())
        sys.stderr.write(f"round {turn} of {rounds}: {shown}\n")
    fewest_rounds.append(min(len(samples) for samples in turns.values()))
    return turns


fewest_rounds: list[int] = []
"""Of each course that this process has held."""


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def summary(turns: Turns, of: str) -> dict[str, Any]:
    """Rates of all, and the ratio of `of` to each of the others, taken round by round."""
    found: dict[str, Any] = {}
    ours = [sample.per_second for sample in turns[of]]
    for name, samples in turns.items():
        rates = [sample.per_second for sample in samples]
        found[name] = {"per_second": spread(rates, 0)}
        cpu = [sample.cpu_microseconds for sample in samples if sample.cpu_microseconds is not None]
        if cpu:
            found[name]["cpu_microseconds"] = spread(cpu, 1)
        brokers = [sample.broker_microseconds for sample in samples if sample.broker_microseconds is not None]
        if brokers:
            found[name]["broker_cpu_microseconds"] = spread(brokers, 1)
        if name != of:
            found[name]["ratio"] = spread([mine / theirs for mine, theirs in zip(ours, rates, strict=True)])
    return found


def machine(broker: str | None = None) -> dict[str, Any]:
    """What a reader has to know to compare."""
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _of_proc("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory": f"{int((_of_proc('/proc/meminfo', 'MemTotal') or '0').split()[0]) / 2**20:.0f} GiB",
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "pika": version("pika"),
    }
    return found | broker_versions() | ({"rabbitmq": broker} if broker else {})


def broker_versions() -> dict[str, str]:
    """Of the private broker, and of the Erlang it runs on."""
    url = os.environ.get("DLQBATCH_TEST_BROKER_URL")
    if url is None:
        return {}
    with connect(url) as connection:
        told = connection._impl.server_properties  # noqa: SLF001  (pika shows it nowhere else)
    return {"rabbitmq": str(told["version"]), "erlang": str(told["platform"]).removeprefix("Erlang/OTP ")}


def broker_process(url: str) -> psutil.Process:
    port = urlsplit(url).port
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
            return psutil.Process(each.pid)
    raise SystemExit(f"nobody listens on port {port}, or not so that this user may see it")


def busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _of_proc(path: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in _lines(path) if line.startswith(name)), "")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def show(title: str, contenders: Mapping[str, Mapping[str, Any]], of: str) -> None:
    """A table for people."""
    print(f"\n{title}")
    print(f"  {'':<22}{'messages/s':>12}{'least':>10}{'most':>10}{'CPU µs':>9}{'broker µs':>11}   {of} is")
    for name, figures in contenders.items():
        rate = figures["per_second"]
        cpus = (figures.get("cpu_microseconds"), figures.get("broker_cpu_microseconds"))
        ratio = figures.get("ratio")
        times = f"   {ratio['median']:.2f} times that ({ratio['least']:.2f} to {ratio['most']:.2f})" if ratio else ""
        own, broker = (f"{cpu['median']:.1f}" if cpu else "" for cpu in cpus)
        rates = f"{rate['median']:>12,.0f}{rate['least']:>10,.0f}{rate['most']:>10,.0f}"
        print(f"  {name:<22}{rates}{own:>9}{broker:>11}{times}")


def keep(name: str, result: Mapping[str, Any], json_file: Path | None = None) -> None:
    """The result as JSON and as a picture, in build/benchmarks or where `json_file` says."""
    release = os.environ.get("BENCH_RELEASE")
    target = json_file or KEPT / f"{name}{f'-{release}' if release else ''}.json"
    rounds = {"rounds": min(fewest_rounds)} if fewest_rounds else {}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**result, **rounds}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    target.with_suffix(".svg").write_text(picture(blocks_of(result)), encoding="utf-8")
    sys.stderr.write(f"kept in {target} and, as a picture, beside it\n")
