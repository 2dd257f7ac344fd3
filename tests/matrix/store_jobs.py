"""The jobs of the dead store on a ground of their own: filled, run until quiet, and counted by plain SQL and raw AMQP.

Nothing that counts uses dlqbatch. Messages carry a number and a checksum in their bodies.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import random
import sqlite3
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psycopg
import rawamqp
from dead_rows import add, row, store_at
from lifecycle_rows import ORIGIN, due
from program import DLQ, Program
from rawamqp import Message, Peer

from matrix.scenario import Count

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable

    from matrix.ground import Ground

WINDOW = 512
"""What may be under way at once: the contract's number, not imported from the program that is judged by it."""
PROGRAM = (sys.executable, str(Path(__file__).resolve().parents[1] / "support" / "strange_machine.py"))
DONE, FAILED, PARTIAL, UNREACHABLE, KILLED = 0, 1, 3, 4, -9
PATIENCE = 120.0
"""Seconds in which everything must be quiet again."""
OLD = datetime(2020, 1, 1, tzinfo=UTC)
_OLD = "'2020-01-01T00:00:00.000000+00:00'"
"""As both stores understand it."""
_SETTINGS = {
    "log_level": "error",
    "lease": "1s",
    "recheck": "1ms",
    "settle_seconds": "2",
    "max_seconds": "20",
    "connect_timeout_seconds": "5",
}


def body_of(number: int, weight: int = 0) -> bytes:
    """Number, as many bytes that cannot be compressed, and a checksum."""
    text = b"%d %d " % (number, weight) + random.Random(number).randbytes(weight)
    return text + hashlib.sha256(text).hexdigest().encode()


def number_of(body: bytes) -> int | None:
    """None if it is none of ours, or not whole."""
    digits, weight, *_ = *body.split(b" ", 2)[:2], b"", b""
    is_ours = digits.isdigit() and weight.isdigit() and body_of(int(digits), int(weight)) == body
    return int(digits) if is_ours else None


class Tables:
    """The database by plain SQL, connected anew for each question: it may have been restarted meanwhile."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")

    def all(self, query: str) -> list[tuple[Any, ...]]:
        with self._connected() as connection:
            return list(connection.execute(query).fetchall())

    def number(self, query: str) -> int:
        return int(self.all(query)[0][0])

    def do(self, *statements: str) -> None:
        """Each is a transaction of its own."""
        with self._connected() as connection:
            for statement in statements:
                connection.execute(statement)

    @contextlib.contextmanager
    def _connected(self) -> Any:
        connection: Any
        if self.is_sqlite:
            connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
        else:
            connection = psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True)
        try:
            yield connection
        finally:
            connection.close()


class Finished:
    """One run: how it ended, and what it told."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.told: dict[str, Any] = json.loads(out) if out.strip() else {}

    def check(self) -> Self:
        """The exit code fits the report, and the report adds up."""
        what = f"code {self.code}\n{self.out}\n{self.err}"
        assert self.code in {DONE, FAILED, PARTIAL, UNREACHABLE, KILLED}, what
        assert "Traceback" not in self.err, what
        if self.code == KILLED:
            return self
        outcome = self.told.get("outcome")
        assert outcome == {DONE: "ok", PARTIAL: "partial"}.get(self.code, "failed"), what
        if counts := dict(self.told.get("counts", {})):
            for beside in () if self.told["job"] != "lifecycle" else ("resolved",):
                counts.pop(beside, None)  # a run that failed has counted nothing
            assert counts.pop("got") == sum(counts.values()), what
        else:
            assert self.told["error"]["message"], what
        if self.code != DONE:
            assert self.told.get("warnings") or self.told.get("error") or self.told.get("reasons"), what
        return self


