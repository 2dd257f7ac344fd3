from __future__ import annotations

import os
import sqlite3
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import pytest
import sqlalchemy
from alembic import command
from program import HANGS_AFTER, eventually
from sqlalchemy import inspect, make_url, text

from dlqbatch.drain.event_config import EventConfig
from dlqbatch.drain.event_policy import EventRow
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.store import migrate
from dlqbatch.store.engine import create_engine_for, reading, writing

HEAD = "0021"
OURS = {
    "dlq_action_rows",
    "dlq_actions",
    "dlq_alert_receivers",
    "dlq_alerts",
    "dlq_attempts",
    "dlq_breakers",
    "dlq_cold_copies",
    "dlq_count_changes",
    "dlq_counts",
    "dlq_facet_counts",
    "dlq_event_config",
    "dlq_field_backfills",
    "dlq_fields",
    "dlq_groups",
    "dlq_looks",
    "dlq_messages",
    "dlq_plan_items",
    "dlq_plans",
    "dlq_queue_readings",
    "dlq_rules",
    "dlq_runs",
    "dlq_scope_breakers",
    "dlq_scope_unproven",
    "dlq_scopes",
    "dlq_stream_offsets",
    "dlq_transitions",
    "dlq_unproven_retries",
    "dlq_unproven_runs",
    "dlqbatch_version",
}
SEED_TABLE = "CREATE TABLE dlq_event_config (id int PRIMARY KEY, name varchar(100) NULL, max_retries integer NULL)"
SQL_FOLDER = Path(__file__).parents[3] / "sql"


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


def test_the_grants_of_the_package_are_those_of_the_folder() -> None:
    """A wheel has no folder sql; `dlqbatch db grants` prints them."""
    assert migrate.grants() == (SQL_FOLDER / "grants.postgresql.sql").read_text(encoding="utf-8")


def test_a_sqlite_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        migrate.upgrade(f"sqlite:///{tmp_path / 'a.sqlite3'}")
    finally:
        os.umask(former)
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}


def engine_at(url: str) -> sqlalchemy.Engine:
    return create_engine_for(url, connect_timeout=30, create=True)


def run(url: str, *statements: str) -> None:
    with writing(engine_at(url)) as connection:
        for statement in statements:
            connection.execute(text(statement))


def schema(url: str) -> dict[str, list[tuple[str, str, bool]]]:
    with reading(engine_at(url)) as connection:
        found = inspect(connection)
        return {
            table: [(column["name"], str(column["type"]), column["nullable"]) for column in found.get_columns(table)]
            for table in found.get_table_names()
        }


def test_an_empty_database_gets_the_policys_table(url: str) -> None:
    assert migrate.current(url) is None
    assert migrate.upgrade(url) == migrate.Upgraded(None, HEAD)
    assert migrate.current(url) == HEAD
    assert schema(url)["dlq_event_config"] == [
        ("id", "INTEGER", False),
        ("name", "VARCHAR(100)", True),
        ("max_retries", "INTEGER", True),
    ]
    assert set(schema(url)) == OURS


def test_a_database_of_the_first_version_gets_the_dead_store_and_keeps_its_policy(url: str) -> None:
    run(
        url,
        SEED_TABLE,
        "INSERT INTO dlq_event_config VALUES (7, 'a', NULL)",
        "CREATE TABLE dlqbatch_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
        "INSERT INTO dlqbatch_version VALUES ('0001')",
    )
    before = schema(url)["dlq_event_config"]
    assert migrate.upgrade(url) == migrate.Upgraded("0001", HEAD)
    assert set(schema(url)) == OURS
    assert schema(url)["dlq_event_config"] == before
    assert EventConfig(engine_at(url)).read() == [EventRow(7, "a", None)]


def test_an_upgrade_that_fails_leaves_nothing_behind(url: str) -> None:
    run(url, SEED_TABLE, "CREATE TABLE dlq_runs (id int)")
    with pytest.raises(DatabaseUnreadable, match="dlq_runs"):
        migrate.upgrade(url)
    assert set(schema(url)) == {"dlq_event_config", "dlq_runs"}
    assert migrate.current(url) is None


def test_upgrading_again_changes_nothing(url: str) -> None:
    migrate.upgrade(url)
    EventConfig(engine_at(url)).set("a", 1)
    assert migrate.upgrade(url) == migrate.Upgraded(HEAD, HEAD)
    assert EventConfig(engine_at(url)).read() == [EventRow(1, "a", 1)]


def test_a_table_of_an_existing_installation_is_adopted_untouched(url: str) -> None:
    run(url, SEED_TABLE, "INSERT INTO dlq_event_config VALUES (7, 'a', NULL), (8, NULL, 2)")
    before = schema(url)["dlq_event_config"]
    assert migrate.upgrade(url) == migrate.Upgraded(None, HEAD)
    assert set(schema(url)) == OURS
    assert schema(url)["dlq_event_config"] == before
    assert EventConfig(engine_at(url)).read() == [EventRow(7, "a", None), EventRow(8, None, 2)]


