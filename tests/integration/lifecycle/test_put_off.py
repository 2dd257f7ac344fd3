"""What waits behind an open circuit breaker keeps nobody else waiting, and is not written again and again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, row, store_at
from sqlalchemy import select

from dlqbatch.lifecycle import breaker, leases
from dlqbatch.lifecycle.backoff_and_off_peak import Options
from dlqbatch.lifecycle.leases import claim
from dlqbatch.lifecycle.outbox import admit
from dlqbatch.lifecycle.put_off import PutOff
from dlqbatch.lifecycle.rules import Rule
from dlqbatch.lifecycle.strategy import Choice, Claimed, LoadLimits
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import On, Phase, Strategy
from dlqbatch.store.tables import BREAKERS, MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

MINUTE = timedelta(minutes=1)
LIMITS = breaker.Limits(cool_down=30 * MINUTE)
RULES = (
    Rule(1, "refused", On.TEXT, "unavailable", Strategy.CONDITIONAL),
    Rule(2, "time-out", On.TEXT, "timed out", Strategy.IMMEDIATE),
)
HELD, FREE, LOOKED_AT = 25, 5, 10


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(leases, "_LOOKED_AT", LOOKED_AT)
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def choice(cpu: float = 10.0) -> Choice:
    return Choice(RULES, Options(), LoadLimits(), lambda: (cpu, 10.0), lambda: 0.5)


def fill(engine: Engine) -> tuple[set[int], set[int]]:
    """Rows of an origin that refuses them, due before those of an origin that is well."""
    held = (row(origin_queue="down", error_message="unavailable", next_retry_at=NOW - MINUTE) for _ in range(HELD))
    free = (row(origin_queue="well", error_message="timed out", next_retry_at=NOW) for _ in range(FREE))
    return set(add(engine, *held)), set(add(engine, *free))


def open_breaker(engine: Engine, since: datetime = NOW) -> None:
    state = {"phase": Phase.OPEN, "since": since, "sent": 0, "failed": 0, "sent_before": 0, "failed_before": 0}
    with writing(engine) as connection:
        connection.execute(BREAKERS.insert().values(origin="down", updated_at=NOW, **state))


def run(engine: Engine, put_off: PutOff, now: datetime) -> list[Claimed]:
    """As a lifecycle run leases and sorts out, until nothing more is due."""
    taken: list[Claimed] = []
    while True:
        before = put_off.counted.total()
        rows = claim(engine, "w", now, 4, hold_back=put_off)
        if not rows and put_off.counted.total() == before:
            return taken
        taken += rows
        _, back = choice().decide(rows, lambda those: admit(engine, those, now, LIMITS), now)
        leases.give_back(engine, {row_id: each for row_id, (each, *_) in back.items()}, now)


def stored(engine: Engine, row_ids: set[int], *names: str) -> set[tuple[Any, ...]]:
    with reading(engine) as connection:
        found = connection.execute(select(*(MESSAGES.c[name] for name in names)).where(MESSAGES.c.id.in_(row_ids)))
        return {tuple(each) for each in found}


def journal(engine: Engine, row_ids: set[int]) -> list[tuple[str | None, str, str]]:
    steps = TRANSITIONS.c
    with reading(engine) as connection:
        asked = select(steps.from_status, steps.to_status, steps.reason).where(steps.message_id.in_(row_ids))
        return [tuple(each) for each in connection.execute(asked.where(steps.from_status.is_not(None)))]


def test_what_an_open_breaker_holds_is_put_off_unclaimed_and_told_once(engine: Engine) -> None:
    held, free = fill(engine)
    open_breaker(engine)
    before = stored(engine, held, "updated_at")
    put_off = PutOff(choice(), LIMITS)
    assert {each.row_id for each in run(engine, put_off, NOW)} == free
    assert put_off.counted == {("rescheduled", "breaker-open"): HELD}
    assert stored(engine, held, "status", "strategy", "next_retry_at") == {
        ("pending", "conditional", NOW + 5 * MINUTE * 1.05)
    }
    told = ("pending", "pending", "the circuit breaker of its origin is open")
    assert journal(engine, held) == [told] * HELD
    for minutes in (6, 12, 18):
        assert run(engine, put_off, NOW + minutes * MINUTE) == []
    assert put_off.counted.total() == 4 * HELD
    assert journal(engine, held) == [told] * HELD
    # A plan that holds one of them sends it: for the plan nothing has changed.
    assert stored(engine, held, "updated_at") == before


def test_after_the_cool_down_one_of_them_is_the_probe(engine: Engine) -> None:
    held, _ = fill(engine)
    open_breaker(engine, NOW - LIMITS.cool_down)
    (probe,) = [each.row_id for each in run(engine, PutOff(choice(), LIMITS), NOW) if each.row_id in held]
    with reading(engine) as connection:
        state = connection.execute(select(BREAKERS.c.phase, BREAKERS.c.probe)).one()
    assert tuple(state) == (Phase.HALF_OPEN, str(probe))
    assert len(journal(engine, held)) == HELD


def test_a_busy_machine_puts_off_what_it_knows_to_be_conditional(engine: Engine) -> None:
    held, free = fill(engine)
    with writing(engine) as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id.in_(held)).values(strategy=Strategy.CONDITIONAL))
    put_off = PutOff(choice(cpu=95.0), LIMITS)
    assert {each.row_id for each in run(engine, put_off, NOW)} == free
    assert put_off.counted == {("rescheduled", "too-busy"): HELD}


def test_a_rule_that_was_changed_holds_for_what_is_put_off(engine: Engine) -> None:
    held, free = fill(engine)
    open_breaker(engine)
    run(engine, PutOff(choice(), LIMITS), NOW)
    changed = replace(choice(), rules=(replace(RULES[0], strategy=Strategy.IMMEDIATE),))
    taken: set[int] = set()
    while rows := claim(engine, "w", NOW + 6 * MINUTE, hold_back=PutOff(changed, LIMITS)):
        taken |= {each.row_id for each in rows}
    assert taken == held
    assert not taken & free
