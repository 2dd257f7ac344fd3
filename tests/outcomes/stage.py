"""All situations of one release at the same time: real queues, real consumers, the jobs as a scheduler runs them."""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pika
import rawamqp
from dead_rows import NOW, add, row, store_at
from pika.exceptions import AMQPError

from dlqbatch import jobs as all_jobs
from dlqbatch import settings
from dlqbatch.errors import DlqbatchError
from dlqbatch.ingest.examine import digest_of
from dlqbatch.topology.declare import apply_topology
from outcomes.situations import ACKNOWLEDGED, FAILED, MANUAL, RESOLVED, SENT, SITUATIONS, Situation
from outcomes.workers import Truth, Worker
from scripts.servers.management import Management

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

KEY = b"orders.created"
SECONDS: Final = 170.0
"""From the last send on. Half of it is what a queue that never empties needs."""
_GRACE: Final = 600.0
"""Seconds more for what has to be claimed, on a machine that is slow."""
_EVERY: Final = 3.0
_WINDOW: Final = 25
"""Seconds of the observation window, which decides only where the broker's counts cannot be had."""
WITHIN: Final = 30.0
"""A good retry is resolved so many seconds after its acknowledgement."""
RANK: Final = (SENT, ACKNOWLEDGED, RESOLVED, FAILED, MANUAL)


@dataclass
class Play:
    """One situation on queues of one kind."""

    situation: Situation
    kind: str
    url: str
    channel: Any
    truth: Truth
    workers: list[Worker] = field(default_factory=list)
    streams: list[tuple[str, float, int | None]] = field(default_factory=list)
    claims: dict[str, float] = field(default_factory=dict)
    """When each was first seen in the store."""
    last: str = ""
    why: str = ""
    """What the store says that is missing, or what it has seen."""
    was_touched: bool = False
    origin: tuple[str | None, str] = ("", "")

    @property
    def title(self) -> str:
        return f"{self.situation.name}.{self.kind}"

    def name_of(self, part: str = "") -> str:
        return f"{self.title}.{part}" if part else self.title

    def queue(self, part: str = "", *, kind: str | None = None, **arguments: Any) -> str:
        wanted = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
        name = self.name_of(part)
        self.channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind or self.kind, **wanted})
        if not part:
            self.origin = (name, self.origin[1])
        return name

    def declare_exchange(self, name: str, kind: str, **arguments: Any) -> None:
        self.channel.exchange_declare(name, kind, durable=True, arguments=arguments)

    def exchange(self, kind: str, **arguments: Any) -> None:
        """Only this exchange is known of the origin."""
        self.declare_exchange(self.name_of("exchange"), kind, **arguments)
        self.origin = (None, self.name_of("exchange"))

    def bind(self, queue: str, key: str, exchange: str | None = None) -> None:
        self.channel.queue_bind(queue, exchange or self.name_of("exchange"), key)

    def bind_exchange(self, exchange: str, key: str) -> None:
        self.channel.exchange_bind(exchange, self.name_of("exchange"), key)

    def worker(self, act: Callable[[Any], None], queue: str | None = None, **options: Any) -> None:
        self.workers.append(Worker(self.url, queue or self.name_of(), self.truth, act, **options))

    def start_workers(self) -> None:
        for worker in self.workers:
            if not worker.is_consuming.is_set():
                worker.start()

    def others(self, number: int, queue: str | None = None, priority: int | None = None) -> None:
        """Messages of somebody else."""
        for _ in range(number):
            self.channel.basic_publish(
                "", queue or self.name_of(), b"other", pika.BasicProperties(delivery_mode=2, priority=priority)
            )

    def traffic(self, rate: float, priority: int | None = None) -> None:
        self.streams.append((self.name_of(), rate, priority))

    def claim(self, what: str, at: float) -> None:
        self.claims.setdefault(what, at)
        self.last = what

    @property
    def problems(self) -> list[str]:
        """What was claimed and not so, or not claimed in the end though it should be."""
        found = [] if self.situation.may_be_false else self.untrue
        if self.last not in self.situation.expected:
            found.append(f"ends {self.last or 'unsent'}, not {' or '.join(self.situation.expected)}")
        return found

    @property
    def is_due(self) -> bool:
        """Something will be claimed for certain, and is not yet."""
        return SENT not in self.situation.expected and self.last not in self.situation.expected

    @property
    def is_late(self) -> bool:
        """A good retry that was not resolved in time; on a machine that is busy with other things that is no fault."""
        return self.situation.expected == (RESOLVED,) and (self.took or 0) > WITHIN

    @property
    def took(self) -> float | None:
        """Seconds from the acknowledgement to `resolved`."""
        began, ended = self.truth.acknowledged_at, self.claims.get(RESOLVED)
        return None if began is None or ended is None else ended - began

    @property
    def untrue(self) -> list[str]:
        """What was claimed and was not so, or not yet."""
        acknowledged, rejected = self.truth.acknowledged_at, self.truth.rejected_at
        settled = min((at for at in (acknowledged, rejected) if at is not None), default=None)
        found = []
        for what, true_since in ((ACKNOWLEDGED, settled), (RESOLVED, acknowledged), (FAILED, rejected)):
            at = self.claims.get(what)
            if at is not None and (true_since is None or at < true_since):
                found.append(f"FALSE: {what} was claimed" + (" too early" if true_since is not None else ""))
        return found


