"""The policy's table on both databases: one suite, then what each of them has alone."""

from __future__ import annotations

import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
import pytest
import sqlalchemy
from ready_store import make_tables
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from dlqbatch.drain.event_config import EventConfig
from dlqbatch.drain.event_policy import EventRow, Policy
from dlqbatch.errors import DatabaseUnreadable, PolicyMissing, SettingsError
from dlqbatch.store import migrate
from dlqbatch.store.engine import create_engine_for, reading, translated, where, writing

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT = 30.0


@pytest.fixture(params=["postgresql", "sqlite"])
def empty_url(request: pytest.FixtureRequest) -> str:
    """A database without any table; on SQLite not even a file."""
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def url(empty_url: str) -> str:
    make_tables(empty_url)
    return empty_url


@pytest.fixture
def config(url: str) -> EventConfig:
    return config_at(url)


def config_at(url: str) -> EventConfig:
    return EventConfig(create_engine_for(url, connect_timeout=WAIT))


def run(url: str, *statements: str) -> None:
    with writing(create_engine_for(url, connect_timeout=WAIT, create=True)) as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_an_empty_table_has_no_rows(config: EventConfig) -> None:
    assert config.read() == []


def test_what_was_set_is_read_back_by_id(config: EventConfig) -> None:
    assert config.set("orders.created", 5).row == EventRow(1, "orders.created", 5)
    assert config.set("payment.#", None).row == EventRow(2, "payment.#", None)
    assert config.set("größe.日本 '%s' :x", 0).row == EventRow(3, "größe.日本 '%s' :x", 0)
    assert config.read() == [
        EventRow(1, "orders.created", 5),
        EventRow(2, "payment.#", None),
        EventRow(3, "größe.日本 '%s' :x", 0),
    ]


def test_set_changes_the_row_that_counts_and_no_other(url: str) -> None:
    run(url, "INSERT INTO dlq_event_config VALUES (4, 'a', 4), (9, 'a', 9), (2, NULL, 2), (12, 'b', NULL)")
    config = config_at(url)
    assert config.set("a", 1).row == EventRow(9, "a", 1)
    assert config.set("c", 3).row == EventRow(13, "c", 3)
    assert config.read() == [
        EventRow(2, None, 2),
        EventRow(4, "a", 4),
        EventRow(9, "a", 1),
        EventRow(12, "b", None),
        EventRow(13, "c", 3),
    ]
    assert Policy(config.read(), {}, 3).max_retries("a") == 1


def test_remove_takes_every_row_of_the_name_and_says_how_many(url: str) -> None:
    run(url, "INSERT INTO dlq_event_config VALUES (4, 'a', 4), (9, 'a', 9), (2, NULL, 2)")
    config = config_at(url)
    assert config.remove("a").rows == 2
    assert config.remove("a").rows == 0
    assert config.read() == [EventRow(2, None, 2)]


def test_a_name_of_a_hundred_characters_fits_and_one_more_is_a_clear_error(config: EventConfig) -> None:
    longest = "ä" * 100
    config.set(longest, 1)
    assert config.read()[0].name == longest
    with pytest.raises(SettingsError, match="has 101 characters"):
        config.set(longest + "x", 1)


@pytest.mark.parametrize("count", [-1, 2**31])
def test_a_count_that_the_table_cannot_mean_is_refused(config: EventConfig, count: int) -> None:
    with pytest.raises(SettingsError, match="from 0 to"):
        config.set("a", count)


@pytest.mark.parametrize("name", ["a\0b", "\udc80"])
def test_a_name_that_is_no_text_is_refused(config: EventConfig, name: str) -> None:
    with pytest.raises(SettingsError, match="no database keeps"):
        config.set(name, 1)


def test_setting_from_several_threads_gives_every_name_an_id_of_its_own(url: str) -> None:
    start = Barrier(4)

    def add(worker: int) -> None:
        config = config_at(url)
        start.wait(timeout=WAIT)
        for number in range(5):
            config.set(f"event.{worker}.{number}", worker)
            config.set("shared", worker)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    rows = config_at(url).read()
    assert [row.id for row in rows] == list(range(1, 22))
    assert len({row.name for row in rows}) == 21


