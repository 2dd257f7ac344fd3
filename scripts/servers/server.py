"""One server process with all it forks, ended by process id and never outliving the program that started it."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

if TYPE_CHECKING:
    import pwd
    from collections.abc import Mapping, Sequence

LOOPBACK = "127.0.0.1"
HANGS_AFTER = max(180.0, float(os.environ.get("DLQBATCH_TEST_HANGS_AFTER", "0")))
"""Seconds after which a server that does not come up is given up; on a busy machine one may take a minute."""
TURN_SECONDS = 0.05
LOG_LINES_SHOWN = 60
# Below the ephemeral ports, so that no outgoing connection takes one in the meantime, and clear of an installed
# broker's distribution port, 25672, and of rabbitmqctl's, 35672 to 35682.
PORTS = range(26_000, 32_000)
_given: set[int] = set()


class ServiceError(RuntimeError):
    """A server is not installed, did not start or did not answer; the message says what to do, or ends with its log."""


def free_port() -> int:
    """A port of loopback where nobody listens now, and that nobody else in this process was given."""
    for port in random.sample(PORTS, k=200):
        if port in _given:  # its server may not listen yet
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            _given.add(port)
            return port
    raise ServiceError("200 ports of loopback were tried and none is free")


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _state_and_parent(pid)[0] != "Z"
    return False


def descendants(pid: int) -> list[int]:
    """Every living process below this one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - it is read many times a second while a server ends
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, parent = _state_and_parent(int(entry))
                if state != "Z":
                    children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    unseen = [pid]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def _state_and_parent(pid: int) -> tuple[str, int]:
    # The name, in parentheses, may hold spaces and parentheses of its own.
    state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    return state, int(parent)


class Guard:
    """The process that ends our servers if we are killed; see guard.py for the lines it reads."""

    _process: subprocess.Popen[str] | None = None

    @classmethod
    def tell(cls, line: str) -> None:
        if cls._process is None:
            command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
            cls._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
            atexit.register(cls.dismiss)
        assert cls._process.stdin is not None
        cls._process.stdin.write(line + "\n")
        cls._process.stdin.flush()

    @classmethod
    def dismiss(cls) -> None:
        """End the guard, and by it every server that still runs."""
        process, cls._process = cls._process, None
        if process is not None:
            process.communicate()


class Server:
    """A server whose data stay in `folder` (the caller's) over stop, kill and restart."""

    title = "server"
    stop_signal = signal.SIGTERM
    abandon_signal = signal.SIGKILL

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServiceError(f"{self.title} is not running")
        return self._process.pid

    def launch(self) -> None:
        """Begin to start, so that several can start at once; `wait_ready` finishes it."""
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def wait_ready(self, timeout: float = HANGS_AFTER) -> None:
        if self._process is None:
            raise ServiceError(f"{self.title} was not launched")
        deadline = time.monotonic() + timeout
        while not self.ready():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._fail(f"ended with code {self._process.wait(TURN_SECONDS)} while it started")
            if time.monotonic() > deadline:
                self._fail(f"did not answer within {timeout:g} s")

    def start(self, timeout: float = HANGS_AFTER) -> Self:
        self.launch()
        self.wait_ready(timeout)
        return self

    def stop(self, timeout: float = 60.0) -> None:
        """End it in good order."""
        self._end(self.stop_signal, timeout)

    def kill(self) -> None:
        """End it and its children by SIGKILL, as a crash would."""
        self._end(signal.SIGKILL, 10.0)

    def abandon(self) -> None:
        """End it at once, without care for its data; nothing of it is left in the kernel."""
        self._end(self.abandon_signal, 10.0)

    def restart(self, timeout: float = HANGS_AFTER) -> None:
        """Start again on the same data and the same ports, after a stop if it still runs."""
        if self._process is not None:
            self.stop()
        self.start(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def spawn(self, command: Sequence[str], env: Mapping[str, str], account: pwd.struct_passwd | None = None) -> None:
        if self._process is not None:
            raise ServiceError(f"{self.title} runs already")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the command that uses the servers
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )
        Guard.tell(f"watch {self.pid} {self.abandon_signal.value}")

    def _end(self, number: signal.Signals, timeout: float) -> None:
        if self._process is None:
            return
        process, deadline = self._process, time.monotonic() + timeout
        if number is signal.SIGKILL:
            process.send_signal(signal.SIGSTOP)  # so that it forks nothing while its children are counted
        family = descendants(process.pid)
        process.send_signal(number)
        if number is signal.SIGKILL:
            _send(family, number)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        while (left := [pid for pid in family if is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(TURN_SECONDS)
        _send(left, signal.SIGKILL)
        Guard.tell(f"forget {process.pid}")
        self._process = None

    def _fail(self, what: str) -> NoReturn:
        self.kill()
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:] if self.log.exists() else []
        raise ServiceError("\n  | ".join([f"{self.title} {what}. The end of {self.log}:", *lines]))


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