@dataclass
class Deployment:
    """One installation: a virtual host, a dead store and the jobs that run every few seconds."""

    name: str
    url: str
    settings: dict[str, Any]
    database: Path
    jobs: tuple[str, ...]
    plays: list[Play] = field(default_factory=list)
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    def load(self) -> Any:
        return settings.load(self.settings, {"DLQBATCH_CONFIG": "/dev/null"})

    def work(self, stop: threading.Event) -> None:
        loaded = self.load()
        while not stop.is_set():
            began = time.monotonic()
            for job in self.jobs:
                try:
                    all_jobs.run(job, loaded, all_jobs.RunOptions())
                except DlqbatchError as error:
                    self.failures.append(f"{job}: {error}")
                if stop.is_set():
                    return
            self.runs += 1
            stop.wait(max(_EVERY - (time.monotonic() - began), 0.2))

    def fill(self) -> None:
        """One due row for each, as a drain and an ingest would have made it."""
        add(store_at(f"sqlite:///{self.database}"), *(_row(play) for play in self.plays), at=NOW.replace(year=2020))

    def look(self) -> None:
        """What the store claims of each by now."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as store:
            columns = {each[1] for each in store.execute("PRAGMA table_info(dlq_attempts)")}
            acknowledged = "a.acknowledged_at" if "acknowledged_at" in columns else "NULL"
            asking = (
                f"SELECT m.body, m.status, a.sent_at, {acknowledged}, a.outcome FROM dlq_messages m "
                "JOIN dlq_attempts a ON a.message_id = m.id AND a.number = 1"
            )
            found = {bytes(body): rest for body, *rest in store.execute(asking)}
            reasons: dict[bytes, str] = {}
            with suppress(sqlite3.Error):
                asking = (
                    "SELECT m.body, t.reason FROM dlq_transitions t JOIN dlq_messages m ON m.id = t.message_id "
                    "ORDER BY t.id"
                )
                reasons = {bytes(body): reason for body, reason in store.execute(asking)}
        now = time.time()
        for play in self.plays:
            status, sent, seen, outcome = found.get(play.truth.ticket, (None, None, None, None))
            play.why = reasons.get(play.truth.ticket, "")
            if status is None:
                continue
            if sent is not None:
                play.claims.setdefault(SENT, now)
            if seen is not None:
                play.claims.setdefault(ACKNOWLEDGED, now)
            last = ACKNOWLEDGED if seen is not None else SENT if sent is not None else ""
            if status == "resolved":
                last = RESOLVED
            elif outcome == "failed":
                last = FAILED
            elif status == "manual":
                last = MANUAL
            if last:
                play.claim(last, now)


def _row(play: Play) -> dict[str, Any]:
    queue, exchange = play.origin
    identity = play.truth.ticket.decode()
    headers = [(b"dlqbatch-id", identity), (b"dlqbatch-origin-exchange", exchange), (b"dlqbatch-origin-key", "")]
    headers += [] if queue is None else [(b"dlqbatch-origin-queue", queue)]
    texts = [(name, rawamqp.text(value or KEY.decode() if name.endswith(b"key") else value)) for name, value in headers]
    digest = digest_of(play.truth.ticket, b"")
    return row(
        identity=identity,
        body=play.truth.ticket,
        digest=digest,
        full_digest=digest,
        properties=rawamqp.properties(texts, delivery_mode=2),
        next_retry_at=NOW.replace(year=2020),
        origin_queue=queue,
        origin_exchange=exchange,
        origin_key=KEY.decode(),
        event=KEY.decode(),
        error_message="connection timed out",
    )


class Stage:
    def __init__(self, broker: str, api: str, other_api: str, folder: Path, release: str) -> None:
        """`broker` is its AMQP address without a virtual host."""
        self.release, self._broker, self._api = release, broker, api
        self._folder = folder
        self._vhosts: list[Management] = []
        self._connections: list[Any] = []
        apis = {"no-api": "http://127.0.0.1:1", "other-api": other_api}
        jobs = {"no-ingest": ("drain", "lifecycle"), "no-drain": ("ingest", "lifecycle")}
        self.deployments: dict[str, Deployment] = {}
        for name in dict.fromkeys(each.deployment for each in SITUATIONS):
            self._open(name, apis.get(name, api), jobs.get(name, ("drain", "ingest", "lifecycle")))

    def _open(self, name: str, api: str, jobs: tuple[str, ...]) -> None:
        vhost = Management(self._api, vhost=f"outcomes-{name}-{secrets.token_hex(4)}")
        vhost.make_vhost()
        self._vhosts.append(vhost)
        url = f"{self._broker}/{vhost.vhost}"
        database = self._folder / f"{name}.sqlite3"
        given = {
            "broker_url": url,
            "management_url": api,
            "database_url": f"sqlite:///{database}",
            "observation_window": f"{_WINDOW}s",
            "retry_delays": "1h",
            "allow_empty_policy": True,
            "max_seconds": 100,
            "log_level": "error",
        }
        self.deployments[name] = Deployment(name, url, given, database, jobs)
        apply_topology(self.deployments[name].load())

    def play(self, only: Sequence[str] = (), seconds: float = SECONDS) -> list[Play]:
        """All of them, to the end."""
        plays = list(self._arrange(only))
        for deployment in self.deployments.values():
            deployment.fill()
        for one in plays:
            one.start_workers()
        for one in plays:
            for worker in one.workers:
                assert worker.is_consuming.wait(60), f"{one.title}: its worker does not consume"
        stop = threading.Event()
        with ThreadPoolExecutor(len(self.deployments) + 1) as pool:
            done = [pool.submit(self._traffic, plays, stop)]
            # The statistics know the queues before anything is sent, as they do where a program has run for a while.
            self._wait_for_statistics(plays)
            done += [pool.submit(each.work, stop) for each in self.deployments.values() if each.plays]
            try:
                self._watch(plays, seconds)
            finally:
                stop.set()
                for one in plays:
                    one.truth.is_over = True
            for each in done:
                each.result()
        return plays

    def _arrange(self, only: Sequence[str]) -> Iterator[Play]:
        for situation in SITUATIONS:
            if only and not any(part in situation.name for part in only):
                continue
            deployment = self.deployments[situation.deployment]
            for kind in ("classic", "quorum"):
                if not situation.runs_on(kind, self.release):
                    continue
                connection = pika.BlockingConnection(pika.URLParameters(deployment.url))
                self._connections.append(connection)
                truth = Truth(f"{situation.name}-{kind}-{secrets.token_hex(3)}".encode())
                one = Play(situation, kind, deployment.url, connection.channel(), truth)
                situation.arrange(one)
                deployment.plays.append(one)
                yield one

    def _wait_for_statistics(self, plays: Sequence[Play]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self._serve()
            told = [one for vhost in self._vhosts for one in vhost.queues()]
            if told and all("messages" in one for one in told):
                return
            time.sleep(0.5)

    def _watch(self, plays: Sequence[Play], seconds: float) -> None:
        ends = time.monotonic() + seconds + _GRACE
        began: float | None = None
        while time.monotonic() < ends or (any(one.is_due for one in plays) and time.monotonic() < ends + _GRACE):
            for deployment in self.deployments.values():
                if deployment.plays:
                    deployment.look()
            for one in plays:
                if SENT in one.claims and not one.was_touched:
                    one.was_touched = True
                    if one.situation.when_sent is not None:
                        one.situation.when_sent(one)
            if began is None and all(SENT in one.claims for one in plays):
                began = time.monotonic()
                ends = began + seconds
            self._serve()
            time.sleep(0.3)

    def _serve(self) -> None:
        for connection in self._connections:
            with suppress(AMQPError):
                connection.process_data_events(0)

    def _traffic(self, plays: Iterable[Play], stop: threading.Event) -> None:
        """The messages of somebody else, at their rates."""
        connections: dict[str, Any] = {}
        due: defaultdict[str, float] = defaultdict(time.monotonic)
        streams = [(one.url, *stream) for one in plays for stream in one.streams]
        try:
            while not stop.wait(0.1):
                for url, queue, rate, priority in streams:
                    if url not in connections:
                        connections[url] = pika.BlockingConnection(pika.URLParameters(url)).channel()
                    properties = pika.BasicProperties(delivery_mode=2, priority=priority)
                    while due[queue] <= time.monotonic():
                        connections[url].basic_publish("", queue, b"other", properties)
                        due[queue] += 1 / rate
                for channel in connections.values():
                    channel.connection.process_data_events(0)
        finally:
            for channel in connections.values():
                channel.connection.close()

    def close(self) -> None:
        every = [
            worker for deployment in self.deployments.values() for one in deployment.plays for worker in one.workers
        ]
        for worker in every:
            worker.stop()
        for worker in every:
            worker.join()
        for connection in self._connections:
            with suppress(AMQPError):
                connection.close()
        for vhost in self._vhosts:
            vhost.drop_vhost()


def told(one: Play) -> str:
    """One line: what was claimed when, what was true, and what is wrong."""
    zero = one.claims.get(SENT, 0.0)
    claims = ", ".join(f"{what} +{at - zero:.0f} s" for what, at in one.claims.items() if what != SENT)
    truth = ", ".join(f"{what} {at - zero:+.0f} s" for at, what, _ in one.truth.events[:3])
    wrong = "; ".join(one.problems)
    return f"{one.title:32} {claims or one.last or 'unsent':34} | {truth:44} | {wrong or 'ok'}"


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"
