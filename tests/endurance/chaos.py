"""Runs, replays, a person and kills at once on one dead store, then every message is looked for.

`scripts/endurance chaos` runs it on servers of its own, and ends with 1 if a message was lost, was resolved though no
consumer has handled it, or was left half done. What is right is known from the consumer's own books alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import pika
from program import HANGS_AFTER, Program
from rawamqp import Message, Peer, properties, text
from ready_store import make_tables
from sqlalchemy import text as sql

from dlqbatch.store.engine import create_engine_for
from scripts import services

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ORIGIN, OTHER, DEAD = "chaos.orders", "chaos.mended", "dlq-queue"
PUBLISHED: Final = 5
"""Messages at once."""
MOST: Final = 900
_WINDOW: Final = 512
"""Messages that one run may have under way when it is killed."""
_FAILS: Final = 0.6
_KILLED: Final = 0.25
_TICK: Final = 0.05
DRAIN: Final = ("drain", "--allow-empty-policy")
SETTINGS: Final = {
    "retry_delays": "1s",
    "observation_window": "1s",
    "recheck": "1s",
    "lease": "20s",
    "settle_seconds": "1",
    "breaker_min_attempts": "1000000",
    "connect_timeout_seconds": "60",
    "log_level": "warning",
}
_ERRORS: Final = (b"SocketTimeoutException: connect timed out", b"ValidationError: the amount is missing")


class Chaos:
    def __init__(self, broker_url: str, database_url: str, seed: int) -> None:
        self.broker_url, self.seed = broker_url, seed
        self.engine = create_engine_for(database_url, connect_timeout=60)
        self.program = Program(SETTINGS | {"broker_url": broker_url, "database_url": database_url})
        self.published = 0
        self.handled: Counter[int] = Counter()
        """By message: how often the consumer was done with it."""
        self.ran: Counter[str] = Counter()
        self.kills = 0
        self.problems: list[str] = []
        self._is_over, self._is_mended, self._ends = threading.Event(), threading.Event(), threading.Event()

    def happen(self, seconds: float) -> dict[str, Any]:
        """So many seconds of everything at once; then the consumer is mended, and what is on its way arrives."""
        applied = self.program.run("topology", "apply", "--yes")
        if applied.code:
            raise RuntimeError(applied.said)
        with Peer(self.broker_url) as peer:
            dead: dict[str, str | int] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
            for queue in (ORIGIN, OTHER):
                peer.queue(queue, dead)
        parties: Sequence[Callable[[Random], None]] = (
            *(
                self._publish,
                self._lifecycle,
                self._lifecycle,
                self._drain_and_ingest,
                self._replay,
                self._replay,
                self._person,
            ),
        )
        with ThreadPoolExecutor(len(parties) + 1) as together:
            consumer = together.submit(self._consume, Random(f"{self.seed} consumer"))
            running = [
                together.submit(self._until_over, each, Random(f"{self.seed} {n}")) for n, each in enumerate(parties)
            ]
            try:
                self._is_over.wait(seconds)
                self._is_over.set()
                for each in running:
                    each.result(HANGS_AFTER)
                self._is_mended.set()
                self._come_to_rest()
            finally:
                self._is_over.set()
                self._ends.set()
            consumer.result(HANGS_AFTER)
        return self._judged()

    def _until_over(self, party: Callable[[Random], None], chance: Random) -> None:
        while not self._is_over.is_set():
            party(chance)
            self._is_over.wait(1.0 if party == self._publish else _TICK)

    # --- Who takes part

    def _publish(self, _: Random) -> None:
        if self.published >= MOST:
            return
        with Peer(self.broker_url) as peer:
            headers = [[(b"x-exception-message", text(error))] for error in _ERRORS]
            peer.publish(
                Message("", ORIGIN.encode(), properties(headers[each % len(headers)], delivery_mode=2), b"%d" % each)
                for each in range(self.published, self.published + PUBLISHED)
            )
        self.published += PUBLISHED

    def _consume(self, chance: Random) -> None:
        """Rejects many, until it is mended; a message is done when it is noted, and acknowledged after that."""
        parameters = pika.URLParameters(self.broker_url)
        parameters.heartbeat = 0  # nobody serves it while the machine is busy with all the others
        connection = pika.BlockingConnection(parameters)
        channel = connection.channel()
        channel.basic_qos(prefetch_count=10)

        def take(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            if chance.random() < _FAILS and not self._is_mended.is_set():
                channel.basic_reject(method.delivery_tag, requeue=False)
            else:
                self.handled[int(body)] += 1
                channel.basic_ack(method.delivery_tag)

        for queue in (ORIGIN, OTHER):
            channel.basic_consume(queue, take)
        while not self._ends.is_set():
            connection.process_data_events(_TICK)
        connection.close()

    def _lifecycle(self, chance: Random) -> None:
        self._run(chance, "lifecycle")

    def _drain_and_ingest(self, chance: Random) -> None:
        self._run(chance, *DRAIN)
        self._run(chance, "ingest")

    def _replay(self, chance: Random) -> None:
        words = chance.choice(([], [], ["--status", "manual"], ["--to-queue", OTHER]))
        named = self._rows("SELECT hash FROM dlq_plans WHERE state IN ('planned', 'applying', 'stopped')")
        if not named or chance.random() < 0.5:
            self._run(chance, "replay", "plan", "--all", "--limit", str(chance.randint(1, 60)), *words[:2])
        elif (step := chance.random()) < 0.7:
            how = chance.choice((["--no-canary"], ["--resume-stopped", "--no-canary"], ["--wait", "3"]))
            self._run(chance, "replay", "apply", chance.choice(named)[0], "--no-guard", *how)
        else:
            self._run(chance, "replay", "abort" if step < 0.9 else "pause", chance.choice(named)[0])

    def _person(self, chance: Random) -> None:
        rows = self._rows("SELECT id, status, fingerprint FROM dlq_messages WHERE status <> 'resolved' ORDER BY id")
        if not rows:
            return
        row_id, status, group = chance.choice(rows)
        step = chance.random()
        if step < 0.2:
            held = self._rows("SELECT fingerprint FROM dlq_groups WHERE held_at IS NOT NULL")
            words = ["unhold", held[0][0]] if held else ["hold", group]
            self._run(None, "groups", *words, "--reason", "chaos")
        elif status == "archived":
            discarded = "SELECT message_id FROM dlq_transitions WHERE to_status = 'archived' AND reason LIKE '%chaos%'"
            if (row_id,) in self._rows(discarded):  # never what an edit took the place of
                self._run(None, "messages", "restore", str(row_id))
        elif step < 0.4:
            self._run(None, "messages", "discard", str(row_id), "--reason", "chaos", "--yes")
        elif step < 0.6:
            self._run(None, "messages", "edit", str(row_id), "--set-header", "mended=yes", "--yes")
        else:
            self._run(None, "messages", "replay", str(row_id))

    def _run(self, chance: Random | None, *words: str) -> None:
        """A command of the program; with `chance` it may be killed at any moment, as only a person's is not."""
        process = self.program.start(*words)
        if chance is not None and chance.random() < _KILLED:
            with contextlib.suppress(Exception):
                process.wait(chance.choice((0.05, 0.3, 1.0, 3.0)) * chance.random())
            if process.poll() is None:
                process.kill()
                self.kills += 1
        _, said = process.communicate(timeout=HANGS_AFTER)
        self.ran[words[0] if words[0] not in {"replay", "messages"} else " ".join(words[:2])] += 1
        if "Traceback" in said:
            self.problems.append(f"{' '.join(words)}: {said[-2000:]}")

    def _rows(self, statement: str) -> list[Any]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sql(statement))]

    # --- How it ends

    def _come_to_rest(self) -> None:
        """Nobody holds or plans anything any more: the jobs alone finish what was begun."""
        for (group,) in self._rows("SELECT DISTINCT fingerprint FROM dlq_groups WHERE held_at IS NOT NULL"):
            self._run(None, "groups", "unhold", group, "--reason", "chaos is over")
        for (plan,) in self._rows("SELECT hash FROM dlq_plans WHERE state IN ('planned', 'applying', 'stopped')"):
            self._run(None, "replay", "abort", plan)
        deadline = time.monotonic() + HANGS_AFTER
        while time.monotonic() < deadline:
            for words in (DRAIN, ("ingest",), ("lifecycle",)):
                self._run(None, *words)
            if not (self._left() or self._depth()):
                return
            self._ends.wait(1.0)
        self.problems.append(f"not at rest: {self._left()}, {self._depth()} in the queues")

    def _left(self) -> list[Any]:
        on_the_way = (
            "SELECT status, count(*) FROM dlq_messages WHERE status IN ('pending', 'processing') GROUP BY status"
        )
        return self._rows(on_the_way)

    def _depth(self) -> int:
        connection = pika.BlockingConnection(pika.URLParameters(self.broker_url))
        channel = connection.channel()
        declared = [channel.queue_declare(queue, passive=True) for queue in (ORIGIN, OTHER, DEAD)]
        connection.close()
        return sum(each.method.message_count for each in declared)

    def _judged(self) -> dict[str, Any]:
        kept: Counter[int] = Counter()
        unproven = []
        for status, body, reason in self._rows(
            "SELECT m.status, m.body, (SELECT t.reason FROM dlq_transitions t WHERE t.message_id = m.id "
            "ORDER BY t.id DESC LIMIT 1) FROM dlq_messages m"
        ):
            ticket = int(bytes(body))
            if status == "resolved" and not self.handled[ticket]:
                unproven.append(ticket)
            # What an edit took the place of stands for nothing any more: its edit does.
            if status in {"manual", "failed", "archived"} and not str(reason).startswith("edited"):
                kept[ticket] += 1
        lost = [ticket for ticket in range(self.published) if not self.handled[ticket] and not kept[ticket]]
        doubled = sum(times - 1 for times in self.handled.values())
        odd = {
            "messages that are processing": "SELECT id FROM dlq_messages WHERE status = 'processing'",
            "messages that a plan has reserved": "SELECT id FROM dlq_messages WHERE plan_id IS NOT NULL AND plan_id IN "
            "(SELECT id FROM dlq_plans WHERE state IN ('done', 'aborted')) AND status <> 'resolved'",
            "plans under way": "SELECT id FROM dlq_plans WHERE state = 'applying'",
            "open attempts of messages at rest": "SELECT id FROM dlq_attempts WHERE closed_at IS NULL",
        }
        found = {name: self._rows(query) for name, query in odd.items()}
        problems = [*self.problems, *(f"{len(rows)} {name}" for name, rows in found.items() if rows)]
        problems += [f"lost: {lost[:9]}"] if lost else []
        problems += [f"resolved, and no consumer has handled them: {unproven[:9]}"] if unproven else []
        # One more: on a busy machine a run that lives may be slower than its lease, as if it had been killed.
        if doubled > (self.kills + 1) * _WINDOW:
            problems.append(f"{doubled} were handled twice, and {self.kills} runs were killed")
        return {
            "problems": problems,
            "published": self.published,
            "handled": len(self.handled),
            "for a person": sum(map(bool, kept.values())),
            "handled more than once": sum(times > 1 for times in self.handled.values()),
            "most often": max(self.handled.values(), default=0),
            "kills": self.kills,
            "commands": dict(sorted(self.ran.items())),
        }


def chaos(broker_url: str, database_url: str, seconds: float, seed: int) -> dict[str, Any]:
    make_tables(database_url)
    return Chaos(broker_url, database_url, seed).happen(seconds)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="on each database (default: %(default)g)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--database", choices=("postgresql", "sqlite"), action="append")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "big")
    problems = 0
    with services.work_folder() as folder, services.private_servers(rabbitmq=True, postgres=True) as servers:
        for name in options.database or ("postgresql", "sqlite"):
            url = servers["DATABASE_URL"] if name == "postgresql" else f"sqlite:///{Path(folder) / 'chaos.sqlite3'}"
            found = chaos(servers["BROKER_URL"], url, options.minutes * 60, seed)
            sys.stdout.write(json.dumps({"database": name, "seed": seed} | found, indent=1) + "\n")
            sys.stdout.flush()
            problems += len(found["problems"])
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
