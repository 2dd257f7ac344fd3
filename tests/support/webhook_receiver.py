"""A webhook's other side on loopback: it takes what is sent, and answers as a test says."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from program import HANGS_AFTER

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Hook:
    """`answers` are used up one by one; the last one stays."""

    answers: list[Any]
    requests: list[bytes] = field(default_factory=list)
    closing: Event = field(default_factory=Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/T0SECRET/B0SECRET?key=S3CRET"

    @property
    def told(self) -> list[Any]:
        return [json.loads(request.partition(b"\r\n\r\n")[2]) for request in self.requests]

    def serve(self, connection: socket.socket) -> None:
        # A client that has given up closes first: nothing of that is a failure here.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(20)
            self.requests.append(_request(connection))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, bytes):
                connection.sendall(answer)
            else:
                answer(connection, self.closing)


def _request(connection: socket.socket) -> bytes:
    taken = b""
    while b"\r\n\r\n" not in taken:
        taken += _some(connection)
    head, _, body = taken.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(lines[b"content-length"]):
        body += _some(connection)
    return head + b"\r\n\r\n" + body


def _some(connection: socket.socket) -> bytes:
    part = connection.recv(65_536)
    if not part:
        raise ConnectionResetError
    return part


def status(code: int, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {code} Some Phrase", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def hang(_: socket.socket, closing: Event) -> None:
    closing.wait(HANGS_AFTER)


def drip(connection: socket.socket, closing: Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not closing.wait(0.05):
        connection.sendall(b"x")


def reset(connection: socket.socket, _: Event) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def flood(connection: socket.socket, closing: Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
    while not closing.is_set():
        connection.sendall(b"x" * 65_536)


@contextlib.contextmanager
def hook(*answers: Any) -> Iterator[Hook]:
    made = Hook(list(answers))
    with socket.create_server(("127.0.0.1", 0)) as server:
        made.port = server.getsockname()[1]
        threads: list[Thread] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if made.closing.is_set():
                        connection.close()
                        return
                    threads.append(Thread(target=made.serve, args=(connection,)))
                    threads[-1].start()

        accepting = Thread(target=accept)
        accepting.start()
        try:
            yield made
        finally:
            made.closing.set()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", made.port), 5):
                pass  # wakes who accepts
            accepting.join(HANGS_AFTER)
            for thread in threads:
                thread.join(HANGS_AFTER)
