"""Release, the job's runs, approve, as a person, a scheduler and a cloud function call them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from program import HANGS_AFTER, Client, Program, client, eventually
from ready_store import make_tables
from replay_rows import ORIGIN, fill

from dlqbatch.store.engine import create_engine_for

if TYPE_CHECKING:
    from collections.abc import Iterator

DONE, USAGE = 0, 2


class Desk:
    def __init__(self, program: Program, team: Client) -> None:
        self.program, self.team = program, team

    def replay(self, *arguments: str, code: int = DONE, **changes: str) -> Any:
        done = self.program.but(**changes).run("replay", *arguments, "--json")
        assert done.code == code, done.said
        return done.told

    def plan(self, size: int, *arguments: str) -> str:
        fill(create_engine_for(self.program.settings["database_url"], connect_timeout=30), range(size))
        return str(self.replay("plan", "--all", *arguments)["hash"])

    def bodies(self) -> list[int]:
        return sorted(int(message.body) for message in self.team.contents(ORIGIN))


@pytest.fixture(params=["postgresql", "sqlite"])
def desk(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Desk]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    make_tables(url)
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        yield Desk(Program({"broker_url": broker_url, "database_url": url}), team)


@pytest.mark.quick
def test_a_released_plan_is_sent_by_a_run_of_the_job(desk: Desk) -> None:
    name = desk.plan(12, "--actor", "ann")
    assert desk.replay("run")["stopped_by"] == "empty"
    released = desk.replay(
        *("release", name[:8], "--no-canary", "--rate", "500/s", "--actor", "bob", "--reason", "the api is back")
    )
    assert (released["state"], released["sent"], released["released"]["by"]) == ("applying", 0, "bob")
    assert "the job `replay` goes on with the 12 that wait" in released["do_next"]
    assert desk.bodies() == []
    shown = desk.program.run("replay", "status", name).out
    assert re.search(r"released by bob, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: the api is back", shown), shown
    assert "rate: 500 a second" in shown

    report = desk.replay("run")

    assert (report["job"], report["outcome"], report["stopped_by"], report["hit_bound"]) == (
        "replay",
        "ok",
        "empty",
        False,
    )
    assert report["counts"] == {"got": 12, "sent": 12, "skipped": 0, "manual": 0, "left": 0}
    assert report["plans"][name]["state"] == "done"
    assert desk.bodies() == list(range(12))
    listed = {plan["hash"]: plan for plan in desk.replay("status")}
    assert (listed[name]["state"], listed[name]["released"]["by"]) == ("done", "bob")
    actions = desk.program.run("actions", "list", "--json").told
    assert [(action["kind"], action["actor"], action["reason"]) for action in actions] == [
        ("replay", "bob", "the api is back")
    ]


def test_a_release_says_when_nobody_starts_the_job(desk: Desk) -> None:
    first, second = desk.plan(2), str(desk.replay("plan", "--all")["hash"])
    alone = desk.program.run("replay", "release", first)
    assert (alone.code, "no run of the job `replay` has begun" in alone.err) == (DONE, True), alone.said
    desk.replay("run")
    assert "has begun" not in desk.program.run("replay", "release", second).err


def test_what_people_read_of_a_run_names_the_plan_and_what_it_waits_for(desk: Desk) -> None:
    name = desk.plan(9)
    desk.replay("release", name)
    said: list[str] = []

    def step_is_out() -> bool:
        # A short run waits for no proof. On a slow machine it may be over before it has sent anything.
        done = desk.program.but(max_seconds="9").run("replay", "run")
        assert done.code == DONE, done.said
        said.append(done.out)
        return bool(re.search(rf"^  {name} +state applying, .*the first 4 are out", done.out, re.MULTILINE))

    assert eventually(step_is_out), said


def test_the_scheduler_goes_on_with_a_plan_that_was_released(desk: Desk) -> None:
    name = desk.plan(12)
    off = {f"schedule_{job}": "off" for job in ("drain", "ingest", "lifecycle", "monitor", "retain")}
    quiet = off | {"schedule_replay": "1s", "trigger_depth": "0", "health_address": "off"}
    process = desk.program.but(**quiet).start("schedule")
    desk.replay("release", name, "--no-canary")
    assert eventually(lambda: desk.replay("status", name)["state"] == "done" or process.poll() is not None)
    process.terminate()
    said = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == DONE, said
    assert desk.bodies() == list(range(12))


def test_a_setting_names_the_job(desk: Desk) -> None:
    name = desk.plan(3)
    desk.replay("release", name, "--no-canary")
    started = desk.program.but(job="replay").run("--json")
    assert (started.code, started.told["job"], started.told["counts"]["sent"]) == (DONE, "replay", 3), started.said
    assert desk.bodies() == [0, 1, 2]


def test_a_plan_that_is_large_is_approved_by_somebody_else(desk: Desk) -> None:
    limit = {"replay_approval": "5"}
    planned = desk.program.but(**limit).run("replay", "plan", "--all", "--actor", "ann", "--json")
    assert planned.code == 1, planned.said
    fill(create_engine_for(desk.program.settings["database_url"], connect_timeout=30), range(6))
    planned = desk.program.but(**limit).run("replay", "plan", "--all", "--actor", "ann", "--json")
    name = planned.told["hash"]
    assert f"somebody other than ann has to approve it: dlqbatch replay approve {name}" in planned.err
    for verb in ("apply", "release"):
        told = desk.replay(verb, name, "--actor", "ann", code=USAGE, **limit)
        assert "a second person has to agree" in told["error"]["message"]
    told = desk.replay("approve", name, "--actor", "ann", "--reason", "r", code=USAGE, **limit)
    assert "another person has to approve it" in told["error"]["message"]
    approved = desk.replay("approve", name, "--actor", "bob", "--reason", "looked at it", **limit)
    assert (approved["state"], approved["approved"]["by"]) == ("planned", "bob")
    assert "approved by bob" in desk.program.run("replay", "status", name).out
    desk.replay("apply", name, "--no-canary", "--actor", "ann", **limit)
    assert desk.bodies() == list(range(6))
