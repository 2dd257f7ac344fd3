"""What a large plan costs others, and itself: nothing waits for all of it, and what was cut goes on later."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, row, store_at
from dead_rows import add as arrive
from plan_rows import LATER, LEASE, abort, add, applying, dead, freeze, reserve
from query_plans import statements_of
from sqlalchemy import func, select

from dlqbatch.lifecycle.ended_replays import release_ended_plans
from dlqbatch.lifecycle.leases import claim
from dlqbatch.replay import items
from dlqbatch.replay import run as runs
from dlqbatch.store.engine import reading
from dlqbatch.store.reservation import ended_plans_with_rows, release_reservations
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def many(engine: Engine, number: int, **columns: object) -> list[int]:
    return sorted(arrive(engine, *(dead(next_retry_at=NOW, **columns) for _ in range(number))))


def reserved(engine: Engine) -> int:
    with reading(engine) as connection:
        return int(connection.scalar(select(func.count()).where(MESSAGES.c.plan_id.is_not(None))) or 0)


def after(pages: int) -> Callable[[], bool]:
    """It is enough after so many pages."""
    asked = itertools.count()
    return lambda: next(asked) >= pages


def test_what_a_plan_has_reserved_keeps_nothing_waiting_that_is_due(engine: Engine) -> None:
    reserve(engine, *many(engine, 1_200))
    due = add(engine, *(row(next_retry_at=LATER) for _ in range(3)))
    assert {each.row_id for each in claim(engine, "w", LATER)} == set(due)


def test_a_plan_is_let_go_page_by_page_without_sorting_what_is_left(engine: Engine) -> None:
    ids = many(engine, 3_000)
    plan_id = reserve(engine, *ids, state="aborted")
    with engine.begin() as connection:
        connection.exec_driver_sql("ANALYZE")
    with statements_of(engine) as seen:
        assert release_reservations(engine, plan_id, after(2)) is False
    assert reserved(engine) == 1_000
    page, parameters = next(each for each in seen if "FOR UPDATE" in each[0] or "LIMIT" in each[0])
    explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    with engine.connect() as connection:
        shown = json.dumps(
            [list(map(str, line)) for line in connection.exec_driver_sql(f"{explain} {page}", parameters)]
        )
    assert "dlq_messages_by_plan" in shown or "PRIMARY KEY" in shown or "dlq_messages_pkey" in shown, shown
    assert "Sort" not in shown, shown
    assert "TEMP B-TREE" not in shown, shown


def test_what_an_abort_that_was_cut_left_is_let_go_in_steps(engine: Engine) -> None:
    ids = many(engine, 2_500)
    plan_id = reserve(engine, *ids, state="aborted")
    release_ended_plans(engine, actor="x", worker="w", lease=LEASE, now=LATER, is_over=after(2))
    assert 0 < reserved(engine) < len(ids)
    release_ended_plans(engine, actor="x", worker="w", lease=LEASE, now=LATER)
    assert (reserved(engine), ended_plans_with_rows(engine), plan_id) == (0, [], plan_id)


def test_a_reservation_goes_on_where_another_run_ended_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_AT_ONCE", 10)
    many(engine, 45)
    frozen = freeze(engine)
    first = applying(engine, frozen)
    first.reserve(after(2))
    assert (reserved(engine), first.unreserved()) == (20, 25)
    second = applying(engine, frozen, "two")
    second.reserve(after(1))
    assert (reserved(engine), second.unreserved()) == (30, 15)
    assert (second.reserve(), reserved(engine), second.unreserved()) == ({}, 45, 0)
    assert abort(engine, frozen).waiting == 45
    assert reserved(engine) == 0


class _Plan:
    """A plan whose reservation takes for ever, and says when it was told that it is enough."""

    def __init__(self) -> None:
        self.asked = 0

    def reserve(self, is_enough: Callable[[], bool]) -> dict[str, int]:
        while not is_enough():
            self.asked += 1
        return {"it changed since the plan": 1}


@pytest.mark.parametrize("ended_by", ["time", "signal"])
def test_no_run_waits_for_the_whole_reservation(monkeypatch: pytest.MonkeyPatch, ended_by: str) -> None:
    """Where the store writes one thing at a time, not even its beginning does."""
    monkeypatch.setattr(runs, "_RESERVES_FOR", 0.05 if ended_by == "time" else 3600.0)
    plan, asked = _Plan(), after(100)
    reservation = runs._Reservation(plan, runs.Inline(), asked if ended_by == "signal" else lambda: False)  # type: ignore[arg-type]
    assert reservation.end() == {"it changed since the plan": 1}
    assert plan.asked > 0


def test_left_out_and_frequent_values_add_up_in_a_plan(engine: Engine) -> None:
    add(engine, *(row(origin_queue="work", event=f"event-{number % 30}") for number in range(90)))
    frozen = freeze(engine)
    assert len(frozen.by_event) == 21
    assert sum(frozen.by_event.values()) == frozen.size == 90
    assert frozen.by_event["other"] == 30
