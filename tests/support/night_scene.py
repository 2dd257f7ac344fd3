"""The bad night: its messages, its workers, its jobs, and where every message has to be in the morning.

RabbitMQ, PostgreSQL, `dlqbatch schedule`, and for each queue a worker that is started again when it has died, are
processes of their own. The night goes by command line in tests/acceptance/night, and by pages in tests/browser.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from program import DLQ, FORKED, HANGS_AFTER, Client, Program, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WORKER = Path(__file__).with_name("night_worker.py")
RUNNER = Path(__file__).with_name("night_jobs.py").read_text()
PREFETCH = 10
MENDED = 20
HELD = "fingerprint IN (SELECT fingerprint FROM dlq_groups WHERE held_at IS NOT NULL)"
QUEUES = ("orders", "payments", "emails")


def messages(usually: int) -> int:
    """DLQBATCH_TEST_NIGHT, or as many as usual."""
    return int(os.environ.get("DLQBATCH_TEST_NIGHT", str(usually)))


SETTINGS = """\
dlqbatch.fields.payment=$.payment
dlqbatch.origins-allowed=shop,orders,payments,emails
dlqbatch.retry-delays=1h
dlqbatch.statistics-delay=2s
dlqbatch.health-address=off
"""


@dataclass(frozen=True, slots=True)
class Size:
    """How many messages die of which cause: orders that timed out, payments, e-mails, then orders without a sku."""

    total: int

    @property
    def timed_out(self) -> int:
        return self.total * 6 // 10

    @property
    def payments(self) -> int:
        return self.total * 3 // 10

    @property
    def emails(self) -> int:
        return self.total * 9 // 100

    @property
    def unknown(self) -> int:
        return self.total - self.timed_out - self.payments - self.emails

    @property
    def poison(self) -> int:
        return self.timed_out // 2

    @property
    def paid(self) -> range:
        """The payments that a ticket names."""
        return range(self.timed_out, self.timed_out + MENDED)

    @property
    def listed(self) -> str:
        """These as somebody pastes them."""
        return "".join(f"P-{number:06}\n" for number in self.paid)

    def work(self, number: int) -> tuple[str, dict[str, Any]]:
        """The queue and the body of a message."""
        if number < self.timed_out:
            lines = list(range(61 if number == self.poison else 1 + number % 5))
            return "orders", {"sku": f"s-{number % 90}", "waits": 17_000 + number, "lines": lines}
        if number < self.timed_out + self.payments:
            return "payments", {"payment": f"P-{number:06}", "amount": number % 500}
        if number < self.total - self.unknown:
            return "emails", {"to": f"c{number}@example.org"}
        return "orders", {"lines": [1]}


class Night:
    def __init__(
        self, size: Size, program: Program, team: Client, folder: Path, store: psycopg.Connection[Any]
    ) -> None:
        self.size, self.program, self.team, self.folder, self.store = size, program, team, folder, store
        self.deaths: Counter[str] = Counter()
        self._is_over = threading.Event()

    def number(self, query: str) -> int:
        found = self.store.execute(query.encode()).fetchone()
        assert found is not None
        return int(found[0])

    def states(self) -> dict[str, int]:
        return dict(self.store.execute("SELECT status, count(*) FROM dlq_messages GROUP BY status").fetchall())

    @property
    def sent(self) -> int:
        return self.number("SELECT count(*) FROM dlq_attempts WHERE sent_at IS NOT NULL")

    def is_at_work(self, queue: str) -> bool:
        """Its worker is there, and has taken all that was before it."""
        found = self.team.channel.queue_declare(queue, passive=True).method
        return bool(found.consumer_count and not found.message_count)

    def mend(self, what: str) -> None:
        (self.folder / what).touch()

    def handled(self) -> Counter[tuple[str, int, str | None]]:
        """Queue, number and currency of what the workers did."""
        lines = (self.folder / "handled").read_text().splitlines()
        return Counter(tuple(json.loads(line)) for line in lines)

    def happen(self) -> None:
        """Everything fails once, and is in the dead store."""
        for number in range(self.size.total):
            queue, work = self.size.work(number)
            self.team.publish("shop", f"{queue}.new", json.dumps({"id": number} | work).encode())
        assert eventually(lambda: self.number("SELECT count(*) FROM dlq_messages") == self.size.total)

    @contextlib.contextmanager
    def running(self, is_scheduled: bool) -> Iterator[None]:
        """The jobs: by `schedule`, or all the time."""
        loop = Program(self.program.settings, (FORKED, RUNNER))
        runs = [("drain", "ingest", "lifecycle"), ("replay",)]
        started = [self.program.start("schedule")] if is_scheduled else [loop.start(*names) for names in runs]
        pipes = [pipe for each in started for pipe in (each.stdout, each.stderr) if pipe is not None]
        silent = [threading.Thread(target=pipe.read) for pipe in pipes]
        for each in silent:
            each.start()
        try:
            yield
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(HANGS_AFTER)
            for each in silent:
                each.join(HANGS_AFTER)

    @contextlib.contextmanager
    def working(self, url: str) -> Iterator[None]:
        supervisors = [threading.Thread(target=self._supervise, args=(url, queue)) for queue in QUEUES]
        for each in supervisors:
            each.start()
        try:
            yield
        finally:
            self._is_over.set()
            for each in supervisors:
                each.join(HANGS_AFTER)

    def _supervise(self, url: str, queue: str) -> None:
        while not self._is_over.is_set():
            with subprocess.Popen([sys.executable, str(WORKER), url, queue, str(self.folder)]) as worker:
                while worker.poll() is None and not self._is_over.wait(0.05):
                    pass
                if worker.poll() is not None:
                    self.deaths[queue] += 1
                worker.terminate()
            self._is_over.wait(1)

    def assert_all_is_accounted_for(self) -> None:
        """By SQL, by the queues, and by what the workers wrote down."""
        size = self.size
        resolved = size.timed_out - 1 + size.emails + MENDED
        expected = {"resolved": resolved, "archived": size.payments, "pending": size.unknown, "manual": 1}
        assert eventually(lambda: self.states() == expected), self.states()
        held = f"SELECT count(*) FROM dlq_messages WHERE status IN ('pending', 'manual') AND {HELD}"
        assert self.number(held) == size.unknown + 1
        taken = "SELECT origin_queue, body FROM dlq_messages WHERE reason = 'taken-from-head'"
        ((queue, body),) = self.store.execute(taken.encode()).fetchall()
        assert (queue, json.loads(bytes(body))["id"]) == ("orders", size.poison)
        for queue in (*QUEUES, DLQ):
            self.team.await_depth(queue, 0)
        handled = self.handled()
        wanted = {(queue, number, None) for number in range(size.total) for queue, _ in [size.work(number)]}
        wanted -= {("payments", number, None) for number in range(size.timed_out, size.timed_out + size.payments)}
        wanted -= {("orders", number, None) for number in (size.poison, *range(size.total - size.unknown, size.total))}
        assert handled.keys() == wanted | {("payments", number, "EUR") for number in size.paid}
        twice = [work for work, times in handled.items() if times > 1]
        assert {queue for queue, *_ in twice} <= {"orders"}
        assert len(twice) <= PREFETCH * self.deaths["orders"], "no more than the dying workers held"
        assert set(self.deaths) == {"orders"}


@contextlib.contextmanager
def night_of(
    size: Size, servers: dict[str, str], team: Client, folder: Path, jobs: Mapping[str, str] | None = None
) -> Iterator[Night]:
    """A night whose jobs and workers run; `servers` are the addresses of broker, management API and database.

    `jobs` is when `schedule` runs a job; without, they run all the time, which takes less of the machine.
    """
    when = "".join(f"dlqbatch.schedule-{job}={often}\n" for job, often in (jobs or {}).items())
    (folder / "application.properties").write_text(SETTINGS + when)
    program = Program(servers | {"config": str(folder / "application.properties")})
    for words in (("db", "upgrade"), ("events", "set", "#", "0"), ("topology", "apply")):
        assert program.run(*words).code == 0
    team.channel.exchange_declare("shop", "topic", durable=True)
    dead = {"x-dead-letter-exchange": "dlq-exchange", "x-dead-letter-routing-key": "dlq-routing-key"}
    for queue in QUEUES:
        team.channel.queue_declare(queue, durable=True, arguments=dead)
        team.channel.queue_bind(queue, "shop", f"{queue}.#")
    url = servers["database_url"].replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as store:
        scene = Night(size, program, team, folder, store)
        with scene.running(bool(jobs)), scene.working(servers["broker_url"]):
            yield scene
