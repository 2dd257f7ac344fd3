"""`/livez`, `/healthz` and `/metrics` over HTTP; nothing can be changed through them.

A connection is one request, in a few seconds, and there are a few connections at once; another one waits for its turn.
Nothing of a request is repeated in an answer or in a log.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import BoundedSemaphore, Lock, Thread, Timer
from typing import Any, Final
from urllib.parse import urlsplit

from dlqbatch import logs
from dlqbatch.aws.secrets import CurrentSettings
from dlqbatch.errors import DatabaseUnreadable, DlqbatchError
from dlqbatch.monitor import prometheus
from dlqbatch.monitor.metrics import Reported, queue_depths, report_of_depths
from dlqbatch.schedule.processes import Tally
from dlqbatch.schedule.scaling import Seen

log = logs.get(__name__)

# Seconds for a request to come, for its answer to be taken, and for the other side to hang up.
SECONDS: Final = 5.0
# Connections at once.
MOST: Final = 16
# Bytes of the first line of a request.
LONGEST: Final = 8 * 1024
# Bytes that are read and thrown away after an answer: what is unread when a socket is closed takes the answer with it.
_LAST_BYTES: Final = 64 * 1024
_METHODS: Final = ("GET", "HEAD")
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
# Seconds for which the figures of the dead store are repeated, so that no number of scrapers reads it more often.
_KEPT: Final = 5.0
# Seconds that a scraper waits for the database; Prometheus itself gives up after ten.
_LONGEST_WAIT: Final = 3.0


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
    /metrics; `is_alive` says whether the status of /livez is 200 or 503. They are called for each request, by several
    threads at once. What they raise is logged, and answered with 500.
    """

    def __init__(
        self,
        address: str,
        state: Callable[[], dict[str, object]],
        is_well: Callable[[], bool],
        metrics: Callable[[], str],
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._address = address
        self._state, self._is_well, self._metrics, self._is_alive = state, is_well, metrics, is_alive
        self._pages = {"/livez": self._livez, "/healthz": self._healthz, "/metrics": self._prometheus}
        self._failed: set[str] = set()
        """Pages whose last answer was a failure, which is logged once."""
        self._server: _Server | None = None

    def start(self) -> str:
        """Return the address it is bound to: with port 0 the system has chosen one."""
        parts = urlsplit(f"//{self._address}")
        try:
            family, *_, place = socket.getaddrinfo(
                parts.hostname, parts.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._server = _Server(family, place, self._answer)
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise HealthAddressTaken(self._address) from error
            raise HealthAddressRefused(self._address, getattr(error, "strerror", None) or str(error)) from error
        Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="health").start()
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if family == socket.AF_INET6 else f"{host!s}:{port}"

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        """Status, content type, body."""
        page = self._pages.get(path)
        if page is None:
            return HTTPStatus.NOT_FOUND, _TEXT, "There are /livez, /healthz and /metrics.\n"
        try:
            answer = page()
        except Exception as error:  # noqa: BLE001  (whatever it is, the next request has to be answered)
            if path not in self._failed:
                self._failed.add(path)
                log.error("a page of the health endpoint failed", page=path, failure=error)  # noqa: TRY400  (ours takes it)
            return HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, "This could not be told; the scheduler's log says why.\n"
        self._failed.discard(path)
        return answer

    def _livez(self) -> tuple[HTTPStatus, str, str]:
        if self._is_alive():
            return HTTPStatus.OK, _TEXT, "It goes on.\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, "Its main loop stands still.\n"

    def _healthz(self) -> tuple[HTTPStatus, str, str]:
        status = HTTPStatus.OK if self._is_well() else HTTPStatus.SERVICE_UNAVAILABLE
        return status, _JSON, json.dumps(self._state(), default=str) + "\n"

    def _prometheus(self) -> tuple[HTTPStatus, str, str]:
        return HTTPStatus.OK, _PROMETHEUS, self._metrics()


class _Server(ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, family: socket.AddressFamily, place: Any, answer: Callable[[str], tuple[HTTPStatus, str, str]]
    ) -> None:
        self.address_family = family
        self.answer = answer
        self._free = BoundedSemaphore(MOST)
        super().__init__(place, _Connection)

    def server_bind(self) -> None:
        # HTTPServer looks for the host's name in the DNS, which may take long, and is needed for nothing here.
        TCPServer.server_bind(self)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        del request, client_address
        return self._free.acquire(timeout=SECONDS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is a mistake of ours."""
        del request, client_address
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("the health endpoint failed", failure=error)


class _Connection(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # the answer to 0.9 would have no status

    def handle(self) -> None:
        self.connection.settimeout(SECONDS)
        self.requestline, self.request_version, self.command = "", self.default_request_version, ""
        with self._cut_off_late():
            self.raw_requestline = self.rfile.readline(LONGEST + 1)
            is_whole = bool(self.raw_requestline) and len(self.raw_requestline) <= LONGEST and self.parse_request()
        if is_whole and self.command in _METHODS:
            self._send(*self.server.answer(self.path.partition("?")[0]))
        elif is_whole:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        elif len(self.raw_requestline) > LONGEST:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        with self._cut_off_late(), suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            taken = 0
            while taken < _LAST_BYTES and (part := self.connection.recv(_LAST_BYTES)):
                taken += len(part)

    @contextmanager
    def _cut_off_late(self) -> Iterator[None]:
        """Shut the connection after some seconds: a socket's own time-out ends silence, but not a byte now and then."""

        def cut() -> None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        timer = Timer(SECONDS, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer without the text of the library, which repeats the request."""
        del message, explain
        self._send(HTTPStatus(code), _TEXT, f"{HTTPStatus(code).phrase}.\n")

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        content = body.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(_METHODS))
        with suppress(OSError):
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def handle_expect_100(self) -> bool:
        return True

    def version_string(self) -> str:
        return "dlqbatch"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name it has there)
        """Log no requests, and not what was wrong with them."""


class Figures:
    """The text of /metrics: the scheduler's own figures, and those of the dead store while its database answers."""

    def __init__(self, current: CurrentSettings, running: Callable[[str], int], seen: Callable[[], Seen]) -> None:
        self._current, self._running, self._seen = current, running, seen
        self._lock = Lock()
        self._reader: Thread | None = None
        self._read_at = 0.0
        self._store: str | None = None
        self._is_away = False

    def text(self, tallies: Mapping[str, Tally], *, is_well: bool) -> str:
        store = self._store_text()
        own = prometheus.text(self._own_lines(tallies, is_well=is_well, is_read=store is not None))
        if store is None:
            seen = self._seen_depths()
            store = "" if seen is None else prometheus.text(prometheus.queue_depth_lines(queue_depths([seen])))
        return prometheus.text(prometheus.build_info()) + own + store

    def _own_lines(self, tallies: Mapping[str, Tally], *, is_well: bool, is_read: bool) -> Iterator[str]:
        def by_job(name: str, meaning: str, number: Callable[[Tally], float], kind: str = "gauge") -> Iterator[str]:
            numbers = {job: number(tally) for job, tally in tallies.items()}
            return prometheus.by_label(f"schedule_{name}", meaning, "job", numbers, kind)

        yield from by_job("runs_started_total", "Runs begun.", lambda one: one.started, "counter")
        meaning = "Starts left out because the run before was still at work."
        yield from by_job("starts_left_out_total", meaning, lambda one: one.left_out, "counter")
        yield from by_job("runs_failed_total", "Runs that did not do well.", lambda one: one.failed, "counter")
        meaning = "Failed runs since the last that did not fail."
        yield from by_job("failures_in_a_row", meaning, lambda one: one.failures_in_a_row)
        # A monitor measures and takes no message.
        moving = {job: one for job, one in tallies.items() if job != "monitor"}
        meaning = "Messages by what became of them, from the reports of the runs."
        yield from prometheus.counters("messages_total", meaning, {job: one.decisions for job, one in moving.items()})
        meaning = "Messages by the reason of that, where a report gives one."
        reasons = {job: one.reasons for job, one in moving.items()}
        yield from prometheus.counters("message_reasons_total", meaning, reasons, label="reason")
        times = {job: (one.times.buckets, one.times.total, one.times.number) for job, one in tallies.items()}
        yield from prometheus.histogram("run_seconds", "How long runs took, from start to end of the process.", times)
        at_work = {job: self._running(job) for job in tallies}
        yield from prometheus.by_label("schedule_runs_at_work", "Runs at work.", "job", at_work)
        ended = {job: one.last_success.timestamp() for job, one in tallies.items() if one.last_success}
        meaning = "When the last run ended that did well."
        yield from prometheus.by_label("schedule_last_success_timestamp_seconds", meaning, "job", ended)
        yield from prometheus.single("schedule_well", "What /healthz says: 1, or 0.", int(is_well))
        reachable = None if (known := self._seen().reachable) is None else int(known)
        meaning = "Whether the last look at the queues reached the broker: 1, or 0."
        yield from prometheus.single("schedule_broker_reachable", meaning, reachable)
        meaning = "Whether the figures of the dead store could be had: 1, or 0."
        yield from prometheus.single("schedule_store_read", meaning, int(is_read))

    def _store_text(self) -> str | None:
        """None if the database does not answer, or not in time."""
        with self._lock:
            if self._reader is None:
                if time.monotonic() - self._read_at < _KEPT:
                    return self._store
                self._reader = Thread(target=self._read, name="figures", daemon=True)
                self._reader.start()
            reader = self._reader
        reader.join(_LONGEST_WAIT)
        with self._lock:
            return None if reader is self._reader else self._store

    def _read(self) -> None:
        store, why = None, None
        try:
            store = self._measured()
        except DlqbatchError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  (the scheduler's own figures have to be reported all the same)
            log.error("the figures of the dead store could not be made", failure=error)  # noqa: TRY400  (ours: with the trace)
        if why is not None and not self._is_away:
            log.warning("the figures of the dead store cannot be had", why=why)
        with self._lock:
            self._is_away = why is not None
            self._store, self._read_at, self._reader = store, time.monotonic(), None

    def _measured(self) -> str:
        from dlqbatch.monitor.job import metrics_text  # noqa: PLC0415  (SQLAlchemy: 20 MB of an idle scheduler)

        seen = self._seen_depths()
        used = self._current.settings
        try:
            return metrics_text(used, seen)
        except DatabaseUnreadable:
            if not self._current.renew(used):
                raise
            return metrics_text(self._current.settings, seen)

    def _seen_depths(self) -> Reported | None:
        reading = self._seen().reading
        return None if reading is None else report_of_depths(reading.at, reading.depths)
