"""Plan, apply, status, abort, as a person types them: on a real broker, with PostgreSQL and with SQLite."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from program import Client, Program, client, eventually
from ready_store import make_tables
from replay_rows import ORIGIN, come_back, dead, fill
from sqlalchemy import select, update

from dlqbatch.amqp.identity import digest_of
from dlqbatch.store import journal as states
from dlqbatch.store.engine import create_engine_for, reading, writing
from dlqbatch.store.tables import BREAKERS, MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

DONE, FAILED, USAGE, PARTIAL, UNREACHABLE = 0, 1, 2, 3, 4


class Desk:
    """A person's terminal, with the database and the broker behind it."""

    def __init__(self, program: Program, engine: Engine, team: Client) -> None:
        self.program, self.engine, self.team = program, engine, team

    def replay(self, *arguments: str, code: int = DONE) -> Any:
        done = self.program.run("replay", *arguments, "--json")
        assert done.code == code, done.said
        return done.told

    def plan(self, *arguments: str) -> str:
        return str(self.replay("plan", *(arguments or ("--all",)))["hash"])

    def bodies(self, queue: str = ORIGIN) -> list[int]:
        return sorted(int(message.body) for message in self.team.contents(queue))

    def column(self, name: str) -> list[Any]:
        with reading(self.engine) as connection:
            return list(connection.scalars(select(MESSAGES.c[name]).order_by(MESSAGES.c.id)))


@pytest.fixture(params=["postgresql", "sqlite"])
def desk(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Desk]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    make_tables(url)
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        engine = create_engine_for(url, connect_timeout=30)
        yield Desk(Program({"broker_url": broker_url, "database_url": url}), engine, team)


def counted(report: Any) -> dict[str, int]:
    counts = {name: number for name, number in report["counts"].items() if number}
    assert counts.get("got", 0) == sum(number for name, number in counts.items() if name != "got")
    return counts


@pytest.mark.quick
def test_a_plan_is_looked_at_applied_and_watched(desk: Desk) -> None:
    fill(desk.engine, range(12))
    planned = desk.replay("plan", "--error-type", "TIMEOUT_ERROR", "--reason", "the api is back", "--actor", "ann")
    assert (planned["size"], planned["by_origin"], planned["by_error"]) == (12, {ORIGIN: 12}, {"TIMEOUT_ERROR": 12})
    assert [(risk["name"], risk["messages"]) for risk in planned["risks"]] == [("no-consumers", 12)]
    assert len(planned["sample"]) == 5
    assert desk.team.depth(ORIGIN) == 0

    report = desk.replay("apply", planned["hash"][:8], "--no-canary", "--actor", "ann", "--batch-size", "5")

    assert counted(report) == {"got": 12, "sent": 12}
    assert (report["job"], report["outcome"], report["stopped_by"]) == ("replay", "ok", "empty")
    assert desk.bodies() == list(range(12))
    one = desk.team.contents(ORIGIN)[0]
    assert (one.routing_key, one.headers["dlqbatch-attempt"], one.headers["shop"]) == ("orders.created", 1, "kept")
    assert one.headers["dlqbatch-id"] == f"m-{int(one.body)}"
    told = desk.replay("status", planned["hash"])
    assert (told["state"], told["sent"], told["outcomes"]) == (
        "done",
        12,
        {"failed": 0, "succeeded": 0, "open": 12},
    )
    assert desk.column("status") == ["processing"] * 12
    shown = desk.program.run("messages", "show", "1").out
    assert (f"replay plan {planned['hash']}" in " ".join(shown.split()), "lease until" in shown) == (True, False), shown
    assert "processing (sent; whether it comes back is being observed) since" in shown
    with reading(desk.engine) as connection:
        actors = set(connection.scalars(select(TRANSITIONS.c.actor).where(TRANSITIONS.c.from_status == "pending")))
    assert actors == {"ann"}


def test_what_people_read_says_what_to_do_next(desk: Desk) -> None:
    fill(desk.engine, range(9))
    planned = desk.program.run("replay", "plan", "--all")
    assert planned.code == DONE, planned.said
    name = planned.out.splitlines()[-2].removeprefix("plan ")
    assert planned.out.endswith(f"nothing has moved; to send them: dlqbatch replay apply {name}\n")
    applied = desk.program.run("replay", "apply", name, "--wait", "0")
    assert applied.code == PARTIAL, applied.said
    assert "the first 4 are out" in applied.out
    assert f"`dlqbatch replay apply {name}` goes on when it is" in applied.out
    listed = desk.program.run("replay", "status")
    assert name in listed.out
    assert "applying" in listed.out
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", listed.out), listed.out
    aborted = desk.program.run("replay", "abort", name)
    assert (aborted.code, "aborted" in aborted.out) == (DONE, True), aborted.said


