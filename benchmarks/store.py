"""What one message costs PostgreSQL, from its arrival in the dead store to its end, with one failed retry.

Usage: scripts/bench store [--messages N] [--body BYTES] [--beside COMMIT] [--write] [--json FILE]
For each step: bytes of WAL, versions of rows, how many of them were heap-only, and the CPU of the server and of ours;
then the disk that a message takes. --beside measures the program of another commit in the same run.
--write keeps the result in benchmarks/results. The server is a private one that ends with this command.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, os.environ.get("BENCH_PROGRAM", sys.path[0]))
sys.path.insert(0, str(Path(sys.path[0]) / "tests" / "support"))
from dead_rows import NOW, begin_attempts, store_at
from sections import writes

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.lifecycle.attempts import mark_sent
from dlqbatch.lifecycle.leases import claim
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.store.states import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import Engine

ROOT: Final = Path(__file__).parent.parent
KEPT: Final = ROOT / "benchmarks" / "results" / "store.json"
AT_ONCE: Final = 256
STACK_LINES: Final = 16
ONE_TRY: Final = "one try: claim, begin, sent, resolved"
WHOLE_LIFE: Final = "whole life"
FIRST_TRY: Final = ("claim", "begin", "sent", "resolved")
FIGURES: Final = {
    "wal": "WAL, bytes",
    "versions": "versions of rows",
    "hot": "of them heap-only",
    "server": "CPU of the server, µs",
    "ours": "our CPU, µs",
}
_TABLES: Final = "relname LIKE 'dlq_%' AND relkind IN ('r', 'p')"


class Server:
    """The counters of a server that nobody else uses."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._main = psutil.Process(psutil.Process(self._connection.info.backend_pid).ppid())

    def counters(self) -> dict[str, float]:
        """A server's process counts what it did when it ends: so nobody else may be connected any more."""
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        while self.number(others):
            time.sleep(0.01)
        self._connection.execute("SELECT pg_stat_clear_snapshot()")
        counted = "FROM pg_stat_user_tables WHERE relname LIKE 'dlq_%'"
        return {
            "wal": self.number("SELECT pg_current_wal_insert_lsn() - '0/0'"),
            "versions": self.number(f"SELECT sum(n_tup_ins + n_tup_upd) {counted}"),
            "hot": self.number(f"SELECT sum(n_tup_hot_upd) {counted}"),
            "server": self._seconds() * 1e6,
            "ours": time.process_time() * 1e6,
        }

    def disk(self) -> float:
        return self.number(f"SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE {_TABLES}")

    def checkpoint(self) -> None:
        """The first change of a page after a checkpoint writes all of it, which would count for one step alone."""
        self._connection.execute("CHECKPOINT")

    def number(self, query: str) -> float:
        row = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return float(row[0])

    def _seconds(self) -> float:
        times = self._main.cpu_times()
        living = [each.cpu_times() for each in self._main.children()]
        return times.children_user + times.children_system + sum(each.user + each.system for each in living)


def arrivals(messages: int, body: int, stack: int, attempt: int | None = None) -> Iterator[list[Examined]]:
    """Batches of messages of 40 origins with 400 kinds of failures; with `attempt` those are failed retries."""
    for start in range(0, messages, AT_ONCE):
        yield [_arrival(number, body, stack, attempt) for number in range(start, min(start + AT_ONCE, messages))]


