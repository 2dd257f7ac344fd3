"""A plan applied in this process, on a real broker: how fast, how far, and when not at all."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, store_at
from program import HANGS_AFTER, eventually
from pydantic import SecretStr
from replay_rows import ORIGIN, come_back, end_leases, fill
from replay_store import AT_ONCE, EVERYTHING, Store, counted, opened
from sqlalchemy import delete, insert, make_url, select

from dlqbatch.actions.queries import recent
from dlqbatch.actions.undo import NotUndoable, undo
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.groups.decisions import hold
from dlqbatch.jobs import RunOptions
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.edit import Editing
from dlqbatch.replay import job as replay_job
from dlqbatch.replay.abort import abort_replay
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.items import PlanItems
from dlqbatch.replay.send_plan import Unhealthy
from dlqbatch.settings import load
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.tables import BREAKERS, MESSAGES, RUNS, TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.replay.items import Taken
    from dlqbatch.replay.risks import Risk


@pytest.fixture(params=["postgresql", "sqlite"])
def store(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Store]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    with opened(url, broker_url) as store:
        yield store


def test_a_rate_is_never_exceeded_by_more_than_three_per_cent(store: Store) -> None:
    """From the start to the last arrival: a busy machine makes that longer, and stretches between arrivals shorter."""
    number, rate = 500, 100
    fill(store.engine, range(number))
    name = store.plan()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(store.apply, name, ApplyOptions(canary=False, rate=f"{rate}/s"))
        for count, _ in enumerate(
            store.team.channel.consume(ORIGIN, auto_ack=True, inactivity_timeout=HANGS_AFTER), start=1
        ):
            if count == number:
                break
        lasted = time.monotonic() - began
        assert applied.result(HANGS_AFTER).report.counts["sent"] == number
    # That it is no slower than it may be, and even, is tested with the pace itself: here it depends on the machine.
    assert number / lasted < rate * 1.03


def test_between_two_batches_lies_the_pause(store: Store) -> None:
    fill(store.engine, range(9))
    began = time.monotonic()
    done = store.apply(store.plan(), ApplyOptions(canary=False, batch_size=3, pause=0.5))
    assert done.status.state == "done"
    assert time.monotonic() - began >= 1.0


def test_a_canary_goes_on_when_its_outcome_is_known_and_not_before(store: Store) -> None:
    fill(store.engine, range(130))
    name, out = store.plan(), 0
    for step in (4, 20, 100):
        done = store.apply(name, ApplyOptions())
        assert counted(done) == {"got": step - out, "sent": step - out}
        assert f"the first {step} are out" in done.report.warnings[0]
        assert (done.report.outcome, done.status.step) == ("partial", step)
        assert counted(store.apply(name, ApplyOptions())) == {}
        come_back(store.engine, step - out, datetime.now(UTC), failed=False)
        out = step
    assert counted(store.apply(name, ApplyOptions())) == {"got": 30, "sent": 30}
    assert sorted(int(message.body) for message in store.team.contents(ORIGIN)) == list(range(130))


def test_what_changed_is_skipped_and_the_rest_goes(store: Store) -> None:
    ids = fill(store.engine, range(4))
    name = store.plan()
    with store.engine.begin() as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == ids[1]).values(updated_at=datetime.now(UTC)))
        connection.execute(MESSAGES.delete().where(MESSAGES.c.id == ids[2]))
    done = store.apply(name)
    assert counted(done) == {"got": 4, "sent": 2, "skipped": 2}
    assert done.status.skipped_why == {"it changed since the plan": 1, "it is no longer in the dead store": 1}


def test_a_replay_is_an_action_that_selects_what_it_sent_and_cannot_be_undone(store: Store) -> None:
    fill(store.engine, range(3))
    name = store.plan()
    done = store.apply(name, ApplyOptions(canary=False))
    (action,) = recent(store.engine)
    assert (action.kind, action.details["plan"], done.report.counts["sent"]) == ("replay", name, 3)
    page = MessageActions(store.engine).page(Filters.parse(action=action.name))
    assert len(page.messages) == 3
    with pytest.raises(NotUndoable, match=f"dlqbatch replay abort {name}"):
        undo(store.engine, action.name, actor="ann", reason="r")


def test_what_is_held_after_it_was_taken_is_not_published_and_then_skipped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = fill(store.engine, range(6))
    with store.engine.begin() as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id.in_(ids[:3])).values(fingerprint="a" * 16))
    name = store.plan()
    take = PlanItems.take

    def take_and_hold(items: PlanItems, *given: Any) -> Taken:
        taken = take(items, *given)
        hold(store.engine, "a", actor="ann", reason="for the developers")
        return taken

    monkeypatch.setattr(PlanItems, "take", take_and_hold)
    first = store.apply(name, ApplyOptions(canary=False))
    assert (first.report.counts["sent"], first.status.state) == (3, "applying")
    assert sorted(int(message.body) for message in store.team.contents(ORIGIN)) == [3, 4, 5]
    second = store.apply(name, ApplyOptions(canary=False))
    assert (counted(second)["skipped"], second.status.state) == (3, "done")
    assert second.status.skipped_why == {"its group is on hold": 3}


def test_a_plan_of_which_nothing_could_go_says_so(store: Store) -> None:
    ids = fill(store.engine, [1])
    name = store.plan()
    with store.engine.begin() as connection:
        connection.execute(MESSAGES.delete().where(MESSAGES.c.id == ids[0]))
    done = store.apply(name)
    assert any(warning.startswith("nothing was sent") for warning in done.report.warnings)
    assert done.status.do_next.startswith("nothing was sent: 1 were skipped")


def test_a_dry_run_finds_what_a_plan_would_and_writes_nothing(store: Store) -> None:
    """While nobody else can write: on SQLite to the file, on PostgreSQL to the tables of plans."""
    fill(store.engine, range(3))
    fill(store.engine, [3], status=Status.MANUAL)
    is_postgres = store.engine.dialect.name == "postgresql"
    with ExitStack() as stack:
        if is_postgres:
            holder = stack.enter_context(store.engine.connect())
            holder.exec_driver_sql("LOCK TABLE dlq_plans, dlq_plan_items IN EXCLUSIVE MODE")
        else:
            stack.enter_context(writing(store.engine))
        found = store.planned(dry_run=True)
    assert replay_job.replay_plans(store.settings, 9) == ()
    kept = store.planned()
    names = ("size", "by_status", "by_origin", "by_error", "groups", "sample", "left_out")
    assert [getattr(found.frozen, name) for name in names] == [getattr(kept.frozen, name) for name in names]
    assert (found.frozen.size, found.risks) == (4, kept.risks)


def test_a_plan_may_take_longer_than_a_statement_of_a_run(
    database_url: str, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlqbatch.store.engine.STATEMENT_SECONDS", 1.0)
    with opened(database_url, broker_url) as store:
        fill(store.engine, range(2))
        with store.engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN PERFORM pg_sleep(2); RETURN NULL; END $$"
            )
            connection.exec_driver_sql(
                "CREATE TRIGGER waits AFTER INSERT ON dlq_plan_items FOR EACH STATEMENT EXECUTE FUNCTION wait()"
            )
        assert store.planned().frozen.size == 2


def test_a_dry_run_needs_the_right_to_read_and_no_other(broker_url: str, database_url: str) -> None:
    engine = store_at(database_url)
    fill(engine, range(2))
    owner = make_url(database_url)
    role = f"reader_{owner.database}"
    reader = owner.set(username=role, password="open-sesame").render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'open-sesame'")
        connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    try:
        settings = load({"broker_url": broker_url, "database_url": reader}, {"DLQBATCH_CONFIG": "/dev/null"})
        found = replay_job.plan_replay(settings, EVERYTHING, actor="ann", reason="why", dry_run=True)
        assert found.frozen.size == 2
        with pytest.raises(DatabaseUnreadable, match="GRANT"):
            replay_job.plan_replay(settings, EVERYTHING, actor="ann", reason="why")
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role}")
            connection.exec_driver_sql(f"DROP ROLE {role}")


def test_a_message_that_an_edit_replaced_is_a_risk_that_names_the_edit(store: Store) -> None:
    original, _ = fill(store.engine, [1, 2])
    fill(store.engine, [3], parent="m-2")  # it came in under an id of its own, and takes nobody's place
    Editing(store.engine).edit(original, body=b"7", actor="ann", reason="a typo", now=NOW, force=True)
    assert _replaced(store) == []  # the original is archived, and stays behind
    with store.engine.connect() as connection:
        edit = connection.scalars(select(MESSAGES.c.id).where(MESSAGES.c.parent == "m-1")).one()
    MessageActions(store.engine).restore([original], actor="ann", reason="on second thoughts", now=NOW)
    (risk,) = _replaced(store)
    assert (risk.messages, f"message {edit} beside message {original}" in risk.says) == (2, True)
    MessageActions(store.engine).discard([edit], actor="ann", reason="no", now=NOW)
    assert _replaced(store) == []


def test_an_edit_of_an_edit_and_one_that_is_deleted_are_risks_as_well(store: Store) -> None:
    first, second, third = fill(store.engine, [1, 2, 3])
    editing, review = Editing(store.engine), MessageActions(store.engine)

    def edit(row_id: int, body: bytes) -> int:
        done = editing.edit(row_id, body=body, actor="ann", reason="a typo", now=NOW, force=True)
        assert done.id is not None
        return done.id

    def restored(row_id: int) -> str:
        return review.restore([row_id], actor="ann", reason="on second thoughts", now=NOW).changes[0].why

    def at_risk() -> int:
        return sum(risk.messages for risk in _replaced(store))

    # Mended twice, and then the original taken back.
    last = edit(edit(first, b"7"), b"8")
    assert at_risk() == 0
    assert restored(first).startswith(f"message {last} (manual) took its place")
    assert at_risk() == 2
    # Taken back once more, and mended in another way: the original itself stays behind.
    other = edit(first, b"9")
    assert at_risk() == 2
    review.discard([last, other], actor="ann", reason="no", now=NOW)
    assert at_risk() == 0
    # Its edit was handled, and deleted when its time was over.
    gone = edit(second, b"7")
    with store.engine.begin() as connection:
        connection.execute(delete(MESSAGES).where(MESSAGES.c.id == gone))
    assert "may well have been handled" in restored(second)
    assert at_risk() == 1
    review.discard([second], actor="ann", reason="no", now=NOW)
    review.discard([third], actor="ann", reason="no", now=NOW)
    assert restored(third) == ""


def test_what_was_resolved_before_a_person_took_it_back_is_a_risk(store: Store) -> None:
    (row_id, _) = fill(store.engine, [1, 2], status=Status.MANUAL)
    with writing(store.engine) as connection:
        # As a discard did it once.
        lines = ["resolved", "pending", "processing", "manual", "archived", "manual"]
        for start, end in pairwise(lines):
            line = {"from_status": start, "to_status": end, "at": NOW, "actor": "ann", "reason": "r"}
            connection.execute(insert(TRANSITIONS).values(message_id=row_id, **line))
    (risk,) = [risk for risk in store.planned(dry_run=True).risks if risk.name == "resolved-before"]
    assert risk.messages == 1


def test_an_origin_that_is_an_exchange_is_a_risk_that_names_its_queues(store: Store, management: Any) -> None:
    for queue in ("emails", "audit"):
        store.team.channel.queue_declare(queue, durable=True)
    store.team.channel.exchange_declare("shop", "topic", durable=True)
    for queue in ("emails", "audit"):
        store.team.channel.queue_bind(queue, "shop", "orders.#")
    fill(store.engine, [1])
    with store.engine.begin() as connection:
        connection.execute(MESSAGES.update().values(origin_queue=None, origin_exchange="shop"))
    api = SecretStr("http://guest:guest@{}:{}".format(*management._address))
    settings = store.settings.model_copy(update={"management_url": api})
    planned = replay_job.plan_replay(settings, EVERYTHING, actor="ann", reason="why", dry_run=True)
    (risk,) = [risk for risk in planned.risks if risk.name == "origin-exchange"]
    assert "'shop' is an exchange" in risk.says
    assert all(queue in risk.says for queue in ("emails", "audit"))


def test_a_replay_counts_in_the_breaker_as_the_settings_say(store: Store) -> None:
    """Attempts that were begun 40 minutes ago are in a window of 24 hours, and in the default one no more."""
    begun = datetime.now(UTC) - timedelta(minutes=40)
    counts = {"sent": 8, "failed": 4, "sent_before": 0, "failed_before": 0}
    with store.engine.begin() as connection:
        row = {"origin": ORIGIN, "phase": "closed", "counted_from": begun, "updated_at": begun, **counts}
        connection.execute(insert(BREAKERS).values(row))
    fill(store.engine, [1])
    settings = store.settings.model_copy(update={"breaker_window": timedelta(hours=24)})
    name = store.plan()
    replay_job.apply_replay(settings, RunOptions(), name, AT_ONCE, actor="ann")
    with store.engine.connect() as connection:
        assert connection.execute(select(BREAKERS.c.sent, BREAKERS.c.failed)).one() == (9, 4)


def test_an_apply_that_is_refused_for_its_rights_leaves_its_plan_planned(broker_url: str, database_url: str) -> None:
    with opened(database_url, broker_url) as store:
        fill(store.engine, range(2))
        name = store.plan()
        owner = make_url(database_url)
        role = f"half_{owner.database}"
        half = owner.set(username=role, password="open-sesame").render_as_string(hide_password=False)
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'open-sesame'")
            connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
            connection.exec_driver_sql(f"GRANT UPDATE ON dlq_plans TO {role}")
        try:
            settings = load({"broker_url": broker_url, "database_url": half}, {"DLQBATCH_CONFIG": "/dev/null"})
            with pytest.raises(DatabaseUnreadable, match="permission denied"):
                replay_job.apply_replay(settings, RunOptions(), name, AT_ONCE, actor="ann")
        finally:
            with store.engine.begin() as connection:
                connection.exec_driver_sql(f"DROP OWNED BY {role}")
                connection.exec_driver_sql(f"DROP ROLE {role}")
        assert replay_job.replay_plans(store.settings, 1)[0].state == "planned"
        assert store.apply(name).status.state == "done"


def test_what_may_be_the_same_message_twice_is_a_risk(store: Store) -> None:
    fill(store.engine, [1, 2], possible_duplicate=True)
    fill(store.engine, [3])
    (risk,) = [risk for risk in store.planned(dry_run=True).risks if risk.name == "possible-duplicate"]
    assert risk.messages == 2


def _replaced(store: Store) -> list[Risk]:
    return [risk for risk in store.planned(dry_run=True).risks if risk.name == "replaced"]


def test_an_apply_that_waits_goes_on_when_the_outcome_is_known(store: Store) -> None:
    fill(store.engine, range(24))
    name = store.plan()
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(store.apply, name, ApplyOptions(wait=60))
        for out, more in ((4, 4), (20, 16)):
            assert eventually(lambda out=out: store.team.depth(ORIGIN) == out and _marked(store) == out)
            come_back(store.engine, more, datetime.now(UTC), failed=False)
        done = applied.result(HANGS_AFTER)
    assert (done.report.outcome, done.status.state, done.report.counts["sent"]) == ("ok", "done", 24)


def _marked(store: Store) -> int:
    found = replay_job.replay_plans(store.settings, 1)[0]
    return found.sent


def test_a_lease_that_ends_while_its_message_is_on_its_way_counts_and_sends_nothing_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may take longer to confirm than a lease lasts; then an apply meets its own rows as left behind."""
    fill(store.engine, range(600))
    take = PlanItems.take

    def after_the_lease(items: PlanItems, limit: int, ceiling: int | None, now: datetime) -> Taken:
        end_leases(store.engine, NOW.replace(year=2021))
        return take(items, limit, ceiling, now)

    monkeypatch.setattr(PlanItems, "take", after_the_lease)
    done = store.apply(store.plan())
    assert (done.report.outcome, counted(done), done.status.state) == ("ok", {"got": 600, "sent": 600}, "done")
    assert sorted(int(message.body) for message in store.team.contents(ORIGIN)) == list(range(600))


