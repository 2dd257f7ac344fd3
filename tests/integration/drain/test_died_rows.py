"""How messages died is read with their retries from the store; the command that asks what other numbers had done."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, add, row, store_at
from program import Program
from sqlalchemy import insert

from dlqbatch.drain.died_rows import history
from dlqbatch.drain.simulate import Died
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.tables import ATTEMPTS

if TYPE_CHECKING:
    from sqlalchemy import Engine


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


def tried(engine: Engine, row_id: int, *outcomes: str | None) -> None:
    with writing(engine) as connection:
        for number, outcome in enumerate(outcomes, 1):
            ended = NOW if outcome else None
            values = {"message_id": row_id, "number": number, "worker": "w", "created_at": NOW}
            connection.execute(insert(ATTEMPTS).values(values | {"outcome": outcome, "closed_at": ended}))


def filled(url: str) -> Engine:
    engine = store_at(url)
    ids = add(engine, *(row(event="orders.created", retry_count=3) for _ in range(4)), row(event="mail", retry_count=0))
    tried(engine, ids[0], "failed", "failed", "succeeded")
    tried(engine, ids[1], "abandoned", "failed", None)
    tried(engine, ids[2], "failed")
    add(engine, row(event="orders.created", retry_count=3), at=NOW - timedelta(days=9))
    return engine


def test_messages_that_died_alike_are_counted_together(url: str) -> None:
    engine = filled(url)
    with reading(engine) as connection:
        found = history(connection, NOW - timedelta(days=7))
        newest = history(connection, NOW - timedelta(days=7), 2)
    assert found.is_complete
    assert sorted(found.died, key=str) == [
        Died("mail", 0, 0, False, 1),
        Died("orders.created", 3, 0, False, 1),
        Died("orders.created", 3, 1, False, 2),
        Died("orders.created", 3, 2, True, 1),
    ]
    assert not newest.is_complete
    assert sum(died.messages for died in newest.died) == 2


def test_the_command_shows_what_other_numbers_had_done(url: str) -> None:
    filled(url)
    program = Program({"database_url": url})
    done = program.run("events", "simulate", "orders.*=6", "--since", "2030-05-30", "--json")
    assert done.code == 0, done.said
    (event,) = done.told["events"]
    assert event == {
        "event": "orders.*",
        "max_retries": 6,
        "messages": 4,
        "as_it_was": 0,
        "dead_sooner": 0,
        "handled": 1,
        "dead_all_the_same": 0,
        "unknown": 3,
        "retries": 12,
        "waits": 105.0,
    }
    assert "handled" in program.run("events", "simulate", "orders.*=0", "--since", "2030-05-30").out
    assert program.run("events", "simulate", "nothing=3", "--since", "2030-05-30").code == 1
    for wrong in ("orders", "orders=", "=3", "orders=-1", "orders=many"):
        refused = program.run("events", "simulate", wrong)
        assert refused.code == 2, refused.said
        assert "is not NAME=N" in refused.err