def _arrival(number: int, body: int, stack: int, attempt: int | None) -> Examined:
    queue = f"payments.orders.{number % 40}"
    # Neither repeats, so that nothing is compressed away: 128 hexadecimal digits for each line.
    lines = (f"\tat {number * 7919 + line:0>{stack // STACK_LINES - 5}x}\n" for line in range(STACK_LINES))
    content = os.urandom(body // 2).hex().encode()
    digest = number.to_bytes(32, "big")
    return Examined(
        source_queue="dlq-queue",
        exchange="dlq-exchange",
        routing_key="dlq-routing-key",
        redelivered=False,
        properties=os.urandom(150).hex().encode(),
        body=content,
        id=f"0190f5fe-7c00-7000-8000-{number:012x}",
        parent=None,
        attempt=attempt,
        digest=digest,
        full_digest=digest,
        message_id=f"order-{number:012}".encode(),
        app_id=b"payments",
        priority=0,
        origin=Origin(queue, "payments", f"orders.created.{number % 40}"),
        reason="retries-exhausted",
        failure=Failure("com.example.payments.TimeoutException", f"no answer for order {number}", "".join(lines)),
        fingerprint=f"{number % 400:016x}",
        retries=3,
        first_failed_at=NOW,
        last_failed_at=NOW,
    )


class Life:
    """One life of many messages, step by step."""

    def __init__(self, engine: Engine, server: Server, messages: int, body: int, stack: int) -> None:
        self._engine = engine
        self._server = server
        self._messages = messages
        self._sizes = body, stack
        self._before = server.counters()
        self.steps: dict[str, dict[str, float]] = {}

    def live(self) -> None:
        self._ingest(None)
        self._end_step("ingest")
        self._try(1, "first ")
        self._ingest(1)
        self._end_step("failed")
        rows = self._try(2, "")
        sent, now = SentAttempts(self._engine), NOW + timedelta(hours=3)
        for some in _by(rows):
            sent.mark_acknowledged(dict.fromkeys(some, 2), now, "its queue was empty")
            sent.resolve(dict.fromkeys(some, (2, "acknowledged, and it did not come back")), now)
        self._end_step("resolved")
        for name, parts in {ONE_TRY: FIRST_TRY, WHOLE_LIFE: tuple(self.steps)}.items():
            self.steps[name] = {figure: sum(self.steps[step][figure] for step in parts) for figure in FIGURES}

    def _end_step(self, name: str) -> None:
        now = self._server.counters()
        self.steps[name] = {figure: (now[figure] - self._before[figure]) / self._messages for figure in FIGURES}
        self._before = self._server.counters()

    def _ingest(self, attempt: int | None) -> None:
        ingestion = Ingestion(self._engine)
        for batch in arrivals(self._messages, *self._sizes, attempt):
            ingestion.store(batch, NOW + timedelta(hours=attempt or 0))

    def _try(self, number: int, prefix: str) -> list[int]:
        now = NOW + timedelta(hours=number)
        tokens: dict[int, str] = {}
        while found := claim(self._engine, "benchmark", now, AT_ONCE):
            tokens.update((row.row_id, row.token) for row in found)
        if len(tokens) != self._messages:
            raise SystemExit(f"{len(tokens):,} of {self._messages:,} messages were claimed")
        self._end_step(f"{prefix}claim")
        for some in _by(tokens):
            begin_attempts(self._engine, {row: tokens[row] for row in some}, Strategy.IMMEDIATE, "benchmark", now)
        self._end_step(f"{prefix}begin")
        for some in _by(tokens):
            mark_sent(self._engine, dict.fromkeys(some, number), now)
        self._end_step(f"{prefix}sent")
        return list(tokens)


def _by(rows: Iterable[int]) -> Iterator[list[int]]:
    every = list(rows)
    for start in range(0, len(every), AT_ONCE):
        yield every[start : start + AT_ONCE]


def measured(messages: int, body: int, stack: int) -> dict[str, Any]:
    from scripts import services  # noqa: PLC0415  (with --beside, of this folder, and not of the program's)

    with services.private_servers(rabbitmq=False, postgres=True) as addresses:
        engine = store_at(addresses["DATABASE_URL"])
        server = Server(addresses["DATABASE_URL"].replace("+psycopg", ""))
        server.checkpoint()
        life = Life(engine, server, messages, body, stack)
        life.live()
        return {"steps": life.steps, "disk": server.disk() / messages}


def measured_at(commit: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The same by the program of this commit, in a process and a folder of its own."""
    archive = subprocess.run(
        ["git", "archive", commit, "dlqbatch", "tests/support"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tempfile.TemporaryDirectory(prefix="dlqbatch-bench-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as opened:
            opened.extractall(folder, filter="data")
        kept = Path(folder) / "kept.json"
        subprocess.run(
            [sys.executable, __file__, *arguments, "--json", str(kept)],
            env=os.environ | {"BENCH_PROGRAM": folder},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    shape: dict[str, Any] = found["shapes"]["this program"]
    return shape


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=5_000)
    parser.add_argument("--body", type=int, default=2_048)
    parser.add_argument("--stack", type=int, default=1_536)
    parser.add_argument("--beside", metavar="COMMIT", help="measure the program of this commit too")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = ("--messages", str(options.messages), "--body", str(options.body), "--stack", str(options.stack))
    shapes = {"this program": measured(options.messages, options.body, options.stack)}
    if options.beside:
        shapes = {f"at {options.beside}": measured_at(options.beside, sizes)} | shapes
    result = {"benchmark": "store", "messages": options.messages, "body": options.body, "stack": options.stack}
    result |= {"shapes": shapes}
    print("\n".join(writes(result)))
    for file in (options.json, KEPT if options.write else None):
        if file is not None:
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
