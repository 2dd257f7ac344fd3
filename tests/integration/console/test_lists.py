"""A pasted list: what of it is there, what is not, and a decision about exactly these, or about all but these."""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import pytest
from console_client import as_role, made, opened, text_of
from dead_rows import add, row

from dlqbatch.console.rights import Role
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from httpx2 import Response
    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console

World = tuple["Console", "TestClient"]


@pytest.fixture
def world(sqlite_url: str) -> Iterator[World]:
    console = made(sqlite_url)
    with opened(console) as browser:
        as_role(browser, console, Role.OPERATOR)
        yield console, browser


def dead(console: Console, number: int) -> list[int]:
    given = {"origin_queue": "orders", "status": Status.MANUAL}
    return add(console.engine, *(row(message_id=f"P-{place:05}", **given) for place in range(number)))


def archived(console: Console, ids: list[int]) -> set[int]:
    return {each for each in ids if console.messages.show(each).record.status is Status.ARCHIVED}


def hidden(page: Response, action: str) -> dict[str, str]:
    """The fields that a form without a script sends by itself."""
    form = next(each for each in re.findall(r"(?s)<form\b.*?</form>", page.text) if f'action="{action}"' in each)
    return {name: unescape(value) for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form)}


def test_a_pasted_list_shows_what_is_there_and_names_what_is_not(world: World) -> None:
    console, browser = world
    ids = dead(console, 4)
    values = "P-00000\r\n\r\n  P-00002 \r\nP-99999\r\n"
    found = browser.post("/messages", data={"by": "message_id", "list": values, "query": "origin=orders"})
    assert found.status_code == 303
    page = browser.get(found.headers["location"])
    assert "2 match" in text_of(page)
    assert "1 of the values of message_id are not found: P-99999" in text_of(page)
    assert ("origin", "orders") in parse_qsl(urlsplit(found.headers["location"]).query)
    by_id = browser.post("/messages", data={"by": "id", "list": f"{ids[0]}, {ids[3]}\n999999"})
    page = browser.get(by_id.headers["location"])
    assert "2 match" in text_of(page)
    assert "not found: 999999" in text_of(page)
    for nonsense in ("", " \r\n ", "P-1", "9" * 5_000):
        assert browser.post("/messages", data={"by": "id", "list": nonsense}).status_code == 422


def test_a_list_that_is_too_long_for_an_address_is_carried_by_the_form_to_the_decision(world: World) -> None:
    console, browser = world
    ids = dead(console, 400)
    text = "\n".join(f"P-{place:05}" for place in range(0, 800, 2))
    page = browser.post("/messages", data={"by": "message_id", "list": text, "query": ""})
    assert page.status_code == 200
    assert "200 match" in text_of(page)
    assert "200 of the values of message_id are not found: P-00400, P-00402" in text_of(page)
    assert "400 values" in text_of(page)
    query = hidden(page, "/messages")["query"] or hidden(page, "/plans")["query"]
    after = re.search(r'name="after" value="([^"]+)"', page.text)
    assert after is not None
    second = browser.post("/messages", data={"query": query, "after": after[1]})
    shown = [set(re.findall(r'name="id" value="(\d+)"', each.text)) for each in (page, second)]
    assert [len(each) for each in shown] == [50, 50]
    assert not shown[0] & shown[1]

    asked = browser.post("/discard", data={"query": query, "step": "ask"})
    assert "Discard 200 messages" in text_of(asked)
    form = hidden(asked, "/discard") | {"number": "200", "reason": "paid by card"}
    done = browser.post("/discard", data=form)
    assert done.status_code == 303
    assert "200 discarded" in text_of(browser.get(done.headers["location"]))
    assert archived(console, ids) == set(ids[::2])
    for each in ("/plans", "/restore"):
        assert "400 values" in text_of(browser.post(each, data={"query": query, "step": "ask"}))


def test_all_but_the_selected(world: World) -> None:
    console, browser = world
    ids = dead(console, 3)
    form = {"of": "origin=orders", "id": [str(ids[0]), str(ids[1])]}
    only = browser.post("/messages", data=form)
    assert "2 match" in text_of(browser.get(only.headers["location"]))
    but = browser.post("/messages", data={**form, "but": "these"})
    page = browser.get(but.headers["location"])
    assert "1 match" in text_of(page)
    query = urlsplit(but.headers["location"]).query
    assert "Discard 1 message" in text_of(browser.get(f"/discard?{query}"))
    browser.post("/discard", data={"query": query, "number": "1", "reason": "x"})
    assert archived(console, ids) == {ids[2]}


def test_ids_beside_another_condition_are_one_of_the_conditions(world: World) -> None:
    """Else a decision would be about more than its page showed."""
    console, browser = world
    ids = dead(console, 2)
    (pending,) = add(console.engine, row(origin_queue="orders", status=Status.PENDING))
    query = f"id={ids[0]}&id={pending}&status=pending"
    assert "1 match" in text_of(browser.get(f"/messages?{query}"))
    assert "Discard 1 message" in text_of(browser.get(f"/discard?{query}"))
    assert browser.get(f"/discard?ids={ids[0]}&status=pending").status_code == 422
    browser.post("/discard", data={"query": query, "number": "1", "reason": "x"})
    assert archived(console, [*ids, pending]) == {pending}
