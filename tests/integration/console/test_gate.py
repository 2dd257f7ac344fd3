"""Every route of the table with every role, and what a request from elsewhere may do: nothing."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
from console_client import as_role, made, opened, text_of
from dead_rows import add, row
from sqlalchemy import select

from dlqbatch.console import audit
from dlqbatch.console.rights import Role
from dlqbatch.console.routes import routes
from dlqbatch.store.engine import reading
from dlqbatch.store.tables import metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console
    from dlqbatch.console.gate import Route

STREAMS = {"/live/now", "/live/plans/{hash}"}
TABLE = [each for each in routes() if each.path not in STREAMS]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Console, TestClient]]:
    # Nothing listens at that address: what needs a broker says so.
    away = {"broker_url": "amqp://127.0.0.1:1/", "connect_timeout_seconds": 0.2}
    console = made(f"sqlite:///{tmp_path_factory.mktemp('console') / 'store.sqlite3'}", **away)
    add(
        console.engine, *(row(error_type="TimeoutError", error_message="slow", origin_queue="orders") for _ in range(3))
    )
    with opened(console) as client:
        yield console, client


def path_of(route: Route) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: {"id": "1"}.get(found[1], "0" * 16), route.path)


def everything(console: Console) -> dict[str, list[Any]]:
    with reading(console.engine) as connection:
        return {
            name: [tuple(found) for found in connection.execute(select(table))]
            for name, table in metadata.tables.items()
        }


def sent(client: TestClient, route: Route) -> Any:
    body = {"json": {}} if route.is_api else {"data": {"reason": "test", "token": "x"}}
    return client.request(route.method, path_of(route), **(body if route.changes else {}))


@pytest.mark.parametrize("role", [None, *Role], ids=lambda role: role.word if role else "nobody")
@pytest.mark.parametrize("route", TABLE, ids=lambda route: f"{route.method} {route.path}")
def test_each_role_may_do_what_the_table_says_and_no_more(
    world: tuple[Console, TestClient], route: Route, role: Role | None
) -> None:
    console, client = world
    as_role(client, console, role)
    before = everything(console)
    answer = sent(client, route)
    if route.needs is not None and role is None:
        is_login = answer.status_code == 303 and "/login?next=" in answer.headers["location"]
        assert is_login if not (route.changes or route.is_api) else answer.status_code == 401
        assert everything(console) == before
    elif route.needs is not None and role is not None and (role < route.needs or route.reveals):
        assert answer.status_code == 403
        assert everything(console) == before
    else:
        assert answer.status_code != 401
        assert answer.status_code < 500 or (answer.status_code == 503 and "broker" in answer.text)
    if role is Role.READER:
        assert everything(console) == before


@pytest.mark.parametrize("route", [each for each in TABLE if each.changes], ids=lambda route: route.path)
@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"}],
    ids=lambda headers: headers["Sec-Fetch-Site"],
)
def test_a_forged_request_changes_nothing_whoever_is_logged_in(
    world: tuple[Console, TestClient], route: Route, headers: dict[str, str]
) -> None:
    console, client = world
    as_role(client, console, Role.ADMIN, may_reveal=True)
    before = everything(console)
    answer = client.request(route.method, path_of(route), headers=headers)
    assert answer.status_code == 403
    assert everything(console) == before


def test_a_browser_that_sends_no_sec_fetch_site_is_held_to_its_origin(world: tuple[Console, TestClient]) -> None:
    console, client = world
    as_role(client, console, Role.READER)
    del client.headers["Sec-Fetch-Site"]
    try:
        assert client.post("/logout").status_code == 403
        assert client.post("/logout", headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.post("/logout", headers={"Origin": "http://127.0.0.1:8422"}).status_code == 303
    finally:
        client.headers["Sec-Fetch-Site"] = "same-origin"


def test_another_name_for_this_machine_is_refused(world: tuple[Console, TestClient]) -> None:
    console, client = world
    as_role(client, console, Role.ADMIN)
    for name in ("evil.example:8422", "evil.example", "127.0.0.1.evil.example"):
        assert client.get("/messages", headers={"Host": name}).status_code == 421
    for name in ("localhost:8422", "127.0.0.1", "[::1]:8422", "LOCALHOST:8422"):
        assert client.get("/messages", headers={"Host": name}).status_code == 200


def test_the_printed_token_makes_a_cookie_that_no_script_reads(world: tuple[Console, TestClient]) -> None:
    console, client = world
    as_role(client, console, None)
    assert client.get("/login", params={"token": "wrong"}).status_code == 403
    answer = client.get("/login", params={"token": console.logins.local_token, "next": "/messages"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/messages")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert client.get("/messages").status_code == 200
    kept = client.cookies[console.cookie]
    assert client.post("/logout").status_code == 303
    client.cookies.set(console.cookie, kept, domain="127.0.0.1", path="/")
    assert client.get("/messages").status_code == 303


def test_every_answer_forbids_what_is_not_from_here(world: tuple[Console, TestClient]) -> None:
    console, client = world
    as_role(client, console, Role.ADMIN, may_reveal=True)
    for route in TABLE:
        answer = sent(client, route)
        assert "default-src 'none'" in answer.headers["content-security-policy"], route.path
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        as_role(client, console, Role.ADMIN, may_reveal=True)


def test_each_decision_is_a_line_of_json_also_when_it_is_refused(
    world: tuple[Console, TestClient], caplog: pytest.LogCaptureFixture
) -> None:
    console, client = world
    with caplog.at_level(logging.INFO, audit.LOGGER):
        as_role(client, console, Role.READER)
        client.post("/messages/1/reveal")
        as_role(client, console, Role.READER, may_reveal=True)
        client.post("/messages/1/reveal")
        client.post("/messages/1/reveal", headers={"Sec-Fetch-Site": "cross-site"})
    lines = [json.loads(each.getMessage()) for each in caplog.records if each.name == audit.LOGGER]
    assert [(line["what"], line["outcome"], line["who"]) for line in lines] == [
        ("reveal a message", "refused", "reader-person"),
        ("reveal a message", "done", "reader-person"),
        ("reveal a message", "refused", None if lines[2]["who"] is None else "reader-person"),
    ]
    assert lines[1]["about"] == {"message": "1"}
    assert lines[1]["verified"] is True


def test_a_body_is_saved_and_never_shown_by_the_browser(world: tuple[Console, TestClient]) -> None:
    console, client = world
    as_role(client, console, Role.READER, may_reveal=True)
    answer = client.post("/messages/1/file")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "sandbox" in answer.headers["content-security-policy"]
    assert answer.content == b"{}"


def test_a_request_that_is_too_large_or_no_text_is_refused(world: tuple[Console, TestClient]) -> None:
    console, client = world
    as_role(client, console, Role.ADMIN, may_reveal=True)
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/messages/1/reveal", content=b"a=" + b"x" * 9_000_000, headers=kind).status_code == 413
    assert client.post("/messages/1/reveal", content=b"\xff\xfe", headers=kind).status_code == 422
    assert client.get("/messages/99999999999999999999999").status_code == 404
    assert client.get("/messages/x").status_code == 404
    assert client.get("/messages?status=nonsense").status_code == 422
    assert "nonsense" in text_of(client.get("/messages?status=nonsense"))
