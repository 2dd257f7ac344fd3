"""Whatever is reserved, held, put off, leased or another deployment's: all else that is due goes next, in its order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from conftest import examples
from dead_rows import NOW, add, lock, row, store_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_rows import reserve
from sqlalchemy import text, update

from dlqbatch.groups.decisions import hold
from dlqbatch.lifecycle import breaker, leases
from dlqbatch.lifecycle.backoff_and_off_peak import Options
from dlqbatch.lifecycle.leases import claim
from dlqbatch.lifecycle.put_off import PutOff
from dlqbatch.lifecycle.rules import Rule
from dlqbatch.lifecycle.strategy import Choice, LoadLimits
from dlqbatch.store.engine import writing
from dlqbatch.store.states import On, Phase, Status, Strategy
from dlqbatch.store.tables import BREAKERS
from dlqbatch.store.tables import MESSAGES as TABLE

if TYPE_CHECKING:
    from sqlalchemy import Engine

MINUTE = timedelta(minutes=1)
LIMITS = breaker.Limits(cool_down=30 * MINUTE)
RULES = (Rule(1, "down", On.TEXT, "unavailable", Strategy.CONDITIONAL), Rule(2, "ok", On.TEXT, "", Strategy.IMMEDIATE))
HELD = "f" * 16
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "reserved": {},
    "held": {"fingerprint": HELD},
    "broken": {"origin_queue": "down", "error_message": "unavailable"},
    "leased": {},
    "later": {"next_retry_at": NOW + MINUTE},
    "of another deployment": {"scope_id": 2},
    "for a person": {"status": Status.MANUAL, "next_retry_at": None},
}


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@dataclass(frozen=True)
class Message:
    kind: str
    priority: int
    age: int
    waits: int


MESSAGES = st.builds(
    Message, st.sampled_from([*KINDS]), st.sampled_from([0, 5, 9]), st.integers(0, 99), st.integers(0, 99)
)


def store(engine: Engine, messages: list[Message]) -> dict[int, Message]:
    with writing(engine) as connection:
        for table in ("dlq_messages", "dlq_plans", "dlq_groups", BREAKERS.name):
            connection.execute(text(f"DELETE FROM {table}"))
        state = {"phase": Phase.OPEN, "since": NOW, "sent": 0, "failed": 0, "sent_before": 0, "failed_before": 0}
        connection.execute(BREAKERS.insert().values(origin="down", updated_at=NOW, **state))
    stored: dict[int, Message] = {}
    for each in messages:
        columns = {"priority": each.priority, "next_retry_at": NOW - each.waits * MINUTE} | KINDS[each.kind]
        (row_id,) = add(engine, row(**columns), at=NOW - each.age * MINUTE)
        stored[row_id] = each
    reserve(engine, *(row_id for row_id, each in stored.items() if each.kind == "reserved"))
    leased = [row_id for row_id, each in stored.items() if each.kind == "leased"]
    with writing(engine) as connection:
        taking = update(TABLE).where(TABLE.c.id.in_(leased))
        connection.execute(taking.values(status=Status.PROCESSING, **lock()))
    if any(each.kind == "held" for each in messages):
        hold(engine, HELD, actor="ann", reason="for the developers")
    return stored


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(messages=st.lists(MESSAGES, max_size=16), looked_at=st.sampled_from([2, 1_000]), limit=st.integers(1, 5))
def test_nothing_that_waits_for_something_else_keeps_a_due_message_waiting(
    engine: Engine, messages: list[Message], looked_at: int, limit: int
) -> None:
    stored = store(engine, messages)
    put_off = PutOff(Choice(RULES, Options(), LoadLimits(), lambda: (10.0, 10.0), lambda: 0.5), LIMITS)
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "_LOOKED_AT", looked_at)
        while True:  # as a run takes rows, until it says that nothing more is due
            before = put_off.counted.total()
            rows = claim(engine, "w", NOW, limit, hold_back=put_off)
            if not rows and put_off.counted.total() == before:
                break
            taken += [each.row_id for each in rows]
    free = [row_id for row_id, each in stored.items() if each.kind == "free"]
    in_order = sorted(free, key=lambda row_id: (-stored[row_id].priority, -stored[row_id].age, row_id))
    assert sorted(taken) == sorted(free)
    assert [stored[row_id].priority for row_id in taken] == [stored[row_id].priority for row_id in in_order]
    if looked_at > len(messages):
        assert taken == in_order
