"""Two operators at once who get into each other's way: the second is told what is so, and nothing is done twice.

Pages without a script stay as they were when they were opened, as one does that nobody has looked at for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from console_incident import LIMITED, happens
from dead_rows import store_at
from program import HANGS_AFTER, Client, client, eventually
from ready_store import make_tables
from replay_rows import ORIGIN, fill
from sqlalchemy import func, select

from dlqbatch import jobs
from dlqbatch.jobs import RunOptions
from dlqbatch.replay import plan as plans
from dlqbatch.settings import load
from dlqbatch.store.access import store_for
from dlqbatch.store.action_tables import ACTIONS, GROUPS
from dlqbatch.store.engine import reading
from dlqbatch.store.filter_conditions import IS_EDIT
from dlqbatch.store.tables import ATTEMPTS, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Site
    from playwright.sync_api import Browser, Page
    from sqlalchemy import Engine

    from dlqbatch.settings import Settings

SECRET = "what-the-proxy-says"
OPEN = {"console_proxy_secret": SECRET, "console_operators": "ann,bob", "console_revealers": "ann,bob"}
MESSAGES_OF_PLAN = 7
Open = Callable[["Site", str], "Page"]


@pytest.fixture
def open_as(chromium: Browser) -> Iterator[Open]:
    """A browser in which somebody is logged in by a proxy, and whose pages stay as they are."""
    opened = []

    def one(site: Site, name: str) -> Page:
        headers = {"X-Dlqbatch-Proxy-Secret": SECRET, "X-Forwarded-User": name}
        context = chromium.new_context(java_script_enabled=False, extra_http_headers=headers)
        context.set_default_timeout(HANGS_AFTER * 1000)
        opened.append(context)
        return context.new_page()

    yield one
    for context in opened:
        context.close()


@pytest.fixture
def store(sqlite_url: str) -> Engine:
    engine = store_at(sqlite_url)
    happens(engine)
    return engine


@pytest.fixture
def quiet(start: Callable[..., Site], store: Engine, sqlite_url: str) -> Site:
    """A console of a store with a night in it, without a broker."""
    return start(database_url=sqlite_url, **OPEN)


class World:
    """Some dead messages that can be replayed, and a console."""

    def __init__(self, settings: Settings, site: Site, team: Client, both: Callable[[str], Page]) -> None:
        self.settings, self.site, self.team, self.open_as = settings, site, team, both
        self.engine = store_for(settings)

    def plan(self, page: Page) -> str:
        """The address of a new plan of all of them."""
        page.goto(self.site(f"/plan?origin={ORIGIN}"))
        page.fill("#reason", "the api is back")
        page.click("main button:has-text('Plan')")
        assert f"{MESSAGES_OF_PLAN} messages are planned" in page.inner_text(".notice")
        return page.url

    def run_the_job(self, until: Callable[[], bool]) -> None:
        jobs.run("replay", self.settings, RunOptions(stopped=until))

    def sent(self) -> int:
        with reading(self.engine) as connection:
            sent = select(func.count()).where(ATTEMPTS.c.sent_at.is_not(None))
            return int(connection.scalar(sent) or 0)


@pytest.fixture
def world(
    database_url: str, broker_url: str, start: Callable[..., Site], open_as: Open, tmp_path: Path
) -> Iterator[World]:
    make_tables(database_url)
    servers = {"database_url": database_url, "broker_url": broker_url}
    site = start(**servers, **OPEN)
    with client(broker_url) as team:
        found = World(load(servers, {}), site, team, lambda name: open_as(site, name))
        team.channel.queue_declare(ORIGIN, durable=True)
        fill(found.engine, range(MESSAGES_OF_PLAN))
        yield found
        found.engine.dispose()


def send_all(page: Page, rate: str = "") -> None:
    page.fill("#number", str(MESSAGES_OF_PLAN))
    page.fill("#rate-all", rate)
    page.click("text=Send all")


def said(page: Page) -> str:
    return page.inner_text("main")


def test_the_second_who_holds_a_group_or_writes_about_it_is_told_of_the_first(
    quiet: Site, store: Engine, open_as: Open
) -> None:
    ann, bob = open_as(quiet, "ann"), open_as(quiet, "bob")
    for page in (ann, bob):
        page.goto(quiet(f"/groups/{LIMITED}"))
        page.click("text=Hold, acknowledge, note")
    ann.fill("#hold-why", "for the developers")
    ann.click("button:text-is('Hold')")
    ann.click("text=Hold, acknowledge, note")
    bob.fill("#hold-why", "the limit")
    bob.click("button:text-is('Hold')")
    assert "on hold already, by ann" in said(bob)
    assert "for the developers. Nothing was changed" in said(bob)
    bob.click("text=To how it is now")
    assert "by ann" in said(bob)

    bob.click("text=Hold, acknowledge, note")
    ann.fill("#note", "INC-4711")
    ann.click("button:text-is('Save')")
    bob.fill("#note", "whose is it?")
    bob.click("button:text-is('Save')")
    assert "note 'INC-4711', no owner. Nothing was changed" in said(bob)
    with reading(store) as connection:
        group = connection.execute(select(GROUPS.c.held_by, GROUPS.c.held_why, GROUPS.c.note)).one()
        kinds = connection.scalars(select(ACTIONS.c.kind).order_by(ACTIONS.c.id)).all()
    assert tuple(group) == ("ann", "for the developers", "INC-4711")
    assert kinds == ["discard", "hold", "note"]

    # What both have seen, either may change.
    bob.click("text=To how it is now")
    bob.click("text=Hold, acknowledge, note")
    bob.fill("#owner", "team-a")
    bob.click("button:text-is('Save')")
    assert "done" in bob.inner_text(".notice")


def test_only_the_first_edit_of_a_message_is_made_and_only_the_first_undo(
    quiet: Site, store: Engine, open_as: Open
) -> None:
    ann, bob = open_as(quiet, "ann"), open_as(quiet, "bob")
    for page, body in ((ann, '{"sku": "A-2"}'), (bob, '{"sku": "B-2"}')):
        page.goto(quiet("/messages/3"))
        page.click("text=Edit…")
        page.fill("#body", body)
        page.fill("#reason", "INC-4711")
        page.click("text=Show the differences")
    for page in (ann, bob):
        page.click("text=Save the edit")
    assert "has taken the place of message 3" in ann.inner_text(".notice")
    assert "message 3 cannot be edited: it is archived" in said(bob)
    assert "othing was changed" in said(bob)
    bob.click("text=To how it is now")
    assert "An edit links it with" in said(bob)
    with reading(store) as connection:
        bodies = connection.scalars(select(MESSAGES.c.body).where(IS_EDIT)).all()
    assert [bytes(body) for body in bodies] == [b'{"sku": "A-2"}']

    for page in (ann, bob):
        page.goto(quiet("/actions"))
    for page in (ann, bob):
        page.click("button:has-text('Undo A-2')")
    assert "2 are as they were before A-2" in ann.inner_text(".notice")
    assert "A-2 was undone already, by ann as A-3: nothing was changed." in bob.inner_text(".notice")


def test_a_plan_is_released_once_and_stays_stopped_for_who_did_not_see_it(world: World) -> None:
    ann, bob = world.open_as("ann"), world.open_as("bob")
    place = world.plan(ann)
    bob.goto(place)
    for page in (ann, bob):
        page.click("text=Send 4 first")
    assert "Released" in ann.inner_text(".notice")
    assert "was released by ann" in said(bob)
    world.run_the_job(lambda: world.sent() == 4)
    bob.click("text=To how it is now")
    ann.click("text=Stop: give up")
    assert "Stopped: 4 were sent, 3 are as they were before the plan" in ann.inner_text(".notice")
    bob.click("text=Pause")
    assert "is aborted: nothing of it is being sent" in said(bob)
    bob.click("text=To how it is now")
    assert bob.locator("main button").all_inner_texts() in ([], ["copy as command"])
    world.run_the_job(lambda: False)
    assert world.team.depth(ORIGIN) == 4


def test_who_stops_while_the_other_sends_is_obeyed_before_the_next_publish(world: World) -> None:
    ann, bob = world.open_as("ann"), world.open_as("bob")
    place = world.plan(ann)
    # One goes at once, and the next one would in six minutes.
    send_all(ann, "10/h")
    job = Thread(target=world.run_the_job, args=(lambda: False,))
    job.start()
    assert eventually(lambda: world.sent() >= 1)
    bob.goto(place)
    bob.click("text=Stop: give up")
    assert "Stopped: 1 were sent" in bob.inner_text(".notice")
    job.join(HANGS_AFTER)
    assert (world.sent(), world.team.depth(ORIGIN)) == (1, 1)
    # Whoever sends them reads on the old page that they go on; what is pressed there says what is so.
    ann.click("text=Pause")
    assert "is aborted" in said(ann)
    ann.click("text=To how it is now")
    ann.click("text=Replays")
    assert "aborted" in said(ann)


def test_what_two_plans_hold_is_sent_by_the_first(world: World) -> None:
    ann, bob = world.open_as("ann"), world.open_as("bob")
    places = [world.plan(page) for page in (ann, bob)]
    for page in (ann, bob):
        send_all(page)
    assert eventually(lambda: _runs_once(world) and world.sent() == MESSAGES_OF_PLAN)
    assert eventually(lambda: _runs_once(world) and all(each.state == "done" for each in plans.recent(world.engine)))
    bob.goto(places[1])
    assert f"{MESSAGES_OF_PLAN} skipped: " in said(bob)
    assert world.team.depth(ORIGIN) == MESSAGES_OF_PLAN
    assert world.sent() == MESSAGES_OF_PLAN


def test_what_somebody_discards_is_not_sent_by_the_other_one(world: World) -> None:
    ann, bob = world.open_as("ann"), world.open_as("bob")
    place = world.plan(ann)
    bob.goto(world.site(f"/discard?origin={ORIGIN}"))
    bob.fill("#reason", "paid by card")
    bob.fill("#number", str(MESSAGES_OF_PLAN))
    bob.click("main button:has-text('Discard')")
    assert f"{MESSAGES_OF_PLAN} discarded, 0 refused" in bob.inner_text(".notice")
    send_all(ann)
    assert eventually(lambda: _runs_once(world) and plans.recent(world.engine)[0].state == "done")
    ann.goto(place)
    assert f"{MESSAGES_OF_PLAN} skipped: it changed since the plan: it is archived" in said(ann)
    assert world.team.depth(ORIGIN) == 0
    bob.click(".notice button:has-text('Undo')")
    assert f"{MESSAGES_OF_PLAN} are as they were" in bob.inner_text(".notice")


def _runs_once(world: World) -> bool:
    """A run of the job that waits for nothing."""
    state: dict[str, Any] = {"looks": 0}

    def stopped() -> bool:
        state["looks"] += 1
        return all(plan.state == "done" for plan in plans.recent(world.engine))

    world.run_the_job(stopped)
    return True
