"""A worker of some framework, and the whole way of its failures: delayed, returned, dead, replayed, resolved."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from program import HANGS_AFTER, RETRY_QUEUE, ROOT, Client, Program, environment, eventually

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = ROOT / "tests" / "interop" / "workers"
CAUSES = ("declined", "refused", "missing", "late", "negative", "overdrawn")
DYING = [f"{cause}-{number}" for cause in CAUSES for number in (1, 2)]
"""Messages that fail until the worker is mended, two for each cause."""
STATISTICS_DELAY = 1.0
"""Seconds; the tests' brokers make their counts twice as often."""
ONCE = "once-1"
"""A message that fails at its first try alone."""


@dataclass
class Loop:
    """A worker of some framework, its broker, and an installation of dlqbatch beside it."""

    program: Program
    team: Client
    folder: Path
    url: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """A process of a client; it ends with the test."""
        given = {"AMQP_URL": self.url, "WORK_FOLDER": str(self.folder), "PYTHONPATH": f"{ROOT}:{WORKERS}"} | variables
        inherited = {name: text for name, text in environment().items() if name != "PYTHONWARNINGS"}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, env=inherited | given, cwd=self.folder, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def call(self, *command: str, **variables: str) -> None:
        """A process of a client that ends by itself."""
        assert self.start(*command, **variables).wait(HANGS_AFTER) == 0, self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text()[-4000:]

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def count(self, outcome: str) -> int:
        return sum(line.endswith(outcome) for line in self.calls())

    def await_consumer(self, queue: str) -> None:
        """Wait until a worker consumes it, for a queue that is only declared may have no binding yet."""

        def is_consumed() -> bool:
            if not self.team.exists(queue):
                return False
            return bool(self.team.channel.queue_declare(queue, passive=True).method.consumer_count)

        assert eventually(is_consumed), self.log()

    def await_depth(self, queue: str, depth: int) -> None:
        def reached() -> bool:
            assert all(process.poll() in {None, 0} for process in self.processes), self.log()
            return self.team.depth(queue) == depth

        assert eventually(reached), f"{queue}: {self.team.depth(queue)} messages, not {depth}\n{self.log()}"

    def await_calls(self, outcome: str, number: int) -> None:
        assert eventually(lambda: self.count(outcome) >= number), f"{self.calls()}\n{self.log()}"
        assert self.count(outcome) == number, self.calls()

    def run(self, *arguments: str) -> Any:
        done = self.program.run(*arguments, "--json")
        assert done.code == 0, done.said
        return done.told

    def climb(self) -> None:
        """All have failed once: they are delayed and returned; the one that fails once is handled then."""
        number = len(DYING)
        self.await_depth(RETRY_QUEUE, number + 1)
        assert self.run("drain")["counts"]["delayed"] == number + 1
        self.await_depth("retry-queue-1", number + 1)
        assert self.run("drain")["counts"]["returned"] == number + 1
        self.await_calls("handled", 1)
        self.await_depth(RETRY_QUEUE, number)
        assert self.run("drain")["reasons"] == {"retries-exhausted": number}

    def bury(self, *queues: str) -> dict[str, dict[str, Any]]:
        """The rows of the dead store, by the name of the message."""
        assert self.run("ingest", *queues)["counts"]["recorded"] == len(DYING)
        listed = {row["id"]: row for row in self.run("messages", "list")["messages"]}
        with contextlib.closing(
            sqlite3.connect(self.program.settings["database_url"].removeprefix("sqlite:///"))
        ) as db:
            bodies = dict(db.execute("SELECT id, body FROM dlq_messages"))
        return {next(each for each in DYING if each.encode() in bodies[row]): listed[row] for row in listed}

    def replay(self, queue: str, *dead_letters: str) -> None:
        """Every row is sent back, handled, and counted as resolved."""
        (self.folder / "mended").touch()
        handled = self.count("handled")
        ids = [str(row["id"]) for row in self.run("messages", "list")["messages"]]
        assert self.program.run("messages", "replay", *ids).code == 0
        self.await_calls("handled", handled + len(ids))
        self.await_depth(queue, 0)

        def is_resolved() -> bool:
            # A round before the broker has counted anew costs three commands, and shows nothing new.
            time.sleep(STATISTICS_DELAY)
            for job in (("drain",), ("ingest", *dead_letters), ("lifecycle",)):
                assert self.program.run(*job).code == 0
            return len(self.program.run("messages", "list", "--status", "resolved", "--json").told["messages"]) == len(
                ids
            )

        assert eventually(is_resolved), self.program.run("status").said


def causes_of(rows: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    """Which causes are in each group."""
    groups: dict[str, set[str]] = {}
    for name, row in rows.items():
        groups.setdefault(row["fingerprint"], set()).add(name.partition("-")[0])
    return groups


def assert_one_group_for_each_cause(rows: dict[str, dict[str, Any]], least: int = 6) -> None:
    groups = causes_of(rows)
    assert all(len(causes) == 1 for causes in groups.values()), groups
    assert len(groups) >= least, groups


def code_of(page: str, language: str) -> list[str]:
    """The blocks in a language of a page about clients, in their order."""
    text = (ROOT / "docs" / "clients" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