def test_a_table_of_that_name_with_other_columns_is_refused_and_nothing_changes(url: str) -> None:
    run(url, "CREATE TABLE dlq_event_config (id int PRIMARY KEY, event varchar(50))")
    with pytest.raises(DatabaseUnreadable, match="no column name and no column max_retries"):
        migrate.upgrade(url)
    assert set(schema(url)) == {"dlq_event_config"}
    assert migrate.current(url) is None


def test_a_schema_from_a_newer_version_is_left_alone(url: str) -> None:
    migrate.upgrade(url)
    run(url, "UPDATE dlqbatch_version SET version_num = '9999'")
    with pytest.raises(DatabaseUnreadable, match="install the newer dlqbatch"):
        migrate.upgrade(url)
    assert migrate.current(url) == "9999"


def test_upgrades_at_the_same_time_do_not_disturb_each_other(url: str) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(migrate.upgrade, [url] * 3))
    assert sorted(outcome.before or "" for outcome in outcomes) == ["", HEAD, HEAD]
    assert {outcome.after for outcome in outcomes} == {HEAD}


def test_an_upgrade_waits_for_another_one_before_it_looks(database_url: str) -> None:
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with writing(engine_at(database_url)) as connection, ThreadPoolExecutor(1) as pool:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": migrate._UPGRADES_ONE_AT_A_TIME})
        upgraded = pool.submit(migrate.upgrade, database_url)
        deadline = time.monotonic() + HANGS_AFTER
        while not connection.scalar(waiting):
            assert time.monotonic() < deadline
            assert not upgraded.done()
        assert schema(database_url) == {}
        connection.commit()
        assert upgraded.result(HANGS_AFTER).before is None


def test_nobody_waits_long_behind_an_upgrade_that_waits_for_a_table(database_url: str) -> None:
    with writing(engine_at(database_url)) as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'relation' AND NOT granted")
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with reading(engine_at(database_url)) as backup, reading(engine_at(database_url)) as watching:
            backup.execute(text("SELECT count(*) FROM dlq_messages"))
            upgraded = pool.submit(migrate.upgrade, database_url, waits=said.append)
            for tries in range(2):
                assert eventually(lambda: watching.scalar(waiting) == 1)
                # As long as a command would wait for it.
                with reading(engine_at(database_url)) as connection:
                    assert connection.scalar(text("SELECT count(*) FROM dlq_messages")) == 0
                assert eventually(lambda tries=tries: len(said) > tries)  # type: ignore[misc]
            assert not upgraded.done()
            assert migrate.current(database_url) == "0005"
        assert upgraded.result(HANGS_AFTER) == migrate.Upgraded("0005", HEAD)
    assert "Nothing has changed yet" in said[0]


def indexes(url: str) -> set[str]:
    with reading(engine_at(url)) as connection:
        asked = (
            "SELECT relname FROM pg_class JOIN pg_index ON indexrelid = oid WHERE relname LIKE 'dlq_%' AND indisvalid"
        )
        return set(connection.scalars(text(asked)))


@pytest.mark.parametrize("before", ["0007", "0011", "0013"])
def test_the_indexes_of_messages_are_built_beside_those_who_write(database_url: str, before: str) -> None:
    fresh = f"{database_url}_fresh"
    run_alone(database_url, f"CREATE DATABASE {make_url(fresh).database}")
    try:
        migrate.upgrade(fresh)
        with writing(engine_at(database_url)) as connection:
            config = migrate._config()
            config.attributes["connection"] = connection
            command.upgrade(config, before)
        run(
            database_url,
            "INSERT INTO dlq_messages (identity, digest, full_digest, had_id, source_queue, exchange, routing_key, "
            "body, properties, fingerprint, retry_count, first_failed_at, last_failed_at, status, status_since, "
            "created_at, updated_at) VALUES ('a', sha256(''), sha256(''), true, '', '', '', '', '', repeat('0', 16), "
            "0, now(), now(), 'pending', now(), now(), now())",
        )
        said: list[str] = []
        # What a job does: it locks the table as every writer does.
        write = "UPDATE dlq_messages SET tags = tags"

        def hears(what: str) -> None:
            said.append(what)
            run(database_url, "SET LOCAL lock_timeout = 2000", write)

        assert migrate.upgrade(database_url, waits=hears) == migrate.Upgraded(before, HEAD)
        assert [each for each in said if "dlq_messages_scope_overdue" in each]
        assert indexes(database_url) == indexes(fresh)
    finally:
        run_alone(database_url, f"DROP DATABASE {make_url(fresh).database} WITH (FORCE)")


def run_alone(url: str, statement: str) -> None:
    with engine_at(url).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))


