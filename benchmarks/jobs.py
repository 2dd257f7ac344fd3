"""Every job beside the drain, on PostgreSQL: same messages, same broker, taking turns; and what a message costs whom.

Usage: scripts/bench jobs [--rounds N] [--messages N] [--stored N,…] [--size BYTES] [--only NAME,…] [--json FILE]
                          [--require NAME=RATIO,…] (exit 1 if a job's median ratio to the drain is below)
Drain, ingest, lifecycle, replay and check each do their whole work on N messages, connecting and reporting included.
Beside the ingest runs what most people write first: a message, its row, a commit, its ack; a tenth of the messages.
So many other rows lie in the dead store besides; with several numbers the lifecycle runs with each of them.
CPU is counted per message: ours, and that of the database and the broker with all their processes and threads.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contenders
import psycopg
import row_and_commit
from contest import Sample, keep, machine, spread, take_turns
from workload import EVENTS, ORIGIN, connect, properties

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import jobs as all_jobs
from dlqbatch import logs
from dlqbatch.replay import job as replay
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.freeze import Selection
from dlqbatch.settings import Settings, load
from dlqbatch.store import migrate
from dlqbatch.store.filters import Filters
from dlqbatch.topology.declare import apply_topology
from scripts import services
from scripts.servers.management import Management

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DRAIN, INGEST, ROW_AND_COMMIT, LIFECYCLE, REPLAY, CHECK = JOBS = (
    *("drain", "ingest", "row and commit", "lifecycle", "replay", "check"),
)
RETRY, DELAYED, DEAD, CHECKED, MOVED = "retry-queue", "queue.delay.1", "dlq-queue", "bench-checked", "bench-moved"
OF_EACH, MOVING = 10, 3
"""Of each ten messages that the check looks at three move."""
PREFIX = "DLQBATCH_TEST_"
KEPT = "bench_messages"
"""What ingest made of the messages, put back as it was before each turn that sends it."""
EMPTIED = "dlq_attempts, dlq_transitions, dlq_plans, dlq_plan_items, dlq_scope_breakers, dlq_runs"
PART = 10
"""Of so many messages the loop that commits each row does one."""
OTHERS_FROM = 1_000_000_000
"""The ids of rows that are none of the messages begin here."""
STATES = "ARRAY['pending', 'processing', 'resolved', 'failed', 'manual', 'archived']"
WHO = "benchmark"


@contextmanager
def server_of_databases() -> Iterator[str]:
    """The address of a PostgreSQL server: DLQBATCH_TEST_DATABASE_URL, else a private one."""
    given = os.environ.get(f"{PREFIX}DATABASE_URL")
    if given is not None:
        yield given
        return
    with services.private_servers(rabbitmq=False, postgres=True) as addresses:
        yield addresses["DATABASE_URL"]


@contextmanager
def database(server: str) -> Iterator[str]:
    name = f"bench_{secrets.token_hex(6)}"
    with psycopg.connect(plain(server), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield f"{server.rpartition('/')[0]}/{name}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def plain(url: str) -> str:
    return url.replace("+psycopg", "")


def version_of(server: str) -> str:
    with psycopg.connect(plain(server)) as connection:
        return str(connection.info.parameter_status("server_version"))


def settings_for(broker_url: str, database_url: str, folder: Path, messages: int) -> Settings:
    config = folder / "jobs.properties"
    config.write_text("".join(f"dlqbatch.events.{event}=3\n" for event in EVENTS), encoding="utf-8")
    migrate.upgrade(database_url)
    return load(
        {
            "broker_url": broker_url,
            "database_url": database_url,
            "max_messages": str(messages),
            "max_bytes": "64GiB",
            "max_seconds": "600",
            "tier_ttls": "1h,2h,3h",
            "check_queues": CHECKED,
            "check_target": MOVED,
            "log_level": "error",
        },
        environ={"DLQBATCH_CONFIG": str(config)},
    )


def _broker_pid(api: str) -> int:
    """A node that has just started tells it a few seconds later."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = Management(api).get("nodes")[0].get("os_pid")
        if found is not None:
            return int(found)
        time.sleep(0.2)
    raise SystemExit("the broker does not tell its process id")


