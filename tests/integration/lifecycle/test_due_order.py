"""What goes next: all that is due and that no plan has reserved, highest priority first, then the oldest."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from conftest import examples
from dead_rows import NOW, add, row, store_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_rows import reserve
from query_plans import statements_of, walk
from sqlalchemy import text

from dlqbatch.lifecycle import leases
from dlqbatch.lifecycle.leases import claim, due
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.monitor.measure import _due as due_figures
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import Status
from dlqbatch.store.waiting import count_overdue, next_time

if TYPE_CHECKING:
    from sqlalchemy import Engine

MINUTE = timedelta(minutes=1)


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@dataclass(frozen=True)
class Message:
    priority: int
    age: int
    """Minutes since it came in."""
    due_since: int | None
    """Minutes; below zero it is not due yet, and None leaves it to a person."""
    reserved: bool
    is_marked: bool

    @property
    def is_due(self) -> bool:
        return self.due_since is not None and self.due_since >= 0 and not self.reserved


MESSAGES = st.builds(
    Message,
    priority=st.sampled_from([0, 1, 5, 9, 255]),
    age=st.integers(0, 1_000),
    due_since=st.one_of(st.none(), st.integers(-60, 600)),
    reserved=st.booleans(),
    is_marked=st.booleans(),
)


def store(engine: Engine, messages: list[Message]) -> dict[int, Message]:
    with writing(engine) as connection:
        for table in ("dlq_messages", "dlq_plans"):
            connection.execute(text(f"DELETE FROM {table}"))
    stored: dict[int, Message] = {}
    for message in messages:
        at = None if message.due_since is None else NOW - message.due_since * MINUTE
        status = Status.MANUAL if at is None else Status.PENDING
        marked = message.is_marked and message.due_since is not None and message.due_since >= 0
        columns = {"priority": message.priority, "next_retry_at": at, "status": status, "is_due": marked}
        (row_id,) = add(engine, row(**columns), at=NOW - message.age * MINUTE)
        stored[row_id] = message
    reserve(engine, *(row_id for row_id, message in stored.items() if message.reserved))
    return stored


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(messages=st.lists(MESSAGES, max_size=12), looked_at=st.sampled_from([2, 1_000]), limit=st.integers(1, 5))
def test_all_that_is_due_and_free_goes_next_whatever_a_plan_has_reserved(
    engine: Engine, messages: list[Message], looked_at: int, limit: int
) -> None:
    stored = store(engine, messages)
    free = [row_id for row_id, message in stored.items() if message.is_due]
    times = [NOW - m.due_since * MINUTE for m in stored.values() if m.due_since is not None and not m.reserved]
    with reading(engine) as connection:
        assert due_figures(connection, NOW) == (len(free), min((at for at in times if at > NOW), default=None))
    in_order = sorted(free, key=lambda row_id: (-stored[row_id].priority, -stored[row_id].age, row_id))
    assert [each.row_id for each in due(engine, 1_000, NOW)] == in_order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "_LOOKED_AT", looked_at)
        taken: list[int] = []
        while rows := claim(engine, "w", NOW, limit):
            taken += [each.row_id for each in rows]
    if looked_at > len(messages):
        assert taken == in_order
    assert sorted(taken) == sorted(free)
    assert [stored[row_id].priority for row_id in taken] == [stored[row_id].priority for row_id in in_order]


def test_priority_holds_across_a_backlog(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_LOOKED_AT", 10)
    add(engine, *(row(priority=0, next_retry_at=NOW - MINUTE) for _ in range(50)))
    urgent = add(engine, *(row(priority=9, next_retry_at=NOW) for _ in range(5)))
    assert {each.row_id for each in claim(engine, "w", NOW, 5)} == set(urgent)


def test_what_waits_is_found_without_reading_what_is_not_due(engine: Engine) -> None:
    later: datetime = NOW + 60 * MINUTE
    for _ in range(10):
        add(engine, *(row(priority=each % 3, next_retry_at=later, origin_queue="q") for each in range(1_000)))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE dlq_messages" if engine.dialect.name == "postgresql" else "ANALYZE"))
    with statements_of(engine) as seen:
        claim(engine, "w", NOW)
        due(engine, 1_000, NOW)
        SentAttempts(engine).due(NOW, 1_000)
        with reading(engine) as connection:
            assert (count_overdue(connection, NOW), next_time(connection, NOW)) == (0, later)
    assert seen
    walking = [plan for statement, parameters in seen if (plan := walk(engine, statement, parameters))]
    assert not walking, "\n\n".join(walking)
