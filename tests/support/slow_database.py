"""A network between the program and its database on which every question takes long."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Self

from program import HANGS_AFTER
from sqlalchemy.engine import make_url

if TYPE_CHECKING:
    from types import TracebackType


class SlowDatabase:
    """Forwards connections; what the program asks reaches the server `seconds` later."""

    def __init__(self, database_url: str, seconds: float) -> None:
        url = make_url(database_url)
        self._target = (url.host or "127.0.0.1", url.port or 5432)
        self._seconds = seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = url.set(host="127.0.0.1", port=self._listener.getsockname()[1]).render_as_string(hide_password=False)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(threading.Thread(target=self._accept, daemon=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in list(self._threads):
            thread.join(HANGS_AFTER)

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                program, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for source, target, seconds in ((program, server, self._seconds), (server, program, 0.0)):
                    self._start(threading.Thread(target=_forward, args=(source, target, seconds), daemon=True))


def _forward(source: socket.socket, target: socket.socket, seconds: float) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            time.sleep(seconds)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
