"""Many messages are edited by the form, as a browser without a script sends it, and by the API."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from console_client import as_role, made, opened, text_of
from dead_rows import add, row

from dlqbatch.console.rights import Role
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console

World = tuple["Console", "TestClient"]
CARD = "4111111111111111"  # a number of a card, which is masked everywhere by default
EURO = {"set": 'body.currency="EUR"', "headers": "tenant=blue"}


@pytest.fixture
def world(sqlite_url: str) -> Iterator[World]:
    console = made(sqlite_url)
    with opened(console) as browser:
        as_role(browser, console, Role.OPERATOR, may_reveal=True)
        yield console, browser


def dead(console: Console, *bodies: bytes, origin: str = "orders") -> list[int]:
    columns = {"origin_queue": origin, "error_type": "ValidationError", "status": Status.MANUAL}
    return add(console.engine, *(row(body=body, **columns) for body in bodies))


def status_of(console: Console, row_id: int) -> Status:
    return console.messages.show(row_id).record.status


def test_the_differences_of_many_are_shown_and_nothing_is_saved_before_the_number_is_typed(world: World) -> None:
    console, browser = world
    ids = dead(console, b'{"n": 1.50, "currency": null}', b'{"n": 2}', b"no JSON")
    assert "Edit 3 messages" in text_of(browser.get("/edit?origin=orders"))
    looked = browser.post("/edit", data={"query": "origin=orders", "step": "look", **EURO})
    page = text_of(looked)
    assert "2 would be edited, 1 refused" in page
    assert "<del>null</del>" in looked.text
    assert looked.text.count("<ins>&#34;EUR&#34;</ins>") == 2
    assert "header tenant" in page
    assert re.search(rf"no JSON.*{ids[2]}", page)
    save = {"query": "origin=orders", "step": "save", "reason": "contract", **EURO}
    for form in (save, {**save, "number": "2"}, {**save, "number": "3", "reason": ""}):
        assert browser.post("/edit", data=form).status_code in {409, 422}
    assert {status_of(console, each) for each in ids} == {Status.MANUAL}

    saved = browser.post("/edit", data={**save, "number": "3"})
    assert "2 edited, 1 refused" in text_of(saved)
    assert [status_of(console, each) for each in ids] == [Status.ARCHIVED, Status.ARCHIVED, Status.MANUAL]
    place = re.search(r'action="(/actions/A-\d+/undo)"', saved.text)
    assert place is not None
    assert 'href="/plan?action=A-1"' in saved.text
    assert browser.post(place[1]).status_code == 303
    assert {status_of(console, each) for each in ids} == {Status.MANUAL}


def test_the_edits_of_chosen_messages_are_listed_from_where_their_replay_is_planned(world: World) -> None:
    console, browser = world
    first, second, other = dead(console, b'{"n": 1.50}', b'{"n": 2}', b'{"n": 3}')
    form = {"ids": f"{first} {second}", "number": "2", "reason": "x", "step": "save"}
    saved = browser.post("/edit", data={**form, "patch": '{"currency": "EUR"}', "remove": "", "headers": ""})
    assert (saved.status_code, saved.headers["location"]) == (303, "/messages?action=A-1")
    page = browser.get("/messages?action=A-1")
    assert "2 edited, 0 refused" in text_of(page)
    assert 'action="/actions/A-1/undo"' in page.text
    assert 'href="/plan?action=A-1"' in page.text
    made_of_it = [int(each) for each in re.findall(r'name="id" value="(\d+)"', page.text)]
    assert {console.messages.show(each).content.body for each in made_of_it} == {
        b'{"n": 1.50,"currency": "EUR"}',
        b'{"n": 2,"currency": "EUR"}',
    }
    assert status_of(console, other) is Status.MANUAL
    assert 'href="/plan?action=A-1"' in browser.get("/actions/A-1").text


def test_what_arrived_after_the_differences_were_shown_is_not_edited_unseen(world: World) -> None:
    console, browser = world
    ids = dead(console, b"{}")
    browser.post("/edit", data={"query": "origin=orders", "step": "look", **EURO})
    ids += dead(console, b"{}")
    save = {"query": "origin=orders", "step": "save", "reason": "x", "number": "1", **EURO}
    answer = browser.post("/edit", data=save)
    assert "1 messages were expected, and 2 match" in text_of(answer)
    assert {status_of(console, each) for each in ids} == {Status.MANUAL}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, "nothing says what to change"),
        ({"set": "currency"}, "write it as --set body.path=VALUE"),
        ({"patch": "[1]"}, "no JSON object"),
        ({"headers": "x-death=1"}, "the broker"),
    ],
)
def test_a_change_that_makes_no_sense_is_said_above_the_form_that_keeps_it(
    world: World, form: dict[str, str], why: str
) -> None:
    console, browser = world
    dead(console, b"{}")
    for step in ("look", "save"):
        given = {"query": "origin=orders", "step": step, "reason": "contract", "number": "1", **form}
        answer = browser.post("/edit", data=given)
        assert answer.status_code == 422
        assert why in text_of(answer)
        assert 'value="contract"' in answer.text


def test_the_differences_are_masked(world: World) -> None:
    console, browser = world
    dead(console, f'{{"card": "{CARD}", "n": 1}}'.encode())
    for change in ({"set": "body.n=2"}, {"set": f'body.card="{CARD}"'}, {"set": 'body.password="hunter22hunter"'}):
        looked = browser.post("/edit", data={"query": "origin=orders", "step": "look", **change})
        shown = re.sub(r"(?s)<form method=\"post\" action=\"/edit\">.*?</form>", "", looked.text)
        assert "<h2>" in shown
        assert CARD not in shown
        assert "hunter22" not in shown


def test_it_takes_the_right_to_reveal_as_the_edit_of_one_message_does(world: World) -> None:
    console, browser = world
    dead(console, b"{}")
    as_role(browser, console, Role.OPERATOR)
    assert browser.get("/edit?origin=orders").status_code == 403
    assert browser.post("/edit", data={"query": "origin=orders", "step": "look", **EURO}).status_code == 403
    assert "/edit" not in browser.get("/messages?origin=orders").text


def test_nothing_chosen_is_not_everything(world: World) -> None:
    console, browser = world
    dead(console, b"{}")
    assert browser.get("/edit").status_code == 422
    assert browser.post("/edit", data={"step": "save", "number": "1", "reason": "x", **EURO}).status_code == 422
