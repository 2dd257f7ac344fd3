"""The console as a cloud function: the events of a function URL and of an HTTP API, and what it answers to them."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from dead_rows import add, row, store_at

from dlqbatch.console.app import application
from dlqbatch.console.function import answer, console_of
from dlqbatch.console.logins import token_line
from dlqbatch.console.rights import Role
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.settings import load
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from pathlib import Path

HOST = "abcdefghij.lambda-url.eu-central-1.on.aws"


def event(method: str, path: str, query: str = "", body: bytes = b"", **headers: str) -> dict[str, Any]:
    """As AWS documents format 2.0; a function URL sends the body of a form as base64."""
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": query,
        "headers": {"host": HOST, "x-forwarded-proto": "https", **{n.replace("_", "-"): v for n, v in headers.items()}},
        "requestContext": {
            "accountId": "anonymous",
            "apiId": "abcdefghij",
            "domainName": HOST,
            "domainPrefix": "abcdefghij",
            "http": {
                "method": method,
                "path": path,
                "protocol": "HTTP/1.1",
                "sourceIp": "203.0.113.1",
                "userAgent": "test",
            },
            "requestId": "e1506fd5-9e7b-434f-bd42-4f8fa224b599",
            "routeKey": "$default",
            "stage": "$default",
            "time": "01/Jun/2030:12:00:00 +0000",
            "timeEpoch": 1906545600000,
        },
        **({"body": base64.b64encode(body).decode(), "isBase64Encoded": True} if body else {"isBase64Encoded": False}),
    }


class Function:
    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder / 'store.sqlite3'}"
        (self.first,) = add(store_at(url), row(error_type="TimeoutError", status=Status.MANUAL))
        self.tokens = {}
        lines = []
        for role in Role:
            ends = datetime.now(UTC) + timedelta(hours=1)
            self.tokens[role], line = token_line(role.word, role, may_reveal=False, ends=ends)
            lines.append(line)
        (folder / "tokens").write_text("\n".join(lines))
        given = {
            "console_tokens": str(folder / "tokens"),
            "console_proxy_secret": "a-secret-of-the-proxy",
            "console_secret": "a-secret-of-all-of-them",
            "console_readers": "*",
        }
        self.settings = load({"database_url": url, **given}, {})
        self.app = application(console_of(self.settings))

    def ask(self, asked: dict[str, Any], role: Role | None = Role.READER) -> Any:
        if role is not None:
            asked["headers"]["authorization"] = f"Bearer {self.tokens[role]}"
        return answer(asked, lambda: self.app)

    def json(self, asked: dict[str, Any], role: Role = Role.READER) -> Any:
        return json.loads(self.ask(asked, role)["body"])


@pytest.fixture
def function(tmp_path: Path) -> Function:
    return Function(tmp_path)


def test_pages_files_and_the_api_are_answered(function: Function) -> None:
    page = function.ask(event("GET", "/messages", "error-type=TimeoutError"))
    assert (page["statusCode"], page["isBase64Encoded"]) == (200, False)
    assert "TimeoutError" in page["body"]
    assert page["headers"]["content-type"].startswith("text/html")
    assert page["headers"]["content-security-policy"].startswith("default-src 'none'")
    style = next(part for part in page["body"].split('"') if part.endswith(".css"))
    assert "css" in function.ask(event("GET", style), None)["headers"]["content-type"]
    assert function.json(event("GET", "/api/v1/me"))["name"] == "reader"
    # An HTTP API with a stage has the stage in the path.
    staged = event("GET", "/prod/api/v1/messages", "limit=1")
    staged["requestContext"]["stage"] = "prod"
    assert [each["id"] for each in function.json(staged)["messages"]] == [function.first]


def test_a_decision_takes_the_same_role_as_elsewhere(function: Function) -> None:
    def discard() -> dict[str, Any]:
        body = json.dumps({"ids": [function.first], "reason": "sent twice"}).encode()
        return event("POST", "/api/v1/discard", body=body, content_type="application/json")

    assert function.ask(discard())["statusCode"] == 403
    assert function.json(discard(), Role.OPERATOR)["action"] == "A-1"
    assert function.ask(event("GET", "/messages"), None)["statusCode"] == 303


def test_cookies_go_both_ways_and_a_form_of_another_page_is_refused(function: Function) -> None:
    logged_in = {"X-Dlqbatch-Proxy-Secret": "a-secret-of-the-proxy", "X-Forwarded-User": "ann"}
    asked = event("GET", "/")
    asked["headers"] |= logged_in
    asked["cookies"] = ["dlqbatch-notice=", "other=1"]
    answered = function.ask(asked, None)
    assert (answered["statusCode"], "ann" in answered["body"]) == (200, True)
    assert any(cookie.startswith("dlqbatch-notice=") for cookie in answered["cookies"])
    form = event(
        "POST",
        "/logout",
        body=urlencode({}).encode() or b"x=1",
        content_type="application/x-www-form-urlencoded",
        sec_fetch_site="cross-site",
    )
    form["headers"] |= logged_in
    assert function.ask(form, None)["statusCode"] == 403


def test_what_is_live_is_asked_for_again_in_place_of_a_stream(function: Function) -> None:
    live = function.ask(event("GET", "/live/now"))
    assert live["headers"]["content-type"].startswith("text/event-stream")
    again, data = live["body"].strip().split("\n\n")
    assert again == "retry: 5000"
    assert "TimeoutError" in json.loads(data.removeprefix("data: "))["parts"]["fails"]


def test_it_does_not_start_open_and_says_only_in_the_log_why(function: Function, sqlite_url: str) -> None:
    for given, why in (
        ({}, "nothing says who is there"),
        ({"console_proxy_secret": "a-secret-of-the-proxy", "console_readers": "*"}, "the same dlqbatch.console-secret"),
    ):
        settings = load({"database_url": sqlite_url, **given}, {})
        with pytest.raises(SettingsError, match=why):
            console_of(settings)

        def start(settings: Any = settings) -> Any:
            return application(console_of(settings))

        refused = answer(event("GET", "/"), start)
        assert (refused["statusCode"], why in str(refused["body"])) == (503, False)
    with pytest.raises(DlqbatchError, match="no request"):
        answer({"job": "drain"}, lambda: function.app)