@pytest.mark.parametrize("actor", ["ingest", "lifecycle", "retain", " "])
def test_the_name_of_a_job_is_refused_before_anything_is_planned_or_moved(store: Store, actor: str) -> None:
    (row_id,) = fill(store.engine, [1], status=Status.MANUAL)
    name = store.plan()
    for ask in (
        lambda: store.planned(actor=actor),
        lambda: replay_job.apply_replay(store.settings, RunOptions(), name, AT_ONCE, actor=actor),
        lambda: replay_job.preview_replay(store.settings, name, AT_ONCE, actor=actor),
        lambda: abort_replay(store.settings, name, actor=actor),
    ):
        with pytest.raises(NotUnderstood, match="--actor") as refused:
            ask()
        assert refused.value.exit_code == 2
    (plan,) = replay_job.replay_plans(store.settings, 9)
    assert (plan.hash, plan.state, store.team.depth(ORIGIN)) == (name, "planned", 0)
    with reading(store.engine) as connection:
        assert connection.scalar(select(MESSAGES.c.status).where(MESSAGES.c.id == row_id)) == "manual"


def test_what_comes_back_during_a_long_run_stops_it(store: Store) -> None:
    fill(store.engine, range(600))
    name = store.plan()
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(store.apply, name, ApplyOptions(canary=False, rate="60/s", batch_size=10))
        assert eventually(lambda: _marked(store) >= 40)
        come_back(store.engine, 40, datetime.now(UTC), failed=True)
        done = applied.result(HANGS_AFTER)
    assert (done.report.outcome, done.status.state) == ("failed", "stopped")
    assert done.status.sent < 600
    with reading(store.engine) as connection:
        states = set(connection.scalars(select(MESSAGES.c.status).where(MESSAGES.c.plan_id.is_not(None))))
    assert states == {"manual", "pending", "processing"}


