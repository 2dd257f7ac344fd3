"""A network between the program and its database that falls silent, as a proxy does that hangs: nothing is closed."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Self

from program import HANGS_AFTER
from sqlalchemy.engine import make_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class StallingLink:
    """Forwards connections until the texts of `script` have passed, in this order; then nothing more, for any of them.

    The last text still reaches the server if it `is_heard`; its answer never comes. Without a script it is silent from
    the start: connections are accepted, and that is all.
    """

    def __init__(self, database_url: str, *script: bytes, is_heard: bool = False) -> None:
        url = make_url(database_url)
        self._target = (url.host or "127.0.0.1", url.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = url.set(host="127.0.0.1", port=self._listener.getsockname()[1]).render_as_string(hide_password=False)
        self._script = list(script)
        self._is_heard = is_heard
        self._one_reads = threading.Lock()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.asked = threading.Event()
        """Somebody waits for an answer that will not come."""

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._hang_up(self._listener)
        for thread in list(self._threads):
            self._hang_up(*self._ends)
            thread.join(HANGS_AFTER)

    @property
    def is_silent(self) -> bool:
        return not self._script

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                program, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._ends += program, server
                self._start(self._ask, program, server)
                self._start(self._answer, server, program)

    def _ask(self, program: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := program.recv(65536):
                if self._passes(data):
                    server.sendall(data)
        # Only who was not silent hands the end on.
        if not self.is_silent:
            self._hang_up(server)

    def _passes(self, data: bytes) -> bool:
        with self._one_reads:
            was_silent, position = self.is_silent, 0
            while self._script and (found := data.find(self._script[0], position)) >= 0:
                position = found + len(self._script.pop(0))
            if self.is_silent:
                self.asked.set()
            return not self.is_silent or (self._is_heard and not was_silent)

    def _answer(self, server: socket.socket, program: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if not self.is_silent:
                    program.sendall(data)
        if not self.is_silent:
            self._hang_up(program)

    @staticmethod
    def _hang_up(*ends: socket.socket) -> None:
        for end in ends:
            # Closing alone does not wake a thread that reads from it.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
