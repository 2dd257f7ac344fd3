"""A console in this process, with a client for each role; the server itself is started in tests/acceptance/console."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from ready_store import make_tables
from starlette.testclient import TestClient

from dlqbatch.console.app import Console, application
from dlqbatch.console.logins import logins_of
from dlqbatch.console.rights import Person, Role
from dlqbatch.settings import load
from dlqbatch.store.access import store_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from httpx2 import Response

SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}
ADDRESS = "http://127.0.0.1:8422"


def made(database_url: str, **options: Any) -> Console:
    make_tables(database_url)
    settings = load({"database_url": database_url, **options}, {})
    return Console(settings, store_for(settings), logins_of(settings, "ann", Role.ADMIN))


def person(role: Role, *, may_reveal: bool = False) -> Person:
    return Person(f"{role.word}-person", role, may_reveal, is_verified=True, by="test")


@contextlib.contextmanager
def opened(console: Console) -> Iterator[TestClient]:
    """A browser without a login; it follows no redirects."""
    client = TestClient(application(console), base_url=ADDRESS, follow_redirects=False, headers=SAME_ORIGIN)
    with client:
        yield client


def as_role(client: TestClient, console: Console, role: Role | None, *, may_reveal: bool = False) -> TestClient:
    client.cookies.clear()
    if role is not None:
        who = person(role, may_reveal=may_reveal)
        client.cookies.set(console.cookie, console.logins.sessions.issue(who), domain="127.0.0.1", path="/")
    return client


def text_of(response: Response) -> str:
    """What a person reads on the page."""
    without = re.sub(r"(?s)<(script|style|svg|dialog)\b.*?</\1>|<[^>]+>", " ", response.text)
    return re.sub(r"\s+", " ", without)
