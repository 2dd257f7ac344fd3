"""The tables in code are the tables in the database; what cannot be text is kept another way."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, add, row, store_at
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, StatementError

from dlqbatch.messages.queries import find, get
from dlqbatch.store.action_tables import ACTIONS
from dlqbatch.store.engine import create_engine_for, reading, writing
from dlqbatch.store.filters import Filters
from dlqbatch.store.tables import MESSAGES, metadata
from dlqbatch.store.text import LONGEST_NAME, LONGEST_TEXT, key, to_json, visible

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def postgresql_schema(engine: Engine) -> set[tuple[str, ...]]:
    """Every column, constraint and index of our tables, as the server itself writes it.

    A condition that a migration has only widened is not checked again for the rows that are there.
    """
    asking = """
        SELECT 'column', c.table_name, c.column_name, c.data_type, c.is_nullable, coalesce(c.column_default, ''),
            c.is_identity
        FROM information_schema.columns c WHERE c.table_schema = 'public'
        UNION ALL SELECT 'constraint', conrelid::regclass::text, conname,
            replace(pg_get_constraintdef(oid), ' NOT VALID', ''), '', '', ''
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace
        UNION ALL SELECT 'index', tablename, indexname, indexdef, '', '', '' FROM pg_indexes WHERE schemaname = 'public'
    """
    with reading(engine) as connection:
        return {tuple(line) for line in connection.execute(text(asking)) if line[1] in metadata.tables}


def sqlite_schema(engine: Engine) -> set[tuple[str, str]]:
    with reading(engine) as connection:
        made = "SELECT tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'trigger'"
        found = connection.execute(text(made))
        return {(name, in_any_order(" ".join(sql.split()))) for name, sql in found if name in metadata.tables}


def in_any_order(sql: str) -> str:
    """A column that was added later stands behind the constraints: each line of a table by itself, sorted.

    SQLite puts the name of a table that was renamed in quotes.
    """
    begins, opened, body = sql.partition("(")
    begins = begins.replace('"', "")
    if not begins.startswith("CREATE TABLE"):
        return sql
    parts, depth = [""], 0
    for each in body.rstrip(")").strip():
        depth += (each == "(") - (each == ")")
        if each == "," and not depth:
            parts.append("")
        else:
            parts[-1] += each
    return begins + opened + ", ".join(sorted(part.strip().rstrip(")") for part in parts))


def test_the_tables_in_code_are_those_that_the_migrations_make_on_postgresql(database_url: str) -> None:
    engine = store_at(database_url)
    migrated = postgresql_schema(engine)
    with writing(engine) as connection:
        connection.execute(text("DROP VIEW dlq_reveals"))
        metadata.drop_all(connection)
        metadata.create_all(connection)
    assert postgresql_schema(engine) == migrated
    assert {table for _, table, *_ in migrated} == set(metadata.tables) > {ACTIONS.name}


def test_the_tables_in_code_are_those_that_the_migrations_make_on_sqlite(sqlite_url: str, tmp_path: Path) -> None:
    made = create_engine_for(f"sqlite:///{tmp_path}/made.sqlite3", connect_timeout=30, create=True)
    with writing(made) as connection:
        metadata.create_all(connection)
    assert sqlite_schema(made) == sqlite_schema(store_at(sqlite_url))


def test_every_table_has_all_indexes(engine: Engine) -> None:
    with reading(engine) as connection:
        for table in metadata.tables.values():
            # SQLAlchemy does not see one of SQLite's that is on an expression.
            asking = {
                "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = :table",
                "postgresql": "SELECT indexname FROM pg_indexes WHERE tablename = :table",
            }[connection.dialect.name]
            names = set(connection.scalars(text(asking), {"table": table.name}))
            assert {index.name for index in table.indexes} <= names


def test_a_row_that_cannot_be_is_refused(engine: Engine) -> None:
    for wrong in (
        {"priority": 256},
        {"priority": -1},
        {"digest": b"short"},
        {"fingerprint": "short"},
        {"lock_token": "t"},
        {"lease_until": NOW},
        {"identity": None},
    ):
        values = row(status_since=NOW, created_at=NOW, updated_at=NOW) | wrong
        with engine.connect() as connection, connection.begin(), pytest.raises(IntegrityError):
            connection.execute(MESSAGES.insert(), values)


def test_a_name_that_is_not_in_the_list_is_refused(engine: Engine) -> None:
    add(engine, row())
    for column, value in (("status", "lost"), ("strategy", "magic")):
        with engine.connect() as connection, connection.begin(), pytest.raises(IntegrityError):
            connection.execute(text(f"UPDATE dlq_messages SET {column} = :value"), {"value": value})


def test_attempts_and_journal_go_with_their_message(engine: Engine) -> None:
    (row_id,) = add(engine, row())
    with writing(engine) as connection:
        connection.execute(text("DELETE FROM dlq_messages WHERE id = :id"), {"id": row_id})
        assert connection.scalar(text("SELECT count(*) FROM dlq_transitions")) == 0


def test_an_id_never_comes_again(engine: Engine) -> None:
    (first,) = add(engine, row())
    with writing(engine) as connection:
        connection.execute(text("DELETE FROM dlq_messages"))
    (second,) = add(engine, row())
    assert second > first


def test_a_time_keeps_its_instant_and_its_order(engine: Engine) -> None:
    times = [
        datetime(2030, 6, 1, 23, 30, 0, 1, tzinfo=UTC),
        datetime(2030, 6, 2, 1, 30, tzinfo=timezone(timedelta(hours=2))),
        datetime(2030, 6, 1, 23, 29, 59, 999_999, tzinfo=UTC),
    ]
    for time in times:
        add(engine, row(), at=time)
    with reading(engine) as connection:
        found = [record.created_at for record in find(connection, Filters()).records]
    assert found == sorted(times, reverse=True)
    assert {time.utcoffset() for time in found} == {timedelta()}


def test_a_time_without_its_zone_is_refused(engine: Engine) -> None:
    with pytest.raises(StatementError, match="without its zone"), engine.connect() as connection:
        connection.execute(MESSAGES.select().where(MESSAGES.c.created_at > datetime(2030, 1, 1)))  # noqa: DTZ001


def test_what_no_text_column_takes_is_shown_as_escapes_and_the_bytes_are_kept(engine: Engine) -> None:
    body, properties = b"\xff\0\xfe" * 100, b"\x20\0\0\0\0\x07\x01a\0S\0\0\0\x01\0"
    hostile = b"a\0b\xffc\xf0\x9f\x98\x80"
    (row_id,) = add(
        engine,
        row(
            body=body,
            properties=properties,
            source=hostile,
            error_message="e\0" * 500_000,
            tags=["a\0", "\ud800"],
            system_state={"cpu\0": float("nan")},
        ),
    )
    with reading(engine) as connection:
        found = get(connection, row_id)
    assert found is not None
    assert (found.content.body, found.content.properties) == (body, properties)
    assert found.record.source == "a\\x00b\\xffc\N{GRINNING FACE}"
    assert found.record.error_message is not None
    assert len(found.record.error_message) == LONGEST_TEXT
    assert found.record.error_message.startswith("e\\x00e\\x00")
    assert found.record.tags == ["a\\x00", "\\ud800"]
    assert found.record.system_state == {"cpu\\x00": "nan"}


def test_a_body_of_ten_megabytes_is_kept_and_not_fetched_for_a_list(engine: Engine) -> None:
    body = bytes(range(256)) * 40_960
    (row_id,) = add(engine, row(body=body))
    with reading(engine) as connection:
        (record,) = find(connection, Filters()).records
        found = get(connection, row_id)
    assert record.body_size == len(body)
    assert found is not None
    assert found.content.body == body


def test_a_name_of_any_length_fits_an_index_and_stays_itself(engine: Engine) -> None:
    names: list[str | bytes] = ["n" * 100_000 + "a", "n" * 100_000 + "b", b"\xff" * 300, "\N{GRINNING FACE}" * 300]
    assert len({key(name) for name in names}) == len(names)
    assert all(len(key(name)) <= LONGEST_NAME for name in names)
    for name in names:
        add(engine, row(identity=name, event=name, origin_queue=name, error_type=name, parent=name))
        with reading(engine) as connection:
            (record,) = find(connection, Filters.parse(event=key(name), origin=key(name))).records
        assert record.identity == key(name)


def test_visible_text_keeps_what_can_be_kept() -> None:
    assert (
        visible("plain \N{LATIN SMALL LETTER U WITH DIAERESIS}\n\t")
        == "plain \N{LATIN SMALL LETTER U WITH DIAERESIS}\n\t"
    )
    assert visible(b"a" * 10, 10) == "a" * 10
    assert visible("a" * 11, 10) == "a" * 9 + "\N{HORIZONTAL ELLIPSIS}"
    assert len(visible("\0" * 10, 10)) == 10
    assert key("short") == "short"


def test_json_says_everything_plainly() -> None:
    odd = {"a": (1, 2.5, float("inf")), "b": b"\xff", 3: {"x"}, "t": NOW, "n": None, "y": True}
    assert json.loads(to_json(odd)) == {
        "a": [1, 2.5, "inf"],
        "b": "\\xff",
        "3": ["x"],
        "t": str(NOW),
        "n": None,
        "y": True,
    }
