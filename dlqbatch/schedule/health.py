"""`/healthz` and `/metrics` over HTTP, for whoever can reach the address; nothing can be changed through it.

Whoever connects may be slow, broken or hostile: each connection is one question, of a few kilobytes, in a few seconds;
there are a few at once, and when there are too many, the one that has kept us waiting longest makes room. Nothing of a
question is repeated in an answer or in a log.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from socketserver import TCPServer
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logs.get(__name__)

SECONDS: Final = 5.0
"""That a connection may take in all, beside the time that its answer takes to be made."""
LONGEST: Final = 8 * 1024
"""Bytes of a request: its line and its headers."""
MOST: Final = 16
"""Connections at once."""
_LAST_BYTES: Final = 64 * 1024
"""Read and thrown away after an answer: what is unread when a socket is closed would take the answer with it."""
_METHODS: Final = frozenset({"GET", "HEAD"})
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"


class HealthAddressTaken(DlqbatchError):
    exit_code = 1

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(
            f"{address} is taken: another program, perhaps another `dlqbatch schedule`, answers there. End it, or set "
            "dlqbatch.health_address to another port, or to off. Nothing was started."
        )


class HealthAddressRefused(DlqbatchError):
    exit_code = 2

    def __init__(self, address: str, why: str) -> None:
        self.address, self.why = address, why
        super().__init__(
            f"nothing can listen at {address}: {why}. Set dlqbatch.health_address to an address of this machine with a "
            "port from 1024 on, or to off. Nothing was started."
        )


class Health:
    """Answers from `start` to `close`, in threads of its own.

    `state` is the body of /healthz, and `is_well` says whether its status is 200 or 503; `metrics` is the body of
    /metrics. They are called for each question, several at once too. What they raise is logged, and answered with 500.
    """

    def __init__(
        self,
        address: str,
        state: Callable[[], dict[str, object]],
        is_well: Callable[[], bool],
        metrics: Callable[[], str],
    ) -> None:
        self._address = address
        self._pages = _Pages(state, is_well, metrics)
        self._server: _Server | None = None
        self._thread: Thread | None = None

    def start(self) -> str:
        """The address it is bound to: with port 0 the system has chosen one."""
        self._server = _bound(self._address, self._pages)
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="health")
        self._thread.start()
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if self._server.address_family == socket.AF_INET6 else f"{host!s}:{port}"

    def close(self) -> None:
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        self._thread.join()
        server.server_close()


def _bound(address: str, pages: _Pages) -> _Server:
    parts = urlsplit(f"//{address}")
    try:
        family, *_, place = socket.getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return _Server(family, place, pages)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise HealthAddressTaken(address) from error
        raise HealthAddressRefused(address, getattr(error, "strerror", None) or str(error)) from error


class _Pages:
    def __init__(
        self, state: Callable[[], dict[str, object]], is_well: Callable[[], bool], metrics: Callable[[], str]
    ) -> None:
        self._state, self._is_well, self._metrics = state, is_well, metrics
        self._failed: set[str] = set()
        """Pages whose last answer was a failure, which is logged once."""

    def answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        """Status, content type, body."""
        page = {"/healthz": self._health, "/metrics": self._prometheus}.get(path)
        if page is None:
            return HTTPStatus.NOT_FOUND, _TEXT, "There is /healthz, and there is /metrics.\n"
        try:
            answer = page()
        except Exception as error:  # noqa: BLE001  (whatever it is, the next question has to be answered)
            if path not in self._failed:
                self._failed.add(path)
                log.error("a page of the health endpoint failed", page=path, failure=error)  # noqa: TRY400  (ours takes it)
            return HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, "This could not be told; the scheduler's log says why.\n"
        self._failed.discard(path)
        return answer

    def _health(self) -> tuple[HTTPStatus, str, str]:
        status = HTTPStatus.OK if self._is_well() else HTTPStatus.SERVICE_UNAVAILABLE
        return status, _JSON, json.dumps(self._state(), default=str) + "\n"

    def _prometheus(self) -> tuple[HTTPStatus, str, str]:
        return HTTPStatus.OK, _PROMETHEUS, self._metrics()


class _Server(ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: socket.AddressFamily, place: Any, pages: _Pages) -> None:
        self.address_family = family
        self.pages = pages
        self._connections: dict[socket.socket, bool] = {}
        """All that are open, the oldest first, and whether we wait for the other side: then it can be sent away."""
        self._counting = Lock()
        super().__init__(place, _Connection)

    def server_bind(self) -> None:
        # HTTPServer looks for the host's name in the DNS, which may take long, and is needed for nothing here.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for it, or send it away if all the others are being answered."""
        del client_address
        with self._counting:
            if len(self._connections) >= MOST:
                silent = next((one for one, waits in self._connections.items() if waits), None)
                if silent is None:
                    return False
                del self._connections[silent]
                with suppress(OSError):
                    silent.shutdown(socket.SHUT_RDWR)  # its thread wakes, and closes it
            self._connections[request] = True
        return True

    def mark(self, connection: socket.socket, *, waits: bool) -> bool:
        """Whether we wait for the other side from now on; False if it has been sent away."""
        with self._counting:
            if connection not in self._connections:
                return False
            self._connections[connection] = waits
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._counting:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """That somebody went away is no news; anything else is a mistake of ours."""
        del request, client_address
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("the health endpoint failed", failure=error)


class _Connection(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # 0.9 would have an answer without a status

    def setup(self) -> None:
        self._deadline = time.monotonic() + SECONDS
        super().setup()

    def handle(self) -> None:
        head = self._head()
        if not head or not self.server.mark(self.connection, waits=False):
            return
        self.rfile.close()
        self.rfile = BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        self.request_version, self.command = self.default_request_version, ""
        if len(head) > LONGEST:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.parse_request():
            self._answer()
        if self.server.mark(self.connection, waits=True):
            self._linger()

    def _head(self) -> bytes:
        """Up to the empty line, or more than may be; nothing if it did not come in time."""
        head = b""
        with suppress(OSError):
            while len(head) <= LONGEST:
                part = self._receive()
                if not part:
                    return b""
                head += part
                if b"\r\n\r\n" in head or b"\n\n" in head:
                    return head
            return head
        return b""

    def _receive(self) -> bytes:
        self.connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
        part: bytes = self.connection.recv(LONGEST)
        return part

    def _answer(self) -> None:
        if self.command not in _METHODS:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
            return
        status, kind, body = self.server.pages.answer(self.path.partition("?")[0])
        self._send(status, kind, body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Without what the library would say: it repeats the request."""
        del message, explain
        status = HTTPStatus(code)
        self._send(status, _TEXT, f"{status.phrase}.\n")

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        content = body.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(sorted(_METHODS)))
        self.connection.settimeout(SECONDS)
        with suppress(OSError):
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def _linger(self) -> None:
        self._deadline = time.monotonic() + SECONDS
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            taken = 0
            while taken < _LAST_BYTES and (part := self._receive()):
                taken += len(part)

    def handle_expect_100(self) -> bool:
        return True

    def version_string(self) -> str:
        return "dlqbatch"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """There is no log of questions."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name it has there)
        """Nor of what was wrong with them."""
