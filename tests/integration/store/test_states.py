"""Every move of the table happens, on both databases, and no other can be written by anybody."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, lock, row, store_at
from program import HANGS_AFTER
from sqlalchemy import event, insert, select
from sqlalchemy.exc import IntegrityError

from dlqbatch.messages.queries import Detail, get
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.journal import RowMove
from dlqbatch.store.states import MoveRefused, Status, pairs, path
from dlqbatch.store.tables import MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from sqlalchemy import Engine

LATER = NOW + timedelta(hours=1)
MOVES = [(from_, to) for from_, to in pairs() if from_ is not None]
OTHERS = [(from_, to) for from_ in Status for to in Status if (from_, to) not in pairs()]
WAYS_TO_WRITE = ["one", "many"]


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def look_at(engine: Engine, row_id: int) -> Detail:
    with reading(engine) as connection:
        found = get(connection, row_id)
    assert found is not None
    return found


def in_state(engine: Engine, status: Status) -> int:
    """A new row, led there by allowed moves of a person; locked by token `t` in processing."""
    (row_id,) = add(engine, row())
    for step in path(Status.PENDING, status, by_person=True):
        assert change(engine, "one", row_id, step.start, step.end)
    return row_id


def change(
    engine: Engine, way: str, row_id: int, from_: str, to: str, token: str | None = "held", actor: str = "a person"
) -> bool:
    """`held`: the token that a row in this state has here."""
    token = ("t" if from_ == Status.PROCESSING else None) if token == "held" else token
    columns: dict[str, Any] = lock() if to == Status.PROCESSING else {}
    with writing(engine) as connection:
        if way == "one":
            return states.move(connection, row_id, Status(from_), Status(to), token, LATER, actor, "why", **columns)
        step = RowMove(row_id, Status(from_), Status(to), token, "why", columns)
        return states.move_many(connection, [step], LATER, actor) == {row_id}


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_every_allowed_move_happens_and_is_journalled(engine: Engine, way: str) -> None:
    for from_, to in MOVES:
        row_id = in_state(engine, Status(from_))
        before = look_at(engine, row_id)
        assert change(engine, way, row_id, from_, to)
        after = look_at(engine, row_id)
        assert after.record.status is Status(to)
        assert after.record.status_since == (before.record.status_since if from_ == to else LATER)
        assert (after.record.lock_token is None) is (to != Status.PROCESSING)
        assert after.record.updated_at == LATER
        assert after.transitions[:-1] == before.transitions
        last = after.transitions[-1]
        found = (last.from_status, last.to_status, last.at, last.actor, last.reason)
        assert found == (from_, to, LATER, "a person", "why")


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_every_other_move_is_refused_before_any_sql(engine: Engine, way: str) -> None:
    (row_id,) = add(engine, row())
    asked: list[str] = []
    with writing(engine) as connection:
        event.listen(connection, "before_cursor_execute", lambda *arguments: asked.append(arguments[2]))
        for from_, to in OTHERS:
            step = RowMove(row_id, from_, to, None, "why")
            with pytest.raises(MoveRefused):
                _ = (
                    states.move(connection, row_id, from_, to, None, LATER, "a person", "why")
                    if way == "one"
                    else states.move_many(connection, [step], LATER, "a person")
                )
    assert asked == []


def test_a_program_may_not_make_a_persons_move(engine: Engine) -> None:
    row_id = in_state(engine, Status.MANUAL)
    with pytest.raises(MoveRefused):
        change(engine, "one", row_id, "manual", "processing", actor="lifecycle")
    assert change(engine, "one", row_id, "manual", "processing", actor="somebody")


def test_no_message_arrives_in_another_state(engine: Engine) -> None:
    for status in set(Status) - {Status.PENDING, Status.MANUAL}:
        with writing(engine) as connection, pytest.raises(MoveRefused):
            states.arrive(connection, [row(status=status)], NOW, "ingest", "why")


def test_the_database_itself_refuses_every_other_move(engine: Engine) -> None:
    (row_id,) = add(engine, row())
    arrivals = [(None, to) for to in Status if (None, to) not in pairs()]
    entry = {"message_id": row_id, "at": NOW, "actor": "by hand", "reason": "why"}
    for from_, to in [*OTHERS, *arrivals]:
        raw = insert(TRANSITIONS).values(**entry, from_status=from_, to_status=to)
        with engine.connect() as connection, connection.begin():
            if from_ == to:
                connection.execute(raw)  # a note
                continue
            with pytest.raises(IntegrityError, match="dlq_transitions_moves"):
                connection.execute(raw)


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_a_stale_token_changes_nothing(engine: Engine, way: str) -> None:
    row_id = in_state(engine, Status.PROCESSING)
    before = look_at(engine, row_id)
    for token in ("stale", None):
        assert not change(engine, way, row_id, "processing", "resolved", token)
    assert look_at(engine, row_id) == before


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_of_workers_at_once_exactly_one_wins(engine: Engine, way: str) -> None:
    ends = ["resolved", "pending", "failed", "manual"]
    for _ in range(5):
        row_id = in_state(engine, Status.PROCESSING)
        start = Barrier(len(ends))

        def attempt(to: str, row_id: int = row_id, start: Barrier = start) -> bool:
            start.wait(HANGS_AFTER)
            return change(engine, way, row_id, "processing", to)

        with ThreadPoolExecutor(len(ends)) as pool:
            outcomes = list(pool.map(attempt, ends))
        assert sum(outcomes) == 1
        found = look_at(engine, row_id)
        assert found.record.status == ends[outcomes.index(True)]
        assert len(found.transitions) == 3


def test_many_rows_move_at_once_and_those_somebody_else_changed_stay(engine: Engine) -> None:
    ids = add(engine, *(row() for _ in range(500)))
    taken = set(ids[::7])
    for row_id in taken:
        assert change(engine, "one", row_id, "pending", "processing")
    with writing(engine) as connection:
        steps = [RowMove(i, Status.PENDING, Status.PROCESSING, None, f"row {i}", lock(f"u{i}")) for i in ids]
        assert states.move_many(connection, steps, LATER, "lifecycle") == set(ids) - taken
    with reading(engine) as connection:
        tokens = dict(connection.execute(select(MESSAGES.c.id, MESSAGES.c.lock_token)).all())
        journal = connection.execute(select(TRANSITIONS).where(TRANSITIONS.c.reason.startswith("row "))).all()
    assert tokens == {i: "t" if i in taken else f"u{i}" for i in ids}
    assert sorted(entry.reason for entry in journal) == sorted(f"row {i}" for i in ids if i not in taken)


def test_a_move_without_its_journal_does_not_happen(engine: Engine) -> None:
    (row_id,) = add(engine, row())
    pending = Status.PENDING
    with writing(engine) as connection:
        assert states.move(connection, row_id, pending, pending, None, LATER, "lifecycle", "why", priority=9)
        connection.rollback()
    found = look_at(engine, row_id)
    assert found.record.priority == 0
    assert len(found.transitions) == 1


def test_an_identity_that_is_there_already_is_left_out(engine: Engine) -> None:
    first, second = row(), row()
    add(engine, first)
    with writing(engine) as connection:
        ids = states.arrive(connection, [first, second], NOW, "ingest", "again")
    assert set(ids) == {second["identity"]}


def test_a_note_changes_no_state(engine: Engine) -> None:
    row_id = in_state(engine, Status.FAILED)
    with writing(engine) as connection:
        assert states.note(connection, row_id, LATER, "ingest", "the same message again")
        assert not states.note(connection, row_id + 1, LATER, "ingest", "of nothing")
    found = look_at(engine, row_id)
    assert found.record.status is Status.FAILED
    last = found.transitions[-1]
    assert (last.from_status, last.to_status, last.reason) == ("failed", "failed", "the same message again")


def test_nobody_takes_a_row_without_a_token(engine: Engine) -> None:
    (row_id,) = add(engine, row())
    with writing(engine) as connection, pytest.raises(ValueError, match="lock_token"):
        states.move(connection, row_id, Status.PENDING, Status.PROCESSING, None, NOW, "lifecycle", "why")
