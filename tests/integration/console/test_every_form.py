"""Every decision has a form on a page that needs no script, and under a path every address begins with that path."""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import pytest
from console_client import as_role, made, opened
from dead_rows import add, row
from replay_rows import fill
from sqlalchemy import func, select, update

from dlqbatch.console.rights import Role
from dlqbatch.console.routes import routes
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, PLANS

if TYPE_CHECKING:
    from sqlalchemy import Engine

FORM = re.compile(r'action="([^"?]*)"')
LINKS = re.compile(r'\b(href|src|action|formaction|data-live-from)="([^"#]*)"')
GROUP = "a" * 16
MOST_PAGES = 120
"""Filters can be put together without end."""
START = (
    "/",
    "/messages/1",
    f"/groups/{GROUP}",
    "/messages?status=manual",
    "/messages?status=archived",
    "/events",
    "/rules",
    "/edit?status=manual",
)


def happened(engine: Engine) -> None:
    """Messages, an action, a held group, and a plan in each state that offers a decision."""
    fill(engine, range(3), status=Status.MANUAL)
    add(engine, *(row(status=Status.MANUAL, fingerprint=GROUP, origin_queue="done") for _ in range(2)))
    with reading(engine) as connection:
        now = connection.scalar(select(func.max(MESSAGES.c.updated_at)))
    assert now is not None
    for number, (state, progress) in enumerate(
        (("planned", {}), ("applying", {}), ("stopped", {"paused": {"by": "ann", "at": "2030-06-01T12:00:00+00:00"}}))
    ):
        plan = freeze(engine, Selection(everything=True, limit=3 - number), actor="somebody else", reason="x", now=now)
        with writing(engine) as connection:
            changed = update(PLANS).where(PLANS.c.id == plan.plan_id)
            connection.execute(changed.values(state=state, progress=progress))


@pytest.mark.parametrize("prefix", ["", "/ops/dlq"])
def test_every_decision_is_a_form_that_a_page_leads_to(sqlite_url: str, prefix: str) -> None:
    """`prefix` is taken off by a proxy for each second page."""
    console = made(sqlite_url, replay_approval=1, **({"console_path": prefix} if prefix else {}))
    happened(console.engine)
    seen: set[str] = set()
    wanted = [prefix + place for place in START]
    forms: set[str] = set()
    with opened(console) as browser:
        as_role(browser, console, Role.ADMIN, may_reveal=True)
        # A group that is held, an event, a rule and an action are there.
        for place, form in (
            (f"/groups/{GROUP}/hold", {"reason": "x"}),
            ("/discard", {"query": "origin=done", "number": "2", "reason": "x"}),
            ("/events", {"name": "orders.#", "max_retries": "5"}),
            ("/rules", {"name": "limited", "pattern": "429", "strategy": "manual", "on": "any"}),
        ):
            assert browser.post(prefix + place, data=form).status_code == 303
        while wanted and len(seen) < MOST_PAGES:
            place = wanted.pop(0)
            if shape(place) in seen:
                continue
            seen.add(shape(place))
            answer = browser.get(place if len(seen) % 2 else place.removeprefix(prefix) or "/")
            opens = re.search(r'action="([^"]*/edit/open)"', answer.text)
            if opens is not None:
                forms |= set(FORM.findall(browser.post(opens[1], data={"reason": "x"}).text))
            if answer.status_code == 303:
                continue
            assert answer.status_code == 200, place
            text = answer.text
            forms |= set(FORM.findall(text))
            for kind, link in ((kind, urljoin(place, unescape(link))) for kind, link in LINKS.findall(text)):
                assert link.startswith(f"{prefix}/"), f"{link} on {place}"
                if kind == "href" and not link.startswith(f"{prefix}/static/"):
                    wanted.append(link)
    decisions = {route.path for route in routes() if route.changes and not route.is_api} - {"/login"}
    reached = {path for path in decisions for form in forms if matches(path, form.removeprefix(prefix))}
    missing = decisions - reached
    assert missing == set()


def matches(path: str, place: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), place) is not None


def shape(place: str) -> str:
    """Pages of one kind that offer the same; plans, groups and those to start with are each of their own."""
    parts = urlsplit(place)
    if place.endswith(START[1:]):
        return place
    return re.sub(r"\d{1,9}\b", "N", parts.path) + "?" + re.sub(r"=[^&]*", "", parts.query)