def test_a_dry_run_shows_and_keeps_nothing(desk: Desk) -> None:
    fill(desk.engine, range(2))
    planned = desk.replay("plan", "--all", "--dry-run")
    assert (planned["size"], planned["hash"]) == (2, None)
    assert desk.replay("status", code=FAILED) == []
    assert desk.replay("plan", "--event", "nothing.like.it", code=FAILED)["size"] == 0
    refused = desk.program.run("messages", "replay", "1", "--to-queue", "q" * 256)
    assert (refused.code, "at most 255 bytes" in refused.err) == (USAGE, True), refused.said


def test_an_apply_can_be_tried_without_moving_anything(desk: Desk) -> None:
    fill(desk.engine, range(12))
    name = desk.plan()
    first = desk.replay("apply", name, "--dry-run", code=PARTIAL)
    assert (first["dry_run"], counted(first), first["plan"]["state"]) == (True, {"got": 4, "sent": 4}, "planned")
    assert "8 more wait" in first["warnings"][0]
    whole = desk.program.run("replay", "apply", name, "--dry-run", "--no-canary")
    assert whole.code == DONE, whole.said
    assert "dry run" in whole.out
    assert re.search(r"^  would be sent +12\n", whole.out, re.MULTILINE), whole.out
    assert not re.search(r"^  sent +[1-9]", whole.out, re.MULTILINE), whole.out
    assert (desk.bodies(), desk.column("status")) == ([], ["pending"] * 12)
    refused = desk.program.run("replay", "apply", name, "--dry-run", "--rate", "fast")
    assert (refused.code, "is no rate" in refused.err) == (USAGE, True), refused.said


def test_a_hash_that_is_stale_unknown_or_no_hash_is_refused_and_moves_nothing(desk: Desk) -> None:
    fill(desk.engine, [1])
    aborted, done = desk.plan(), desk.plan()
    desk.replay("abort", aborted)
    desk.replay("apply", done, "--no-canary")
    for stale in (aborted, done, "0" * 16):
        told = desk.replay("apply", stale, code=USAGE)
        assert "dlqbatch replay plan" in told["error"]["message"]
    desk.replay("plan", code=USAGE)
    assert desk.bodies() == [1]


def test_a_canary_that_comes_back_stops_the_plan_until_a_person_goes_on(desk: Desk) -> None:
    fill(desk.engine, range(9))
    name = desk.plan()
    desk.replay("apply", name, "--wait", "0", code=PARTIAL)
    come_back(desk.engine, 1, datetime.now(UTC), failed=True)
    report = desk.replay("apply", name, "--wait", "0", code=FAILED)
    assert (report["outcome"], report["plan"]["state"]) == ("failed", "stopped")
    assert "1 of 4 came back" in report["plan"]["stopped_why"]
    refused = desk.replay("apply", name, code=USAGE)
    assert "--resume-stopped" in refused["error"]["message"]
    assert desk.bodies() == [0, 1, 2, 3]
    resumed = desk.replay("apply", name, "--resume-stopped", "--wait", "0", code=PARTIAL)
    assert counted(resumed) == {"got": 4, "sent": 4}


def test_an_origin_that_is_gone_stops_an_apply_before_anything_moves_and_another_queue_helps(desk: Desk) -> None:
    fill(desk.engine, range(3), queue="gone")
    planned = desk.replay("plan", "--all")
    assert [risk["name"] for risk in planned["risks"]] == ["origin-missing"]
    told = desk.replay("apply", planned["hash"], "--no-canary", code=FAILED)
    assert "'gone' is not on the broker" in told["error"]["message"]
    assert desk.column("status") == ["pending"] * 3
    assert desk.column("plan_id") == [None] * 3
    assert desk.replay("status", planned["hash"])["state"] == "planned"
    desk.replay("apply", desk.plan("--all", "--to-queue", ORIGIN), "--no-canary")
    assert desk.bodies() == [0, 1, 2]
    assert {message.routing_key for message in desk.team.contents(ORIGIN)} == {"orders.created"}


