"""Every page in a real browser: nothing that axe finds, nothing that the policy of the page refuses, every state."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from shutil import copy
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from console_incident import ATTACKS, CURRENCY, LIMITED, POISON, TIMEOUT, attack, happens
from dead_rows import add, row, store_at
from program import ROOT

from dlqbatch.drain.event_config import EventConfig
from dlqbatch.groups.decisions import hold
from dlqbatch.messages.actions import MessageActions
from dlqbatch.replay.freeze import Selection, freeze, keep_risks
from dlqbatch.replay.plan import recent
from dlqbatch.store.filters import Filters

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Site
    from playwright.sync_api import BrowserContext, Page

Enter = Callable[..., "BrowserContext"]

PAGES = {
    "now": "/",
    "group": f"/groups/{TIMEOUT}",
    "messages": "/messages?status=manual",
    "list": "/messages?id=3&id=4&id=999999",
    "message": "/messages/3",
    "plan": f"/plan?group={TIMEOUT}",
    "discard": f"/discard?group={POISON}",
    "edit": f"/edit?group={POISON}",
    "replays": "/plans",
    "actions": "/actions",
    "action": "/actions/A-1",
    "events": "/events",
    "try": "/events/try?since=7d&numbers=orders.%23%3D5%0Apayments.created%3D0",
    "rules": "/rules",
    "runs": "/runs",
    "alerts": "/alerts",
    "doctor": "/doctor",
    "journal": "/journal",
    "settings": "/settings",
}
LOOKS = [("dark", 1280), ("light", 360), ("dark", 360)]
"""Beside light and wide, for which every rule of axe is tried; these are the rules that depend on the look."""
LOOKED_AT = {"runOnly": {"type": "rule", "values": ["color-contrast", "target-size", "scrollable-region-focusable"]}}
UNREACHED = """
[...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary, [onclick]')]
  .filter((each) => each.checkVisibility() && (each.tabIndex !== 0 || each.disabled))
  .map((each) => each.outerHTML.slice(0, 160))
"""
"""What a person can use and does not reach with Tab, in the order of the page."""
WITHOUT_PATHS = """
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  walk.currentNode.data = walk.currentNode.data.replace(/sqlite:\\S+/g, "sqlite:///dlqbatch.sqlite3");
}
"""
"""A picture does not show where the tests keep their files."""
PICTURED = os.environ.get("DLQBATCH_TEST_PICTURES")


@pytest.fixture(scope="session")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("browser") / "night.sqlite3"
    engine = store_at(f"sqlite:///{file}")
    happens(engine)
    currency = Selection(Filters(groups=(CURRENCY,)), mended="INC-4711")
    plan = freeze(engine, currency, actor="ann", reason="the contract is mended", now=datetime.now(UTC))
    keep_risks(engine, plan.plan_id, ())
    return file


@pytest.fixture
def site(start: Callable[..., Site], night: Path, tmp_path: Path) -> Site:
    copy(night, tmp_path / "store.sqlite3")
    return start(database_url=f"sqlite:///{tmp_path / 'store.sqlite3'}")


def test_axe_finds_nothing_on_any_page_and_the_keyboard_reaches_everything(
    start: Callable[..., Site], night: Path, tmp_path: Path, enter: Enter, reports: list[str], broker_url: str
) -> None:
    copy(night, tmp_path / "store.sqlite3")
    site = start(database_url=f"sqlite:///{tmp_path / 'store.sqlite3'}", broker_url=broker_url)
    page = enter(site).new_page()
    plan = recent(store_at(f"sqlite:///{tmp_path / 'store.sqlite3'}"), 1)[0].hash
    found = {}
    for name, place in (*PAGES.items(), ("replay", f"/plans/{plan}")):
        answer = page.goto(site(place))
        assert answer is not None
        assert answer.status == 200, place
        for scheme, width in (("light", 1280), *LOOKS):
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            page.set_viewport_size({"width": width, "height": 860})
            result = Axe().run(page, options=LOOKED_AT if (scheme, width) in LOOKS else None)
            if result.violations_count:
                wrong = [(each["id"], each["nodes"][0]["html"][:200]) for each in result.response["violations"]]
                found[name, scheme, width] = wrong
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than the screen"
            if PICTURED and width > 1000:
                picture(page, f"console-{name}-{scheme}")
        assert page.evaluate(UNREACHED) == [], place
    assert found == {}
    assert reports == []


def picture(page: Page, name: str) -> None:
    from io import BytesIO  # noqa: PLC0415  (only who makes pictures needs these)

    from PIL import Image  # noqa: PLC0415

    page.set_viewport_size({"width": 1100, "height": 640})
    page.wait_for_load_state("networkidle" if "data-live-from" not in page.content() else "load")
    page.evaluate(WITHOUT_PATHS)
    shot = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(48)
    shot.save(ROOT / "docs" / "images" / f"{name}.png", optimize=True)
    page.set_viewport_size({"width": 1280, "height": 860})


def test_a_hostile_message_can_do_nothing_to_any_page(
    start: Callable[..., Site], enter: Enter, reports: list[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'hostile.sqlite3'}"
    engine = store_at(url)
    ids = attack(engine)
    plan = freeze(engine, Selection(row_ids=tuple(ids)), actor=ATTACKS[0], reason=ATTACKS[1], now=datetime.now(UTC))
    MessageActions(engine).discard(ids[:1], actor=ATTACKS[0], reason=ATTACKS[1])
    hold(engine, f"{1:016x}", actor=ATTACKS[2], reason=ATTACKS[0])
    EventConfig(engine).set(ATTACKS[2], 3)
    site = start(database_url=url)
    page = enter(site).new_page()
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    places = [
        *("/", "/messages", "/journal", "/discard?status=manual", "/restore?status=archived", "/edit?status=manual"),
        *("/plan?status=manual", "/plans", f"/plans/{plan.hash}", "/actions", "/actions/A-1", "/runs", "/alerts"),
        *("/events?key=%3Cscript%3E", "/rules?text=%3Cscript%3E", "/settings", "/events/try?since=%3Cscript%3E"),
        *(f"/messages/{row_id}" for row_id in ids),
        *(f"/groups/{place:016x}" for place in range(len(ids))),
        "/messages?text=%3Cscript%3Ewindow.hacked%3D1%3C/script%3E&origin=%22%3E%3Cimg%20src%3Dx%20onerror%3Dwindow.hacked%3D1%3E",
        "/login?next=javascript:window.hacked=1",
    ]
    for place in places:
        page.goto(site(place))
        assert page.evaluate("window.hacked") is None, place
        assert (
            page.evaluate("[...document.querySelectorAll('main script, main style, main img, main iframe')].length")
            == 0
        )
        assert page.evaluate("[...document.links].every((link) => link.protocol === 'http:')"), place
        assert "\u202e" not in page.inner_text("main"), place
        assert page.is_visible("main"), place
    assert dialogs == []
    assert [each for each in reports if "422" not in each] == []
    # A page from elsewhere sends a form in the browser of somebody who is logged in.
    page.goto("about:blank")
    page.set_content(f'<form method="post" action="{site("/events")}"><input name="name" value="forged"></form>')
    page.evaluate("document.forms[0].submit()")
    page.wait_for_selector("text=did not come from a page of the console")
    assert "forged" not in {each.name for each in EventConfig(engine).read()}


def test_the_page_changes_by_itself_when_something_dies(
    start: Callable[..., Site], enter: Enter, reports: list[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'live.sqlite3'}"
    engine = store_at(url)
    site = start(database_url=url)
    page = enter(site).new_page()
    page.goto(site("/"))
    assert "Nothing is dead" in page.inner_text("main")
    add(engine, row(error_type="BoomError", origin_queue="orders"))
    page.wait_for_selector("text=BoomError")
    assert page.inner_text("[data-live-mark]") == "live"
    site.process.terminate()
    page.wait_for_selector(".mark.off")
    assert "BoomError" in page.inner_text("main")
    assert [each for each in reports if "ERR_CONNECTION" not in each and "ERR_INCOMPLETE" not in each] == []


def test_everything_is_reached_by_keyboard(site: Site, enter: Enter, reports: list[str]) -> None:
    page = enter(site).new_page()
    page.goto(site("/"))
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/groups/*")
    page.keyboard.press("r")
    page.wait_for_url("**/plan?group=*")
    page.keyboard.press("g")
    page.keyboard.press("m")
    page.wait_for_url("**/messages")
    page.keyboard.press("/")
    page.keyboard.type("sku")
    page.keyboard.press("Enter")
    page.wait_for_url("**/messages?text=sku*")
    assert "9 match" in page.inner_text("h1")
    page.keyboard.press("?")
    assert page.is_visible("#keys")
    page.keyboard.press("Escape")
    assert not page.is_visible("#keys")
    page.keyboard.press("j")
    page.keyboard.press("x")
    assert page.evaluate("document.querySelectorAll('input[name=id]:checked').length") == 1
    # Every link and button is reached with Tab, in the order of the page.
    reached: set[Any] = set()
    page.goto(site("/messages/3"))
    count = "[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex=\"0\"]')]"
    count += ".filter((each) => each.offsetParent && !each.disabled && each.type !== 'hidden').length"
    wanted = page.evaluate(count)
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.outerHTML.slice(0, 160) + document.activeElement.offsetTop"))
    assert len(reached) >= wanted
    assert reports == []


@pytest.mark.parametrize("prefix", ["", "/ops/dlq"])
def test_without_a_script_and_under_a_path_a_decision_is_taken_and_taken_back(
    start: Callable[..., Site], enter: Enter, night: Path, tmp_path: Path, prefix: str
) -> None:
    copy(night, tmp_path / "plain.sqlite3")
    url = f"sqlite:///{tmp_path / 'plain.sqlite3'}"
    site = start(database_url=url, **({"console_path": prefix} if prefix else {}))
    page = enter(site, scripted=False).new_page()
    page.goto(site("/"))
    page.click("text=KeyError")
    page.click("a:has-text('Discard…')")
    page.fill("#reason", "the developers mend it")
    page.fill("#number", "9")
    page.click("main button:has-text('Discard')")
    assert "9 discarded, 0 refused" in page.inner_text(".notice")
    assert page.url.startswith(site("/messages"))
    page.click(".notice button:has-text('Undo')")
    assert "9 are as they were before A-2" in page.inner_text(".notice")
    page.click("nav >> text=Actions")
    assert "undone by A-3" in page.inner_text("main")
    page.click("text=Log out")
    assert page.url == site("/login")


def test_many_are_edited_and_the_edits_taken_back(site: Site, enter: Enter, reports: list[str]) -> None:
    page = enter(site).new_page()
    page.goto(site(f"/groups/{POISON}"))
    page.keyboard.press("e")
    page.wait_for_url("**/edit?group=*")
    page.fill("#set", 'body.lines[0].sku="B-2"')
    page.fill("#reason", "the catalogue was changed")
    page.click("text=Show the differences")
    assert "9 would be edited, 0 refused" in page.inner_text("main")
    assert Axe().run(page).violations_count == 0
    page.fill("#number", "9")
    page.click("text=Save the edits")
    assert "9 edited, 0 refused" in page.inner_text(".notice")
    assert "9 match" in page.inner_text("h1")
    page.click(".notice button:has-text('Undo')")
    page.wait_for_url("**/actions/A-*")
    assert reports == []


def test_what_is_wrong_is_said_on_a_page(start: Callable[..., Site], enter: Enter, site: Site, tmp_path: Path) -> None:
    page = enter(site).new_page()
    for place, status, text in (
        ("/messages/999999", 404, "there is no message 999999"),
        ("/messages?status=dead", 422, "'dead' is no state"),
        ("/plans/00000000", 404, "there is no plan"),
        ("/messages?origin=ordres", 200, "there is orders"),
        (f"/groups/{'0' * 16}", 404, "No message of this group"),
        ("/discard", 422, "nothing says which messages"),
    ):
        answer = page.goto(site(place))
        assert answer is not None
        assert answer.status == status, place
        assert text in page.inner_text("main")
    looks_only = start(database_url=f"sqlite:///{tmp_path / 'store.sqlite3'}", role="reader")
    page = enter(looks_only).new_page()
    page.goto(looks_only("/discard?status=manual"))
    assert "takes the role operator" in page.inner_text("main")


def test_two_people_at_one_message_get_into_no_muddle(site: Site, enter: Enter) -> None:
    first, second = enter(site).new_page(), enter(site).new_page()
    for page in (first, second):
        page.goto(site(f"/discard?group={LIMITED}"))
        page.fill("#reason", "too late by now")
        page.fill("#number", "30")
    first.click("main button:has-text('Discard')")
    assert "30 discarded" in first.inner_text(".notice")
    second.click("main button:has-text('Discard')")
    assert "30 messages were expected, and 0 match" in second.inner_text("main")
    first.click(".notice button:has-text('Undo')")
    assert "30 are as they were" in first.inner_text(".notice")
