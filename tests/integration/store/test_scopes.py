"""Two deployments on one database: whatever a job or a command does in one scope, the other's rows stay as they are."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import plan_rows
import pytest
from arrivals import arrival
from dead_rows import NOW, add, begin_attempts, lock, row, store_at
from sqlalchemy import insert, select, text, update

from dlqbatch import settings
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.facts import QueueReading
from dlqbatch.cli.commands import run_command
from dlqbatch.errors import SettingsError
from dlqbatch.groups.decisions import hold, unhold
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.lifecycle import attempts, leases
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import LIMITS
from dlqbatch.lifecycle.ended_replays import release_ended_plans
from dlqbatch.lifecycle.outcome_rows import SentAttempts, UnprovenRetries
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.edit import Editing
from dlqbatch.monitor.alert_rules import BACKLOG, Alert, Severity, of_group
from dlqbatch.monitor.alerts import Alerts
from dlqbatch.monitor.job import overview
from dlqbatch.monitor.measure import measure
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.plan import NoSuchPlan, check, recent
from dlqbatch.retain.rows import Retention
from dlqbatch.store.access import store_for, store_of
from dlqbatch.store.count_changes import merge
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, NoSuchMessage
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.store.scopes import FIRST, ScopeUnknown, known_scopes, of_every_scope, register, scoped
from dlqbatch.store.states import NEW_GROUP, Status, Strategy
from dlqbatch.store.tables import ATTEMPTS, BREAKERS, MESSAGES, PLANS, QUEUE_READINGS, RUNS, SCOPES, TRANSITIONS

if TYPE_CHECKING:
    from sqlalchemy import Engine

SHOP, BILLING = "rabbit@one/shop", "rabbit@one/billing"
LATER = NOW + timedelta(hours=1)
MONTHS = timedelta(days=200)


class Two(NamedTuple):
    shop: Engine
    billing: Engine
    url: str


@pytest.fixture(params=["postgresql", "sqlite"])
def two(request: pytest.FixtureRequest) -> Two:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    engine = store_at(url)
    return Two(scoped(engine, register(engine, SHOP)), scoped(engine, register(engine, BILLING)), url)


def scopes(two: Two, *row_ids: int) -> set[int]:
    with reading(two.shop) as connection:
        return set(connection.scalars(select(MESSAGES.c.scope_id).where(MESSAGES.c.id.in_(row_ids))))


def due(**columns: Any) -> dict[str, Any]:
    return row(next_retry_at=NOW, origin_queue="orders", origin_exchange="", origin_key="orders", **columns)


def send(engine: Engine, now: Any = LATER) -> dict[int, int]:
    tokens = {each.row_id: each.token for each in leases.claim(engine, "w", now)}
    numbers = begin_attempts(engine, tokens, Strategy.IMMEDIATE, "w", now)
    attempts.mark_sent(engine, numbers, now)
    return numbers


def test_the_first_scope_that_is_known_has_what_was_there_and_what_an_older_program_writes(two: Two) -> None:
    assert known_scopes(two.shop) == {SHOP: FIRST, BILLING: 2}
    (old,) = add(two.shop, row())
    with writing(two.shop) as connection:
        # As the version before writes it: it names no scope.
        columns = ", ".join(each.name for each in MESSAGES.c if each.name not in {"id", "scope_id"})
        copied = columns.replace("identity", "'another'", 1)
        connection.execute(text(f"INSERT INTO dlq_messages ({columns}) SELECT {copied} FROM dlq_messages"))
    assert len(MessageActions(two.shop).page(Filters()).messages) == 2
    assert not MessageActions(two.billing).page(Filters()).messages
    assert scopes(two, old) == {FIRST}


def test_those_who_come_at_once_are_each_known_once(two: Two) -> None:
    names = [f"rabbit@one/{number % 4}" for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda name: register(two.shop, name), names))
    assert dict(zip(names, ids, strict=True)) == {name: known_scopes(two.shop)[name] for name in names}
    assert sorted(known_scopes(two.shop).values()) == [1, 2, 3, 4, 5, 6]


def test_a_claim_takes_the_due_rows_of_its_scope_marked_or_not(two: Two) -> None:
    ours, theirs = add(two.shop, due(), due(priority=1)), add(two.billing, due(priority=9), due())
    with writing(two.billing) as connection:
        # As the version before marks what it is about to claim.
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == theirs[0]).values(is_due=True))
    assert {each.row_id for each in leases.due(two.shop, 9, LATER)} == set(ours)
    assert {each.row_id for each in leases.claim(two.shop, "w", LATER)} == set(ours)
    assert leases.claim(two.shop, "w", LATER) == []
    assert {each.row_id for each in leases.claim(two.billing, "w", LATER)} == set(theirs)
    with reading(two.shop) as connection:
        written = select(TRANSITIONS.c.message_id, TRANSITIONS.c.scope_id).distinct()
        found = {tuple(each) for each in connection.execute(written)}
    assert found == {*((each, FIRST) for each in ours), *((each, 2) for each in theirs)}


def test_an_ended_lease_is_taken_over_in_its_own_scope(two: Two) -> None:
    (theirs,) = add(two.billing, row(status=Status.PENDING))
    with writing(two.billing) as connection:
        held = update(MESSAGES).where(MESSAGES.c.id == theirs)
        connection.execute(held.values(status="processing", **lock(lease_until=NOW)))
    assert leases.take_over(two.shop, "w", LATER) == []
    assert leases.due(two.shop, 9, LATER) == []
    assert [each.row_id for each in leases.take_over(two.billing, "w", LATER)] == [theirs]


def test_an_outcome_is_looked_for_and_proven_in_its_own_scope(two: Two) -> None:
    add(two.shop, due())
    (theirs,) = add(two.billing, due())
    send(two.billing)
    (ours,) = send(two.shop)
    shop, billing = SentAttempts(two.shop), SentAttempts(two.billing)
    much_later = LATER + timedelta(hours=1)
    assert [each.row_id for each in shop.sent_before(much_later, 9)] == [ours]
    assert [each.row_id for each in billing.sent_before(much_later, 9)] == [theirs]
    assert [each.retries for each in shop.by_way(9)] == [1]
    before = NOW - timedelta(hours=1)
    for name, queue in ((BILLING, "theirs"), (SHOP, "ours"), (None, "of an older program")):
        run = RunRecord("ingest", NOW, NOW, "ok", "empty", (queue,), {}, name)
        assert record(two.url, run).warning is None
    queues = ("ours", "theirs", "of an older program")
    # A run of the version before names no scope, and is one of the first.
    assert [run is not None for run in shop.newest_ingests(queues, before).values()] == [True, False, True]
    assert [run is not None for run in billing.newest_ingests(queues, before).values()] == [False, True, False]


def test_readings_and_what_is_missing_are_kept_for_each_scope(two: Two) -> None:
    shop, billing = SentAttempts(two.shop), SentAttempts(two.billing)
    for store in (shop, billing):
        store.save_readings([QueueReading("orders", LATER, is_there=True)], {}, LATER)
        store.save_unproven([UnprovenRetries("orders", 1, NOW, False, "why", *(None,) * 5, LATER)])
    assert [len(each["orders"]) for each in (shop.sightings(["orders"]), billing.sightings(["orders"]))] == [1, 1]
    billing.save_unproven([])
    billing.save_readings([], {}, LATER + timedelta(days=60))
    with reading(two.shop) as connection:
        assert measure(connection, LATER).unproven
        assert list(connection.scalars(select(QUEUE_READINGS.c.scope_id))) == [FIRST]
    with reading(two.billing) as connection:
        assert not measure(connection, LATER).unproven


def test_the_breaker_of_a_queue_of_the_same_name_is_another_one(two: Two) -> None:
    for engine, number in ((two.shop, 1), (two.billing, 2)):
        with writing(engine) as connection:
            breakers.count_sent(connection, ["orders"] * number, NOW, LIMITS)
            if engine is two.billing:
                is_theirs = (BREAKERS.c.scope_id == 2, BREAKERS.c.origin == "orders")
                connection.execute(update(BREAKERS).where(*is_theirs).values(phase="open", since=NOW))
    with writing(two.shop) as connection:
        assert breakers.not_closed(connection, ["orders"]) == set()
        assert breakers.admit(connection, {"orders": [1]}, NOW, LIMITS) == {1}
        assert {tuple(each) for each in connection.execute(select(BREAKERS.c.scope_id, BREAKERS.c.sent))} == {
            (1, 1),
            (2, 2),
        }
    with writing(two.billing) as connection:
        assert breakers.not_closed(connection, ["orders"]) == {"orders"}


def test_an_id_of_the_other_scope_is_another_message_also_when_it_comes_again(two: Two) -> None:
    assert Ingestion(two.billing).store([arrival("m-1")], NOW) == [("recorded", None)]
    # The same bytes, by a shovel say: it speaks for no row of the other virtual host.
    run = Ingestion(two.shop)
    assert run.store([arrival("m-1")], NOW) == [("recorded", None)]
    with reading(two.shop) as connection:
        found = connection.execute(select(MESSAGES).order_by(MESSAGES.c.id)).all()
    assert [(each.scope_id, each.parent, each.status) for each in found] == [
        (2, None, "pending"),
        (1, "m-1", "pending"),
    ]
    # In its own scope the row is known by the identity that it got.
    assert Ingestion(two.shop).store([arrival(found[1].identity)], NOW) == [("duplicate", None)]
    # A retry of billing that comes out of a queue of the shop fails no attempt there.
    (number,) = {send(two.billing)[found[0].id]}
    assert Ingestion(two.shop).store([arrival("m-1", attempt=number)], LATER) == [("recorded", None)]
    with reading(two.shop) as connection:
        assert connection.scalar(select(ATTEMPTS.c.outcome)) is None


@pytest.mark.parametrize("identity", ["", "dramatiq"])
def test_a_message_without_an_id_is_matched_in_its_own_scope(two: Two, identity: str) -> None:
    one = arrival(framework_id=identity or None, redelivered=True, origin=Origin("orders", "shop", "k"))
    assert Ingestion(two.billing).store([one], NOW) == [("recorded", None)]
    assert Ingestion(two.shop).store([one], NOW) == [("recorded", None)]
    with reading(two.shop) as connection:
        found = connection.execute(select(MESSAGES.c.scope_id, MESSAGES.c.parent, MESSAGES.c.possible_duplicate)).all()
    assert sorted(tuple(each) for each in found) == [(1, None, False), (2, None, False)]


def test_a_plan_holds_and_is_found_in_its_own_scope(two: Two) -> None:
    ours, theirs = plan_rows.add(two.shop, plan_rows.dead()), plan_rows.add(two.billing, plan_rows.dead())
    frozen = plan_rows.freeze(two.shop)
    assert [each for each, _ in plan_rows.items_of(two.shop, frozen)] == ours
    named = plan_rows.freeze(two.shop, Selection(row_ids=(*ours, *theirs)))
    assert (named.size, named.left_out) == (1, {"no such message": 1})
    assert [each.hash for each in recent(two.billing)] == []
    with pytest.raises(NoSuchPlan):
        check(two.billing, frozen.hash, resume_stopped=False)
    assert check(two.shop, frozen.hash, resume_stopped=False).size == 1


def test_the_rows_of_an_ended_plan_are_released_by_their_own_lifecycle(two: Two) -> None:
    (theirs,) = plan_rows.add(two.billing, plan_rows.dead())
    plan = plan_rows.reserve(two.billing, theirs, state="aborted")
    with writing(two.billing) as connection:
        connection.execute(update(PLANS).where(PLANS.c.id == plan).values(scope_id=2))
    end = {"actor": "replay", "worker": "w", "lease": timedelta(minutes=1), "now": LATER}
    release_ended_plans(two.shop, **end)  # type: ignore[arg-type]
    assert plan_rows.column(two.shop, "plan_id", theirs) == [plan]
    release_ended_plans(two.billing, **end)  # type: ignore[arg-type]
    assert plan_rows.column(two.shop, "plan_id", theirs) == [None]


def test_retain_counts_finds_and_prunes_its_own(two: Two) -> None:
    states = (Status.RESOLVED, Status.FAILED, Status.ARCHIVED)
    (theirs,) = add(two.billing, row(status=Status.PENDING))
    with writing(two.billing) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == theirs).values(status="failed"))
        for scope in (1, 2):
            plan = dict.fromkeys(("actor", "reason"), "ann") | {
                "filters": {},
                "size": 0,
                "risks": [],
                "scope_id": scope,
            }
            times = dict.fromkeys(("created_at", "state_since"), NOW)
            connection.execute(insert(PLANS).values(plan | times | {"hash": f"{scope}", "state": "done"}))
    shop, billing = Retention(two.shop), Retention(two.billing)
    before = dict.fromkeys(states, NOW + MONTHS)
    assert shop.count_due(before)[Status.FAILED] == 0
    assert shop.due(Status.FAILED, NOW + MONTHS, 9) == []
    assert billing.count_due(before)[Status.FAILED] == 1
    (found,) = billing.due(Status.FAILED, NOW + MONTHS, 9)
    assert found.id == theirs
    assert [line.message["scope"] for line in billing.lines([found])] == [BILLING]
    assert shop.prune(NOW + MONTHS, NOW, 9, NOW + MONTHS)["plans"] == 1
    with reading(two.shop) as connection:
        assert list(connection.scalars(select(PLANS.c.scope_id))) == [2]


def test_figures_and_alerts_are_of_one_scope(two: Two) -> None:
    add(two.shop, row(status=Status.MANUAL))
    add(two.billing, row(status=Status.MANUAL), row(status=Status.MANUAL), due())
    send(two.billing)
    with reading(two.shop) as connection:
        ours = measure(connection, NOW)
    with reading(two.billing) as connection:
        theirs = measure(connection, NOW)
    with reading(of_every_scope(two.shop)) as connection:
        both = measure(connection, NOW)
    assert [each.states["manual"] for each in (ours, theirs, both)] == [1, 2, 3]
    assert [each.ingested_last_hour for each in (ours, theirs, both)] == [1, 3, 4]
    assert [each.sent for each in (ours, theirs, both)] == [0, 1, 1]
    alert = Alert(BACKLOG, "", Severity.CRITICAL, "too many", 2, 1)
    for engine in (two.shop, two.billing):
        alerts = Alerts(engine)
        groups = alerts.new_groups()
        assert len(groups) == 1
        settled = alerts.settle([alert], [of_group(group) for group in groups], NOW, receivers=("webhook",))
        assert {each.name for each in settled.fired} == {BACKLOG, NEW_GROUP}
    turns = [Alerts(engine).take_turn("webhook", NOW) for engine in (two.shop, two.billing)]
    assert [len(turn.notices) for turn in turns if turn is not None] == [2, 2]
    assert {each.name for each in Alerts(two.billing).settle([], [], NOW).resolved} == {BACKLOG}
    assert len(Alerts(two.shop).active()) == 2
    for engine in (two.shop, two.billing):
        with reading(engine) as connection:
            measured = measure(connection, LATER)
        Alerts(engine).note_look(measured)
    with reading(two.shop) as connection:
        assert set(connection.scalars(text("SELECT figure FROM dlq_looks"))) == {"ingestion", "ingestion 2"}


def test_a_person_changes_nothing_in_another_scope(two: Two) -> None:
    (theirs,) = add(two.billing, row(status=Status.MANUAL))
    shop = MessageActions(two.shop)
    for done in (shop.discard([theirs], actor="ann", reason="why"), shop.restore([theirs], actor="ann", reason="why")):
        assert (done.done, done.changes[0].why) == (0, "there is no such message")
    assert shop.discard(everything=True, actor="ann", reason="why").changes == ()
    with pytest.raises(NoSuchMessage):
        Editing(two.shop).edit(theirs, actor="ann", reason="why", body=b"[]")
    assert MessageActions(two.billing).discard([theirs], actor="ann", reason="why").done == 1


def test_who_looks_at_every_scope_changes_none(two: Two) -> None:
    rows = [*add(two.shop, row(status=Status.MANUAL)), *add(two.billing, row(status=Status.MANUAL))]
    every = MessageActions(of_every_scope(two.shop))
    assert {each.id for each in every.page(Filters()).messages} == set(rows)
    for dry_run in (True, False):
        with pytest.raises(ScopeUnknown, match=f"{SHOP}, {BILLING}.*give --scope"):
            every.discard(everything=True, actor="ann", reason="why", dry_run=dry_run)
    with reading(two.shop) as connection:
        assert set(connection.scalars(select(MESSAGES.c.status))) == {"manual"}


def loaded(two: Two, **given: str) -> settings.Settings:
    return settings.load({"database_url": two.url} | given, {"DLQBATCH_CONFIG": "/dev/null"})


def seen(engine: Engine) -> int:
    return len(MessageActions(engine).page(Filters()).messages)


def test_a_command_without_the_broker_has_the_scope_of_the_settings_or_of_the_virtual_host_or_every(two: Two) -> None:
    add(two.shop, row())
    add(two.billing, row(), row())
    assert seen(store_for(loaded(two, scope=BILLING))) == 2
    assert seen(store_for(loaded(two, scope="all"))) == 3
    assert seen(store_for(loaded(two, broker_url="amqp://somewhere.example/shop"))) == 1
    assert seen(store_for(loaded(two, broker_url="amqp://somewhere.example/other"))) == 3
    with pytest.raises(SettingsError, match=f"no run has worked in the scope 'billing' yet; there is {SHOP}"):
        store_for(loaded(two, scope="billing"))


def test_a_dry_run_makes_no_scope_known_and_has_no_rows_of_others(two: Two) -> None:
    add(two.shop, row())
    assert seen(store_of(loaded(two), "rabbit@two/shop", dry_run=True)) == 0
    assert set(known_scopes(two.shop)) == {SHOP, BILLING}
    assert seen(store_of(loaded(two), "rabbit@two/shop")) == 0
    assert "rabbit@two/shop" in known_scopes(two.shop)


def test_the_log_of_runs_names_the_scope(two: Two) -> None:
    record(two.url, RunRecord("check", NOW, NOW, "ok", "empty", (), {}, BILLING))
    with reading(two.shop) as connection:
        assert list(connection.scalars(select(RUNS.c.scope))) == [BILLING]


def test_a_hold_is_one_of_its_own_scope(two: Two) -> None:
    (ours,), (theirs,) = add(two.shop, due()), add(two.billing, due())
    hold(two.billing, "0" * 16, actor="ann", reason="why", now=NOW)
    assert {each.row_id for each in leases.claim(two.shop, "w", LATER)} == {ours}
    assert leases.claim(two.billing, "w", LATER) == []
    unhold(two.billing, "0" * 16, actor="ann", reason="why", now=NOW)
    assert {each.row_id for each in leases.claim(two.billing, "w", LATER)} == {theirs}


def test_status_says_whose_figures_it_shows_and_how_many_messages_are_in_other_scopes(
    two: Two, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(two.shop, row())
    add(two.billing, *(row(status=Status.MANUAL) for _ in range(2)))
    merge(two.shop)
    add(two.billing, row())
    monkeypatch.setenv("DLQBATCH_DATABASE_URL", two.url)
    monkeypatch.setenv("DLQBATCH_CONFIG", "/dev/null")

    def shown(*words: str) -> str:
        assert run_command(("status", *words)) == 0
        return capsys.readouterr().out

    lines = shown("--scope", SHOP).splitlines()
    assert lines[0].endswith(", 1 messages")
    assert lines[1] == f"of          {SHOP}; 3 messages in other scopes"
    told = json.loads(shown("--scope", BILLING, "--json"))
    assert (told["scope"], told["messages_of_other_scopes"], told["metrics"]["backlog"]) == (BILLING, 1, 3)
    every = json.loads(shown("--scope", "all", "--json"))
    assert (every["scope"], every["messages_of_other_scopes"]) == ("all", 0)
    assert "every deployment" in shown("--scope", "all")


def test_status_of_the_only_deployment_names_it_and_no_other(two: Two) -> None:
    with writing(two.shop) as connection:
        connection.execute(SCOPES.delete().where(SCOPES.c.name == BILLING))
    assert overview(loaded(two)).as_dict()["scope"] == SHOP
    with writing(two.shop) as connection:
        connection.execute(SCOPES.delete())
    found = overview(loaded(two)).as_dict()
    assert (found["scope"], found["messages_of_other_scopes"]) == (None, 0)