def test_an_origin_that_is_gone_is_found_out_before_anything_moves(store: Store) -> None:
    fill(store.engine, range(2), queue="gone")
    fill(store.engine, range(2, 4))
    name = store.plan()
    with pytest.raises(Unhealthy, match="'gone' is not on the broker") as refused:
        store.apply(name)
    assert refused.value.exit_code == 1
    store.team.channel.queue_declare("gone")
    assert store.apply(name).status.state == "done"
    assert (store.team.depth("gone"), store.team.depth(ORIGIN)) == (2, 2)


def test_large_bodies_are_taken_from_the_store_a_few_at_a_time_and_arrive_whole(store: Store) -> None:
    bodies = {bytes([number]) * (6 * 1024 * 1024) for number in range(4)}
    for number, body in enumerate(sorted(bodies)):
        fill(store.engine, [number])
        with store.engine.begin() as connection:
            connection.execute(MESSAGES.update().where(MESSAGES.c.identity == f"m-{number}").values(body=body))
    assert store.apply(store.plan()).status.state == "done"
    assert {message.body for message in store.team.contents(ORIGIN)} == bodies


def test_each_run_is_in_the_log_of_runs(store: Store) -> None:
    fill(store.engine, range(2))
    store.apply(store.plan())
    with reading(store.engine) as connection:
        runs = connection.execute(select(RUNS.c.job, RUNS.c.outcome, RUNS.c.stopped_by)).all()
    assert runs == [("replay", "ok", "empty")]
