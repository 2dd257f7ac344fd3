"""How the database is reached: one connection for many transactions, and errors that say what to do."""

from __future__ import annotations

import secrets
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, add, row, store_at
from sqlalchemy import event, func, select, text
from stalling_link import StallingLink

from dlqbatch.drain.event_config import EventConfig
from dlqbatch.errors import DatabaseForbids, DatabaseUnreadable, PolicyMissing
from dlqbatch.messages.actions import MessageActions
from dlqbatch.store import timeouts
from dlqbatch.store.engine import create_engine_for, keeping, reading, writing
from dlqbatch.store.filters import Filters
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def size(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(MESSAGES)).scalar_one()


# --- One connection for many transactions


def test_a_batch_of_changes_opens_one_connection(engine: Engine) -> None:
    opened: list[object] = []
    event.listen(engine, "connect", lambda connection, _: opened.append(connection))
    review = MessageActions(engine)
    ids = add(engine, *(row() for _ in range(20)))
    for change in (
        lambda: review.discard(ids, actor="somebody", reason="r", now=NOW),
        lambda: review.restore(ids, actor="somebody", reason="r", now=NOW),
        lambda: review.discard(filters=Filters.parse(event="x"), actor="somebody", reason="r", now=NOW),
    ):
        opened.clear()
        change()
        assert len(opened) == 1


def test_a_connection_that_is_kept_commits_each_transaction(engine: Engine) -> None:
    elsewhere = create_engine_for(engine.url.render_as_string(hide_password=False), connect_timeout=30)
    with keeping(engine) as kept:
        for number in range(1, 4):
            with writing(kept) as connection:
                connection.execute(text(f"UPDATE dlq_rules SET position = {number} WHERE name = 'conflict'"))
            with reading(elsewhere) as other:
                found = text("SELECT count(*) FROM dlq_rules WHERE position = :number AND name = 'conflict'")
                assert other.execute(found, {"number": number}).scalar() == 1


def break_off(connection: Connection) -> None:
    connection.execute(text("DELETE FROM dlq_rules"))
    raise ZeroDivisionError


def test_the_pool_says_nothing_in_our_log(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "dlqbatch")
    with keeping(engine) as kept, kept.connect():
        pass
    assert caplog.messages == []


def test_a_transaction_that_failed_leaves_nothing_and_the_next_one_works(engine: Engine) -> None:
    with keeping(engine) as kept:
        with pytest.raises(ZeroDivisionError), writing(kept) as connection:
            break_off(connection)
        with pytest.raises(DatabaseUnreadable), writing(kept) as connection:
            connection.execute(text("DELETE FROM nothing_like_it"))
        with reading(kept) as connection:
            assert connection.execute(text("SELECT count(*) FROM dlq_rules")).scalar_one() > 0


def test_a_connection_that_is_lost_is_opened_anew(database_url: str) -> None:
    engine = store_at(database_url)
    with keeping(engine) as kept:
        with reading(kept) as connection:
            process = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with writing(create_engine_for(database_url, connect_timeout=30)) as other:
            other.execute(text("SELECT pg_terminate_backend(:process, 5000)"), {"process": process})
        with pytest.raises(DatabaseUnreadable), reading(kept) as connection:
            size(connection)
        with writing(kept) as connection:
            assert size(connection) == 0


