"""A dry run of an apply says what the apply then does, and leaves database and broker as they are."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW
from pika.exceptions import ChannelClosedByBroker
from program import client
from replay_rows import ORIGIN, come_back, end_leases, fill
from replay_store import AT_ONCE, Store, counted, opened

from dlqbatch.deadstore.engine import writing
from dlqbatch.deadstore.plan_items import PlanItems
from dlqbatch.deadstore.plans import PlanRefused
from dlqbatch.deadstore.tables import MESSAGES
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.message.returns import return_exchange
from dlqbatch.runs.replay import Unhealthy
from dlqbatch.wiring import replay as wiring
from dlqbatch.wiring.replay import ReplayAsked, Replayed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture(params=["postgresql", "sqlite"])
def store(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Store]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    with opened(url, broker_url) as store:
        yield store


def foreseen(store: Store, name: str, asked: ReplayAsked = AT_ONCE) -> Replayed:
    """Looked at while nobody may write to the tables of the dead store: on SQLite to the whole file."""
    with ExitStack() as stack:
        if store.engine.dialect.name == "postgresql":
            holder = stack.enter_context(store.engine.connect())
            holder.exec_driver_sql(
                "LOCK TABLE dlq_messages, dlq_attempts, dlq_plans, dlq_plan_items, dlq_runs IN EXCLUSIVE MODE"
            )
        else:
            stack.enter_context(writing(store.engine))
        seen = wiring.preview_replay(store.settings, name, asked, actor="ann")
    assert seen.report.dry_run
    return seen


def told(done: Replayed) -> tuple[str, str, Mapping[str, int], Mapping[str, int]]:
    return done.report.outcome, done.report.stopped_by, counted(done), done.report.reasons


@pytest.mark.parametrize("asked", [AT_ONCE, ReplayAsked()], ids=["at-once", "canary"])
def test_it_says_what_the_apply_then_does(store: Store, asked: ReplayAsked) -> None:
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
    assert seen.report.counts["sent"] == store.team.depth(ORIGIN) == (18 if asked == AT_ONCE else 1)


def test_each_step_of_a_canary_is_foreseen_and_so_is_its_stop(store: Store) -> None:
    fill(store.engine, range(12))
    name = store.plan()
    store.apply(name, ReplayAsked())
    waits = foreseen(store, name, ReplayAsked())
    assert (waits.report.outcome, counted(waits)) == ("partial", {})
    assert "the first 1 are out" in waits.report.warnings[0]
    come_back(store.engine, 1, datetime.now(UTC), failed=False)
    assert counted(foreseen(store, name, ReplayAsked())) == {"got": 9, "sent": 9}
    store.apply(name, ReplayAsked())
    come_back(store.engine, 9, datetime.now(UTC), failed=True)
    stops = foreseen(store, name, ReplayAsked())
    assert (stops.report.outcome, counted(stops), stops.status.state) == ("failed", {}, "applying")
    assert "it would stop at once: 9 of 10 came back" in stops.report.warnings[0]


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


def test_it_refuses_what_the_apply_would_refuse(store: Store) -> None:
    fill(store.engine, [1], queue="gone")
    name = store.plan()
    with pytest.raises(Unhealthy, match="'gone' is not on the broker"):
        foreseen(store, name)
    wiring.abort_replay(store.settings, name, actor="ann")
    with pytest.raises(PlanRefused, match="aborted"):
        foreseen(store, name)
