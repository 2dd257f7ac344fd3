"""The program as its users run it, in processes of its own; and its broker as a client of theirs sees it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pika
from forked_program import Forked, Warm
from pika.exceptions import ChannelClosedByBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
HANDLER = str(ROOT / "handler.py")
OURS = (sys.executable, HANDLER)
FORKED = "a script, forked"
"""Begins a command: what stands behind it is run as `python -c` runs it, where dlqbatch is imported already."""
RETRY_QUEUE, DLQ = "retry-queue", "dlq-queue"
HANGS_AFTER = float(os.environ.get("DLQBATCH_TEST_HANGS_AFTER", "300"))
"""Seconds after which what a test waits for is taken to hang. However busy the machine is, nothing takes as long."""
_STYLES = re.compile(r"\x1b\[[0-9;]*m|\r[^\r\n]*\x1b\[K")
"""Colours, and a line of progress that is written over."""
_TRIED = 0.3
"""CPU seconds, enough to meet all that wants the cores."""


def eventually(condition: Callable[[], bool], seconds: float = HANGS_AFTER) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def slowdown() -> float:
    """How many times its CPU time something takes now: 1 on a machine that does nothing else.

    For a bound that the program promises on such a machine.
    """
    began, before = time.monotonic(), time.thread_time()
    while (used := time.thread_time() - before) < _TRIED:
        pass
    return (time.monotonic() - began) / used


def environment(**changes: str) -> dict[str, str]:
    """This process's, without any setting of dlqbatch but the given ones; no application.properties is read."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DLQBATCH_")}
    settings = {"DLQBATCH_CONFIG": os.devnull} | {f"DLQBATCH_{name.upper()}": text for name, text in changes.items()}
    return inherited | {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONWARNINGS": "error"} | settings


class Finished(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def told(self) -> Any:
        """What it printed with --json: one JSON value, and nothing else."""
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Program:
    """One installation: its settings, and the command that starts it."""

    settings: Mapping[str, str]
    command: Sequence[str] = OURS

    def but(self, **changes: str) -> Program:
        return Program({**self.settings, **changes}, self.command)

    def run(self, *arguments: str, cwd: Path | None = None, **more: str) -> Finished:
        """`more` are variables that are no settings, such as COLUMNS."""
        began = time.monotonic()
        variables = environment(**self.settings) | more
        command = (*self.command, *arguments)
        if command[:2] == OURS or command[0] == FORKED:
            warm, script = Warm.of(HANDLER, environment()), command[1] if command[0] == FORKED else None
            code, *said = warm.run(command[2:], variables, str(cwd or Path.cwd()), HANGS_AFTER, script)
            out, err = (part.decode() for part in said)
        else:
            done = subprocess.run(
                command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=HANGS_AFTER, check=False
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        return Finished(code, out, err, time.monotonic() - began)

    def on_terminal(self, *arguments: str, columns: int = 80) -> Finished:
        """Stdin, stdout and stderr are one terminal of so many columns; `out` is what it shows, without colours."""
        began = time.monotonic()
        variables = environment(**self.settings) | {"TERM": "xterm"}
        del variables["COLUMNS"]  # of a real terminal only the terminal itself knows
        child, terminal = pty.fork()
        if child == 0:
            termios.tcsetwinsize(0, (24, columns))
            os.execve(self.command[0], [*self.command, *arguments], variables)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that its program has ended
            while chunk := os.read(terminal, 65536):
                shown += chunk
        os.close(terminal)
        _, status = os.waitpid(child, 0)
        text = _STYLES.sub("", shown.decode().replace("\r\n", "\n"))
        return Finished(os.waitstatus_to_exitcode(status), text, "", time.monotonic() - began)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """It ends with the test at the latest."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        variables = environment(**self.settings)
        process: subprocess.Popen[str]
        command = (*self.command, *arguments)
        if command[:2] == OURS or command[0] == FORKED:
            warm, script = Warm.of(HANDLER, environment()), command[1] if command[0] == FORKED else None
            process = Forked(warm, command[2:], script, env=variables, **pipes)
        else:
            process = subprocess.Popen(command, env=variables, text=True, **pipes)
        _started.append(process)
        return process


_started: list[subprocess.Popen[str]] = []


def end_all() -> None:
    """What a test has started and left: a pipe that nobody closes would be another test's warning."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait(HANGS_AFTER)


class Message(NamedTuple):
    exchange: str
    routing_key: str
    body: bytes
    headers: dict[str, Any]


class RawHeaders(pika.BasicProperties):
    """Headers as bytes, for what the client library cannot write."""

    def __init__(self, entries: bytes) -> None:
        super().__init__()
        self._entries = entries

    def encode(self) -> list[bytes]:
        return [struct.pack(">H", self.FLAG_HEADERS), struct.pack(">I", len(self._entries)), self._entries]


def header_entry(name: str, tag: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name.encode() + tag + value


class Client:
    """A team's own use of the broker: queues whose failures go to the ladder, messages that fail, a look around."""

    def __init__(self, url: str) -> None:
        parameters = pika.URLParameters(url)
        parameters.heartbeat = (
            0  # nobody serves it while a test waits for something else, for minutes on a busy machine
        )
        self._connection = pika.BlockingConnection(parameters)
        self.channel = self._connection.channel()
        self.channel.confirm_delivery()

    def close(self) -> None:
        with contextlib.suppress(pika.exceptions.AMQPError):
            self._connection.close()

    def make_origin(self, queue: str, exchange: str = "orders", key: str = "#") -> None:
        arguments = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
        self.channel.exchange_declare(exchange, "topic", durable=True)
        self.channel.queue_declare(queue, durable=True, arguments=arguments)
        self.channel.queue_bind(queue, exchange, key)

    def publish(
        self,
        exchange: str,
        key: str,
        body: bytes = b"body",
        headers: dict[str, Any] | pika.BasicProperties | None = None,
    ) -> None:
        written = headers if isinstance(headers, pika.BasicProperties) else pika.BasicProperties(headers=headers)
        self.channel.basic_publish(exchange, key, body, written, mandatory=True)

    def reject_all(self, queue: str) -> int:
        """What a failing consumer does with everything that is there."""
        number = 0
        while True:
            method, _, _ = self.channel.basic_get(queue)
            if method is None:
                return number
            self.channel.basic_reject(method.delivery_tag, requeue=False)
            number += 1

    def fail(self, queue: str, key: str, *bodies: bytes, exchange: str = "orders", headers: Any = None) -> None:
        """Publish to the origin, let its consumer reject it, and wait until it is a failure that dlqbatch sees."""
        before = self.depth(RETRY_QUEUE)
        for body in bodies:
            self.publish(exchange, key, body, headers)
        rejected = self.reject_all(queue)
        self.await_depth(RETRY_QUEUE, before + rejected)

    def expire(self, exchange: str, key: str, bodies: Iterable[bytes]) -> None:
        """Publish many that nobody takes in time: they fail without a consumer, and as fast as they come."""
        unconfirmed = self._connection.channel()
        for body in bodies:
            unconfirmed.basic_publish(exchange, key, body, pika.BasicProperties(expiration="0", delivery_mode=2))
        unconfirmed.close()

    def depth(self, queue: str) -> int:
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)

    def await_depth(self, queue: str, depth: int) -> None:
        found: list[int] = []

        def reached() -> bool:
            found[:] = [self.depth(queue)]
            return found == [depth]

        assert eventually(reached), f"{queue} holds {found} messages, not {depth}"

    def contents(self, queue: str) -> list[Message]:
        """Everything in a queue, in order; it stays there."""
        channel = self._connection.channel()
        found = []
        while True:
            method, properties, body = channel.basic_get(queue)
            if method is None:
                break
            found.append(Message(method.exchange, method.routing_key, body, dict(properties.headers or {})))
        channel.close()
        self.await_depth(queue, len(found))
        return found

    def exists(self, queue: str) -> bool:
        channel = self._connection.channel()
        try:
            channel.queue_declare(queue, passive=True)
        except ChannelClosedByBroker:
            return False
        channel.close()
        return True


@contextlib.contextmanager
def client(url: str) -> Iterator[Client]:
    opened = Client(url)
    try:
        yield opened
    finally:
        opened.close()
