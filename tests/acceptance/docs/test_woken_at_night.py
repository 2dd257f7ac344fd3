"""A night on call: the commands of docs/woken-at-night.md are pasted, in their order, into a scene that needs them.

RabbitMQ, PostgreSQL, `dlqbatch schedule` and a worker are processes of their own. The worker times out while its
inventory is away, gives up on orders without a total, and dies of one order. What a pasted `dlqbatch` does is forked.
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
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest
from dead_rows import store_at
from forked_command import forked_command
from program import HANDLER, HANGS_AFTER, ROOT, client, environment, eventually
from replay_rows import fill

from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

PAGE = (ROOT / "docs" / "woken-at-night.md").read_text()
STEPS = dict(re.findall(r"^## \d\. ([\w ]+)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
BLOCK = re.compile(r"^```(sh|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ORDERS, INCOMPLETE = 8, 2

SETTINGS = """\
dlqbatch.topology.orders.kind=pipeline
dlqbatch.topology.orders.exchange=orders
dlqbatch.ingest-queues=dlq.orders
dlqbatch.retry-delays=1h
dlqbatch.statistics-delay=2s
dlqbatch.schedule-drain=1m
dlqbatch.schedule-ingest=10s
dlqbatch.schedule-lifecycle=6s
dlqbatch.health-address=off
"""

WORKER = """\
import json, os, pathlib, sys
from dlqbatch.consumer import Consumer

folder = pathlib.Path(sys.argv[1])
consumer = Consumer(os.environ["DLQBATCH_BROKER_URL"], queue="orders", max_retries=1)


@consumer.on("#")
def handle(body, context):
    order = json.loads(body)
    if order.get("currency") == "XTS":
        os._exit(1)
    if "total" not in order:
        raise ValueError("the order has no total")
    if not (folder / "inventory").exists():
        raise TimeoutError("inventory-service timed out")
    with (folder / "handled").open("a") as handled:
        handled.write(f"{order['order']}\\n")


