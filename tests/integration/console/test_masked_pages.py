"""Secrets in messages: no page and no answer of the API shows one to somebody who may not see what is masked."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pika
import pytest
from console_client import as_role, made, opened, text_of
from planted_secrets import PLAIN, leaks
from program import client
from sqlalchemy import select

from dlqbatch import jobs, logs
from dlqbatch.amqp.masking import Masking
from dlqbatch.console.rights import Role
from dlqbatch.console.routes import routes
from dlqbatch.jobs import RunOptions
from dlqbatch.settings import mask_secrets
from dlqbatch.store.engine import reading
from dlqbatch.store.tables import MESSAGES
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console

SAID = f"login failed: password={PLAIN}, Authorization: Bearer {PLAIN}{PLAIN}"
BODIES = (
    json.dumps({"order": 7, "password": PLAIN, "deep": [{"apiKey": [PLAIN]}], "email": PLAIN}).encode(),
    b"<login><password>" + PLAIN.encode() + b"</password></login>",
    f"user=u&token={PLAIN}".encode(),
)
PROPERTIES = pika.BasicProperties(
    delivery_mode=2,
    correlation_id=f"token={PLAIN}",
    message_id=f"password={PLAIN}",
    headers={
        "authorization": f"Bearer {PLAIN}",
        "X-Api-Key": PLAIN,
        "x-customer-name": PLAIN,
        "nested": {"cookie": PLAIN},
        "x-exception-fqcn": f"net.LoginError token={PLAIN}",
        "x-exception-message": SAID,
        "x-exception-stacktrace": f"net.LoginError: {SAID}\n\tat app.Login.enter(Login.java:7)\nCaused by: {SAID}",
        "dlqbatch-failed-queue": "orders",
    },
)
STREAMS = {"/live/now", "/live/plans/{hash}"}
SHOWN = [each for each in routes() if each.method == "GET" and each.needs and each.path not in STREAMS]


@pytest.fixture
def world(broker_url: str, database_url: str) -> Iterator[tuple[Console, TestClient]]:
    """Three dead messages full of secrets, decisions about them whose words are secrets too, and a plan."""
    console = made(
        database_url,
        broker_url=broker_url,
        origins_allowed="orders",
        ingest_queues="dlq-queue",
        masking_headers="x-customer-*",
        masking_paths="$..email",
    )
    apply_topology(console.settings)
    with client(broker_url) as team, opened(console) as browser:
        team.channel.queue_declare("orders", durable=True)
        for body in BODIES:
            team.channel.basic_publish("", "dlq-queue", body, PROPERTIES)
        team.await_depth("dlq-queue", len(BODIES))
        assert jobs.run("ingest", console.settings, RunOptions()).counts["recorded"] == len(BODIES)
        mask_secrets(console.settings)  # as the process of a console does when it begins
        yield console, as_role(browser, console, Role.ADMIN)
    logs.mask_by(Masking())


def test_no_page_and_no_answer_shows_a_secret(world: tuple[Console, TestClient]) -> None:
    console, browser = world
    with reading(console.engine) as connection:
        rows = connection.execute(select(MESSAGES.c.id, MESSAGES.c.fingerprint)).all()
        assert {bytes(body) for body in connection.scalars(select(MESSAGES.c.body))} == set(BODIES)
    group = str(rows[0].fingerprint)
    held = browser.post(f"/groups/{group}/hold", data={"reason": f"password={PLAIN}"})
    assert held.status_code == 303, text_of(held)
    assert browser.post(f"/groups/{group}/unhold", data={"reason": "over"}).status_code == 303
    plan = browser.post("/plans", data={"query": "text=net.LoginError", "reason": f"token={PLAIN}"})
    assert plan.status_code == 303, text_of(plan)
    names = {"hash": plan.headers["location"].rpartition("/")[2], "name": "A-1", "fingerprint": group, "group": group}
    seen = 0
    for route in SHOWN:
        for row in rows:
            path = re.sub(r"\{(\w+)\}", lambda found, row=row: ({"id": str(row.id)} | names)[found[1]], route.path)
            for query in ("", "?text=net.LoginError", f"?id={row.id}"):
                answer = browser.get(path + query)
                if answer.status_code < 300:
                    seen += 1
                assert not leaks(_without_the_query(answer.content, query)), path + query
    assert seen > 3 * len(SHOWN)
    # It would be found: who may reveal it sees it.
    as_role(browser, console, Role.ADMIN, may_reveal=True)
    assert leaks(browser.post(f"/messages/{rows[0].id}/reveal", data={"reason": "the bank asks"}).content)


def _without_the_query(content: bytes, query: str) -> bytes:
    return content.replace(query.encode(), b"") if query else content


def test_what_a_decision_answers_shows_no_secret(world: tuple[Console, TestClient]) -> None:
    _, browser = world
    answers: list[Any] = [
        browser.post("/discard", data={"query": "text=net", "step": "ask"}),
        browser.post("/discard", data={"query": "text=net", "number": "2", "reason": "x"}),
        browser.post("/discard", data={"query": "text=net", "number": "3", "reason": f"password={PLAIN}"}),
        browser.post("/restore", data={"query": "text=net", "number": "3", "reason": "x"}),
        browser.post("/actions/A-1/undo"),
    ]
    for answer in answers:
        page = browser.get(answer.headers["location"]) if answer.status_code == 303 else answer
        assert not leaks(page.content), page.url