@dataclass
class Meter:
    """CPU of the servers, as the kernel has counted it."""

    database_pid: int
    broker_pid: int
    turns: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By job, microseconds for each message: the database's and the broker's."""

    @classmethod
    def of(cls, server: str, api: str) -> Meter:
        with psycopg.connect(plain(server)) as connection:
            database_pid = int(_stat(connection.info.backend_pid)[1])
        return cls(database_pid, _broker_pid(api))

    def around(self, name: str, number: int, turn: Callable[[], Sample]) -> Sample:
        before = self._now()
        sample = turn()
        database, broker = ((now - then) / number * 1e6 for now, then in zip(self._now(), before, strict=True))
        self.turns.setdefault(name, []).append((database, broker))
        return sample

    def _now(self) -> tuple[float, float]:
        return _family(self.database_pid), _seconds(self.broker_pid, children=False)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: 0 is the state, 1 the parent."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _seconds(pid: int, *, children: bool) -> float:
    ticks = _stat(pid)[11 : 15 if children else 13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _family(parent: int) -> float:
    """A server with a process for each session: itself, those that have ended, and those that run."""
    while True:
        ended = _seconds(parent, children=True)
        found = ended + sum(map(_seconds_of_child, _children(parent)))
        # One that ends in this moment would be counted twice, or not at all.
        if _seconds(parent, children=True) == ended:
            return found


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if int(_stat(int(folder.name))[1]) == parent:
                    yield int(folder.name)


def _seconds_of_child(pid: int) -> float:
    try:
        return _seconds(pid, children=False)
    except OSError:
        return 0.0


class Course:
    """Before each turn the messages are made ready, and what came of them is emptied afterwards."""

    def __init__(self, settings: Settings, meter: Meter, *, size: int, stored: int) -> None:
        self.settings, self.meter, self.size, self.stored = settings, meter, size, stored
        self.number = settings.max_messages
        self.broker_url = settings.broker_url.get_secret_value()
        self.database_url = settings.database_url.get_secret_value()

    def prepare(self) -> None:
        apply_topology(self.settings)
        with closing(connect(self.broker_url)) as connection:
            channel = connection.channel()
            for queue in (ORIGIN, CHECKED):
                channel.queue_declare(queue, durable=True)
        self._rows(self._others())
        self._ready_to_ingest()
        contenders.job(INGEST, self.settings, self.number, "recorded")
        self._rows(
            f"CREATE TABLE {KEPT} AS SELECT * FROM dlq_messages WHERE id < {OTHERS_FROM}",
            f"UPDATE {KEPT} SET next_retry_at = now() - interval '1 hour'",
            row_and_commit.TABLE,
        )

    def turns(self) -> dict[str, Callable[[], Sample]]:
        moving = sum(each % OF_EACH < MOVING for each in range(self.number))
        few, places = max(self.number // PART, 1), (self.broker_url, plain(self.database_url))
        return {
            DRAIN: self._turn(DRAIN, lambda: self._fill(RETRY), lambda: self._job(DRAIN, "delayed")),
            INGEST: self._turn(INGEST, self._ready_to_ingest, lambda: self._job(INGEST, "recorded")),
            ROW_AND_COMMIT: self._turn(
                ROW_AND_COMMIT, lambda: self._fill(DEAD, few), partial(row_and_commit.run, *places, DEAD, few), few
            ),
            LIFECYCLE: self.lifecycle(LIFECYCLE),
            REPLAY: self._turn(REPLAY, self._ready_to_replay, self._replay),
            CHECK: self._turn(
                CHECK, lambda: self._fill(CHECKED, some_move=True), lambda: self._job(CHECK, "moved", moving)
            ),
        }

    def lifecycle(self, title: str) -> Callable[[], Sample]:
        return self._turn(title, self._restore, lambda: self._job(LIFECYCLE, "sent"))

    def _turn(
        self, title: str, ready: Callable[[], None], run: Callable[[], Sample], number: int | None = None
    ) -> Callable[[], Sample]:
        def turn() -> Sample:
            ready()
            sample = self.meter.around(title, number or self.number, run)
            self._empty()
            # Now, and not by the server itself in the turn of another.
            self._without_messages()
            return sample

        return turn

    def _job(self, name: str, counted_as: str, wanted: int | None = None) -> Sample:
        return contenders.job(name, self.settings, self.number, counted_as, wanted)

    def _ready_to_replay(self) -> None:
        """With the plan: a person looks at it before anything moves."""
        self._restore()
        self.plan = replay.plan_replay(
            self.settings, Selection(Filters.parse(origin=ORIGIN), limit=self.number), actor=WHO, reason=WHO
        ).frozen

    def _replay(self) -> Sample:
        asked = ApplyOptions(canary=False)
        started, busy = time.perf_counter(), time.process_time()
        report = replay.apply_replay(self.settings, all_jobs.RunOptions(), self.plan.hash, asked, actor=WHO).report
        busy, elapsed = time.process_time() - busy, time.perf_counter() - started
        if report.counts["sent"] != self.number or report.outcome != "ok":
            raise SystemExit(f"the replay did not do its work: {report.as_dict()}")
        return Sample(self.number / elapsed, busy / self.number * 1e6)

    def _fill(self, queue: str, number: int | None = None, *, some_move: bool = False) -> None:
        number = number or self.number
        body = b"x" * self.size
        with closing(connect(self.broker_url)) as connection:
            channel = connection.channel()
            for each in range(number):
                found = properties(each)
                if some_move and each % OF_EACH < MOVING:
                    found.headers["x-death"][0]["count"] = 9
                channel.basic_publish("", queue, body, found)
            while channel.queue_declare(queue, passive=True).method.message_count < number:
                connection.process_data_events(0.01)

    def _ready_to_ingest(self) -> None:
        self._without_messages()
        self._fill(DEAD)

    def _restore(self) -> None:
        self._without_messages(f"INSERT INTO dlq_messages OVERRIDING SYSTEM VALUE SELECT * FROM {KEPT}")

    def _without_messages(self, *then: str) -> None:
        deleting = f"DELETE FROM dlq_messages WHERE id < {OTHERS_FROM}"
        self._rows(f"TRUNCATE {EMPTIED}", deleting, "VACUUM dlq_messages", *then, "VACUUM ANALYZE dlq_messages")

    def _others(self) -> str:
        """Rows of every other age, state, event and group; none of them is due."""
        return f"""
            INSERT INTO dlq_messages (id, identity, digest, full_digest, had_id, source_queue, exchange, routing_key,
                body, properties, origin_queue, event, error_type, error_message, fingerprint, retry_count,
                first_failed_at, last_failed_at, status, status_since, lock_token, next_retry_at, ack_proven,
                created_at, updated_at)
            OVERRIDING SYSTEM VALUE
            SELECT {OTHERS_FROM} + n, 'other-' || n, d, d, true, '{DEAD}', '{DEAD}', 'k',
                convert_to(repeat('x', 200), 'utf8'), '', 'queue-' || n % 100, 'event-' || n % 200, 'Error' || n % 20,
                'failed ' || n, lpad((n % 50)::text, 16, '0'), 3, t, t, s, t, CASE s WHEN 'processing' THEN 't' END,
                CASE s WHEN 'pending' THEN now() + interval '30 days' END, true, t, t
            FROM (SELECT n, decode(repeat('00', 32), 'hex') AS d, now() - n * interval '1 second' AS t,
                ({STATES})[n % 6 + 1] AS s FROM generate_series(1, {self.stored}) AS n) AS numbered
        """

    def _rows(self, *statements: str) -> None:
        with psycopg.connect(plain(self.database_url), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def _empty(self) -> None:
        with closing(connect(self.broker_url)) as connection:
            channel = connection.channel()
            for queue in (RETRY, DELAYED, DEAD, ORIGIN, CHECKED):
                channel.queue_purge(queue)
            channel.queue_delete(MOVED)


def told(turns: Mapping[str, list[Sample]], meter: Meter) -> dict[str, Any]:
    """Rates, CPU, and the ratio of each job to the drain, taken round by round."""
    drained = [sample.per_second for sample in turns[DRAIN]]
    found: dict[str, Any] = {}
    for name, samples in turns.items():
        rates = [sample.per_second for sample in samples]
        servers = list(zip(*meter.turns[name][-len(samples) :], strict=True))  # the first turn has warmed up
        found[name] = {
            "per_second": spread(rates, 0),
            "cpu_microseconds": spread([sample.cpu_microseconds or 0.0 for sample in samples], 1),
            "database_cpu_microseconds": spread(servers[0], 1),
            "broker_cpu_microseconds": spread(servers[1], 1),
            "of_the_drain": spread([mine / theirs for mine, theirs in zip(rates, drained, strict=True)]),
        }
    if {INGEST, ROW_AND_COMMIT} <= turns.keys():
        both = zip(turns[INGEST], turns[ROW_AND_COMMIT], strict=True)
        found[INGEST]["of_row_and_commit"] = spread([mine.per_second / theirs.per_second for mine, theirs in both])
    return found


def show(title: str, jobs: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{title}")
    print(f"  {'':<28}{'messages/s':>12}{'least':>9}{'most':>9}   CPU µs: ours  database  broker   of the drain")
    for name, figures in jobs.items():
        rate, ratio = figures["per_second"], figures["of_the_drain"]
        ours, database, broker = (
            figures[f"{whose}cpu_microseconds"]["median"] for whose in ("", "database_", "broker_")
        )
        print(
            f"  {name:<28}{rate['median']:>12,.0f}{rate['least']:>9,.0f}{rate['most']:>9,.0f}"
            f"{ours:>15.1f}{database:>10.1f}{broker:>8.1f}"
            f"   {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"
        )
    times = jobs.get(INGEST, {}).get("of_row_and_commit")
    if times:
        print(f"  ingest: {times['median']:.1f} times {ROW_AND_COMMIT} ({times['least']:.1f} to {times['most']:.1f}).")


def compete(options: argparse.Namespace, broker_url: str, api: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was seen of each job, and where."""
    few, *more = map(int, options.stored.split(","))
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="dlqbatch-bench-")))
        server = ends.enter_context(server_of_databases())
        ends.callback(contenders.remove_all, api)
        meter = Meter.of(server, api)

        def course(stored: int) -> Course:
            settings = settings_for(broker_url, ends.enter_context(database(server)), folder, options.messages)
            found = Course(settings, meter, size=options.size, stored=stored)
            found.prepare()
            return found

        chosen = {DRAIN, *options.only.split(",")}
        contend = {name: turn for name, turn in course(few).turns().items() if name in chosen}
        titles = {stored: f"{LIFECYCLE}, {stored:,} stored" for stored in more}
        contend |= {title: course(stored).lifecycle(title) for stored, title in titles.items()}
        turns = take_turns(contend, options.rounds)
        about = machine(contenders.broker_version(broker_url)) | {"postgresql": version_of(server)}
        return told(turns, meter), about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--stored", default="10000", help="other rows that lie in the dead store (%(default)s)")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a body")
    parser.add_argument("--only", default=",".join(JOBS), help="beside the drain: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--require", default="", help="exit 1 if a job's median ratio to the drain is below")
    options = parser.parse_args()
    logs.configure("error")
    found, about = compete(options, os.environ[f"{PREFIX}BROKER_URL"], os.environ[f"{PREFIX}MANAGEMENT_URL"])
    few = options.stored.split(",")[0]
    title = f"{options.messages:,} messages of {options.size:,} bytes, {int(few):,} other rows in the dead store"
    show(title, found)
    keep(
        "jobs",
        {"benchmark": "jobs", "machine": about, "cases": {title: {"of": DRAIN, "contenders": found}}},
        options.json,
    )
    required = (word.split("=") for word in options.require.split(",") if word)
    return int(any(found[name]["of_the_drain"]["median"] < float(least) for name, least in required))


if __name__ == "__main__":
    sys.exit(main())
