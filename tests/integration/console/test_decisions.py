"""What the forms decide, each as a browser without a script sends it, and what stands in the database afterwards."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from console_client import as_role, made, opened, text_of
from dead_rows import add, row
from program import ROOT, client
from sqlalchemy import make_url, select

from dlqbatch.console.app import Console
from dlqbatch.console.logins import logins_of, token_line
from dlqbatch.console.rights import Role
from dlqbatch.settings import load
from dlqbatch.store.access import store_for
from dlqbatch.store.engine import reading
from dlqbatch.store.scopes import register, scoped
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, PLANS, TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.testclient import TestClient

World = tuple[Console, "TestClient"]


@pytest.fixture
def world(sqlite_url: str) -> Iterator[World]:
    console = made(sqlite_url)
    with opened(console) as browser:
        as_role(browser, console, Role.OPERATOR, may_reveal=True)
        yield console, browser


def dead(console: Console, number: int = 1, **columns: object) -> list[int]:
    given = {"origin_queue": "orders", "error_type": "TimeoutError", "status": Status.MANUAL} | columns
    return add(console.engine, *(row(**given) for _ in range(number)))


def states(console: Console) -> dict[int, Status]:
    with reading(console.engine) as connection:
        return {found.id: found.status for found in connection.execute(select(MESSAGES.c.id, MESSAGES.c.status))}


def test_a_discard_shows_the_split_and_takes_the_number_and_a_reason(world: World) -> None:
    console, browser = world
    ids = dead(console, 3) + dead(console, 2, origin_queue="payments", error_type="KeyError")
    page = text_of(browser.get("/discard?origin=orders"))
    assert "Discard 3 messages" in page
    for form in ({"number": "2", "reason": "twice"}, {"number": "", "reason": "twice"}, {"number": "3", "reason": " "}):
        assert browser.post("/discard", data={"query": "origin=orders", **form}).status_code in {409, 422}
    assert set(states(console).values()) == {Status.MANUAL}
    done = browser.post("/discard", data={"query": "origin=orders", "number": "3", "reason": "sent twice"})
    assert done.status_code == 303
    after = browser.get(done.headers["location"])
    assert "3 discarded, 0 refused" in text_of(after)
    assert "3 discarded" not in text_of(browser.get(done.headers["location"]))
    assert [states(console)[each] for each in ids] == [Status.ARCHIVED] * 3 + [Status.MANUAL] * 2
    with reading(console.engine) as connection:
        lines = connection.execute(
            select(TRANSITIONS.c.actor, TRANSITIONS.c.reason).where(TRANSITIONS.c.to_status == "archived")
        )
        assert {tuple(line) for line in lines} == {("operator-person", "sent twice")}


def test_what_arrived_after_the_page_was_shown_is_not_discarded_unseen(world: World) -> None:
    console, browser = world
    dead(console, 3)
    assert "Discard 3" in text_of(browser.get("/discard?origin=orders"))
    dead(console)
    answer = browser.post("/discard", data={"query": "origin=orders", "number": "3", "reason": "x"})
    assert answer.status_code == 409
    assert "3 messages were expected, and 4 match" in text_of(answer)
    assert set(states(console).values()) == {Status.MANUAL}


def test_an_empty_filter_discards_nothing(world: World) -> None:
    console, browser = world
    dead(console, 2)
    assert browser.get("/discard").status_code == 422
    assert browser.post("/discard", data={"number": "2", "reason": "x"}).status_code == 422
    assert browser.post("/discard", data={"query": "nonsense=1", "number": "2", "reason": "x"}).status_code == 422
    assert set(states(console).values()) == {Status.MANUAL}


def test_chosen_rows_are_discarded_and_restored(world: World) -> None:
    console, browser = world
    ids = dead(console, 3)
    page = browser.get("/discard", params={"id": ids[:2]})
    assert "Discard 2 messages" in text_of(page)
    form = {"ids": re.search(r'name="ids" value="([^"]+)"', page.text)[1], "number": "2", "reason": "x"}  # type: ignore[index]
    assert browser.post("/discard", data=form).status_code == 303
    assert [states(console)[each] for each in ids] == [Status.ARCHIVED, Status.ARCHIVED, Status.MANUAL]
    assert browser.post("/restore", data={**form, "number": "1"}).status_code == 409
    assert browser.post("/restore", data=form).status_code == 303
    assert set(states(console).values()) == {Status.MANUAL}


def test_the_bar_that_says_what_was_done_takes_it_back(world: World) -> None:
    console, browser = world
    dead(console, 2)
    done = browser.post("/discard", data={"query": "origin=orders", "number": "2", "reason": "x"})
    bar = browser.get(done.headers["location"]).text
    place = re.search(r'action="(/actions/A-\d+/undo)"', bar)
    assert place is not None
    assert set(states(console).values()) == {Status.ARCHIVED}
    undone = browser.post(place[1])
    assert "2 are as they were before A-1" in text_of(browser.get(undone.headers["location"]))
    assert set(states(console).values()) == {Status.MANUAL}
    assert "undone by A-2" in text_of(browser.get("/actions"))
    assert "operator-person ✓ verified" in text_of(browser.get("/actions"))
    assert browser.get("/actions/A-99").status_code == 404
    assert browser.get("/actions/nonsense").status_code in {404, 422}


def test_what_is_refused_is_listed_with_its_reason(world: World) -> None:
    console, browser = world
    ids = dead(console, 2)
    browser.post("/discard", data={"ids": str(ids[0]), "number": "1", "reason": "x"})
    answer = browser.post("/discard", data={"ids": " ".join(map(str, ids)), "number": "2", "reason": "y"})
    assert answer.status_code == 200
    assert "1 discarded, 1 refused" in text_of(answer)
    assert "archived already" in text_of(answer)


def test_an_edit_shows_its_differences_before_it_is_saved(world: World) -> None:
    console, browser = world
    (row_id,) = dead(console, body=b'{"id": 1,\r\n "currency": null}')
    form = {"body": '{"id": 1,\r\n "currency": "EUR"}', "headers": "tenant=blue", "reason": "contract"}
    looked = browser.post(f"/messages/{row_id}/edit", data={**form, "step": "look"})
    assert "<ins> &#34;currency&#34;: &#34;EUR&#34;}</ins>" in looked.text
    assert states(console) == {row_id: Status.MANUAL}
    saved = browser.post(f"/messages/{row_id}/edit", data={**form, "step": "save"})
    assert saved.status_code == 303, text_of(saved)
    new = int(saved.headers["location"].rpartition("/")[2])
    assert states(console) == {row_id: Status.ARCHIVED, new: Status.MANUAL}
    found = console.messages.show(new)
    assert found.content.body == b'{"id": 1,\n "currency": "EUR"}'
    assert found.readable.headers["tenant"] == "blue"
    again = browser.post(f"/messages/{row_id}/edit", data={**form, "step": "save"})
    assert again.status_code == 409


def test_a_body_that_was_not_touched_stays_byte_for_byte(world: World) -> None:
    console, browser = world
    (row_id,) = dead(console, body=b"one\r\ntwo\r\n")
    form = {"body": "one\r\ntwo\r\n", "headers": "a=b", "reason": "x", "step": "save"}
    saved = browser.post(f"/messages/{row_id}/edit", data=form)
    assert saved.status_code == 303, text_of(saved)
    assert console.messages.show(int(saved.headers["location"].rpartition("/")[2])).content.body == b"one\r\ntwo\r\n"


def test_the_source_of_an_edit_takes_the_right_to_reveal(world: World) -> None:
    console, browser = world
    (row_id,) = dead(console, body=b"secret=1")
    as_role(browser, console, Role.OPERATOR)
    assert browser.post(f"/messages/{row_id}/edit/open").status_code == 403
    assert "Edit…" not in browser.get(f"/messages/{row_id}").text


def test_events_and_rules_are_changed_by_an_admin(world: World) -> None:
    console, browser = world
    as_role(browser, console, Role.ADMIN)
    assert browser.post("/events", data={"name": "orders.#", "max_retries": "5"}).status_code == 303
    assert "orders.#" in text_of(browser.get("/events?key=orders.created"))
    assert browser.post("/events", data={"name": "orders.#", "max_retries": "many"}).status_code == 422
    assert browser.post("/events/remove", data={"name": "orders.#"}).status_code == 303
    rule = {"name": "limited", "pattern": "429", "strategy": "scheduled", "on": "any"}
    assert browser.post("/rules", data=rule).status_code == 303
    assert "scheduled , by limited" in text_of(browser.get("/rules?text=429"))
    assert browser.post("/rules", data={**rule, "pattern": "("}).status_code in {409, 422}
    assert browser.post("/rules", data={**rule, "strategy": "never"}).status_code == 422
    assert browser.post("/rules/remove", data={"name": "limited"}).status_code == 303


def test_a_plan_is_made_from_a_filter_shown_and_aborted(database_url: str, broker_url: str) -> None:
    console = made(database_url, broker_url=broker_url)
    with client(broker_url) as team, opened(console) as browser:
        team.channel.queue_declare("orders", durable=True)
        ids = dead(console, 5) + dead(console, 2, origin_queue="payments")
        as_role(browser, console, Role.OPERATOR)
        assert browser.post("/plans", data={"query": "origin=nothing", "reason": "x"}).status_code == 422
        assert browser.post("/plans", data={"query": "", "reason": "x"}).status_code == 422
        made_plan = browser.post("/plans", data={"query": "origin=orders", "reason": "it works", "mended": "INC-1"})
        assert made_plan.status_code == 303, text_of(made_plan)
        place = made_plan.headers["location"]
        page = text_of(browser.get(place))
        assert "5 messages" in page
        assert "it works" in page
        assert "mended INC-1" in page
        assert "mended: INC-1" in text_of(browser.get("/plans"))
        assert "planned" in text_of(browser.get("/plans"))
        assert text_of(browser.get("/")).count("planned") == 1
        for word, form in (("pause", {}), ("resume", {}), ("rate", {"rate": "faster"}), ("rate", {"rate": "many"})):
            # Nothing of it is sent yet: there is nothing to pause, and no rate to raise.
            assert browser.post(f"{place}/{word}", data=form).status_code in {409, 422}
        assert browser.post(f"{place}/rate", data={"rate": "50/s"}).status_code == 303
        assert browser.post(f"{place}/rate", data={"rate": "slower"}).status_code == 303
        aborted = browser.post(f"{place}/abort")
        assert "5 are as they were before the plan" in text_of(browser.get(aborted.headers["location"]))
        assert browser.post(f"{place}/abort").status_code == 303
        with reading(console.engine) as connection:
            assert connection.scalar(select(PLANS.c.state)) == "aborted"
        assert set(states(console).values()) == {Status.MANUAL}
        by_ids = browser.post("/plans", data={"ids": f"{ids[0]}, {ids[6]}", "reason": "x", "to_queue": "orders"})
        assert "2 messages" in text_of(browser.get(by_ids.headers["location"]))


def test_the_first_page_says_whose_messages_it_counts(sqlite_url: str) -> None:
    engine = made(sqlite_url).engine
    numbers = {name: register(engine, name) for name in ("rabbit@one/shop", "rabbit@one/billing")}
    console = made(sqlite_url, scope="rabbit@one/shop")
    dead(console, 2)
    add(scoped(engine, numbers["rabbit@one/billing"]), *(row() for _ in range(3)))
    with opened(console) as browser:
        page = text_of(as_role(browser, console, Role.READER).get("/"))
    assert "Of rabbit@one/shop; 3 messages in other scopes of the database." in page


def test_the_api_keeps_with_a_plan_what_was_mended(sqlite_url: str, broker_url: str, tmp_path: Path) -> None:
    token, line = token_line("bot", Role.OPERATOR, may_reveal=False, ends=datetime.now(UTC) + timedelta(hours=1))
    (tmp_path / "tokens").write_text(line)
    console = made(sqlite_url, broker_url=broker_url, console_tokens=str(tmp_path / "tokens"))
    dead(console, 2, dlq_retry_count=1)
    with opened(console) as browser:
        del browser.headers["Sec-Fetch-Site"]
        who = {"Authorization": f"Bearer {token}"}
        asked = {"reason": "it works", "everything": True}
        planned = browser.post("/api/v1/plans", json={**asked, "mended": "INC-1"}, headers=who).json()
        assert (planned["mended"], [risk["name"] for risk in planned["answered"]]) == ("INC-1", ["failed-before"])
        kept = browser.get(f"/api/v1/plans/{planned['hash']}", headers=who).json()
        assert (kept["mended"], kept["filters"]) == ("INC-1", {"all": True})
        assert browser.post("/api/v1/plans", json={**asked, "mended": " "}, headers=who).status_code == 422


def test_with_a_readers_login_to_the_database_nothing_can_be_written(database_url: str) -> None:
    """The second fence: the console believes that this is an admin, and the database does not."""
    made(database_url)
    name = make_url(database_url).database
    grants = (ROOT / "sql" / "grants.postgresql.sql").read_text()
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as owner:
        owner.execute(re.sub(r"dlqbatch_(drain|worker|operator|reader|revealer)", rf"\g<0>_{name}", grants).encode())
        owner.execute(f"CREATE ROLE login_{name} LOGIN IN ROLE dlqbatch_reader_{name}".encode())
    url = make_url(database_url).set(username=f"login_{name}").render_as_string(hide_password=False)
    try:
        writer = made(database_url)
        (row_id,) = dead(writer)
        settings = load({"database_url": url}, {})
        console = Console(settings, store_for(settings), logins_of(settings, "ann", Role.ADMIN))
        with opened(console) as browser:
            as_role(browser, console, Role.ADMIN, may_reveal=True)
            for page in (
                "/",
                "/messages",
                f"/messages/{row_id}",
                "/plans",
                "/events",
                "/rules",
                "/runs",
                "/alerts",
                "/journal",
            ):
                assert browser.get(page).status_code == 200, page
            for place, form in (
                ("/discard", {"ids": str(row_id), "number": "1", "reason": "x"}),
                ("/edit", {"ids": str(row_id), "number": "1", "reason": "x", "step": "save", "headers": "a=b"}),
                ("/events", {"name": "a", "max_retries": "1"}),
                ("/rules", {"name": "a", "pattern": "b", "strategy": "manual", "on": "any"}),
                (f"/messages/{row_id}/edit", {"body": "{ }", "reason": "x", "step": "save"}),
            ):
                answer = browser.post(place, data=form)
                assert answer.status_code == 403, (place, text_of(answer))
                assert "database login may not" in text_of(answer)
        assert states(writer) == {row_id: Status.MANUAL}
    finally:
        with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as owner:
            for role in (
                "login",
                *(f"dlqbatch_{each}" for each in ("drain", "worker", "operator", "reader", "revealer")),
            ):
                owner.execute(f"DROP OWNED BY {role}_{name}".encode())
                owner.execute(f"DROP ROLE {role}_{name}".encode())


SECRET = "4111111111111111"  # a number of a card, which is masked everywhere by default


def test_what_is_masked_is_on_no_page_without_the_right_and_its_reveal_is_journalled(world: World) -> None:
    console, browser = world
    (row_id,) = dead(
        console,
        body=f'{{"card": {{"number": "{SECRET}"}}, "password": "hunter22hunter"}}'.encode(),
        error_message=f"card {SECRET} refused, password=hunter22hunter",
        error_stack=f"pay(card={SECRET})",
        fingerprint="c" * 16,
    )
    for role in Role:
        as_role(browser, console, role)
        for page in ("/", "/messages", f"/messages/{row_id}", f"/groups/{'c' * 16}", "/journal", "/messages?text=card"):
            text = browser.get(page).text
            assert SECRET not in text, page
            assert "hunter22" not in text, page
        assert browser.post(f"/messages/{row_id}/reveal", data={"reason": "x"}).status_code == 403
        assert browser.post(f"/messages/{row_id}/edit/open").status_code == 403
    as_role(browser, console, Role.READER, may_reveal=True)
    assert SECRET not in browser.get(f"/messages/{row_id}").text
    page = text_of(browser.post(f"/messages/{row_id}/reveal", data={"reason": "the bank asks"}))
    assert page.count(SECRET) == 3
    assert "hunter22hunter" in page
    assert "the bank asks" in text_of(browser.get(f"/messages/{row_id}"))
    saved = browser.post(f"/messages/{row_id}/file", data={"reason": "for the bank"})
    assert SECRET in saved.text


def test_a_group_is_held_acknowledged_noted_and_each_is_undone(world: World) -> None:
    console, browser = world
    dead(console, 2, fingerprint="c0ffee00" * 2)
    place = f"/groups/{'c0ffee00' * 2}"
    assert browser.post(f"{place}/hold", data={"reason": ""}).status_code == 422
    held = browser.post(f"{place}/hold", data={"reason": "for the developers"})
    page = browser.get(held.headers["location"])
    assert "Held in orders by operator-person" in text_of(page)
    assert "held" in text_of(browser.get("/"))
    undo = re.search(r'action="(/actions/A-\d+/undo)"', page.text)
    assert undo is not None
    assert browser.post(undo[1]).status_code == 303
    assert "Held in orders" not in text_of(browser.get(place))
    assert browser.post(f"{place}/unhold", data={"reason": "x"}).status_code == 409
    assert browser.post(f"{place}/note", data={"note": "see INC-1", "owner": "team-a"}).status_code == 303
    assert browser.post(f"{place}/acknowledge", data={"reason": "known", "until": "4h"}).status_code == 303
    assert browser.post(f"{place}/acknowledge", data={"reason": "known", "until": "never"}).status_code == 422
    page = text_of(browser.get(place))
    assert "see INC-1" in page
    assert "acknowledged" in page
    assert "team-a" in text_of(browser.get("/"))
