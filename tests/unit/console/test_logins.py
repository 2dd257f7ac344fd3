from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.console.entrance import safe_place
from dlqbatch.console.logins import ApiTokens, Sessions, logins_of, parse_tokens, token_line
from dlqbatch.console.rights import Person, Role
from dlqbatch.errors import SettingsError
from dlqbatch.settings import load

if TYPE_CHECKING:
    from pathlib import Path

ANN = Person("ann", Role.OPERATOR, may_reveal=False, is_verified=True, by="oidc")


def test_a_cookie_says_who_logged_in_until_its_end() -> None:
    sessions = Sessions(b"k" * 32)
    cookie = sessions.issue(ANN)
    assert sessions.person(cookie) == ANN
    assert sessions.person(cookie, time.time() + 11 * 3600) is None


def test_a_cookie_that_was_changed_or_signed_by_another_console_is_none() -> None:
    sessions = Sessions(b"k" * 32)
    cookie = sessions.issue(ANN)
    body, signature = cookie.split(".")
    other = Sessions(b"x" * 32).issue(Person("eve", Role.ADMIN, may_reveal=True, is_verified=True, by="x"))
    for forged in (
        f"{other.split('.')[0]}.{signature}",
        f"{body}.",
        body,
        "",
        "é",
        "a" * 5_000,
        other,
        f"{body}x.{signature}",
    ):
        assert sessions.person(forged) is None


def test_after_a_logout_no_copy_of_the_cookie_counts() -> None:
    sessions = Sessions(b"k" * 32)
    cookie, another = sessions.issue(ANN), sessions.issue(ANN)
    sessions.end(cookie)
    assert sessions.person(cookie) is None
    assert sessions.person(another) == ANN


def test_what_is_signed_for_a_login_under_way_is_no_session() -> None:
    sessions = Sessions(b"k" * 32)
    assert sessions.person(sessions.sign({"state": "x", "ends": time.time() + 60})) is None


@given(st.text(max_size=40))
def test_no_text_is_a_session_by_chance(text: str) -> None:
    assert Sessions(b"k" * 32).person(text) is None


def test_a_token_lets_in_until_its_end_and_while_its_line_is_there(tmp_path: Path) -> None:
    ends = datetime.now(UTC) + timedelta(days=1)
    token, line = token_line("ci", Role.OPERATOR, may_reveal=True, ends=ends)
    assert token not in line
    file = tmp_path / "tokens"
    file.write_text(f"# people\n{line}\n")
    tokens = ApiTokens(file)
    found = tokens.person(token)
    assert found is not None
    assert (found.name, found.role, found.may_reveal) == ("ci", Role.OPERATOR, True)
    assert tokens.person(token, ends + timedelta(seconds=2)) is None
    assert tokens.person(token + "x") is None
    file.write_text("# nobody\n")
    assert tokens.person(token) is None
    file.unlink()
    assert tokens.person(token) is None


@pytest.mark.parametrize("line", ["x", "ci boss 2030-01-01 sha256 " + "0" * 64, "ci reader soon sha256 " + "0" * 64])
def test_a_line_that_is_no_token_is_named(line: str) -> None:
    with pytest.raises(SettingsError, match="line 1"):
        parse_tokens(line)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"console_address": "0.0.0.0:1"}, "nothing says who is there"),
        ({"console_oidc_issuer": "https://id.example", "console_admins": "*"}, "console-oidc-client-id"),
        ({"console_proxy_secret": "s" * 20}, "nobody could look"),
    ],
)
def test_it_does_not_start_open(options: dict[str, Any], why: str) -> None:
    settings = load({"database_url": "sqlite:///x", **options}, {})
    with pytest.raises(SettingsError, match=why):
        logins_of(settings, "ann", Role.ADMIN)


def test_the_printed_token_is_for_a_console_on_this_machine_alone() -> None:
    here = logins_of(load({"database_url": "sqlite:///x"}, {}), "ann", Role.READER)
    assert here.local is not None
    assert here.by_local_token(here.local_token) == here.local
    assert here.by_local_token("") is None
    proxied = {"console_proxy_secret": "s" * 20, "console_readers": "*"}
    there = logins_of(load({"database_url": "sqlite:///x", **proxied}, {}), "ann", Role.ADMIN)
    assert there.by_local_token(there.local_token) is None


def test_a_proxy_without_the_secret_names_nobody() -> None:
    options = {"console_proxy_secret": "s" * 20, "console_operators": "ops"}
    logins = logins_of(load({"database_url": "sqlite:///x", **options}, {}), "ann", Role.ADMIN)
    headers = {"X-Forwarded-User": "bob", "X-Forwarded-Groups": "devs, ops"}
    assert logins.by_proxy(headers) is None
    assert logins.by_proxy({**headers, "X-Dlqbatch-Proxy-Secret": "s" * 19}) is None
    found = logins.by_proxy({**headers, "X-Dlqbatch-Proxy-Secret": "s" * 20})
    assert found is not None
    assert (found.name, found.role, found.by) == ("bob", Role.OPERATOR, "proxy")


@given(st.text(max_size=60))
def test_a_login_never_leads_to_another_site(text: str) -> None:
    place = safe_place(text)
    assert place.startswith("/")
    assert not place.startswith(("//", "/\\"))
    for hostile in (f"//{text}", f"/\\{text}", f"http://{text}"):
        assert safe_place(hostile) == "/"
