"""The bad night by the pages of the console: by mouse, and by keyboard alone; then every message is counted.

`DLQBATCH_TEST_NIGHT=10000 DLQBATCH_TEST_READING=3 scripts/test tests/browser/test_the_night.py -rP` is the whole night
of somebody who looks at each page for three seconds, and prints how long it took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from console_person import READING, Person, WithKeyboard, WithMouse
from night_scene import MENDED, Night, Size, messages, night_of
from program import Client, client, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Site
    from playwright.sync_api import BrowserContext

JOBS = dict.fromkeys(("drain", "ingest", "lifecycle", "replay"), "5s")


@pytest.fixture
def servers(broker_url: str, broker_addresses: tuple[str, str], database_url: str) -> dict[str, str]:
    return {"broker_url": broker_url, "management_url": broker_addresses[1], "database_url": database_url}


@pytest.fixture
def team(broker_url: str) -> Iterator[Client]:
    with client(broker_url) as connected:
        yield connected


@pytest.fixture
def night(servers: dict[str, str], team: Client, tmp_path: Path) -> Iterator[Night]:
    with night_of(Size(messages(200)), servers, team, tmp_path, JOBS if READING else None) as scene:
        yield scene


def failed_with(person: Person, error: str, *, without_edits: bool = False) -> None:
    person.goes_to("Messages")
    person.unfolds("More conditions")
    person.writes("error-type", error)
    if without_edits:
        person.chooses("edits", "without")
    person.decides("Filter")


def plan(person: Person, reason: str) -> None:
    """The messages that are shown."""
    person.follows("Retry all that match…")
    person.writes("Why?", reason)
    person.decides("Plan")
    person.sees("nothing has moved yet")


def discard(person: Person, number: int, reason: str) -> None:
    person.follows("Discard all that match…")
    person.writes("Why?", reason)
    person.writes("Type the number of messages", str(number))
    person.decides("Discard")
    person.sees(f"{number:,} discarded, 0 refused")


def hold_what_nobody_understands(person: Person) -> None:
    """Two workers have described it in two ways."""
    unknown = person.page.locator("[data-row]").filter(has_text="KeyError").filter(has_not_text="held")
    for left in (2, 1):
        assert unknown.count() == left
        person.presses(unknown.first.get_by_role("link"))
        person.unfolds("Hold, acknowledge, note")
        person.writes("Hold it", "for the developers")
        person.decides("Hold")
        person.sees("Hold the group: done.")
        person.goes_to("Now")


def send_emails(person: Person) -> None:
    """At the pace of the limit."""
    failed_with(person, "RateLimited")
    plan(person, "the limit is over")
    person.writes("at most", "50/s")
    person.decides("Send 4 first")
    person.sees("Released")


def mend_payments(person: Person, size: Size) -> None:
    """By the list of a ticket."""
    person.goes_to("Messages")
    person.unfolds("Paste a list")
    person.chooses("they are", "payment")
    person.pastes("list", size.listed)
    person.decides("Find them")
    person.sees(f"Messages {MENDED} match")
    person.follows("Edit all that match…")
    person.writes("Set in the body", 'body.currency="EUR"')
    person.writes("Why?", "INC-4712")
    person.decides("Show the differences")
    person.sees(f"{MENDED} would be edited, 0 refused")
    person.writes("To save it, type the number", str(MENDED))
    person.decides("Save the edits")
    person.sees(f"{MENDED} edited, 0 refused")
    plan(person, "INC-4712")
    person.decides("Send 4 first")
    person.sees("Released")


def discard_other_payments(person: Person, size: Size) -> None:
    """At first it was the wrong group."""
    failed_with(person, "TimeoutError")
    discard(person, size.timed_out, "paid by card")
    person.decides("Undo")
    person.sees(f"{size.timed_out:,} are as they were before")
    failed_with(person, "ValidationError", without_edits=True)
    discard(person, size.payments - MENDED, "paid by card")


def send_orders_too_early(person: Person, size: Size) -> None:
    failed_with(person, "TimeoutError")
    plan(person, "the inventory is back")
    person.writes("Or all at once", str(size.timed_out))
    person.writes("at most", "1/s", place=1)
    person.decides("Send all")
    assert eventually(lambda: person.figure("sent") > 0)
    person.decides("Stop")
    person.sees("Stopped: ")
    # What was sent fails again, and is back.
    person.goes_to("Now")
    assert eventually(lambda: not person.figure("under way"))


def send_orders(person: Person, night: Night) -> None:
    """One of them kills its worker, and is taken out."""
    failed_with(person, "TimeoutError")
    plan(person, "the inventory is back, INC-4711")
    person.decides("Send 4 first")
    person.sees("It stopped by itself")
    person.follows("Take the head out of orders…")
    person.writes("Why?", "61 lines: it kills the worker")
    person.decides("Take it out")
    person.sees("was taken out of orders, and is on hold")
    person.sees("In orders there is now 1 consumer, 0 ready and 0 unacknowledged")
    assert eventually(lambda: night.is_at_work("orders")), "the statistics may be old"
    person.decides("Go on")
    assert eventually(lambda: person.figure("succeeded") == night.size.timed_out - 1)


def the_night(person: Person, night: Night) -> None:
    hold_what_nobody_understands(person)
    night.mend("limit-is-over")
    send_emails(person)
    mend_payments(person, night.size)
    discard_other_payments(person, night.size)
    send_orders_too_early(person, night.size)
    night.mend("inventory-is-back")
    send_orders(person, night)
    # All that is left is on hold.
    person.goes_to("Now")
    assert eventually(lambda: not person.figure("under way"))
    assert person.figure("undecided") == 1


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", [WithMouse, WithKeyboard], ids=["mouse", "keyboard"])
def test_the_night_goes_by_pages_and_loses_and_doubles_nothing(
    kind: type[Person],
    night: Night,
    servers: dict[str, str],
    start: Callable[..., Site],
    enter: Callable[..., BrowserContext],
    reports: list[str],
) -> None:
    night.happen()
    site = start(config=night.folder / "application.properties", **servers)
    context = enter(site)
    began = time.monotonic()
    person = kind(context.new_page(), site.door)
    the_night(person, night)
    seconds = time.monotonic() - began
    night.assert_all_is_accounted_for()
    assert reports == []
    did = f"{person.clicks} clicks" if person.clicks else f"{person.keys} keys"
    sys.stdout.write(f"{night.size.total:,} messages, {did} and {person.letters} letters, {seconds:.0f} s\n")
