"""A process that has loaded all of the program and forks for each command: the start of Python is most of a short one.

What runs is what `python handler.py …` runs, in a process of its own with its own environment, folder and pipes; only
the reading of the modules is done once. Tests about the start itself start Python.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_LOADED = ("psycopg", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite", "alembic.command")
_REQUEST_BYTES = 1024 * 1024


class Warm:
    """The other side of it, in the tests' process; one for all commands with the same handler."""

    _at: ClassVar[Warm | None] = None
    _only_one: ClassVar = threading.Lock()

    def __init__(self, handler: str, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, handler, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    @classmethod
    def of(cls, handler: str, environment: Mapping[str, str]) -> Warm:
        with cls._only_one:
            if cls._at is None:
                cls._at = cls(handler, environment)
                atexit.register(cls._at.close)
            return cls._at

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, script: str | None, *files: int
    ) -> socket.socket:
        """Begin a command, whose stdout, stderr and (if it is given) stdin are these files.

        A script is run in place of the handler, as `python -c` runs it. What is returned tells the process's number,
        a space and, once it has ended, its exit code.
        """
        ours, theirs = socket.socketpair()
        wanted = {"arguments": [*arguments], "environment": {**environment}, "folder": folder, "script": script}
        request = json.dumps(wanted)
        with theirs:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
            socket.send_fds(self._socket, [request.encode()], [theirs.fileno(), *files])
        return ours

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        timeout: float,
        script: str | None = None,
    ) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr."""
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        try:
            ours = self.fork(arguments, environment, folder, script, its_out, its_err)
        finally:
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


class Forked(subprocess.Popen[str]):
    """A command that was forked, for as long as it runs; `args` are its arguments, behind `python handler.py`."""

    def __init__(self, warm: Warm, arguments: Sequence[str], script: str | None = None, **given: Any) -> None:
        self._warm, self._script = warm, script
        super().__init__(arguments, text=True, **given)

    def _execute_child(self, arguments: Sequence[str], *given: Any) -> None:
        folder, variables = given[4:6]
        in_read, _, _, out_write, _, err_write = given[9:15]
        files = [file if file != -1 else ours for file, ours in ((out_write, 1), (err_write, 2), (in_read, 0))]
        variables, folder = variables or os.environ, str(folder or Path.cwd())
        self._told = self._warm.fork(arguments, variables, folder, self._script, *files)
        self.pid = int(b"".join(iter(lambda: self._told.recv(1).strip(), b"")))
        self._child_created = True
        self._close_pipe_fds(*given[9:15])

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        """Whoever has forked it waits for it, and tells its exit code."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._told:
                self.returncode = int(self._told.recv(16))
        return self.returncode


def load_all() -> None:
    package = importlib.import_module("dlqbatch")
    for module in pkgutil.walk_packages(package.__path__, "dlqbatch."):
        # A migration is loaded by its own tool, an integration by its framework; the entry point runs when it is.
        if not re.search(r"\.migrations|\.integrations\.|__main__$", module.name):
            importlib.import_module(module.name)
    for name in _LOADED:
        importlib.import_module(name)


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request; in the process that is to run a command this returns what is wanted."""
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _REQUEST_BYTES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for the commands are waited for by nobody
    while True:
        message, given, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
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


def begin(request: dict[str, Any], told: int, *files: int) -> dict[str, Any]:
    os.close(told)
    for number, at in zip(files, (1, 2, 0), strict=False):
        os.dup2(number, at)
        os.close(number)
    # Those that Python made know the files it was started with.
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # noqa: SIM115  (open until the end)
    is_unbuffered = bool(request["environment"].get("PYTHONUNBUFFERED"))
    written = io.FileIO(1, "w") if is_unbuffered else open(1, "wb")  # noqa: SIM115  (open until the end)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(written, encoding="utf-8", write_through=is_unbuffered)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    return request


def tell_how_it_ended(command: int, told: int, *files: int) -> NoReturn:
    for number in files:
        os.close(number)
    os.write(told, b"%d " % command)
    _, status = os.waitpid(command, 0)
    os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    program = sys.argv[1]
    sys.path[0] = os.path.dirname(program)  # noqa: PTH120  (as Python sets it)
    load_all()
    wanted = serve(socket.socket(fileno=int(sys.argv[2])))
    if wanted["script"] is None:
        sys.argv = [program, *wanted["arguments"]]
        runpy.run_path(program, run_name="__main__")
    else:
        sys.argv = ["-c", *wanted["arguments"]]
        exec(compile(wanted["script"], "<string>", "exec"), {"__name__": "__main__"})
