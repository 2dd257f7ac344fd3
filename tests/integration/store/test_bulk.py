"""Many values in one statement, on both databases: every kind of value, none at all, more than a list would take."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, row, store_at
from sqlalchemy import event, func, select, update

from dlqbatch.store import bulk
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.journal import RowMove
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

MINUTE = timedelta(minutes=1)
ODD = ["", 'it\'s "so" {1,2} \\', "\u2028 ✓ 𝄞", "NULL", None, "a,b\nc\td"]


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@pytest.fixture
def statements(engine: Engine) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("BEGIN"):
            seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield seen
    event.remove(engine, "before_cursor_execute", note)


def column(engine: Engine, name: str, ids: Sequence[int]) -> list[Any]:
    with reading(engine) as connection:
        found = {row.id: row[1] for row in connection.execute(select(MESSAGES.c.id, MESSAGES.c[name]))}
    return [found[row_id] for row_id in ids]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("error_message", ODD),
        ("next_retry_at", [NOW, None, NOW + MINUTE, NOW + timedelta(microseconds=1), None, NOW - 9 * MINUTE]),
        ("strategy", [*Strategy, None, None]),
        ("priority", [0, 255, 7, 7, 7, 1]),
        ("plan_id", [2**62, None, 1, 2, 3, 4]),
        ("lease_until", [None] * 6),
        ("possible_duplicate", [True, False, True, True, False, False]),
        ("tags", [["a"], [], ["x", "y"], ["'"], ["\\"], ["✓"]]),
    ],
)
def test_each_row_gets_its_own_value_and_no_other(engine: Engine, name: str, values: list[Any]) -> None:
    ids = add(engine, *(row() for _ in values))
    with writing(engine) as connection:
        listed = bulk.values_table(connection, {MESSAGES.c.id: ids, MESSAGES.c[name]: values})
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == listed.c.id).values({name: listed.c[name]}))
    assert column(engine, name, ids) == values


@pytest.mark.parametrize(
    ("name", "values", "kept"),
    [
        ("body", [b"", bytes(range(256)), b"\0", b"x" * 100_000, b"\\x00"], None),
        ("error_stack", ["at", "at\n" * 300, "at\n" * 300, None, "\0\ud800"], {"\0\ud800": r"\x00\ud800"}),
        ("origin_key", ["a", "a", "ü" * 255, "\0", None], {"\0": r"\x00"}),
    ],
)
def test_bytes_and_texts_stand_in_a_new_row_as_a_single_insert_would_write_them(
    engine: Engine, name: str, values: list[Any], kept: dict[str, str] | None
) -> None:
    ids = add(engine, *(row(**{name: value}) for value in values))
    assert column(engine, name, ids) == [(kept or {}).get(value, value) for value in values]


def test_among_none_is_nobody_and_among_thousands_is_each_of_them(engine: Engine) -> None:
    ids = add(engine, *(row(event=name) for name in ("a", "b", "it's")))
    with reading(engine) as connection:

        def found(asked: Any, values: Sequence[Any]) -> list[int]:
            query = select(MESSAGES.c.id).where(bulk.in_list(connection, asked, values))
            return list(connection.scalars(query.order_by(MESSAGES.c.id)))

        assert found(MESSAGES.c.id, []) == []
        assert found(MESSAGES.c.id, range(ids[0] + 50_000)) == ids
        assert found(MESSAGES.c.event, ["it's", "a", "nobody's"]) == [ids[0], ids[2]]


def test_a_batch_takes_as_many_statements_as_a_row(engine: Engine, statements: list[str]) -> None:
    """However its rows differ: what each statement costs on the way there and back is not paid for each row."""
    ids = add(engine, *(row() for _ in range(301)))

    def put_off(some: Sequence[int]) -> int:
        statements.clear()
        moves = [
            RowMove(
                row_id, Status.PENDING, Status.PENDING, None, f"later {row_id}", {"next_retry_at": NOW + place * MINUTE}
            )
            for place, row_id in enumerate(some)
        ]
        with writing(engine) as connection:
            assert states.move_many(connection, moves, NOW, "lifecycle") == set(some)
        return len(statements)

    assert put_off(ids[:1]) == put_off(ids[1:]) == 3
    assert column(engine, "next_retry_at", ids[1:]) == [NOW + place * MINUTE for place in range(300)]
    with reading(engine) as connection:
        reasons = select(TRANSITIONS.c.message_id, TRANSITIONS.c.reason).where(TRANSITIONS.c.reason != "test")
        found = {row.message_id: row.reason for row in connection.execute(reasons)}
        assert found == {row_id: f"later {row_id}" for row_id in ids}
        assert connection.scalar(select(func.count()).where(TRANSITIONS.c.actor == "lifecycle")) == 301
