"""The client of a console: a decision is taken once, and where nobody knows whether it was, it says so."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from console_client import made
from cutting_link import CuttingLink
from dead_rows import add, row
from hypothesis import given
from hypothesis import strategies as st
from program import eventually

from dlqbatch.actions.queries import recent
from dlqbatch.console.addresses import filters_of
from dlqbatch.console.app import application
from dlqbatch.console.gate import asked_pairs
from dlqbatch.console.logins import token_line
from dlqbatch.console.repeated import Repeated
from dlqbatch.console.rights import Role
from dlqbatch.errors import DlqbatchError
from dlqbatch.remote.client import DecisionUnknown, OtherVersion, RemoteConsole, RemoteUnreachable, TokenRefused
from dlqbatch.remote.requests import words
from dlqbatch.store.filters import Filters
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DECISION = b'"reason": "cut here"'


class Served:
    """A console at an address of its own, with three messages."""

    def __init__(self, folder: Path) -> None:
        self.token, line = token_line("ann", Role.ADMIN, may_reveal=True, ends=datetime.now(UTC) + timedelta(hours=1))
        file = folder / "tokens"
        file.write_text(line)
        self.console = made(
            f"sqlite:///{folder / 'store.sqlite3'}", console_tokens=str(file), broker_url="amqp://127.0.0.1:1/"
        )
        self.ids = add(self.console.engine, *(row(origin_queue="orders", status=Status.MANUAL) for _ in range(3)))
        config = uvicorn.Config(application(self.console), port=0, log_config=None, lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        assert eventually(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def client(self, url: str) -> RemoteConsole:
        return RemoteConsole(url, self.token, comes_back_within=1.0)

    def discard(self, url: str) -> Any:
        return self.client(url).decide("/discard", ids=self.ids, reason="cut here")

    def actions(self) -> list[str]:
        return [each.name for each in recent(self.console.engine)]

    def forget(self) -> None:
        """As a console that was started again."""
        self.console.repeated = Repeated()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    found.end()


def test_a_decision_whose_answer_is_lost_is_not_taken_again(served: Served) -> None:
    with CuttingLink(served.url, 1, is_heard=True, text=DECISION) as link:
        done = served.discard(link.url)
        assert link.has_cut.is_set()
    assert (done["done"], done["action"], served.actions()) == (3, "A-1", ["A-1"])


def test_a_decision_that_did_not_arrive_is_sent_again(served: Served) -> None:
    with CuttingLink(served.url, 1, text=DECISION) as link:
        assert served.discard(link.url)["done"] == 3
        assert link.has_cut.is_set()
    assert served.actions() == ["A-1"]


def test_a_console_that_was_started_again_knows_what_was_done_before(served: Served) -> None:
    with CuttingLink(served.url, 1, is_heard=True, act=served.forget, text=DECISION) as link:
        with pytest.raises(DlqbatchError, match="DONE before the connection broke, as A-1") as failed:
            served.discard(link.url)
        assert failed.value.exit_code == 4
    assert served.actions() == ["A-1"]
    shown = served.client(served.url).get("/actions/A-1")
    assert (shown["details"], shown["counts"]) == ({}, {"done": 3})


def test_a_console_that_was_started_again_does_nothing_twice_of_what_it_does_not_know(served: Served) -> None:
    with (
        CuttingLink(served.url, 1, act=served.forget, text=DECISION) as link,
        pytest.raises(DlqbatchError, match="NOT known, and nothing was done again"),
    ):
        served.discard(link.url)
    assert served.actions() == []


def test_a_console_that_stays_away_leaves_it_unknown(served: Served) -> None:
    with CuttingLink(served.url, 1, is_heard=True, text=DECISION) as link:
        link.act(link.go_down)
        with pytest.raises(DecisionUnknown, match=r"NOT known\. Look before you repeat it") as failed:
            served.discard(link.url)
        assert failed.value.exit_code == 4


def test_nothing_is_unknown_before_it_was_sent(served: Served) -> None:
    with CuttingLink(served.url, 1, text=b"GET /api/v1/me") as link:
        link.act(link.go_down)
        with pytest.raises(RemoteUnreachable, match="Nothing was done"):
            served.discard(link.url)
    with pytest.raises(TokenRefused):
        RemoteConsole(served.url, "dlq_wrong").decide("/discard", ids=served.ids, reason="x")
    assert served.actions() == []


def test_a_repeated_request_waits_for_the_one_that_is_being_done(served: Served) -> None:
    client, may_go, began = served.client(served.url), threading.Event(), threading.Event()
    original, count = served.console.messages.discard, []

    def slow(*given: Any, **named: Any) -> Any:
        count.append(1)
        began.set()
        may_go.wait()
        return original(*given, **named)

    served.console.messages.discard = slow  # type: ignore[method-assign]
    answers: list[Any] = []
    headers = {"Idempotency-Key": "one"}

    def ask() -> None:
        found = client._exchange("POST", "/discard", {"ids": served.ids, "reason": "x"}, headers)
        answers.append(client._answer(found))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    began.wait()
    for thread in threads[1:]:
        thread.start()
    assert eventually(lambda: served.console.repeated.waiting == 2)
    may_go.set()
    for thread in threads:
        thread.join()
    assert (len(count), [each["action"] for each in answers]) == (1, ["A-1"] * 3)
    other = client._exchange("POST", "/discard", {"ids": served.ids[:1], "reason": "x"}, headers)
    with pytest.raises(DlqbatchError, match="stands for another request"):
        client._answer(other)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b"Not Found", OtherVersion),
        (405, b"Method Not Allowed", OtherVersion),
        (200, b"<html>a page of somebody else</html>", OtherVersion),
        (200, b'{"name": "ann"}', OtherVersion),
        (502, b"Bad Gateway", RemoteUnreachable),
    ],
)
def test_an_older_console_or_something_else_is_named(status: int, body: bytes, kind: type[DlqbatchError]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = RemoteConsole(f"http://127.0.0.1:{server.server_port}", "dlq_x")
        with pytest.raises(kind, match=r"Nothing was done\."):
            client.decide("/discard", reason="x")
        server.shutdown()
        thread.join()


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
WORDS = st.lists(TEXT, max_size=3, unique=True)


@given(
    ids=st.lists(st.integers(1, 2**63 - 1).map(str), max_size=3),
    statuses=st.lists(st.sampled_from(Status), max_size=2, unique=True),
    named=st.fixed_dictionaries(dict.fromkeys(("error_type", "event", "origin", "source", "tag", "text"), WORDS)),
    field=st.lists(st.tuples(st.sampled_from(["order.id", "k"]), TEXT).map("=".join), max_size=3),
    group=st.lists(st.sampled_from(["dba6", "0" * 16]), max_size=2),
    action=st.lists(st.integers(1, 99).map(str), max_size=2),
    unwanted=st.lists(
        st.sampled_from(["event=a=b", "error-type= x", "id=4", "status=manual", "field=k=v"]), max_size=2
    ),
    since=st.none() | st.sampled_from(["2030-06-01", "2030-06-01T12:00:00.000001Z"]),
    until=st.none() | st.sampled_from(["2031-06-01", "2031-06-01T12:00:00+02:00"]),
    is_edit=st.none() | st.booleans(),
)
def test_a_filter_arrives_as_it_was_meant(named: dict[str, list[str]], **others: Any) -> None:
    filters = Filters.parse(**named, **others)
    assert filters_of(asked_pairs({"filter": words(filters)}), as_written=True) == filters
