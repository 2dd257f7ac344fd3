"""A plan is sent from its page and by the API: a few first, all at once, or after a second person has agreed."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from console_client import as_role, made, opened, text_of
from program import Client, client
from replay_rows import ORIGIN, fill

from dlqbatch import jobs
from dlqbatch.console.logins import token_line
from dlqbatch.console.rights import Role
from dlqbatch.jobs import RunOptions
from dlqbatch.replay import plan as plans

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console

MESSAGES = 7
TOKENS = {role: token_line(role.word, role, may_reveal=False, ends=datetime.now(UTC) + timedelta(1)) for role in Role}
World = tuple["Console", "TestClient", Client]


@pytest.fixture
def world(tmp_path: Path, database_url: str, broker_url: str) -> Iterator[World]:
    """As many dead messages as may need a second person; the browser is an operator's."""
    (tmp_path / "tokens").write_text("\n".join(line for _, line in TOKENS.values()))
    tokens = str(tmp_path / "tokens")
    console = made(database_url, broker_url=broker_url, replay_approval=MESSAGES, console_tokens=tokens)
    with client(broker_url) as team, opened(console) as browser:
        team.channel.queue_declare(ORIGIN, durable=True)
        fill(console.engine, range(MESSAGES))
        yield console, as_role(browser, console, Role.OPERATOR), team


def planned(browser: TestClient) -> str:
    answer = browser.post("/plans", data={"query": f"origin={ORIGIN}", "reason": "mended, INC-1"})
    assert answer.status_code == 303, text_of(answer)
    return str(answer.headers["location"])


def run_the_job(console: Console, sent: int) -> None:
    """One run of the job `replay`, until so many are out."""

    def stopped() -> bool:
        return plans.recent(console.engine, 1)[0].sent >= sent

    jobs.run("replay", console.settings, RunOptions(stopped=stopped))


def test_a_few_go_first_when_the_job_runs(world: World) -> None:
    console, browser, team = world
    place = planned(browser)
    assert "Send 4 first" in text_of(browser.get(place))
    done = browser.post(f"{place}/release", data={"rate": "50/s"})
    page = text_of(browser.get(done.headers["location"]))
    assert "no run of the job `replay` has begun in the last ten minutes" in page
    assert "operator-person: as planned" in page
    assert "50.0 a second" in page
    assert "Send 4 first" not in page
    assert team.depth(ORIGIN) == 0
    run_the_job(console, 4)
    assert team.depth(ORIGIN) == 4
    assert "operator-person ✓ verified" in text_of(browser.get("/actions"))
    # Once is enough, and somebody else is not asked any more.
    for word in ("release", "approve"):
        again = browser.post(f"{place}/{word}", data={"reason": "x"})
        assert again.status_code == 422, text_of(again)


def test_all_at_once_takes_the_number_typed(world: World) -> None:
    console, browser, team = world
    place = planned(browser)
    for number in ("", "6", "many"):
        assert browser.post(f"{place}/release", data={"send": "all", "number": number}).status_code == 422
    assert plans.recent(console.engine, 1)[0].state == "planned"
    released = browser.post(f"{place}/release", data={"send": "all", "number": "7", "rate": "500/s"})
    assert "500.0 a second" in text_of(browser.get(released.headers["location"]))
    run_the_job(console, MESSAGES)
    assert team.depth(ORIGIN) == MESSAGES


def test_a_large_plan_waits_for_a_second_person(world: World) -> None:
    console, browser, _ = world
    fill(console.engine, [MESSAGES])
    place = planned(browser)
    page = text_of(browser.get(place))
    assert "a second person has to agree" in page
    assert "Send" not in page
    assert browser.post(f"{place}/release").status_code == 422
    assert browser.post(f"{place}/approve", data={"reason": "I am sure"}).status_code == 422
    as_role(browser, console, Role.ADMIN)
    assert "Approve it" in text_of(browser.get(place))
    assert browser.post(f"{place}/approve", data={"reason": " "}).status_code == 422
    approved = browser.post(f"{place}/approve", data={"reason": "looked at the sample"})
    page = text_of(browser.get(approved.headers["location"]))
    assert "admin-person: looked at the sample" in page
    assert "Approve it" not in page
    assert "admin-person ✓ verified" in text_of(browser.get("/actions"))
    as_role(browser, console, Role.OPERATOR)
    assert "Send 4 first" in text_of(browser.get(place))
    assert browser.post(f"{place}/release").status_code == 303


