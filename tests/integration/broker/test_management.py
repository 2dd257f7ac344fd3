"""Wildcards become queues: with the broker's own management API, and with one that misbehaves."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from broker_client import Side

from dlqbatch.broker.management import Api, expansion
from dlqbatch.errors import BrokerUnreachable
from dlqbatch.jobs import RunOptions, run
from dlqbatch.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def expand(names: list[str], broker_url: str, url: str | None, **trust: Any) -> tuple[str, ...]:
    return expansion(names, Api(broker_url, url, **trust)).queues


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    opened = Side(broker_url)
    yield opened
    opened.close()


def test_a_wildcard_is_the_queues_it_matches_now_each_once(
    side: Side, broker_url: str, broker_addresses: tuple[str, str]
) -> None:
    for name in ("dlq.b", "dlq.a", "dlqXa", "orders", "dlq.ö/%", "[dlq.]"):
        side.queue(name)
    side.channel.queue_declare("dlq.exclusive", exclusive=True)
    api = broker_addresses[1]
    assert expand(["orders", "dlq.*", "dlq.a"], broker_url, api) == ("orders", "dlq.a", "dlq.b", "dlq.ö/%")
    assert expand(["[dlq.]*"], broker_url, api) == ("[dlq.]",)
    assert expand(["nothing.*"], broker_url, api) == ()


def test_a_virtual_host_without_queues_has_none(broker_url: str, broker_addresses: tuple[str, str]) -> None:
    assert expand(["*"], broker_url, broker_addresses[1]) == ()


def test_names_need_no_api() -> None:
    assert expand(["b", "a", "b"], "amqp://127.0.0.1:1/", "http://127.0.0.1:1") == ("b", "a")


def test_the_brokers_login_is_the_apis_unless_it_has_its_own(
    broker_url: str, broker_addresses: tuple[str, str], side: Side
) -> None:
    side.queue("dlq.a")
    bare = broker_addresses[1].replace("guest:guest@", "")
    assert expand(["dlq.*"], broker_url, bare) == ("dlq.a",)
    with pytest.raises(BrokerUnreachable, match="401") as refused:
        expand(["*"], broker_url, bare.replace("://", "://guest:wr%40ng@"))
    assert not any(shown in str(refused.value) for shown in ("wr@ng", "wr%40ng"))


@contextmanager
def answering(answer: Callable[[int], tuple[int, Any]]) -> Iterator[str]:
    """A management API that answers each page as it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = int(parse_qs(urlsplit(self.path).query)["page"][0])
            status, body = answer(page)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name it has there)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_every_page_is_read() -> None:
    def pages(page: int) -> tuple[int, Any]:
        names = range(500 * (page - 1), min(500 * page, 1_234))
        return 200, {"page_count": 3, "items": [{"name": f"dlq.{name}"} for name in names]}

    with answering(pages) as api:
        found = expand(["dlq.*"], "amqp://127.0.0.1/", api)
    assert set(found) == {f"dlq.{number}" for number in range(1_234)}


def test_queues_deleted_while_they_are_listed_end_the_list_and_not_the_run() -> None:
    def pages(page: int) -> tuple[int, Any]:
        if page == 2:
            return 400, {"error": "bad_request", "reason": "page_out_of_range"}
        return 200, {"page_count": 2, "items": [{"name": "dlq.a"}]}

    with answering(pages) as api:
        assert expand(["dlq.*"], "amqp://127.0.0.1/", api) == ("dlq.a",)


NO_NAMES = ("dlq." + "x" * 252, "dlq." + "ö" * 126, "dlq.\ud800", "")


def test_names_that_no_queue_can_have_are_left_out_and_told() -> None:
    items = [{"name": name, "type": "classic"} for name in (*NO_NAMES, "dlq." + "x" * 251)]
    with answering(lambda _: (200, {"page_count": 1, "items": items})) as api:
        found = expansion(["*"], Api("amqp://127.0.0.1/", api))
    assert found.queues == ("dlq." + "x" * 251,)
    assert len(found.left_out) == 4
    assert any(text.startswith(r"'dlq.\ud800' is left out") for text in found.left_out)
    assert all(len(text) < 500 and text.isascii() for text in found.left_out)


def test_names_that_no_queue_can_have_do_not_end_a_run(side: Side, broker_url: str) -> None:
    side.fill(side.queue("dlq.a"), [b"1", b"2"])
    items = [{"name": name, "type": "classic"} for name in (*NO_NAMES, "dlq.a")]
    with answering(lambda _: (200, {"page_count": 1, "items": items})) as api:
        given = {"broker_url": broker_url, "management_url": api, "check_queues": "dlq.*"}
        settings = load(given, {"DLQBATCH_CONFIG": "/dev/null", "DLQBATCH_DATABASE_URL": "sqlite:////dev/null"})
        report = run("check", settings, RunOptions())
    assert (report.outcome, report.counts["got"]) == ("ok", 2), report
    assert len([text for text in report.warnings if "no queue can be called so" in text]) == 3


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, []),
        (200, {"items": [1], "page_count": 1}),
        (200, {"items": []}),
        (200, {"items": [{"name": 7}], "page_count": 1}),
        (400, {"error": "bad_request"}),
        (500, b"\xff"),
        (302, b""),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error_that_names_the_address(status: int, body: Any) -> None:
    with answering(lambda _: (status, body)) as api, pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1"):
        expand(["*"], "amqp://127.0.0.1/", api)


def test_no_answer_is_an_error_that_says_what_needs_the_api() -> None:
    with pytest.raises(BrokerUnreachable, match="management_url"):
        expand(["*"], "amqp://127.0.0.1/", "http://127.0.0.1:1")
