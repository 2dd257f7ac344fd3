"""A link between a client and the S3 of the tests: notes what is asked, and answers otherwise where a test says so."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from program import HANGS_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOSE = "the request is carried out, and its answer is lost"
HOLD = "the request waits for the end of the test"
_HOP = {"connection", "transfer-encoding", "expect", "keep-alive", "content-length"}


class Asked(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    """Their names in small letters."""
    body: bytes


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    sent: int | None = None
    """So many bytes of the body, and then the connection is closed."""


def refusal(status: int, code: str, message: str = "a reason", **headers: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return Answer(status, body, {"Content-Type": "application/xml", **headers})


@dataclass
class Link:
    target: str
    meddle: Callable[[Asked], object] = lambda _: None
    """What becomes of a request: None, it goes on; or LOSE, HOLD, an Answer, or a function from the answer to one."""
    asked: list[Asked] = field(default_factory=list)
    held: Event = field(default_factory=Event)
    closing: Event = field(default_factory=Event)
    url: str = ""

    def of(self, method: str) -> list[Asked]:
        return [each for each in self.asked if each.method == method]

    def forward(self, asked: Asked) -> Answer:
        place = urlsplit(self.target)
        connection = HTTPConnection(str(place.hostname), place.port or 80, timeout=HANGS_AFTER)
        with contextlib.closing(connection):
            kept = {name: text for name, text in asked.headers.items() if name not in _HOP}
            connection.request(asked.method, asked.path, asked.body, kept)
            answer = connection.getresponse()
            headers = {name: text for name, text in answer.getheaders() if name.lower() not in _HOP}
            # What HEAD is answered with tells a length that no body follows.
            if asked.method == "HEAD":
                headers["Content-Length"] = answer.getheader("Content-Length") or "0"
            return Answer(answer.status, answer.read(), headers)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    link: Link

    def _take(self) -> None:
        link = self.link
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = Asked(self.command, self.path, {name.lower(): text for name, text in self.headers.items()}, body)
        link.asked.append(asked)
        wanted = link.meddle(asked)
        if wanted is HOLD:
            link.held.set()
            link.closing.wait(HANGS_AFTER)
            self.close_connection = True
            return
        answer = wanted if isinstance(wanted, Answer) else link.forward(asked)
        if wanted is LOSE:
            self.close_connection = True
            return
        self._answer(wanted(answer) if callable(wanted) else answer)

    def _answer(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, text in answer.headers.items():
            self.send_header(name, text)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if answer.sent is not None:
            self.close_connection = True
        self.wfile.write(answer.body[: answer.sent])

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _take  # noqa: N815  (the library looks for these names)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """A client that was killed or gave up is what the tests are about."""


@contextlib.contextmanager
def s3_link(target: str, meddle: Callable[[Asked], object] = lambda _: None) -> Iterator[Link]:
    link = Link(target, meddle)
    server = _Server(("127.0.0.1", 0), type("_LinkHandler", (_Handler,), {"link": link}))
    link.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield link
    finally:
        link.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(HANGS_AFTER)