def test_a_missing_table_is_said_to_be_missing_and_how_to_make_it(empty_url: str) -> None:
    for ask in (EventConfig.read, lambda config: config.set("a", 1), lambda config: config.remove("a")):
        with pytest.raises(PolicyMissing, match=r"no table dlq_event_config .*`dlqbatch db upgrade`"):
            ask(config_at(empty_url))


def test_a_hundred_thousand_rows_become_a_policy_quickly(url: str) -> None:
    fill = "INSERT INTO dlq_event_config SELECT n, {name}, NULL FROM {numbers}"
    if url.startswith("sqlite"):
        counted = "(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 100000) SELECT n FROM c)"
    else:
        counted = "generate_series(1, 100000) AS n"
    name = "'app' || (n % 97) || '.*.event' || n || CASE WHEN n % 2 = 0 THEN '.#' ELSE '' END"
    run(url, fill.format(name=name, numbers=counted))
    config = config_at(url)
    began = time.process_time()  # ours alone: whatever else the machine does
    policy = Policy(config.read(), {}, 3)
    elapsed = time.process_time() - began
    print(f"{elapsed:.2f} s of CPU")  # noqa: T201 - the figure itself, under `pytest -rP`
    assert policy.size == 100_000
    assert policy.max_retries("app3.x.event100") == 3
    assert elapsed < 3  # under 1 s on a small machine


# SQLite


def test_reading_makes_no_sqlite_file(sqlite_url: str) -> None:
    with pytest.raises(PolicyMissing):
        config_at(sqlite_url).read()
    assert migrate.current(sqlite_url) is None
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


def test_a_sqlite_path_may_hold_any_character(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c%20?ä"
    folder.mkdir()
    url = f"sqlite:///{quote(str(folder))}/x.sqlite3"
    make_tables(url)
    config_at(url).set("a", 1)
    assert config_at(url).read() == [EventRow(1, "a", 1)]
    assert [file.name for file in folder.iterdir()] == ["x.sqlite3"]


def test_a_sqlite_connection_is_durable_and_strict(sqlite_url: str) -> None:
    make_tables(sqlite_url)
    with reading(create_engine_for(sqlite_url, connect_timeout=WAIT)) as connection:
        asked = ["synchronous", "foreign_keys", "journal_mode", "busy_timeout"]
        assert [connection.scalar(text(f"PRAGMA {name}")) for name in asked] == [2, 1, "wal", 1000 * WAIT]


def test_a_reader_goes_on_while_a_writer_holds_the_sqlite_file(sqlite_url: str) -> None:
    make_tables(sqlite_url)
    with writing(create_engine_for(sqlite_url, connect_timeout=WAIT)) as connection:
        connection.execute(text("INSERT INTO dlq_event_config VALUES (1, 'a', 1)"))
        assert config_at(sqlite_url).read() == []


def test_a_locked_sqlite_file_is_an_error_after_the_wait(sqlite_url: str) -> None:
    make_tables(sqlite_url)
    impatient = EventConfig(create_engine_for(sqlite_url, connect_timeout=1))
    with (
        writing(create_engine_for(sqlite_url, connect_timeout=WAIT)),
        pytest.raises(DatabaseUnreadable, match="locked"),
    ):
        impatient.set("a", 1)


def test_a_file_that_is_no_database_is_unreadable(sqlite_url: str) -> None:
    Path(sqlite_url.removeprefix("sqlite:///")).write_bytes(b"something else entirely" * 100)
    with pytest.raises(DatabaseUnreadable, match="not a database"):
        config_at(sqlite_url).read()


def test_a_folder_in_place_of_the_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnreadable, match="unable to open"):
        config_at(f"sqlite:///{tmp_path}").read()


def test_a_count_that_is_text_is_an_error_not_a_guess(sqlite_url: str) -> None:
    make_tables(sqlite_url)
    run(sqlite_url, "INSERT INTO dlq_event_config VALUES (1, 'a', 'three')")
    with pytest.raises(DatabaseUnreadable, match=r"row 1 .*'three'"):
        config_at(sqlite_url).read()


