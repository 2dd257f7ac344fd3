"""The login at an OIDC provider: who is let in, with which role, and each answer that is not to be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from console_client import made, opened, text_of
from oidc_provider import Provider, provider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.testclient import TestClient

URL = "http://127.0.0.1:8422"


@pytest.fixture
def idp() -> Iterator[Provider]:
    with provider() as found:
        found.claims = {"sub": "7", "email": "ann@example.org", "email_verified": True, "groups": ["payments", "ops"]}
        yield found


@pytest.fixture
def browser(idp: Provider, sqlite_url: str) -> Iterator[TestClient]:
    console = made(
        sqlite_url,
        console_address="0.0.0.0:8422",
        console_url=URL,
        console_oidc_issuer=idp.address,
        console_oidc_client_id="dlqbatch",
        console_oidc_client_secret="not-so-secret-here",
        console_operators="ops",
        console_revealers="ann@example.org",
    )
    with opened(console) as client:
        yield client


def started(browser: TestClient, idp: Provider, place: str = "/messages") -> str:
    """The address at which the browser comes back from the provider."""
    answer = browser.get("/login/oidc", params={"next": place})
    assert answer.status_code == 303
    return idp.authorize(answer.headers["location"])


def test_whoever_the_provider_names_has_the_role_of_the_group(browser: TestClient, idp: Provider) -> None:
    back = browser.get(started(browser, idp))
    assert (back.status_code, back.headers["location"]) == (303, "/messages")
    page = text_of(browser.get("/messages"))
    assert "ann@example.org operator" in page
    assert browser.post("/events", data={"name": "a"}).status_code == 403
    assert idp.asked["code_challenge_method"] == "S256"
    assert {"state", "nonce", "code_challenge"} <= idp.asked.keys()


def test_who_is_in_no_list_sees_nothing(browser: TestClient, idp: Provider) -> None:
    idp.claims["groups"] = ["payments"]
    answer = browser.get(started(browser, idp))
    assert answer.status_code == 403
    assert "no right here" in text_of(answer)
    assert browser.get("/messages").status_code == 303


def test_an_address_that_nobody_has_verified_is_not_a_name(browser: TestClient, idp: Provider) -> None:
    idp.claims |= {"email": "ann@example.org", "email_verified": False}
    browser.get(started(browser, idp))
    assert "7 operator" in text_of(browser.get("/messages"))


@pytest.mark.parametrize(
    "lies",
    [
        {"aud": "another"},
        {"iss": "https://evil.example"},
        {"nonce": "of another login"},
        {"exp": 1_700_000_000},
        {"exp": None},
    ],
    ids=str,
)
def test_a_token_that_was_not_made_for_this_login_lets_nobody_in(
    browser: TestClient, idp: Provider, lies: dict[str, Any]
) -> None:
    idp.lies = lies
    assert browser.get(started(browser, idp)).status_code == 403
    assert browser.get("/messages").status_code == 303


def test_a_token_that_somebody_else_has_signed_lets_nobody_in(browser: TestClient, idp: Provider) -> None:
    idp.signs_with = idp.others_key
    assert browser.get(started(browser, idp)).status_code == 403


def test_a_way_back_that_did_not_begin_in_this_browser_is_refused(browser: TestClient, idp: Provider) -> None:
    stolen = started(browser, idp)
    browser.cookies.clear()
    assert browser.get(stolen).status_code == 403
    started(browser, idp)
    assert browser.get(stolen).status_code == 403


def test_a_way_back_that_is_replayed_is_refused(browser: TestClient, idp: Provider) -> None:
    place = started(browser, idp)
    assert browser.get(place).status_code == 303
    assert browser.get(place).status_code == 403


def test_a_provider_that_is_away_is_said(sqlite_url: str) -> None:
    console = made(
        sqlite_url,
        console_url=URL,
        console_oidc_issuer="http://127.0.0.1:1",
        console_oidc_client_id="dlqbatch",
        console_readers="*",
    )
    with opened(console) as browser:
        answer = browser.get("/login/oidc")
        assert answer.status_code == 503
        assert "OIDC provider cannot be reached" in text_of(answer)
