"""A broker and a database of its own, and one `dlqbatch schedule` that lives for all of the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import psutil
import psycopg
from endurance import traffic
from program import HANDLER, HANGS_AFTER, environment

from scripts.servers.management import Management
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

LOGIN, PASSWORD = "dlqbatch", "endures"
PROPERTIES = """\
dlqbatch.events.work.#=2
"""
SETTINGS = {
    "queue_type": "quorum",
    "tier_ttls": "1s,2s",
    "schedule_drain": "1s",
    "schedule_ingest": "2s",
    "schedule_lifecycle": "2s",
    "schedule_monitor": "3s",
    "schedule_retain": "5s",
    "schedule_check": "5s",
    "schedule_jitter": "0s",
    "trigger_depth": "3000",
    "trigger_interval": "2s",
    "max_workers": "2",
    "max_messages": "20000",
    "max_seconds": "8",
    "settle_seconds": "2",
    "connect_timeout_seconds": "5",
    "check_queues": "parked.*",
    "retry_delays": "1s",
    "observation_window": "2s",
    "recheck": "2s",
    "lease": "15s",
    "keep_resolved": "20s",
    "alert_ingestion_per_minute": "5",
    "alert_backlog": "5",
    "health_address": "127.0.0.1:0",
    "log_level": "warning",
}
EXPECTED_ALERTS = frozenset({"HighDLQIngestionRate", "DLQBacklogGrowing", "NewGroupNeedsPerson"})
"""What the load has to set off: each minute brings more than a few, some wait, and some need a person."""


class World:
    workers = 2
    dead_lettering = 3
    """Queues that dead-letter by themselves: the origin and the two tiers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = RabbitNode(folder / "rabbitmq")
        self.cluster = PostgresCluster(folder / "postgres")
        self.alerts: list[dict[str, Any]] = []
        self.temporary = folder / "temporary"
        self.log = folder / "schedule.log"
        self._told: list[dict[str, Any]] = []
        self._read_upto = 0
        self.alarm: subprocess.Popen[bytes] | None = None
        """Who raises the broker's alarm, and ends it."""
        self._ends = contextlib.ExitStack()
        self._schedule: subprocess.Popen[bytes] | None = None

    @property
    def database(self) -> str:
        return self.cluster.url.replace("+psycopg", "")

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for server in (self.node, self.cluster):
                stack.callback(server.abandon)
                server.launch()
            for server in (self.node, self.cluster):
                server.wait_ready()
            self.management = Management(self.node.management_url)
            self.management.put(f"users/{LOGIN}", {"password": PASSWORD, "tags": "management"})
            everything = {"configure": ".*", "write": ".*", "read": ".*"}
            self.management.put(f"permissions/%2F/{LOGIN}", everything)
            webhook = stack.enter_context(_listening(self.alerts))
            self.temporary.mkdir()
            config = self.folder / "endurance.properties"
            config.write_text(PROPERTIES)
            self._variables = environment(
                **SETTINGS,
                config=str(config),
                broker_url=f"amqp://{LOGIN}:{PASSWORD}@127.0.0.1:{self.node.port}/%2F",
                management_url=f"http://{LOGIN}:{PASSWORD}@127.0.0.1:{self.node.management_port}",
                database_url=self.cluster.url,
                cold_storage=str(self.folder / "cold"),
                webhook_url=webhook,
            ) | {"TMPDIR": str(self.temporary)}
            self._command("db", "upgrade")
            with psycopg.connect(self.database) as connection:
                connection.execute("SELECT 1 FROM dlq_event_config")
            self._command("topology", "apply", "--yes")
            traffic.prepare(self.node.url)
            self._schedule = self._start()
            stack.callback(self._kill)
            stack.callback(self.end_alarm)
            self._ends = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ends.close()

    def _command(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, HANDLER, *words], env=self._variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            command = [sys.executable, HANDLER, "schedule", "--json"]
            return subprocess.Popen(command, env=self._variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def end_alarm(self) -> None:
        """Wait for whoever raised it; a broker that is restarted has none."""
        if self.alarm is not None:
            try:
                self.alarm.wait(120)
            except subprocess.TimeoutExpired:
                self.alarm.kill()
                self.alarm.wait()
            self.alarm = None

    def _kill(self) -> None:
        if self._schedule is not None and self._schedule.poll() is None:
            self._schedule.kill()
            self._schedule.wait()

    @property
    def pid(self) -> int:
        assert self._schedule is not None
        return self._schedule.pid

    def is_alive(self) -> bool:
        return self._schedule is not None and self._schedule.poll() is None

    def end(self) -> int:
        """Its exit code, after SIGTERM."""
        assert self._schedule is not None
        self._schedule.terminate()
        return self._schedule.wait(HANGS_AFTER)

    def runs(self) -> list[psutil.Process]:
        """Runs at work; what is ending is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [one for one in psutil.Process(self.pid).children() if one.status() != psutil.STATUS_ZOMBIE]
        return []

    def connections(self) -> list[dict[str, Any]]:
        """Those of dlqbatch that the broker knows of."""
        found: list[dict[str, Any]] = self.management.get("connections")
        return [one for one in found if one.get("user") == LOGIN]

    def told(self) -> list[dict[str, Any]]:
        """What each run that has ended has said of itself."""
        with self.log.open("rb") as log:
            log.seek(self._read_upto)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read_upto += len(line)
                entry = _entry(line)
                if entry is not None and "job" in entry and "counts" in entry:
                    self._told.append(entry)
        return self._told


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def _listening(alerts: list[dict[str, Any]]) -> Iterator[str]:
    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            alerts.append(json.loads(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/hook"
    finally:
        server.shutdown()
        server.server_close()


def temporary_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))
