"""What a million messages cost, and a month in which nothing happens, from runs that are measured here.

Usage: scripts/bench cost [--rounds N] [--messages N] [--memory MB] [--lambda-gb-second USD] … [--json FILE] [--write]
Each function is a process of its own that calls the handler as Lambda does: a first run on empty queues is a cold
start, a second a warm one, a third moves the messages, and of drain a fourth returns what has waited. The prices are
those of benchmarks/prices.py, each can be given; what a function has and how often it runs is read from serverless.yml.
--write puts the results into docs/aws.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pika
import psycopg
from bills import Basis, Measured, shown
from contest import keep
from page import PAGE, machine, put
from prices import AS_OF, LAMBDA_LOG_BYTES, REGION, Prices, Run
from workload import ORIGIN, connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import jobs, logs
from dlqbatch.settings import load
from dlqbatch.store import migrate
from dlqbatch.topology.declare import apply_topology
from scripts import services

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pika.adapters.blocking_connection import BlockingChannel

MOVING: Final = {"drain": "delayed", "ingest": "recorded", "lifecycle": "sent"}
"""By function, what a report counts of its work."""
FUNCTIONS: Final = (*MOVING, "monitor", "retain")
DELAYED: Final = "queue.delay.1"
AFTER_THE_DELAY: Final = "retry-queue-1"


def work(job: str) -> int:
    """A function: the handler is called for each line that comes; what it prints and logs goes into one file."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from handler import handler  # noqa: PLC0415  (a part of the cold start that is measured)

    for _ in sys.stdin:
        before, began, busy = os.fstat(2).st_size, time.perf_counter(), time.process_time()
        report: Any = handler({"job": job})
        sys.stdout.flush()
        spent = (time.perf_counter() - began, time.process_time() - busy, time.process_time())
        found = {
            **dict(zip(("seconds", "cpu", "cpu_since_start"), spent, strict=True)),
            "log_bytes": os.fstat(2).st_size - before,
            "peak_mb": peak_mb(),
            "outcome": report["outcome"],
            "counts": report["counts"],
        }
        told.write(json.dumps(found) + "\n")
        told.flush()
    return 0


