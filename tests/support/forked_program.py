"""A process that has loaded all of the program and forks for each command: the start of Python is most of a short one.

What runs is what `python handler.py …` runs, in a process of its own with its own environment, folder and pipes; only
the reading of the modules is done once. Tests about the start itself, and those that kill, start Python.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, ClassVar, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOADED = ("psycopg", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite", "alembic.command")
_REQUEST_BYTES = 1024 * 1024


class Warm:
    """The other side of it, in the tests' process; one for all commands with the same handler."""

    _at: ClassVar[Warm | None] = None

    def __init__(self, handler: str, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, handler, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    @classmethod
    def of(cls, handler: str, environment: Mapping[str, str]) -> Warm:
        if cls._at is None:
            cls._at = cls(handler, environment)
            atexit.register(cls._at.close)
        return cls._at

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, timeout: float
    ) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr."""
        ours, theirs = socket.socketpair()
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment), "folder": folder})
        given = [theirs.fileno(), its_out, its_err]
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
            socket.send_fds(self._socket, [request.encode()], given)
        finally:
            theirs.close()
            os.close(its_out)
            os.close(its_err)
        with ours, contextlib.closing(selectors.DefaultSelector()) as selector:
            read: dict[int, bytearray] = {out: bytearray(), err: bytearray(), ours.fileno(): bytearray()}
            for number in read:
                selector.register(number, selectors.EVENT_READ)
            deadline = time.monotonic() + timeout
            try:
                while selector.get_map():
                    if not (ready := selector.select(deadline - time.monotonic())):
                        told = bytes(read[ours.fileno()]).split()
                        os.kill(int(told[0]), signal.SIGKILL)
                        raise subprocess.TimeoutExpired(list(arguments), timeout, bytes(read[out]), bytes(read[err]))
                    for key, _ in ready:
                        if more := os.read(key.fd, 65536):
                            read[key.fd] += more
                        else:
                            selector.unregister(key.fd)
            finally:
                os.close(out)
                os.close(err)
            _, code = bytes(read[ours.fileno()]).split()
        return int(code), bytes(read[out]), bytes(read[err])


def load_all() -> None:
    package = importlib.import_module("dlqbatch")
    for module in pkgutil.walk_packages(package.__path__, "dlqbatch."):
        # A migration is loaded by its own tool; the demonstration and the entry point run when they are.
        if ".migrations" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in _LOADED:
        importlib.import_module(name)


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request; in the process that is to run a command this returns its arguments."""
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _REQUEST_BYTES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for the commands are waited for by nobody
    while True:
        message, given, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            if not (command := os.fork()):
                return begin(json.loads(message), *given)
            tell_how_it_ended(command, *given)
        for number in given:
            os.close(number)


def begin(request: dict[str, object], told: int, out: int, err: int) -> list[str]:
    os.close(told)
    for number, at in ((out, 1), (err, 2)):
        os.dup2(number, at)
        os.close(number)
    # Those that Python made know the files it was started with.
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")  # noqa: SIM115  (open until the end)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(request["folder"]))
    return arguments


def tell_how_it_ended(command: int, told: int, out: int, err: int) -> NoReturn:
    for number in (out, err):
        os.close(number)
    os.write(told, b"%d " % command)
    _, status = os.waitpid(command, 0)
    os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    program = sys.argv[1]
    sys.path[0] = os.path.dirname(program)  # noqa: PTH120  (as Python sets it)
    load_all()
    sys.argv = [program, *serve(socket.socket(fileno=int(sys.argv[2])))]
    runpy.run_path(program, run_name="__main__")
