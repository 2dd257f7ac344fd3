"""A network between the program and its broker that can be made to stop and go on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from program import HANGS_AFTER

if TYPE_CHECKING:
    from types import TracebackType


class SlowLink:
    """Forwards one connection; after `pause_after` bytes from the broker nothing more reaches the program."""

    def __init__(self, broker_url: str, pause_after: int) -> None:
        parts = urlsplit(broker_url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 5672)
        self._listener = socket.create_server(("127.0.0.1", 0))
        login = parts.netloc.rpartition("@")[0]
        self.url = f"amqp://{login}@127.0.0.1:{self._listener.getsockname()[1]}{parts.path}"
        self._pause_after = pause_after
        self.paused = threading.Event()
        self._open = threading.Event()
        self._last_request = time.monotonic()
        self._ends: tuple[socket.socket, ...] = ()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]

    def go_on(self) -> None:
        self._open.set()

    def hang_up(self) -> None:
        """The network is gone for both ends."""
        _hang_up(*self._ends)
        self._open.set()

    def quiet_for(self, seconds: float) -> bool:
        """Wait until the program has sent nothing for so long."""
        deadline = time.monotonic() + HANGS_AFTER
        while time.monotonic() - self._last_request < seconds:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open.set()
        self._listener.close()
        for thread in self._threads:
            thread.join(HANGS_AFTER)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            program, _ = self._listener.accept()
            broker = socket.create_connection(self._target)
            self._ends = (program, broker)
            upward = threading.Thread(target=self._forward, args=(program, broker), daemon=True)
            self._threads.append(upward)
            upward.start()
            self._deliver(broker, program)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._last_request = time.monotonic()
                target.sendall(data)
        _hang_up(source, target)

    def _deliver(self, source: socket.socket, target: socket.socket) -> None:
        delivered = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                delivered += len(data)
                if delivered > self._pause_after and not self._open.is_set():
                    self.paused.set()
                    self._open.wait(HANGS_AFTER)
                target.sendall(data)
        _hang_up(source, target)


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        # Closing alone does not wake a thread that reads from it.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