def test_messages_named_by_their_numbers_go_at_once(desk: Desk) -> None:
    ids = fill(desk.engine, range(3))
    done = desk.program.run("messages", "replay", str(ids[0]), str(ids[2]), str(ids[2] + 9), "--json")
    assert done.code == DONE, done.said
    assert counted(done.told) == {"got": 2, "sent": 2}
    assert "no such message" in done.err
    assert len(desk.bodies()) == 2
    assert desk.program.run("messages", "replay", str(ids[0]), "--json").code == FAILED
    refused = desk.program.run("messages", "replay", str(ids[1]), "--rate", "50ps")
    assert (refused.code, refused.out) == (USAGE, ""), refused.said
    assert "'50ps' is no rate" in refused.err.splitlines()[0], refused.said
    assert len(desk.replay("status")) == 1
    assert desk.program.run("messages", "replay", str(ids[1]), "--dry-run", "--json").told["size"] == 1


def test_one_that_cannot_be_sent_is_for_a_person_and_does_not_stop_the_others(desk: Desk) -> None:
    with writing(desk.engine) as connection:
        bad = dead(7) | {"properties": b"\x20\x00\x00\x00\x00\x02\xff\xff"}
        states.arrive(connection, [dead(1), bad], datetime.now(UTC), "ingest", "test")
    report = desk.replay("apply", desk.plan(), "--no-canary")
    assert counted(report) == {"got": 2, "sent": 1, "manual": 1}
    assert desk.bodies() == [1]
    assert sorted(desk.column("status")) == ["manual", "processing"]
    assert report["plan"]["state"] == "done"


def test_a_broker_that_is_down_and_a_default_database_move_nothing(desk: Desk) -> None:
    fill(desk.engine, [1])
    name = desk.plan()
    down = desk.program.but(broker_url="amqp://127.0.0.1:1", connect_timeout_seconds="1")
    assert down.run("replay", "apply", name).code == UNREACHABLE
    assert down.run("replay", "plan", "--all").code == UNREACHABLE
    unnamed = Program({"broker_url": desk.program.settings["broker_url"]}).run("replay", "plan", "--all", "--json")
    assert (unnamed.code, "DLQBATCH_DATABASE_URL" in unnamed.said) == (USAGE, True)
    assert desk.column("plan_id") == [None]


def test_what_became_of_a_replay_is_told_when_its_messages_are_gone(desk: Desk) -> None:
    fill(desk.engine, range(10))
    name = desk.plan()
    desk.replay("apply", name, "--no-canary")
    come_back(desk.engine, 1, datetime.now(UTC), failed=True)
    come_back(desk.engine, 9, datetime.now(UTC), failed=False)
    assert desk.replay("status", name)["outcomes"] == {"failed": 1, "succeeded": 9, "open": 0}
    successes = desk.program.run("monitor", "--json").told["metrics"]["replay_success"]

    def nine_are_gone() -> bool:
        desk.program.run("retain", "-s", "keep_resolved=1ms")
        return len(desk.column("id")) == 1

    assert eventually(nine_are_gone)
    assert desk.replay("status", name)["outcomes"] == {"failed": 1, "succeeded": 9, "open": 0}
    assert desk.program.run("monitor", "--json").told["metrics"]["replay_success"] == successes


def test_what_a_plan_sent_elsewhere_counts_for_where_it_went(desk: Desk) -> None:
    """The origin's circuit breaker stays as it is; the next plan goes there too, and is warned of what comes back."""
    leads_back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dlq-queue"}
    desk.team.channel.queue_declare("moved", durable=True, arguments=leads_back)
    desk.team.channel.queue_declare("dlq-queue", durable=True)
    fill(desk.engine, range(12))
    with writing(desk.engine) as connection:
        for row_id, body in connection.execute(select(MESSAGES.c.id, MESSAGES.c.body)).all():
            digest = digest_of(bytes(body), b"")
            connection.execute(update(MESSAGES).where(MESSAGES.c.id == row_id).values(digest=digest))
    name = desk.plan("--all", "--to-queue", "moved")
    desk.replay("apply", name, "--no-canary", "--max-failure-rate", "1")
    desk.team.reject_all("moved")
    desk.team.await_depth("dlq-queue", 12)
    assert desk.program.run("ingest").code == DONE
    with reading(desk.engine) as connection:
        phases = dict(connection.execute(select(BREAKERS.c.origin, BREAKERS.c.phase)).all())
    assert (phases.get(ORIGIN, "closed"), phases["moved"]) == ("closed", "open")

    def warned(*arguments: str) -> tuple[object, bool]:
        planned = desk.replay("plan", "--all", "--dry-run", *arguments)
        return planned["by_origin"], "loops-back" in [risk["name"] for risk in planned["risks"]]

    assert warned() == warned("--to-queue", "moved") == ({"moved": 12}, True)
    assert warned("--to-queue", ORIGIN) == ({ORIGIN: 12}, False), "the way back is open"