# PostgreSQL


@pytest.fixture
def reader_url(database_url: str) -> Iterator[str]:
    """A login that may SELECT from the table and nothing else."""
    make_tables(database_url)
    parsed = sqlalchemy.make_url(database_url)
    role = f"reader_{parsed.database}"
    run(
        database_url,
        f"CREATE ROLE {role} LOGIN PASSWORD 'open-sesame'",
        f"GRANT SELECT ON dlq_event_config TO {role}",
        "INSERT INTO dlq_event_config VALUES (1, 'a', 1)",
    )
    yield parsed.set(username=role, password="open-sesame").render_as_string(hide_password=False)
    run(database_url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_reading_needs_no_more_than_select(reader_url: str) -> None:
    assert config_at(reader_url).read() == [EventRow(1, "a", 1)]
    with pytest.raises(DatabaseUnreadable, match="permission denied for table dlq_event_config"):
        config_at(reader_url).set("b", 1)


def test_no_right_to_read_is_an_error_that_names_the_table(reader_url: str, database_url: str) -> None:
    role = sqlalchemy.make_url(reader_url).username
    run(database_url, f"REVOKE SELECT ON dlq_event_config FROM {role}")
    with pytest.raises(DatabaseUnreadable, match="permission denied for table dlq_event_config"):
        config_at(reader_url).read()


@pytest.mark.parametrize("kind", ["serial", "int GENERATED BY DEFAULT AS IDENTITY", "int GENERATED ALWAYS AS IDENTITY"])
def test_a_table_that_numbers_itself_goes_on_doing_so(database_url: str, kind: str) -> None:
    run(
        database_url,
        f"CREATE TABLE dlq_event_config (id {kind} PRIMARY KEY, name varchar(100), max_retries int)",
        "INSERT INTO dlq_event_config (name) VALUES ('a')",
    )
    assert config_at(database_url).set("b", 1).row == EventRow(2, "b", 1)
    run(database_url, "INSERT INTO dlq_event_config (name) VALUES ('c')")
    assert [row.id for row in config_at(database_url).read()] == [1, 2, 3]


def test_a_name_that_is_bytes_is_an_error(database_url: str) -> None:
    run(database_url, "CREATE TABLE dlq_event_config (id int PRIMARY KEY, name bytea, max_retries int)")
    run(database_url, r"INSERT INTO dlq_event_config VALUES (1, '\xff', 1)")
    with pytest.raises(DatabaseUnreadable, match="row 1"):
        config_at(database_url).read()


def test_a_statement_that_takes_too_long_is_ended(database_url: str) -> None:
    engine = create_engine_for(database_url, connect_timeout=WAIT, statement_timeout=0.1)
    with pytest.raises(DatabaseUnreadable, match="statement timeout"), reading(engine) as connection:
        connection.execute(text("SELECT pg_sleep(60)"))


def test_the_connection_says_who_it_is(database_url: str) -> None:
    with reading(create_engine_for(database_url, connect_timeout=WAIT)) as connection:
        assert connection.scalar(text("SHOW application_name")) == "dlqbatch"
        assert connection.scalar(text("SHOW statement_timeout")) == "30s"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_the_usual_spellings_of_a_postgresql_url_are_understood(database_url: str, scheme: str) -> None:
    spelt = f"{scheme}://{database_url.partition('://')[2]}"
    make_tables(spelt)
    assert config_at(spelt).read() == []


def test_a_closed_port_is_unreachable_at_once_and_without_the_password() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        began = time.perf_counter()
        with pytest.raises(DatabaseUnreadable, match="refused") as caught:
            config_at(f"postgresql://u:open-sesame@127.0.0.1:{taken.getsockname()[1]}/d").read()
    assert time.perf_counter() - began < 60
    assert_not_told("open-sesame", caught.value)


def test_a_server_that_says_nothing_is_given_up_after_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u:open-sesame@127.0.0.1:{silent.getsockname()[1]}/d"
        began = time.perf_counter()
        with pytest.raises(DatabaseUnreadable) as caught:
            EventConfig(create_engine_for(url, connect_timeout=2)).read()
    assert time.perf_counter() - began < 60  # libpq itself would wait for ever
    assert_not_told("open-sesame", caught.value)


def test_a_refused_login_does_not_tell_the_password(database_url: str) -> None:
    url = sqlalchemy.make_url(database_url).set(username="nobody_of_this_name", password="open-sesame")
    with pytest.raises(DatabaseUnreadable, match="nobody_of_this_name") as caught:
        config_at(url.render_as_string(hide_password=False)).read()
    assert_not_told("open-sesame", caught.value)


def test_a_password_that_the_server_repeats_is_covered(database_url: str) -> None:
    url = sqlalchemy.make_url(database_url).set(password="open-sesame")
    engine = create_engine_for(url.render_as_string(hide_password=False), connect_timeout=WAIT)
    with pytest.raises(DatabaseUnreadable) as caught, reading(engine) as connection:
        connection.execute(text("SELECT 'open-sesame'::int"))
    assert "open-sesame" not in str(caught.value)


def assert_not_told(password: str, error: BaseException | None) -> None:
    # The cause as well: a traceback in a log prints the whole chain.
    while error is not None:
        assert password not in str(error)
        error = error.__cause__ or error.__context__


# Both: URLs, and what the vendors can raise


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("open-sesame", "cannot be parsed"),
        ("mysql://u:open-sesame@h/d", "not supported"),
        ("postgresql+asyncpg://u:open-sesame@h/d", "not supported"),
        ("postgresql://u:open@sesame@h/d", "%40"),
        ("postgresql://u:open-sesame@h:port/d", "cannot be parsed"),
        ("sqlite://", "names a file"),
        ("sqlite:///:memory:", "names a file"),
        ("sqlite:///x?mode=memory", "no options"),
    ],
)
def test_a_wrong_url_is_a_clear_error_without_the_password(wrong: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        create_engine_for(wrong, connect_timeout=WAIT)
    assert "sesame" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_where_names_the_database_but_no_secret() -> None:
    url = sqlalchemy.make_url("postgresql+psycopg://u:open-sesame@h:5433/d?password=open-sesame&sslpassword=x")
    assert where(url) == "postgresql://u@h:5433/d"


def every_subclass(of: type[BaseException]) -> Iterator[type[BaseException]]:
    yield of
    for direct in of.__subclasses__():
        yield from every_subclass(direct)


@pytest.mark.parametrize("kind", sorted(set(every_subclass(SQLAlchemyError)), key=str))
def test_every_error_of_sqlalchemy_comes_out_as_ours(kind: type[SQLAlchemyError]) -> None:
    needed = [name for name, one in signature(kind).parameters.items() if one.default is one.empty and one.kind < 2]
    assert_ours(kind(*["it broke"] * len(needed)))


@pytest.mark.parametrize("kind", sorted(set(every_subclass(psycopg.Error)), key=str))
def test_every_error_of_psycopg_comes_out_as_ours(kind: type[psycopg.Error]) -> None:
    assert_ours(DBAPIError.instance("SELECT 1", {}, kind("it broke"), psycopg.Error))


# Without what the program itself makes of them, which carries more than a text.
OF_SQLITE = sorted((each for each in set(every_subclass(sqlite3.Error)) if each.__module__ == "sqlite3"), key=str)


@pytest.mark.parametrize("kind", OF_SQLITE)
def test_every_error_of_sqlite_comes_out_as_ours(kind: type[sqlite3.Error]) -> None:
    assert_ours(kind("it broke"))


def assert_ours(error: BaseException) -> None:
    url = sqlalchemy.make_url("postgresql://u:open-sesame@h/d")
    with pytest.raises((DatabaseUnreadable, PolicyMissing)) as caught, translated(url):
        raise error
    assert caught.value.__cause__ is not None
    assert "open-sesame" not in str(caught.value)