def test_in_sqlite_only_who_writes_takes_the_write_lock(sqlite_url: str) -> None:
    engine = store_at(sqlite_url)
    file = sqlite_url.removeprefix("sqlite:///")

    def others_may_write() -> bool:
        other = sqlite3.connect(file, timeout=0, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        finally:
            other.close()
        return True

    with keeping(engine) as kept:
        for _ in range(2):
            with reading(kept) as connection:
                size(connection)
                assert others_may_write()
            with writing(kept):
                assert not others_may_write()


# --- What an error says


def test_a_sqlite_file_that_is_missing_is_named_with_what_makes_it(sqlite_url: str) -> None:
    file = sqlite_url.removeprefix("sqlite:///")
    engine = create_engine_for(sqlite_url, connect_timeout=1)
    for ask in (
        lambda: MessageActions(engine).page(Filters()),
        lambda: MessageActions(engine).discard([1], actor="somebody", reason="r", now=NOW),
    ):
        with pytest.raises(DatabaseUnreadable) as refused:
            ask()
        assert f"there is no file {file}" in str(refused.value)
        assert "`dlqbatch db upgrade` makes it" in str(refused.value)
    # A run of the drain has no policy then, which is another matter: nothing is to be dead-lettered for it.
    with pytest.raises(PolicyMissing):
        EventConfig(engine).read()
    assert not Path(file).exists()


@pytest.fixture
def reader(database_url: str) -> Iterator[tuple[Engine, Engine, str]]:
    """The owner's engine, that of a role which may do nothing yet, and the role's name."""
    owner = store_at(database_url)
    role = f"role_{secrets.token_hex(4)}"
    with writing(owner) as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'open-sesame'"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {role}"))
    head, _, place = database_url.partition("://")
    theirs = f"{head}://{role}:open-sesame@{place.rpartition('@')[2]}"
    yield owner, create_engine_for(theirs, connect_timeout=30), role
    with writing(owner) as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_missing_right_is_named_so_that_it_can_be_given(reader: tuple[Engine, Engine, str]) -> None:
    owner, theirs, role = reader
    (row_id,) = add(owner, row())

    def grant(statement: str) -> None:
        with writing(owner) as connection:
            connection.execute(text(f"GRANT {statement} TO {role}"))

    def hint(ask: object) -> str:
        with pytest.raises(DatabaseForbids, match="permission denied") as refused:
            ask()  # type: ignore[operator]
        assert refused.value.exit_code == 2  # it was reached, and waiting does not help
        return str(refused.value)

    def look() -> object:
        return MessageActions(theirs).page(Filters())

    def discard() -> object:
        return MessageActions(theirs).discard([row_id], actor="somebody", reason="r", now=NOW)

    def names(granted: str, ask: object, does: str) -> None:
        told = hint(ask)
        assert f"`GRANT {granted} TO {role}` lets a person {does}, `GRANT dlqbatch_worker TO {role}` a job" in told

    names("dlqbatch_reader", look, "look")
    grant("SELECT ON dlq_messages")
    look()
    names("dlqbatch_operator", discard, "do so")

    config = EventConfig(theirs)
    assert f"for the policy, `GRANT SELECT ON dlq_event_config TO {role}` is enough" in hint(config.read)
    grant("SELECT ON dlq_event_config")
    names("dlqbatch_operator", lambda: config.set("a", 1), "do so")
    grant("SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public")
    config.set("a", 1)
    assert discard().done == 1  # type: ignore[attr-defined]


# --- A database that falls silent


def test_a_database_that_falls_silent_is_given_up(database_url: str) -> None:
    """Whether it was asked, told, or asked to commit; and nobody waits a second time to roll back or to close."""
    store_at(database_url)

    def rename(connection: Connection) -> None:
        connection.execute(text("UPDATE dlq_rules SET position = 99 WHERE name = 'conflict'"))

    def many(connection: Connection) -> None:
        connection.execute(text("UPDATE dlq_rules SET position = :p WHERE name = 'x'"), [{"p": 1}, {"p": 2}])

    for last, enter, ask in (
        (b"statement_timeout", reading, size),
        (b"dlq_messages", reading, size),
        (b"UPDATE dlq_rules", writing, rename),
        (b"UPDATE dlq_rules", writing, many),
        (b"COMMIT", writing, rename),
    ):
        with StallingLink(database_url, last) as link:
            engine = create_engine_for(link.url, connect_timeout=2, statement_timeout=0.1)
            began = time.monotonic()
            with (
                pytest.raises(DatabaseUnreadable, match=r"no answer from the database within 2\.1 s"),
                enter(engine) as c,
            ):
                ask(c)
            assert 2 < time.monotonic() - began < 60  # by itself it would wait for ever
            assert link.is_silent
    with reading(create_engine_for(database_url, connect_timeout=30)) as connection:
        moved = text("SELECT count(*) FROM dlq_rules WHERE position = 99")
        assert connection.execute(moved).scalar_one() == 0


def test_a_statement_that_takes_long_is_ended_by_the_server_which_says_so(database_url: str) -> None:
    engine = create_engine_for(database_url, connect_timeout=30, statement_timeout=0.5)
    with pytest.raises(DatabaseUnreadable, match="statement timeout"), reading(engine) as connection:
        connection.execute(text("SELECT pg_sleep(30)"))


def test_an_answer_that_keeps_coming_may_take_its_time(database_url: str) -> None:
    """Only silence is bounded here: the time a statement may take is the server's to bound."""
    with timeouts.connect(0.0, database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.silence_limit = 0.5
        # 5 x 0.3 s, a row and more of padding after each, so that the server sends it.
        slow = "SELECT repeat('x', 100000), pg_sleep(0.3) FROM generate_series(1, 5)"
        assert len(connection.execute(slow).fetchall()) == 5