consumer.run()
"""


class Night:
    def __init__(self, folder: Path, **settings: str) -> None:
        """The command `dlqbatch` is in its folder bin, if the lines are pasted in an `open_shell`."""
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "worker.py").write_text(WORKER)
        (folder / "application.properties").write_text(SETTINGS)
        self.variables = environment(**settings, config=str(folder / "application.properties")) | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "80",
        }
        self.broker = settings["broker_url"]
        self.database = settings["database_url"].replace("+psycopg", "")
        self.chosen: dict[str, str] = {}
        self.home_time = threading.Event()
        self._supervisor = threading.Thread()

    def open_shell(self) -> AbstractContextManager[None]:
        return forked_command(self.folder / "bin" / "dlqbatch")

    def add_rabbitmqctl(self, node: RabbitNode) -> None:
        file = self.folder / "bin" / "rabbitmqctl"
        variables = " ".join(shlex.quote(f"{name}={text}") for name, text in node.environment.items())
        file.write_text(f'#!/bin/sh\nexec env -i {variables} {node.sbin / "rabbitmqctl"} --node {node.name} "$@"\n')
        file.chmod(0o755)

    def paste(self, text: str, code: int = 0) -> str:
        """What the lines print, with the values chosen so far in the places that the page names."""
        for name, value in self.chosen.items():
            text = re.sub(rf"\b{name}\b", value, text)
        done = subprocess.run(
            ["sh", "-e", "-c", text],
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=4 * HANGS_AFTER,
            check=False,
        )
        assert done.returncode == code, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def follow(self, step: str, **chosen: object) -> list[str]:
        """Paste the blocks of one step; what each prints holds what the page says that it prints, in this order."""
        self.chosen |= {name: str(value) for name, value in chosen.items()}
        said: list[str] = []
        for kind, text in BLOCK.findall(STEPS[step]):
            if kind == "sh":
                lines = [self.choose(self.paste(line)) for line in text.splitlines()]
                said.append("".join(lines))
                continue
            printed = iter([plain(line) for line in said[-1].splitlines()])
            for line in text.replace("\n…\n", "\n").splitlines():
                wanted, cut, _ = plain(line).partition("…")
                assert any(one.startswith(wanted) if cut else one == wanted for one in printed), (line, said[-1])
        return said

    def choose(self, said: str) -> str:
        """The numbers of the first message and of an action, and the hash of a plan, go into the next command."""
        if listed := re.search(r"^id .*\n(\d+) ", said):
            self.chosen["ID"] = listed[1]
        if discard := re.search(r"^(A-\d+) .* discard ", said, re.MULTILINE):
            self.chosen["ACTION"] = discard[1]
        if head := re.search(r"^\d+ .* (A-\d+) +taken, on hold$", said, re.MULTILINE):
            self.chosen["HEAD"] = head[1]
        if planned := re.search(r"^plan (\w+)$", said, re.MULTILINE):
            self.chosen["HASH"] = planned[1]
        return said

    def group(self, error: str) -> str:
        found = json.loads(self.paste("dlqbatch messages groups --json"))["groups"]
        return str(next(one["fingerprint"] for one in found if error in json.dumps(one)))

    def states(self) -> dict[str, int]:
        return self._counted("SELECT status, count(*) FROM dlq_messages GROUP BY status")

    def runs(self) -> dict[str, int]:
        return self._counted("SELECT job, count(*) FROM dlq_runs GROUP BY job")

    def _counted(self, query: LiteralString) -> dict[str, int]:
        """Asked of the database itself: a program that is started again and again would slow the scene down."""
        with psycopg.connect(self.database, autocommit=True) as connection:
            return dict(connection.execute(query).fetchall())

    def publish(self, *orders: dict[str, object]) -> None:
        with client(self.broker) as team:
            for order in orders:
                team.publish("orders", "orders.created", json.dumps(order).encode())

    def handled(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(int(line) for line in (self.folder / "handled").read_text().split())
        return []

    def start_workers(self) -> None:
        """One worker, under a supervisor that starts what has died again."""
        self.home_time.clear()
        self._supervisor = threading.Thread(target=self._supervise)
        self._supervisor.start()

    def _supervise(self) -> None:
        command = [sys.executable, str(self.folder / "worker.py"), str(self.folder)]
        while not self.home_time.is_set():
            with subprocess.Popen(command, env=self.variables, stderr=subprocess.DEVNULL) as worker:
                while worker.poll() is None and not self.home_time.wait(0.1):
                    pass
                worker.terminate()

    def stop_workers(self) -> None:
        self.home_time.set()
        if self._supervisor.ident is not None:
            self._supervisor.join(HANGS_AFTER)


def plain(line: str) -> str:
    """Without what differs from night to night: numbers, names, times, and the charts."""
    line = re.sub(r"\b[0-9a-f]{16}\b", "HASH", re.sub("[▁-▏]", "", line))
    line = re.sub(r"\d+ (s|min|h) ago", "ago", re.sub(r"by \S+,", "by", line))
    return " ".join(re.sub(r"\d+", "0", line).split())


@pytest.fixture
def night(work_folder: Path, tmp_path: Path, database_url: str) -> Iterator[Night]:
    with RabbitNode(work_folder / "rabbitmq").start() as node, contextlib.ExitStack() as shell:
        scene = Night(tmp_path, broker_url=node.url, management_url=node.management_url, database_url=database_url)
        scene.add_rabbitmqctl(node)
        shell.enter_context(scene.open_shell())
        scene.paste("dlqbatch db upgrade; dlqbatch events set '#' 3; dlqbatch topology apply")
        schedule = subprocess.Popen(
            [sys.executable, HANDLER, "schedule"],
            env=scene.variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield scene
        finally:
            scene.stop_workers()
            schedule.terminate()
            schedule.wait(HANGS_AFTER)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_commands_of_a_night_are_pasted_one_after_the_other(night: Night) -> None:
    night.start_workers()
    orders = [{"order": number, "total": number} for number in range(ORDERS)]
    incomplete = [{"order": ORDERS + number} for number in range(INCOMPLETE)]
    night.publish(*orders, *incomplete)
    assert eventually(lambda: night.states() == {"pending": ORDERS + INCOMPLETE})

    assert eventually(lambda: night.runs().keys() >= {"drain", "ingest", "lifecycle", "monitor"})

    night.follow("Notice")
    time_outs, without_total = night.group("TimeoutError"), night.group("ValueError")
    night.follow("Look", GROUP=time_outs)
    night.follow("Hold")
    night.follow("Decide", GROUP=without_total)
    assert night.states() == {"pending": ORDERS, "archived": INCOMPLETE}

    (night.folder / "inventory").touch()
    night.follow("Replay", GROUP=time_outs)
    assert night.handled() == list(range(ORDERS))
    assert eventually(lambda: night.states() == {"resolved": ORDERS, "archived": INCOMPLETE})

    night.publish({"order": 99, "total": 1, "currency": "XTS"}, {"order": 100, "total": 1})
    look, *isolate = BLOCK.findall(STEPS["Isolate a poison"])
    assert re.search(r"^orders\s+\d", night.paste(look[1]), re.MULTILINE)
    night.stop_workers()
    assert 100 not in night.handled()
    STEPS["the poison"] = "".join(f"```{kind}\n{text}```\n" for kind, text in isolate)
    *_, shown = night.follow("the poison")
    assert '"currency": "XTS"' in shown
    night.start_workers()
    assert eventually(lambda: night.handled() == [*range(ORDERS), 100])

    # The message itself is wrong: it is edited, and goes where its worker is.
    (night.folder / "body").write_text('{"order": 99, "total": 1, "currency": "EUR"}')
    night.paste(f"dlqbatch undo {night.chosen['HEAD']}")
    edited = night.paste(f"dlqbatch messages edit ID --body-file {night.folder / 'body'} --json")
    night.paste(f"dlqbatch messages replay {json.loads(edited)['id']}")
    assert eventually(lambda: night.handled() == [*range(ORDERS), 99, 100])

    *_, undone = night.follow("Undo", GROUP=without_total)
    assert "hold" not in night.paste("dlqbatch rules list")
    assert "the wrong group" in undone


@pytest.fixture
def desk(tmp_path: Path, broker_url: str, database_url: str) -> Iterator[Night]:
    """Two messages are dead, and nothing is at work."""
    fill(store_at(database_url), range(2))
    scene = Night(tmp_path, broker_url=broker_url, database_url=database_url)
    with scene.open_shell():
        yield scene


def test_an_abort_leaves_what_was_not_sent_as_it_was(desk: Night) -> None:
    desk.chosen["GROUP"] = desk.group("TIMEOUT_ERROR")
    desk.choose(desk.paste("dlqbatch replay plan --group GROUP"))
    (abort,) = re.findall(r"`(dlqbatch replay abort HASH)`", STEPS["Undo"])
    assert "not sent 2 as they were before the plan" in " ".join(desk.paste(abort).split())

    edited = json.loads(desk.paste("dlqbatch messages edit 1 --set-header checked=yes --json"))
    undo = re.findall(r"^\| an edit \| `(.*?)`, then `(.*?)` \|$", STEPS["Undo"], re.MULTILINE)
    desk.chosen |= {"ID": "1", "NEW": str(edited["id"])}
    for line in undo[0]:
        desk.paste(line if "--reason" in line else f"{line} --reason undone")
    assert desk.states() == {"pending": 1, "manual": 1, "archived": 1}