def test_the_settings_of_tables_are_changed_beside_readers_and_writers(database_url: str) -> None:
    config = migrate._config()
    with writing(engine_at(database_url)) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0012")
    with writing(engine_at(database_url)) as job, writing(engine_at(database_url)) as upgrade:
        job.execute(text("INSERT INTO dlq_breakers VALUES ('q', 'closed', NULL, NULL, NULL, 0, 0, 0, 0, now())"))
        job.execute(text("SELECT count(*) FROM dlq_messages, dlq_attempts, dlq_transitions, dlq_plan_items"))
        upgrade.execute(text("SET LOCAL lock_timeout = 2000"))
        config.attributes["connection"] = upgrade
        command.upgrade(config, "0013")
        asked = text("SELECT reloptions FROM pg_class WHERE relname = 'dlq_attempts'")
        assert "fillfactor=80" in upgrade.scalar(asked)


def test_a_large_store_gets_its_indexes_after_the_upgrade_and_once_more_if_a_build_was_cut(database_url: str) -> None:
    config = migrate._config()
    with writing(engine_at(database_url)) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0013")
        connection.execute(
            text(
                "INSERT INTO dlq_messages (identity, digest, full_digest, had_id, source_queue, exchange, routing_key, "
                "body, properties, fingerprint, retry_count, first_failed_at, last_failed_at, status, status_since, "
                "created_at, updated_at) SELECT 'm', d, d, true, 'q', '', 'q', '', '', repeat('0', 16), 0, now(), "
                "now(), 'pending', now(), now(), now() FROM (SELECT sha256('') AS d) AS made"
            )
        )
    said: list[str] = []
    assert migrate.upgrade(database_url, waits=said.append) == migrate.Upgraded("0013", HEAD)
    assert any("dlq_messages_scope_due; jobs go on" in one for one in said)
    valid = "SELECT relname, indisvalid FROM pg_index JOIN pg_class ON oid = indexrelid WHERE relname LIKE 'dlq_%'"

    def indexes() -> dict[str, bool]:
        with reading(engine_at(database_url)) as connection:
            return {name: is_valid for name, is_valid in connection.execute(text(valid))}  # noqa: C416

    whole = indexes()
    assert all(whole.values())
    assert "dlq_messages_scope_due" in whole
    assert not {"dlq_messages_due", "dlq_attempts_observed", "dlq_messages_by_age_in_status"} & whole.keys()
    with reading(engine_at(database_url)) as connection:
        assert connection.scalar(text("SELECT scope_id FROM dlq_messages")) == 1
    # As a build that was cut leaves it.
    run(
        database_url,
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'dlq_messages_scope_due'::regclass",
        "DROP INDEX dlq_messages_scope_leases",
    )
    assert migrate.upgrade(database_url) == migrate.Upgraded(HEAD, HEAD)
    assert indexes() == whole


def test_a_new_sqlite_file_becomes_wal_though_another_upgrade_holds_it_at_first(sqlite_url: str) -> None:
    run(sqlite_url, SEED_TABLE)
    with ThreadPoolExecutor(1) as pool:
        with writing(engine_at(sqlite_url)):
            switched = pool.submit(migrate._use_wal, engine_at(sqlite_url))
            with pytest.raises(TimeoutError):
                switched.result(timeout=0.2)
        switched.result(HANGS_AFTER)
    with reading(engine_at(sqlite_url)) as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"


def test_the_sql_for_an_administrator_makes_the_same_schema(url: str, tmp_path: Path) -> None:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as by_hand:
            by_hand.executescript(migrate.sql("sqlite"))
        other = f"sqlite:///{tmp_path}/other.sqlite3"
        migrate.upgrade(other)
        assert schema(url) == schema(other)
    else:
        with engine_at(url).connect() as connection:
            connection.connection.cursor().execute(migrate.sql("postgresql"))
        made = schema(url)
        run(url, f"DROP TABLE {', '.join(OURS)} CASCADE")
        migrate.upgrade(url)
        assert made == schema(url)
    assert migrate.upgrade(url) == migrate.Upgraded(HEAD, HEAD)


def test_the_sql_can_be_run_beside_an_existing_table(database_url: str) -> None:
    run(database_url, SEED_TABLE, "INSERT INTO dlq_event_config VALUES (7, 'a', NULL)")
    with engine_at(database_url).connect() as connection:
        connection.connection.cursor().execute(migrate.sql("postgresql"))
    assert EventConfig(engine_at(database_url)).read() == [EventRow(7, "a", None)]


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_the_rendered_schema_is_what_the_migrations_make(dialect: Literal["postgresql", "sqlite"]) -> None:
    rendered = (SQL_FOLDER / f"schema.{dialect}.sql").read_text(encoding="utf-8")
    assert rendered == migrate.sql(dialect), f"regenerate it: dlqbatch db sql {dialect} > sql/schema.{dialect}.sql"


def test_an_unreachable_database_is_said_to_be_so() -> None:
    for ask in (migrate.upgrade, migrate.current):
        with pytest.raises(DatabaseUnreadable, match="refused"):
            ask("postgresql://u:open-sesame@127.0.0.1:1/d")


def test_an_existing_sqlite_file_keeps_its_journal_mode(sqlite_url: str) -> None:
    run(sqlite_url, SEED_TABLE)
    migrate.upgrade(sqlite_url)
    with reading(engine_at(sqlite_url)) as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "delete"
