"""The API: it says what the command line says, keeps to its own document, and takes no token that is over."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from console_client import ADDRESS, made, opened
from dead_rows import add, row
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import settings as of_hypothesis
from program import Program
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dlqbatch.console.app import application
from dlqbatch.console.logins import token_line
from dlqbatch.console.openapi import document_of
from dlqbatch.console.rights import Role
from dlqbatch.console.routes import routes
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console

AWAY = {"broker_url": "amqp://127.0.0.1:1/", "connect_timeout_seconds": 0.1}


class Api:
    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'store.sqlite3'}"
        ends = datetime.now(UTC) + timedelta(hours=1)
        lines = {role: token_line(role.word, role, may_reveal=role is Role.ADMIN, ends=ends) for role in Role}
        over = token_line("over", Role.ADMIN, may_reveal=True, ends=datetime.now(UTC) - timedelta(seconds=1))
        file = folder / "tokens"
        file.write_text("\n".join(line for _, line in (*lines.values(), over)))
        self.tokens = {role: token for role, (token, _) in lines.items()}
        self.over = over[0]
        self.console: Console = made(self.url, console_tokens=str(file), **AWAY)
        columns: dict[str, Any] = {"origin_queue": "orders", "error_type": "TimeoutError", "status": Status.MANUAL}
        self.ids = add(self.console.engine, *(row(body=b'{"n": 1}', **columns) for _ in range(3)))

    def headers(self, role: Role) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[role]}"}


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path)


@pytest.fixture
def browser(api: Api) -> Iterator[TestClient]:
    with opened(api.console) as client:
        # A program sends no Sec-Fetch-Site.
        del client.headers["Sec-Fetch-Site"]
        yield client


def test_it_answers_what_the_command_line_prints(api: Api, browser: TestClient) -> None:
    program, read = Program({"database_url": api.url}), api.headers(Role.READER)
    for place, command in (
        ("/messages?origin=orders", ("messages", "list", "--origin", "orders")),
        (f"/messages/{api.ids[0]}", ("messages", "show", str(api.ids[0]))),
        ("/groups", ("groups", "list")),
        ("/journal", ("messages", "journal")),
    ):
        assert browser.get(f"/api/v1{place}", headers=read).json() == program.run(*command, "--json").told
    told = program.run("rules", "list", "--json").told
    named = {rule["name"] for rule in browser.get("/api/v1/rules", headers=read).json()["rules"]}
    assert named == {rule["name"] for rule in told}
    assert browser.get("/api/v1/status", headers=read).json()["metrics"]["backlog"] == 3


def test_a_token_has_a_role_and_an_end(api: Api, browser: TestClient) -> None:
    assert browser.get("/api/v1/messages").status_code == 401
    over = browser.get("/api/v1/messages", headers={"Authorization": f"Bearer {api.over}"})
    assert over.status_code == 401
    assert over.headers["www-authenticate"] == "Bearer"
    asked = {"reason": "x", "ids": api.ids}
    assert browser.post("/api/v1/discard", json=asked, headers=api.headers(Role.READER)).status_code == 403
    assert browser.post("/api/v1/events", json={"event": "a"}, headers=api.headers(Role.OPERATOR)).status_code == 403
    hidden = f"/api/v1/messages/{api.ids[0]}/reveal"
    assert browser.post(hidden, json={"reason": "x"}, headers=api.headers(Role.OPERATOR)).status_code == 403
    assert browser.post(hidden, json={"reason": "x"}, headers=api.headers(Role.ADMIN)).status_code == 201


def test_what_is_revealed_is_not_kept_for_a_repeated_request(api: Api, browser: TestClient) -> None:
    who = {**api.headers(Role.ADMIN), "Idempotency-Key": "one"}
    for what in ("reveal", "original"):
        for _ in range(2):
            assert browser.post(f"/api/v1/messages/{api.ids[0]}/{what}", json={"reason": "x"}, headers=who).is_success
    seen = api.console.messages.journal(api.ids[0]).entries
    assert [each.reason for each in seen].count("shown unmasked: x") == 4


def test_a_decision_is_done_undone_and_repeated_without_being_done_again(api: Api, browser: TestClient) -> None:
    who = {**api.headers(Role.OPERATOR), "Idempotency-Key": "one"}
    asked = {"reason": "x", "filter": {"origin": ["orders"]}, "expect": 3}
    first = browser.post("/api/v1/discard", json=asked, headers=who).json()
    assert (first["done"], first["action"]) == (3, "A-1")
    assert browser.post("/api/v1/discard", json=asked, headers=who).json() == first
    undone = browser.post("/api/v1/actions/A-1/undo", json={"reason": "y"}, headers=api.headers(Role.OPERATOR)).json()
    assert undone["done"] == 3
    found = browser.get("/api/v1/actions/A-1", headers=api.headers(Role.READER)).json()
    assert (found["actor"], found["verified"], found["undone_by"]) == ("operator", True, "A-2")


def test_many_are_edited_as_by_the_command_line(api: Api, browser: TestClient) -> None:
    asked: dict[str, Any] = {
        "reason": "x",
        "filter": {"origin": ["orders"]},
        "set": ["body.price=1.50"],
        "set_headers": {"tenant": "blue=1"},
        "expect": 3,
    }
    assert browser.post("/api/v1/edit", json=asked, headers=api.headers(Role.OPERATOR)).status_code == 403
    may = api.headers(Role.ADMIN)
    looked = browser.post("/api/v1/edit", json={**asked, "dry_run": True}, headers=may).json()
    assert (looked["done"], looked["action"], looked["messages"][0]["differences"][0]["after"]) == (3, None, "1.50")
    assert browser.post("/api/v1/edit", json={**asked, "expect": 2}, headers=may).status_code == 409
    done = browser.post("/api/v1/edit", json=asked, headers=may).json()
    assert (done["done"], done["not_done"], done["action"]) == (3, 0, "A-1")
    edited = api.console.messages.show(done["messages"][0]["new"])
    assert (edited.content.body, edited.readable.headers["tenant"]) == (b'{"n": 1,"price": 1.50}', "blue=1")
    for wrong in ({"merge_patch": "[]"}, {"set_headers": {"a": 1}}, {"set": ["n=1"]}, {"ids": api.ids}):
        answer = browser.post("/api/v1/edit", json={**asked, **wrong}, headers=may)
        assert answer.status_code == 422, wrong


def test_what_a_program_has_already_is_not_sent_again(api: Api, browser: TestClient) -> None:
    read = api.headers(Role.READER)
    first = browser.get("/api/v1/messages", headers=read)
    again = browser.get("/api/v1/messages", headers={**read, "If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    browser.post("/api/v1/discard", json={"reason": "x", "ids": api.ids}, headers=api.headers(Role.OPERATOR))
    assert browser.get("/api/v1/messages", headers={**read, "If-None-Match": first.headers["etag"]}).status_code == 200


def test_pages_follow_each_other_by_key(api: Api, browser: TestClient) -> None:
    read, seen, after = api.headers(Role.READER), [], ""
    while True:
        page = browser.get("/api/v1/messages", params={"limit": 1, **({"after": after} if after else {})}, headers=read)
        seen += [message["id"] for message in page.json()["messages"]]
        after = page.json()["next"]
        if not after:
            break
    assert sorted(seen) == sorted(api.ids)


def test_the_document_holds_every_route_of_the_api(api: Api) -> None:
    document: Any = document_of(api.console)
    named = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert named == {(route.method, route.path) for route in routes() if route.is_api}
    json.dumps(document)


def test_whatever_is_sent_it_keeps_to_its_document(api: Api) -> None:
    """Schemathesis makes requests from the document, right ones and wrong ones."""
    schema: Any = schemathesis.openapi.from_dict(document_of(api.console))
    app, answers = application(api.console), Counter[tuple[str, int]]()
    for found in schema.get_all_operations():
        operation = found.ok()

        @of_hypothesis(max_examples=examples(6), deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def send(case: Any) -> None:
            response = case.call(base_url=ADDRESS, app=app, headers=api.headers(Role.ADMIN))
            answers[case.operation.label, response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        send()
    assert {label for label, _ in answers} == {found.ok().label for found in schema.get_all_operations()}
    assert {200, 201, 404, 422} <= {status for _, status in answers}


def not_a_server_error_but_away(ctx: Any, response: Any, case: Any) -> None:
    """503 is the broker, which is not there in this test."""
    if response.status_code != 503:
        not_a_server_error(ctx, response, case)


CHECKS = [
    not_a_server_error_but_away,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
