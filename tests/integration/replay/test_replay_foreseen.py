"""A dry run of an apply says what the apply then does, and leaves database and broker as they are."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import rawamqp
from dead_rows import NOW
from pika.exceptions import ChannelClosedByBroker
from program import client
from replay_rows import ORIGIN, come_back, end_leases, fill
from replay_store import AT_ONCE, EVERYTHING, Store, counted, opened

from dlqbatch.amqp.retry_headers import return_exchange
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.replay import job as replay_job
from dlqbatch.replay.abort import abort_replay
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.items import PlanItems
from dlqbatch.replay.job import Replayed
from dlqbatch.replay.plan import PlanRefused
from dlqbatch.replay.send_plan import Unhealthy
from dlqbatch.store.engine import writing
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture(params=["postgresql", "sqlite"])
def store(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Store]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    with opened(url, broker_url) as store:
        yield store


def foreseen(store: Store, name: str, asked: ApplyOptions = AT_ONCE) -> Replayed:
    """Looked at while nobody may write to the tables of the dead store: on SQLite to the whole file."""
    with ExitStack() as stack:
        if store.engine.dialect.name == "postgresql":
            holder = stack.enter_context(store.engine.connect())
            holder.exec_driver_sql(
                "LOCK TABLE dlq_messages, dlq_attempts, dlq_plans, dlq_plan_items, dlq_runs IN EXCLUSIVE MODE"
            )
        else:
            stack.enter_context(writing(store.engine))
        seen = replay_job.preview_replay(store.settings, name, asked, actor="ann")
    assert seen.report.dry_run
    return seen


def told(done: Replayed) -> tuple[str, str, Mapping[str, int], Mapping[str, int]]:
    return done.report.outcome, done.report.stopped_by, counted(done), done.report.reasons


@pytest.mark.parametrize("asked", [AT_ONCE, ApplyOptions()], ids=["at-once", "canary"])
def test_it_says_what_the_apply_then_does(store: Store, asked: ApplyOptions) -> None:
    ids = fill(store.engine, range(20))
    name = store.plan()
    with store.engine.begin() as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == ids[1]).values(updated_at=datetime.now(UTC)))
        connection.execute(MESSAGES.delete().where(MESSAGES.c.id == ids[2]))
    seen = foreseen(store, name, asked)
    assert (seen.status.state, store.team.depth(ORIGIN)) == ("planned", 0)
    with client(store.settings.broker_url.get_secret_value()) as other, pytest.raises(ChannelClosedByBroker):
        other.channel.exchange_declare(return_exchange(ORIGIN), passive=True)
    done = store.apply(name, asked)
    assert told(seen) == told(done)
    assert seen.report.counts["sent"] == store.team.depth(ORIGIN) == (18 if asked == AT_ONCE else 4)


def test_each_step_of_a_canary_is_foreseen_and_so_is_its_stop(store: Store) -> None:
    fill(store.engine, range(24))
    name = store.plan()
    store.apply(name, ApplyOptions())
    waits = foreseen(store, name, ApplyOptions())
    assert (waits.report.outcome, counted(waits)) == ("partial", {})
    assert "the first 4 are out" in waits.report.warnings[0]
    come_back(store.engine, 4, datetime.now(UTC), failed=False)
    assert counted(foreseen(store, name, ApplyOptions())) == {"got": 16, "sent": 16}
    store.apply(name, ApplyOptions())
    come_back(store.engine, 16, datetime.now(UTC), failed=True)
    stops = foreseen(store, name, ApplyOptions())
    assert (stops.report.outcome, counted(stops), stops.status.state) == ("failed", {}, "applying")
    assert "it would stop at once: 16 of 20 came back" in stops.report.warnings[0]


def test_what_a_cut_apply_holds_is_told_and_not_counted_as_free(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store.engine, range(600))
    name = store.plan()

    def cut(*_: object) -> None:
        raise DatabaseUnreadable("a test", "it is gone")

    with monkeypatch.context() as broken:
        broken.setattr(PlanItems, "sent", cut)
        broken.setattr(PlanItems, "give_back", cut)
        with pytest.raises(DatabaseUnreadable):
            store.apply(name)
    seen = foreseen(store, name)
    held = seen.status.held
    assert held > 0
    assert (seen.report.outcome, counted(seen)) == ("partial", {"got": 600 - held, "sent": 600 - held})
    assert f"{held} message(s) are held" in seen.report.warnings[0]
    end_leases(store.engine, NOW.replace(year=2021))
    assert store.apply(name).status.state == "done"


@pytest.mark.parametrize("asked", [AT_ONCE, ApplyOptions()], ids=["at-once", "canary"])
def test_plan_dry_run_and_apply_agree_about_an_origin_that_nobody_vouches_for(
    store: Store, asked: ApplyOptions
) -> None:
    """Only headers that a client wrote name it; it was ingested when dlqbatch.origins-allowed listed it."""
    claimed = [(b"x-original-exchange", rawamqp.text("")), (b"x-original-routingKey", rawamqp.text(ORIGIN))]
    properties = rawamqp.properties(claimed, delivery_mode=2)
    first, _ = fill(store.engine, [1, 2])
    with store.engine.begin() as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == first).values(properties=properties))
    (risk,) = [risk for risk in store.planned(dry_run=True).risks if risk.name == "origin-not-allowed"]
    assert (risk.messages, "--to-queue" in risk.says) == (1, True)
    trusting = store.settings.model_copy(update={"origins_allowed": (ORIGIN,)})
    planned = replay_job.plan_replay(trusting, EVERYTHING, actor="ann", reason="why", dry_run=True)
    assert "origin-not-allowed" not in [risk.name for risk in planned.risks]
    name = store.plan()
    seen = foreseen(store, name, asked)
    assert any("nobody vouches" in warning for warning in seen.report.warnings)
    done = store.apply(name, asked)
    assert told(seen)[2:] == told(done)[2:]
    assert done.report.counts["manual"] == 1


def test_it_refuses_what_the_apply_would_refuse(store: Store) -> None:
    fill(store.engine, [1], queue="gone")
    name = store.plan()
    with pytest.raises(Unhealthy, match="'gone' is not on the broker"):
        foreseen(store, name)
    abort_replay(store.settings, name, actor="ann")
    with pytest.raises(PlanRefused, match="aborted"):
        foreseen(store, name)