def peak_mb() -> float:
    """Of this program. What the system counts for a process begins with the memory of the one that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # macOS, in bytes


class Function:
    """A process that has not run anything yet."""

    def __init__(self, job: str, variables: dict[str, str], log: Path) -> None:
        self.job = job
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("DLQBATCH_")}
        self._began = time.perf_counter()
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--work", job],
                env=inherited | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._log = log

    def run(self) -> dict[str, Any]:
        written = self._log.stat().st_size
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.job} ended: {self._log.read_text()[-2000:]}")
        told: dict[str, Any] = json.loads(line)
        if told["outcome"] != "ok":
            raise SystemExit(f"{self.job} did not do its work: {told}")
        return told | {"since_start": time.perf_counter() - self._began, "metrics": self._metrics(written)}

    def _metrics(self, begin: int) -> set[str]:
        """The names that the run printed in the embedded metric format."""
        with self._log.open("rb") as log:
            log.seek(begin)
            lines = [json.loads(line) for line in log if line.startswith(b"{")]
        directives = [one for line in lines for one in line.get("_aws", {}).get("CloudWatchMetrics", [])]
        return {metric["Name"] for one in directives for metric in one["Metrics"]}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Place:
    """The servers, and how the queues and the store are filled for each job."""

    def __init__(self, broker_url: str, database_url: str, options: argparse.Namespace) -> None:
        self.messages, self.size = options.messages, options.size
        self.variables = {
            "DLQBATCH_BROKER_URL": broker_url,
            "DLQBATCH_DATABASE_URL": database_url,
            "DLQBATCH_CONFIG": str(Path(__file__).parent / "benchmark.properties"),
            "DLQBATCH_TIER_TTLS": "1h,2h,3h",
            "DLQBATCH_MAX_MESSAGES": str(options.messages),
            "DLQBATCH_RETRY_DELAYS": "1ms",
            "DLQBATCH_LOG_FORMAT": "json",
            "DLQBATCH_METRICS_NAMESPACE": "dlqbatch",
        }
        self._store = psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True)
        self._connection = connect(broker_url)
        self._channel: BlockingChannel = self._connection.channel()
        self._channel.queue_declare(ORIGIN, durable=True)
        self.versions = {
            "RabbitMQ": str(self._connection._impl.server_properties["version"]),  # noqa: SLF001  (nowhere else)
            "PostgreSQL": str(self._store.info.server_version // 10_000),
            "pika": pika.__version__,
        }

    def close(self) -> None:
        self._connection.close()
        self._store.close()

    def fill(self, job: str) -> None:
        getattr(self, f"_for_{job}", lambda: None)()

    def _for_drain(self) -> None:
        fill(self._channel, "retry-queue", self.messages, self.size)

    def _for_ingest(self) -> None:
        """Dead letters, by a drain that knows no event."""
        self._for_drain()
        self._prepare("drain", "dead_lettered", DLQBATCH_CONFIG=os.devnull, DLQBATCH_ALLOW_EMPTY_POLICY="true")

    def _for_lifecycle(self) -> None:
        """Rows that are due, by an ingest."""
        self._for_ingest()
        self._prepare("ingest", "recorded")

    def let_pass_the_delay(self) -> None:
        """What was delayed goes on at once, the way that it goes when its time is over: dead-lettered by its queue."""
        for number, (method, _, _) in enumerate(self._channel.consume(DELAYED), 1):
            if number == self.messages:
                self._channel.basic_nack(method.delivery_tag, multiple=True, requeue=False)
                break
        self._channel.cancel()
        while self._channel.queue_declare(AFTER_THE_DELAY, passive=True).method.message_count < self.messages:
            self._connection.process_data_events(0.01)

    def _prepare(self, job: str, count: str, **variables: str) -> None:
        given = {name: text for name, text in self.variables.items() if name != "DLQBATCH_METRICS_NAMESPACE"}
        report = jobs.run(job, load({}, {**given, **variables}), jobs.RunOptions())
        if report.counts[count] != self.messages:
            raise SystemExit(f"the {job} that prepares has not done its work: {report.as_dict()}")

    def check(self, job: str, counts: dict[str, int], name: str) -> None:
        if counts[name] != self.messages:
            raise SystemExit(f"{job} has {counts[name]} {name}, not {self.messages}: {counts}")

    def clear(self) -> None:
        for queue in (DELAYED, "dlq-queue", ORIGIN):
            self._channel.queue_purge(queue)
        self._store.execute("TRUNCATE dlq_messages, dlq_scope_breakers, dlq_alerts, dlq_runs CASCADE")


def once(place: Place, job: str, log: Path) -> dict[str, dict[str, Any]]:
    function = Function(job, place.variables, log)
    try:
        told = {"cold": function.run(), "empty": function.run()}
        if job in MOVING:
            place.fill(job)
            told["full"] = function.run()
            place.check(job, told["full"]["counts"], MOVING[job])
        if job == "drain":
            place.let_pass_the_delay()
            told["returning"] = function.run()
            place.check(job, told["returning"]["counts"], "returned")
        return told
    finally:
        function.end()


def measure(place: Place, options: argparse.Namespace, log: Path) -> tuple[dict[str, Measured], int]:
    rounds: dict[str, list[dict[str, dict[str, Any]]]] = {job: [] for job in FUNCTIONS}
    deadline = time.monotonic() + options.seconds
    for turn in range(options.rounds):
        for job in FUNCTIONS:
            rounds[job].append(once(place, job, log))
            place.clear()
        sys.stderr.write(f"round {turn + 1} of {options.rounds}\n")
        if time.monotonic() > deadline:
            break
    return {job: _medians(told, options.messages) for job, told in rounds.items()}, len(rounds["drain"])


def _medians(told: list[dict[str, dict[str, Any]]], messages: int) -> Measured:
    def run(kind: str, seconds: str = "seconds", cpu: str = "cpu", messages: int = 0) -> Run:
        def of(name: str) -> float:
            return statistics.median(each[kind][name] for each in told)

        return Run(of(seconds), of(cpu), of("log_bytes") + LAMBDA_LOG_BYTES, messages)

    return Measured(
        run("cold", "since_start", "cpu_since_start"),
        run("empty"),
        run("full", messages=messages) if "full" in told[0] else None,
        run("returning", messages=messages) if "returning" in told[0] else None,
        max(run["peak_mb"] for each in told for run in each.values()),
        len({name for each in told for run in each.values() for name in run["metrics"]}),
    )


@contextmanager
def database() -> Iterator[str]:
    given = os.environ.get("DLQBATCH_TEST_DATABASE_URL")
    if given is not None:
        server = given.replace("+psycopg", "")
        name = f"cost_{os.getpid()}"
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
            yield f"{given.rpartition('/')[0]}/{name}"
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        return
    with services.private_servers(rabbitmq=False, postgres=True) as addresses:
        yield addresses["DATABASE_URL"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=5_000, help="of one run")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--memory", type=int, help="MB of every function; else those of serverless.yml")
    parser.add_argument("--region", help="whose prices are given, for the words beside the table")
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no round after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=PAGE,
        metavar="PAGE",
        help="put the results into docs/aws.md, or this page",
    )
    parser.add_argument("--work", choices=FUNCTIONS, help=argparse.SUPPRESS)
    for name in Prices.names():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, metavar="USD", help=f"{getattr(Prices(), name):g}"
        )
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    logs.configure("error")
    prices = Prices().but(**{name: getattr(options, name) for name in Prices.names()})
    with database() as url, services.work_folder() as folder:
        place = Place(os.environ["DLQBATCH_TEST_BROKER_URL"], url, options)
        migrate.upgrade(url)
        apply_topology(load({}, place.variables))
        found, rounds = measure(place, options, folder / "log")
        place.close()
    about = machine(**place.versions)
    whose = f"List prices of {REGION}, {AS_OF}" if options.region is None else f"Prices of {options.region}, as given"
    seconds = load({}, place.variables).max_seconds
    basis = Basis(about, rounds, options.messages, options.size, options.memory, seconds, prices, whose)
    lines = shown(found, basis)
    sys.stdout.write("\n".join(lines) + "\n")
    told = {job: {name: _plain(value) for name, value in each._asdict().items()} for job, each in found.items()}
    text = {
        "benchmark": "cost",
        **about,
        "rounds": rounds,
        "memory_mb": options.memory,
        "max_seconds": seconds,
        "prices": _plain(prices),
        "functions": told,
    }
    keep("cost", text, options.json)
    if options.write:
        put("cost", lines, options.write)
    return 0


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


if __name__ == "__main__":
    sys.exit(main())
