"""A management API that is somebody else: endless, slow, nested, or of any types."""

from __future__ import annotations

import json
import random
import secrets
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from dlqbatch.broker import management
from dlqbatch.broker.management import Api, NoReply
from dlqbatch.doctor.job import Surveyor
from dlqbatch.topology.inspect import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAITS = 0.02
"""Seconds between the pieces of a slow answer."""


@contextmanager
def answering(write: Callable[[Any], None]) -> Iterator[Api]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # it has had enough
                write(self.wfile.write)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Api("amqp://127.0.0.1/", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_answer_without_an_end_is_given_up_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "_LONGEST_ANSWER", 1_000_000)
    written = 0

    def endless(write: Any) -> None:
        nonlocal written
        while written < 1 << 30:
            written += write(b"[" + b" " * 65_535)

    with answering(endless) as api, pytest.raises(NoReply, match="longer than 1,000,000 bytes"):
        api.ask("overview")
    assert written < 1 << 27  # what the socket holds beside it


def test_an_answer_that_drips_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "_LONGEST_SECONDS", 0.3)
    over = threading.Event()

    def drips(write: Any) -> None:
        while not over.wait(WAITS):
            write(b" ")

    with answering(drips) as api:
        try:
            with pytest.raises(NoReply, match="takes longer than"):
                api.ask("overview")
        finally:
            over.set()


def test_an_answer_nested_without_an_end_is_none() -> None:
    with answering(lambda write: write(b"[" * 500_000)) as api, pytest.raises(NoReply, match="does not answer"):
        api.ask("overview")


def anything(dice: random.Random, depth: int = 3) -> Any:
    """JSON of any type, with the names that the broker's answers have."""
    names = ("name", "items", "page_count", "source", "routing_key", "alarms", "arguments", "destination", "pattern")
    names += ("consumer_details", "default_queue_type", "messages")
    kind = dice.randrange(9 if depth else 6)
    if kind < 6:
        return (None, True, -1, 10**30, "text", 0.5)[kind]
    if kind == 6:
        return [anything(dice, depth - 1) for _ in range(dice.randrange(3))]
    return {name: anything(dice, depth - 1) for name in dice.sample(names, dice.randrange(1, len(names)))}


def test_answers_of_any_types_are_as_good_as_none() -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    dice = random.Random(seed)
    with answering(lambda write: write(json.dumps(anything(dice)).encode())) as api:
        for _ in range(100):
            surveyor, reader = Surveyor(api, clock=lambda: datetime.now(UTC)), Reader(api)
            surveyor.alarms(), surveyor.permissions(), surveyor.map()
            reader.messages("q"), reader.arguments("q"), reader.exchanges(), reader.bindings_from("e")
            reader.dead_lettering(), surveyor.deprecated(), surveyor.default_queue_type(), surveyor.stuck("q")
            surveyor.foreign_consumers("q")


def test_pages_without_an_end_are_read_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "MOST_PAGES", 5)
    asked = 0

    def page(write: Any) -> None:
        nonlocal asked
        asked += 1
        write(json.dumps({"items": [], "page_count": 10**30}).encode())

    with answering(page) as api:
        assert list(Surveyor(api, clock=lambda: datetime.now(UTC)).queues("name")) == []
    assert asked == 5