def test_what_kills_its_consumer_is_taken_out_and_the_plan_goes_on(world: World) -> None:
    console, browser, team = world
    place = planned(browser)
    browser.post(f"{place}/release", data={"send": "all", "number": "7", "rate": "1000/s"})
    plan = plans.recent(console.engine, 1)[0]
    # What the guard does when it sees a consumer go.
    plans.stop(console.engine, plan.id, "1 of 1 consumer(s) went away", datetime.now(UTC), ORIGIN)
    team.publish("", ORIGIN, b"poison")
    page = browser.get(place)
    assert f"Take the head out of {ORIGIN}…" in text_of(page)
    asked = f"/head?queue={ORIGIN}&plan={plan.hash}"
    assert f'href="{asked}"'.replace("&", "&amp;") in page.text
    assert f"Take the head out of {ORIGIN}" in text_of(browser.get(asked))
    form = {"queue": ORIGIN, "plan": plan.hash, "note": "INC-1"}
    assert browser.post("/head", data=form).status_code == 422
    refused = browser.post("/head", data={**form, "reason": "kills the worker"})
    assert refused.status_code == 409
    assert "no replay and no retry of dlqbatch has sent the message" in text_of(refused)
    assert browser.post("/head", data={**form, "queue": "none", "reason": "x"}).status_code == 422
    taken = browser.post("/head", data={**form, "reason": "kills the worker", "any": "yes"})
    assert taken.headers["location"] == place
    page = browser.get(place)
    assert re.search(rf"Message \d+ was taken out of {ORIGIN}, and is on hold", text_of(page))
    assert "Undo" in text_of(page)
    assert "operator-person ✓ verified kills the worker" in text_of(browser.get("/actions"))
    assert browser.post(f"{place}/resume").status_code == 303
    assert "Take the head" not in text_of(browser.get(place))
    run_the_job(console, MESSAGES)
    assert team.depth(ORIGIN) == MESSAGES


def test_a_reader_is_offered_nothing_of_it(world: World) -> None:
    console, browser, _ = world
    place = planned(browser)
    as_role(browser, console, Role.READER)
    assert "Send" not in text_of(browser.get(place))
    assert browser.post(f"{place}/release").status_code == 403


def test_a_program_plans_approves_releases_pauses_and_goes_on(world: World) -> None:
    console, browser, team = world
    fill(console.engine, [MESSAGES])
    browser.cookies.clear()
    del browser.headers["Sec-Fetch-Site"]

    def post(place: str, role: Role = Role.OPERATOR, **asked: object) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {TOKENS[role][0]}"}
        answer = browser.post(f"/api/v1/plans{place}", json=asked, headers=headers)
        return answer.status_code, answer.json()

    _, plan = post("", reason="mended", filter={"origin": [ORIGIN]})
    place = f"/{plan['hash']}"
    assert post(f"{place}/release")[0] == 422
    assert post(f"{place}/approve", Role.ADMIN, reason="looked at it")[0] == 201
    assert post(f"{place}/release", canary="no")[0] == 422
    status, released = post(f"{place}/release", canary=False, rate="600/min", reason="the api is back")
    assert (status, released["state"], released["per_second"], released["canary"]) == (201, "applying", 10.0, False)
    assert (released["released"]["by"], released["released"]["verified"]) == ("operator", True)
    assert post(f"{place}/rate", rate="faster")[1]["per_second"] == 20.0
    assert post(f"{place}/pause", reason="too many at once")[1]["is_paused"]
    run_the_job(console, MESSAGES + 1)
    assert team.depth(ORIGIN) == 0
    assert post(f"{place}/resume")[1]["state"] == "applying"
    run_the_job(console, MESSAGES + 1)
    assert team.depth(ORIGIN) == MESSAGES + 1
    assert post(f"{place}/rate", rate="slower")[0] == 422
