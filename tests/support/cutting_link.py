"""A network between the program and PostgreSQL that breaks at a chosen text, and is whole again for who comes next."""

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

_COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
"""As psycopg sends it."""


class CuttingLink:
    """Forwards connections; at the commit of this number, of all together, `act` is called, and that one is cut.

    The commit reaches the server and is done if it `is_heard`: only its answer is lost. Without `cuts` the commit
    waits for `act`, and goes on. `commits` counts them all.
    """

    def __init__(
        self,
        database_url: str,
        number: int = 0,
        *,
        is_heard: bool = False,
        act: Callable[[], object] = lambda: None,
        text: bytes = _COMMIT,
        cuts: bool = True,
    ) -> None:
        url = make_url(database_url)
        self._target = (url.host or "127.0.0.1", url.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = url.set(host="127.0.0.1", port=self._listener.getsockname()[1]).render_as_string(hide_password=False)
        self._number, self._is_heard, self._act, self._text = number, is_heard, act, text
        self._cuts = cuts
        self.commits = 0
        self.has_cut, self.has_acted = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _hang_up(self._listener)
        for thread in list(self._threads):
            _hang_up(*self._ends)
            thread.join(HANGS_AFTER)

    def act(self, act: Callable[[], object]) -> None:
        """What to do then, where that needs the link itself."""
        self._act = act

    def cut_next(self, number: int, *, is_heard: bool) -> None:
        """Cut at this commit, counted from now."""
        self.has_cut.clear()
        self.has_acted.clear()
        with self._lock:
            self._number, self._is_heard = self.commits + number, is_heard

    def go_down(self) -> None:
        """Nobody is served any more."""
        _hang_up(self._listener, *self._ends)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                program, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:  # it is down: refused is what the program has to see
                    program.close()
                    continue
                self._ends += program, server
                is_mute = threading.Event()
                self._start(self._ask, program, server, is_mute)
                self._start(self._answer, server, program, is_mute)

    def _ask(self, program: socket.socket, server: socket.socket, is_mute: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := program.recv(65536):
                is_it = self._is_it(data)
                if is_it and not self._cuts:
                    self.has_cut.set()
                    self._act()
                    self.has_acted.set()
                elif is_it:
                    if self._is_heard:
                        is_mute.set()
                        server.sendall(data)
                        return  # the answer's thread does the rest
                    self._cut(program, server)
                    return
                server.sendall(data)
        _hang_up(server)

    def _answer(self, server: socket.socket, program: socket.socket, is_mute: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if is_mute.is_set():
                    break
                program.sendall(data)
        if is_mute.is_set():
            self._cut(program, server)
        _hang_up(program)

    def _is_it(self, data: bytes) -> bool:
        with self._lock:
            for _ in range(data.count(self._text)):
                self.commits += 1
                if self.commits == self._number:
                    return True
            return False

    def _cut(self, program: socket.socket, server: socket.socket) -> None:
        self.has_cut.set()
        self._act()
        self.has_acted.set()
        _hang_up(program, server)


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        # Closing alone does not wake a thread that reads from it.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
