"""The login of the console at a certified OpenID Connect provider, as a browser goes through it."""

from __future__ import annotations

import re
import socket
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

import httpx2
import pytest
from console_client import made, opened, text_of
from program import HANGS_AFTER, ROOT

from scripts import clients
from scripts.servers.server import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.testclient import TestClient

URL = "http://127.0.0.1:8422"
BACK = f"{URL}/login/oidc/back"


class Provider:
    """A process of its own; its port stays the same when it is started again with another key."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self, key: str, seconds_behind: int = 0) -> None:
        self.stop()
        try:
            modules = clients.oidc_modules()
        except ServiceError as error:
            pytest.fail(str(error), pytrace=False)
        script = ROOT / "tests" / "interop" / "oidc" / "provider.mjs"
        command = ["node", str(script), str(modules), str(self.port), BACK, key, str(seconds_behind)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        said = ""
        while "ready" not in said.splitlines():
            line = self._process.stdout.readline()
            assert line, said
            said += line

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=HANGS_AFTER)
            self._process = None

    def log_in(self, place: str, name: str = "ann") -> str:
        """Give a name and agree, as a person does on the provider's pages; the address that leads back."""
        with httpx2.Client(timeout=HANGS_AFTER) as person:
            answer = person.get(place)
            while True:
                while answer.is_redirect:
                    place = urljoin(str(answer.url), answer.headers["location"])
                    if place.startswith(BACK):
                        return place
                    answer = person.get(place)
                assert answer.status_code == 200, answer.text
                form = re.search(r'(?s)<form[^>]* action="([^"]+)".*?name="prompt" value="(\w+)"', answer.text)
                assert form is not None, answer.text
                answer = person.post(form[1], data={"prompt": form[2], "login": name, "password": "any"})


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    provider = Provider()
    provider.start("first")
    yield provider
    provider.stop()


@pytest.fixture
def browser(running: Provider, sqlite_url: str) -> Iterator[TestClient]:
    console = made(
        sqlite_url,
        console_address="0.0.0.0:8422",
        console_url=URL,
        console_oidc_issuer=running.address,
        console_oidc_client_id="dlqbatch",
        console_oidc_client_secret="not-so-secret-here",
        console_operators="ops",
        console_revealers="ann@example.org",
    )
    with opened(console) as client:
        yield client


def begun(browser: TestClient, **changes: str) -> str:
    """The address at the provider; `changes` are what somebody on the way has written into it."""
    place = urlsplit(browser.get("/login/oidc", params={"next": "/messages"}).headers["location"])
    return place._replace(query=urlencode(dict(parse_qsl(place.query)) | changes)).geturl()


def is_in(browser: TestClient) -> bool:
    return browser.get("/messages").status_code == 200


def test_a_person_is_let_in_with_the_role_of_a_group(browser: TestClient, running: Provider) -> None:
    back = browser.get(running.log_in(begun(browser)))
    assert (back.status_code, back.headers["location"]) == (303, "/messages")
    assert "ann@example.org operator" in text_of(browser.get("/messages"))
    browser.post("/logout")
    assert not is_in(browser)


def test_an_address_that_the_provider_has_not_verified_gives_nobody_a_right(
    browser: TestClient, running: Provider
) -> None:
    answer = browser.get(running.log_in(begun(browser), "eve"))
    assert answer.status_code == 403
    assert "you are logged in as eve, who has no right here" in text_of(answer)


def test_each_part_of_the_way_belongs_to_one_login(browser: TestClient, running: Provider) -> None:
    used = running.log_in(begun(browser))
    assert browser.get(used).status_code == 303
    browser.post("/logout")
    assert browser.get(used).status_code == 403
    code = dict(parse_qsl(urlsplit(used).query))["code"]
    for changes in ({"nonce": "another"}, {"code_challenge": "A" * 43}, {"state": "another"}):
        assert browser.get(running.log_in(begun(browser, **changes))).status_code == 403, changes
    back = urlsplit(running.log_in(begun(browser)))
    replayed = back._replace(query=urlencode(dict(parse_qsl(back.query)) | {"code": code})).geturl()
    assert browser.get(replayed).status_code == 403
    assert not is_in(browser)


def test_new_keys_of_the_provider_are_found_and_a_token_that_is_over_is_refused(
    browser: TestClient, running: Provider
) -> None:
    assert browser.get(running.log_in(begun(browser))).status_code == 303
    running.start("second")
    browser.post("/logout")
    assert browser.get(running.log_in(begun(browser))).status_code == 303
    browser.post("/logout")
    # Its tokens hold for a minute, and its clock is ten behind.
    running.start("third", seconds_behind=600)
    assert browser.get(running.log_in(begun(browser))).status_code == 403
    assert not is_in(browser)
    running.start("fourth")