class Scene:
    """A job with something to do."""

    job = ""
    size = 300
    doubled_by_a_crash = WINDOW
    """Copies that one crash may make."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.database = ground.database()
        self.engine = store_at(self.database)
        self.tables = Tables(self.database)
        self.ends: list[str] = []
        self.settings = {**_SETTINGS, "broker_url": ground.url, "database_url": self.database, **self.more_settings()}
        self.fill()

    def more_settings(self) -> dict[str, str]:
        return {}

    def fill(self) -> None:
        raise NotImplementedError

    def command(self) -> tuple[str, ...]:
        return (self.job,)

    def ease(self) -> None:
        """What a cut run held is anybody's now; as if the time had passed."""

    def is_quiet(self) -> bool:
        raise NotImplementedError

    def count(self) -> tuple[int, int, int]:
        """Lost, changed, doubled."""
        raise NotImplementedError

    def close(self) -> None:
        """What it has started."""

    def recover(self) -> None:
        """What was broken on purpose and does not mend itself."""

    def empty(self) -> None:
        """The broker is as if it had never been there."""
        with Peer(self.ground.url) as peer:
            for queue in (DLQ, ORIGIN):
                peer.queue(queue)
                peer.read(queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def program(self, **settings: str) -> Program:
        return Program({**self.settings, **settings}, PROGRAM)

    def start(self, variables: dict[str, str] | None = None, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """Its job, unless other arguments are given."""
        command = ("env", *(f"{name}={value}" for name, value in (variables or {}).items()), *PROGRAM)
        return Program({**self.settings, **settings}, command).start(*(arguments or self.command()), "--json")

    def end(self, process: subprocess.Popen[str]) -> Finished:
        """Wait for its end, which comes within its bounds."""
        out, err = process.communicate(timeout=PATIENCE)
        done = Finished(process.returncode, out, err)
        self.ground.note(done.code, out, err)
        return done.check()

    def run_until_quiet(self) -> None:
        until = time.monotonic() + PATIENCE
        while not self.is_quiet():
            assert time.monotonic() < until, f"not quiet within {PATIENCE} s"
            self.ease()
            done = self.end(self.start())
            assert done.code in {DONE, PARTIAL}, (done.out, done.err)

    def found(self, crashes: int, hits: int = 1) -> Count:
        self.run_until_quiet()
        lost, changed, doubled = self.count()
        return Count(self.size, lost, changed, doubled, self.doubled_by_a_crash * crashes, hits)


class Ingesting(Scene):
    """Every other message has an id: those make one row each, whatever happens."""

    job = "ingest"
    size = 700
    weight = 0

    def fill(self) -> None:
        self.sent: dict[int, bytes] = {}
        with Peer(self.ground.url) as peer:
            peer.queue(DLQ)
            peer.publish(self._message(number) for number in range(self.size))

    def _message(self, number: int) -> Message:
        headers = [(b"shop", rawamqp.text("kept"))]
        if number % 2:
            headers.append((b"dlqbatch-id", rawamqp.text(f"id-{number}")))
        self.sent[number] = rawamqp.properties(headers, delivery_mode=2, correlation_id=b"t-%d" % number)
        return Message("", DLQ.encode(), self.sent[number], body_of(number, self.weight))

    def is_quiet(self) -> bool:
        with Peer(self.ground.url) as peer:
            if peer.depth(DLQ):
                return False
        return self._bodies().keys() >= set(range(self.size))

    def run_until_quiet(self) -> None:
        # What a dead run held comes back only when the broker has noticed.
        until = time.monotonic() + PATIENCE
        while any(one["vhost"] == self.ground.management.vhost for one in self.ground.management.get("connections")):
            assert time.monotonic() < until, "the broker keeps the connection of a run that is over"
            time.sleep(0.02)
        super().run_until_quiet()

    def _bodies(self) -> Counter[int | None]:
        return Counter(number_of(bytes(body)) for (body,) in self.tables.all("SELECT body FROM dlq_messages"))

    def count(self) -> tuple[int, int, int]:
        rows = self.tables.all("SELECT body, properties, had_id, status FROM dlq_messages")
        found = Counter(number_of(bytes(body)) for body, *_ in rows)
        changed = found.pop(None, 0)
        changed += sum(
            bytes(properties) != self.sent[number]
            for body, properties, *_ in rows
            if (number := number_of(bytes(body))) is not None
        )
        doubled = found.total() - len(found)
        with_id = [number for number, times in found.items() if number is not None and number % 2 and times > 1]
        assert not with_id, f"{len(with_id)} with an id are two rows"
        assert {status for *_, status in rows} == {"pending"}
        return self.size - len(found), changed, doubled


class Heavy(Ingesting):
    """More than a disk of 17 MB holds."""

    size = 240
    weight = 100_000


class Sends(Scene):
    """Rows of the store, which go to their origin."""

    has_run = False

    def end(self, process: subprocess.Popen[str]) -> Finished:
        """Of the first run it is known that nothing was sent before it."""
        done = super().end(process)
        if not self.has_run and "No message was moved" in done.out:
            with Peer(self.ground.url) as peer:
                assert not peer.depth(ORIGIN), f"it says that no message was moved: {done.out}"
        self.has_run = True
        return done

    def fill(self) -> None:
        with Peer(self.ground.url) as peer:
            peer.queue(ORIGIN)
        add(self.engine, *(self.row(number) for number in range(self.size)), at=OLD)

    def row(self, number: int) -> dict[str, Any]:
        return due(number, body=body_of(number))

    def ease(self) -> None:
        self.tables.do(
            f"UPDATE dlq_messages SET lease_until = {_OLD} WHERE lease_until IS NOT NULL",
            f"UPDATE dlq_messages SET next_retry_at = {_OLD} WHERE next_retry_at IS NOT NULL",
        )

    def is_quiet(self) -> bool:
        return self.unsent() == 0

    def unsent(self) -> int:
        return self.tables.number(
            "SELECT count(*) FROM dlq_messages AS m WHERE NOT EXISTS (SELECT 1 FROM dlq_attempts AS a "
            "WHERE a.message_id = m.id AND a.sent_at IS NOT NULL AND a.closed_at IS NULL)"
        )

    def count(self) -> tuple[int, int, int]:
        with Peer(self.ground.url) as peer:
            seen = peer.read(ORIGIN)
        found = Counter(number_of(one.body) for one in seen)
        changed = found.pop(None, 0)
        self._explained(seen)
        return self.size - len(found), changed, found.total() - len(found)

    def _explained(self, seen: Iterable[rawamqp.Seen]) -> None:
        """Each row is out, under one attempt that is open, and each copy names an attempt that the store knows."""
        wrong = self.tables.all("SELECT m.id, m.status FROM dlq_messages AS m WHERE m.status <> 'processing'")
        assert not wrong, wrong[:5]
        known = {
            (identity, number)
            for identity, number in self.tables.all(
                "SELECT m.identity, a.number FROM dlq_attempts AS a JOIN dlq_messages AS m ON m.id = a.message_id"
            )
        }
        for one in seen:
            headers = dict(rawamqp.headers_of(one.properties))
            identity = headers[b"dlqbatch-id"][5:].decode()
            attempt = int.from_bytes(headers[b"dlqbatch-attempt"][1:], "big")
            assert (identity, attempt) in known, (identity, attempt)


class Lifecycling(Sends):
    job = "lifecycle"


class Replaying(Sends):
    job = "replay"

    def fill(self) -> None:
        super().fill()
        planned = self.program().run("replay", "plan", "--all", "--json")
        assert planned.code == 0, planned.said
        self.hash = planned.told["hash"]

    def row(self, number: int) -> dict[str, Any]:
        return due(number, body=body_of(number), next_retry_at=None, status="manual")

    def command(self) -> tuple[str, ...]:
        return ("replay", "apply", self.hash, "--no-canary")

    def is_quiet(self) -> bool:
        return super().is_quiet() and self.tables.all("SELECT state FROM dlq_plans") == [("done",)]

    def count(self) -> tuple[int, int, int]:
        assert self.tables.all("SELECT state, count(*) FROM dlq_plan_items GROUP BY state") == [("sent", self.size)]
        at_rest = "plan_id IS NOT NULL AND status <> 'processing'"
        assert self.tables.number(f"SELECT count(*) FROM dlq_messages WHERE {at_rest}") == 0
        return super().count()


class Canary(Replaying):
    """First 1, then 10 in all, then 100, then the rest; each step waits until those before it have succeeded."""

    job = "replay"

    def command(self) -> tuple[str, ...]:
        return ("replay", "apply", self.hash, "--wait", "0")

    def ease(self) -> None:
        super().ease()
        self.tables.do(
            "UPDATE dlq_messages SET status = 'resolved', lock_token = NULL, lock_owner = NULL, locked_at = NULL, "
            "lease_until = NULL, "
            "plan_id = (SELECT p.id FROM dlq_plans AS p WHERE p.id = plan_id AND p.state = 'applying') WHERE id IN "
            "(SELECT message_id FROM dlq_attempts WHERE sent_at IS NOT NULL AND closed_at IS NULL)",
            f"UPDATE dlq_attempts SET outcome = 'succeeded', closed_at = {_OLD} "
            "WHERE sent_at IS NOT NULL AND closed_at IS NULL",
        )

    def unsent(self) -> int:
        return 0

    def _explained(self, seen: Iterable[rawamqp.Seen]) -> None:
        wrong = self.tables.all("SELECT id, status FROM dlq_messages WHERE status NOT IN ('resolved', 'processing')")
        assert not wrong, wrong[:5]


class Retaining(Scene):
    job = "retain"
    size = 150
    doubled_by_a_crash = 0

    def more_settings(self) -> dict[str, str]:
        return {"cold_storage": str(self.ground.folder / "cold")}

    def fill(self) -> None:
        self.was: dict[str, set[int]] = {}
        third = self.size // 3
        for place, status in enumerate(("failed", "archived", "resolved")):
            numbers = range(place * third, (place + 1) * third)
            ids = add(self.engine, *(row(body=body_of(number)) for number in numbers), at=OLD)
            self.was[status] = set(numbers)
            self.tables.do(f"UPDATE dlq_messages SET status = '{status}' WHERE id IN ({', '.join(map(str, ids))})")

    def is_quiet(self) -> bool:
        return self._rows() == dict.fromkeys(self.was["failed"], "archived")

    def _rows(self) -> dict[int, str]:
        found = self.tables.all("SELECT body, status FROM dlq_messages")
        return {number: status for body, status in found if (number := number_of(bytes(body))) is not None}

    def count(self) -> tuple[int, int, int]:
        lost, changed = self.missing()
        return lost, changed, 0

    def missing(self) -> tuple[int, int]:
        """At any instant: what is neither in the database nor in a cold copy that is whole."""
        copied = self._copied()
        changed = copied.pop(None, 0)
        rows = self._rows()
        kept = self.was["failed"] | self.was["archived"]
        bare = {number for number in self.was["failed"] if rows.get(number) == "archived"} - copied.keys()
        return len(kept - rows.keys() - copied.keys()) + len(bare), changed

    def _copied(self) -> Counter[int | None]:
        """Who is in a part that has a manifest, by a reader of gzip and JSON."""
        found: Counter[int | None] = Counter()
        for path in Path(self.settings["cold_storage"]).rglob("*.jsonl.gz"):
            if not path.with_name(path.name.replace(".jsonl.gz", ".manifest.json")).exists():
                continue
            with gzip.open(path) as lines:
                for line in lines:
                    told = json.loads(line)
                    if "message" in told:
                        found[number_of(base64.b64decode(told["message"]["body"]))] += 1
        return found


class Monitoring(Scene):
    """What happens to a message here is that somebody is told of an alert."""

    job = "monitor"
    size = 1
    doubled_by_a_crash = 1

    def more_settings(self) -> dict[str, str]:
        heard: list[Any] = []
        scene = self

        class Listener(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if scene.is_answered():
                    self.send_response(204)
                    self.end_headers()
                    scene.has_answered()

            def log_message(self, *_: object) -> None:
                pass

        self.heard = heard
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.server.server_port}/"
        return {"webhook_url": url, "alert_backlog": "5", "alert_new_groups": "false"}

    def is_answered(self) -> bool:
        """Asked when it has heard something."""
        return True

    def has_answered(self) -> None:
        """Called when the answer has gone out."""

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fill(self) -> None:
        add(self.engine, *(row(body=body_of(number)) for number in range(20)), at=OLD)

    def ease(self) -> None:
        self.tables.do(f"UPDATE dlq_alert_receivers SET telling_until = NULL, next_try_at = {_OLD}")

    def is_quiet(self) -> bool:
        return bool(self.tables.number("SELECT count(*) FROM dlq_alerts")) and not self.tables.number(
            "SELECT count(*) FROM dlq_alerts WHERE fired_told_at IS NULL"
        )

    def count(self) -> tuple[int, int, int]:
        fired = {name for (name,) in self.tables.all("SELECT name FROM dlq_alerts")}
        assert len(self.tables.all("SELECT name FROM dlq_alerts")) == self.size, fired
        text = json.dumps(self.heard)
        told = {name: text.count(f'"{name}"') for name in fired}
        return sum(not times for times in told.values()), 0, sum(max(times - 1, 0) for times in told.values())


SCENES: tuple[type[Scene], ...] = (Ingesting, Lifecycling, Replaying, Canary, Retaining, Monitoring)
