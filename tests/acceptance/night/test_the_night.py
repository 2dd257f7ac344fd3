"""The bad night of docs/the-night.md: its commands are typed in their order, and then every message is counted.

RabbitMQ, PostgreSQL, `dlqbatch schedule`, and for each queue a worker that is started again when it has died, are
processes of their own. `DLQBATCH_TEST_NIGHT=10000 scripts/test tests/acceptance/night -rP` is the whole night, and
prints how long it took.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from program import DLQ, HANGS_AFTER, ROOT, Client, Finished, Program, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (ROOT / "docs" / "the-night.md").read_text()
STEPS = {
    number: "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
    for number, text in re.findall(r"^## (\d)\. .*?$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
WORKER = Path(__file__).with_name("worker.py")
PREFETCH = 10
MOST_COMMANDS = 20
SIZE = int(os.environ.get("DLQBATCH_TEST_NIGHT", "1000"))
TIMED_OUT, PAYMENTS, EMAILS = SIZE * 6 // 10, SIZE * 3 // 10, SIZE * 9 // 100
UNKNOWN = SIZE - TIMED_OUT - PAYMENTS - EMAILS
MENDED = 20
POISON = TIMED_OUT // 2
PAID = range(TIMED_OUT, TIMED_OUT + MENDED)
HELD = "fingerprint IN (SELECT fingerprint FROM dlq_groups WHERE held_at IS NOT NULL)"
QUEUES = ("orders", "payments", "emails")
STOPPED = 1

SETTINGS = """\
dlqbatch.fields.payment=$.payment
dlqbatch.origins-allowed=shop,orders,payments,emails
dlqbatch.retry-delays=1h
dlqbatch.statistics-delay=2s
dlqbatch.schedule-drain=1m
dlqbatch.schedule-ingest=10s
dlqbatch.schedule-lifecycle=6s
dlqbatch.health-address=off
"""


class Night:
    def __init__(self, program: Program, team: Client, folder: Path, store: psycopg.Connection[Any]) -> None:
        self.program, self.team, self.folder, self.store = program, team, folder, store
        self.commands = 0
        self.chosen: dict[str, str] = {}
        self.deaths: Counter[str] = Counter()
        self._is_over = threading.Event()

    def type(self, line: str, code: int = 0) -> Finished:
        done = self.program.run(*self._words(line), cwd=self.folder)
        assert done.code == code, f"{line}\n{done.said}"
        if actions := re.findall(r"\bA-\d+\b", done.said):
            self.chosen["ACTION"] = actions[-1]
        if plan := re.search(r"^plan (\w+)$", done.said, re.MULTILINE):
            self.chosen["HASH"] = plan[1]
        return done

    def start(self, line: str) -> subprocess.Popen[str]:
        """In another terminal."""
        return self.program.start(*self._words(line.removesuffix("&")))

    def _words(self, line: str) -> list[str]:
        self.commands += 1
        for name, value in self.chosen.items():
            line = re.sub(rf"\b{name}\b", value, line)
        program, *words = shlex.split(line)
        assert program == "dlqbatch", line
        return words

    def number(self, query: str) -> int:
        found = self.store.execute(query.encode()).fetchone()
        assert found is not None
        return int(found[0])

    def states(self) -> dict[str, int]:
        return dict(self.store.execute("SELECT status, count(*) FROM dlq_messages GROUP BY status").fetchall())

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
        """Everything fails once."""
        for number in range(SIZE):
            queue, work = self.work(number)
            self.team.publish("shop", f"{queue}.new", json.dumps({"id": number} | work).encode())

    @staticmethod
    def work(number: int) -> tuple[str, dict[str, Any]]:
        if number < TIMED_OUT:
            lines = list(range(61 if number == POISON else 1 + number % 5))
            return "orders", {"sku": f"s-{number % 90}", "waits": 17_000 + number, "lines": lines}
        if number < TIMED_OUT + PAYMENTS:
            return "payments", {"payment": f"P-{number:06}", "amount": number % 500}
        if number < TIMED_OUT + PAYMENTS + EMAILS:
            return "emails", {"to": f"c{number}@example.org"}
        return "orders", {"lines": [1]}

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


@pytest.fixture
def night(
    broker_url: str, broker_addresses: tuple[str, str], team: Client, database_url: str, tmp_path: Path
) -> Iterator[Night]:
    (tmp_path / "application.properties").write_text(SETTINGS)
    given = {"broker_url": broker_url, "management_url": broker_addresses[1], "database_url": database_url}
    program = Program(given | {"config": str(tmp_path / "application.properties")})
    for words in (("db", "upgrade"), ("events", "set", "#", "0"), ("topology", "apply")):
        assert program.run(*words).code == 0
    team.channel.exchange_declare("shop", "topic", durable=True)
    dead = {"x-dead-letter-exchange": "dlq-exchange", "x-dead-letter-routing-key": "dlq-routing-key"}
    for queue in QUEUES:
        team.channel.queue_declare(queue, durable=True, arguments=dead)
        team.channel.queue_bind(queue, "shop", f"{queue}.#")
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as store:
        scene = Night(program, team, tmp_path, store)
        jobs = program.start("schedule")
        silent = [threading.Thread(target=pipe.read) for pipe in (jobs.stdout, jobs.stderr) if pipe is not None]
        for each in silent:
            each.start()
        try:
            with scene.working(broker_url):
                yield scene
        finally:
            jobs.terminate()
            jobs.wait(HANGS_AFTER)
            for each in silent:
                each.join(HANGS_AFTER)


def assert_all_is_accounted_for(night: Night) -> None:
    """By SQL, by the queues, and by what the workers wrote down."""
    expected = {"resolved": TIMED_OUT - 1 + EMAILS + MENDED, "archived": PAYMENTS, "pending": UNKNOWN, "manual": 1}
    assert eventually(lambda: night.states() == expected), night.states()
    assert (
        night.number(f"SELECT count(*) FROM dlq_messages WHERE status IN ('pending', 'manual') AND {HELD}")
        == UNKNOWN + 1
    )
    held = "SELECT origin_queue, body FROM dlq_messages WHERE reason = 'taken-from-head'"
    ((queue, body),) = night.store.execute(held).fetchall()
    assert (queue, json.loads(bytes(body))["id"]) == ("orders", POISON)
    for queue in (*QUEUES, DLQ):
        night.team.await_depth(queue, 0)
    handled = night.handled()
    wanted = {(queue, number, None) for number in range(SIZE) for queue, _ in [night.work(number)]}
    wanted -= {("payments", number, None) for number in range(TIMED_OUT, TIMED_OUT + PAYMENTS)}
    wanted -= {("orders", number, None) for number in (POISON, *range(SIZE - UNKNOWN, SIZE))}
    assert handled.keys() == wanted | {("payments", number, "EUR") for number in PAID}
    twice = [work for work, times in handled.items() if times > 1]
    assert {queue for queue, *_ in twice} <= {"orders"}
    assert len(twice) <= PREFETCH * night.deaths["orders"], "no more than the dying workers held"
    assert set(night.deaths) == {"orders"}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_night_takes_twenty_commands_and_loses_and_doubles_nothing(night: Night) -> None:
    night.happen()
    assert eventually(lambda: night.number("SELECT count(*) FROM dlq_messages") == SIZE)
    began = time.monotonic()

    _, groups = [night.type(line) for line in STEPS["1"]]
    unknown = [line.split()[0] for line in groups.out.splitlines() if "KeyError" in line]
    for line, night.chosen["GROUP"] in zip(STEPS["2"], unknown, strict=True):
        night.type(line)

    night.mend("limit-is-over")
    for line in STEPS["3"]:
        night.type(line)

    (night.folder / "paid.txt").write_text("".join(f"P-{number:06}\n" for number in PAID))
    for line in STEPS["4"]:
        night.type(line)

    archived = night.states()["archived"]
    wrong, undo, right = STEPS["5"]
    night.chosen["NUMBER"] = str(TIMED_OUT)
    night.type(wrong)
    night.type(undo)
    assert night.states()["archived"] == archived
    night.chosen["NUMBER"] = str(PAYMENTS - MENDED)
    night.type(right)

    sent = night.number("SELECT count(*) FROM dlq_attempts WHERE sent_at IS NOT NULL")
    plan, too_early, abort = STEPS["6"]
    night.type(plan)
    process = night.start(too_early)
    assert eventually(lambda: night.number("SELECT count(*) FROM dlq_attempts WHERE sent_at IS NOT NULL") > sent)
    night.type(abort)
    process.communicate(timeout=HANGS_AFTER)
    assert eventually(lambda: "processing" not in night.states())

    night.mend("inventory-is-back")
    plan, apply, head, go_on = STEPS["7"]
    night.type(plan)
    stopped = night.type(apply, STOPPED)
    for line in (head.partition(" --note")[0], go_on.replace("HASH", night.chosen["HASH"])):
        assert f"`{line}`" in stopped.out, "the way out is named, to be pasted"
    night.type(head)
    assert eventually(lambda: night.is_at_work("orders"))
    night.type(go_on)
    (done,) = STEPS["8"]
    night.type(done)
    seconds = time.monotonic() - began

    assert_all_is_accounted_for(night)
    assert night.commands <= MOST_COMMANDS
    sys.stdout.write(f"{SIZE:,} messages, {night.commands} command lines, {seconds:.0f} s\n")
