"""What a person sees while the broker is away, the database is slow, or a run dies behind the plan's page."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from console_client import as_role, made, opened, text_of
from dead_rows import add, row
from program import HANGS_AFTER, Program, client, eventually
from replay_rows import ORIGIN, end_leases, fill
from slow_database import SlowDatabase

from dlqbatch.console.rights import Role
from dlqbatch.replay import plan as plans
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console

PAGES = ("/messages", "/messages/1", f"/groups/{'0' * 16}", "/plans", "/actions", "/events", "/runs", "/journal")
MESSAGES, KILLED_AT = 30, 8


def test_a_broker_that_is_away_takes_only_the_queues_from_the_pages(sqlite_url: str) -> None:
    # Nothing listens there.
    console = made(sqlite_url, broker_url="amqp://127.0.0.1:1/", connect_timeout_seconds=0.2)
    add(console.engine, row(status=Status.MANUAL, origin_queue="orders", error_type="KeyError"))
    with opened(console) as browser:
        as_role(browser, console, Role.OPERATOR)
        page = text_of(browser.get("/"))
        assert "KeyError" in page
        assert "the broker does not answer" in page
        assert {browser.get(place).status_code for place in PAGES} == {200}
        form = {"query": "origin=orders", "number": "1", "reason": "x"}
        refused = browser.post("/plans", data=form)
        assert refused.status_code == 503
        assert plans.recent(console.engine, 1) == ()
        # What needs no broker is decided as ever.
        assert browser.post("/discard", data=form).status_code == 303


def test_a_slow_database_makes_pages_slow_and_nothing_else(database_url: str) -> None:
    with SlowDatabase(database_url, 0.02) as slow:
        console = made(slow.url)
        add(console.engine, row(status=Status.MANUAL, origin_queue="orders", error_type="KeyError"))
        with opened(console) as browser:
            as_role(browser, console, Role.OPERATOR)
            assert {browser.get(place).status_code for place in ("/", *PAGES)} == {200}
            form = {"query": "origin=orders", "number": "1", "reason": "x"}
            assert browser.post("/discard", data=form).status_code == 303
            assert browser.post("/discard", data=form).status_code == 409


def test_the_page_of_a_plan_says_what_is_so_when_its_run_is_killed(database_url: str, broker_url: str) -> None:
    console = made(database_url, broker_url=broker_url)
    program = Program({"database_url": database_url, "broker_url": broker_url})
    with client(broker_url) as team, opened(console) as browser:
        team.channel.queue_declare(ORIGIN, durable=True)
        fill(console.engine, range(MESSAGES), status=Status.MANUAL)
        as_role(browser, console, Role.OPERATOR)
        place = browser.post("/plans", data={"query": f"origin={ORIGIN}", "reason": "x"}).headers["location"]
        form = {"send": "all", "number": str(MESSAGES), "rate": "5/s"}
        assert browser.post(f"{place}/release", data=form).status_code == 303
        run = program.start("replay", "run", "--json")
        assert eventually(lambda: team.depth(ORIGIN) >= KILLED_AT or run.poll() is not None)
        run.kill()
        run.communicate(timeout=HANGS_AFTER)
        out = team.depth(ORIGIN)
        held = end_leases(console.engine, datetime.now(UTC))
        plan = shown(browser, console, place)
        # What the broker has, the page says; but for the one or the other that was confirmed while the run died.
        assert out - held <= plan.sent <= out < MESSAGES
        assert browser.post(f"{place}/rate", data={"rate": "none"}).status_code == 303
        while plans.recent(console.engine, 1)[0].state == "applying":
            assert program.run("replay", "run").code == 0
        assert shown(browser, console, place).sent == MESSAGES
        assert MESSAGES <= team.depth(ORIGIN) <= MESSAGES + held


def shown(browser: TestClient, console: Console, place: str) -> plans.PlanStatus:
    """The state of the plan, which its page says too."""
    plan = plans.recent(console.engine, 1)[0]
    page = text_of(browser.get(place))
    for word in (plan.state, f"{plan.size} messages", f"{plan.sent} sent", f"{plan.waiting} not sent"):
        assert word in page
    return plan
