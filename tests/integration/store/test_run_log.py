"""A run's report is kept where it can be, at little cost, and never at the run's expense."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import sqlalchemy
from dead_rows import recent_runs, store_at
from program import HANGS_AFTER
from ready_store import make_tables
from sqlalchemy import func, select, text
from sqlalchemy.engine import make_url

from dlqbatch import jobs, settings
from dlqbatch.jobs import Report
from dlqbatch.monitor import job as monitor
from dlqbatch.retain.rows import prune_runs
from dlqbatch.store import database_url, run_log
from dlqbatch.store.engine import create_engine_for, parse, reading, writing
from dlqbatch.store.run_log import KEPT_FOR, Recorded, RunRecord, record
from dlqbatch.store.tables import RUNS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
KEPT = Recorded(is_kept=True)
NOT_KEPT = Recorded(is_kept=False)


@pytest.fixture(params=["postgresql", "sqlite"])
def empty_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def url(empty_url: str) -> str:
    make_tables(empty_url)
    return empty_url


def run(at: datetime = NOW, job: str = "drain") -> RunRecord:
    report = {"job": job, "counts": {"got": 0}, "warnings": ["odd \0 \ud800 text"]}
    return RunRecord(job, at, at + timedelta(seconds=1), "ok", "empty", ["retry-queue", "a\0b"], report)


def test_a_run_is_kept_with_its_report(url: str) -> None:
    assert record(url, run()) == KEPT
    (found,) = recent_runs(create_engine_for(url, connect_timeout=30), "drain")
    assert found == RunRecord(
        "drain",
        NOW,
        NOW + timedelta(seconds=1),
        "ok",
        "empty",
        ["retry-queue", "a\\x00b"],
        {"job": "drain", "counts": {"got": 0}, "warnings": ["odd \\x00 \\ud800 text"]},
    )


def test_the_last_runs_of_a_job_come_first(url: str) -> None:
    for minute, job in enumerate(["drain", "ingest", "drain", "drain"]):
        record(url, run(NOW + timedelta(minutes=minute), job))
    engine = create_engine_for(url, connect_timeout=30)
    assert [each.started_at.minute for each in recent_runs(engine, "drain", 2)] == [3, 2]
    assert [each.job for each in recent_runs(engine)] == ["drain", "drain", "ingest", "drain"]


def test_old_runs_go_a_few_with_every_new_one(url: str) -> None:
    for _ in range(15):
        record(url, run(NOW - KEPT_FOR - timedelta(days=1)))
    kept = []
    for _ in range(3):
        assert record(url, run()) == KEPT
        kept.append(len(recent_runs(create_engine_for(url, connect_timeout=30))))
    assert kept == [6, 2, 3]


def test_pruning_takes_the_oldest_and_no_more_than_it_may(url: str) -> None:
    for day in (1, 2, 3, 4):
        record(url, run(NOW + timedelta(days=day)))
    engine = create_engine_for(url, connect_timeout=30)
    assert prune_runs(engine, NOW + timedelta(days=4), limit=2) == 2
    assert [each.started_at.day for each in recent_runs(engine)] == [5, 4]
    assert prune_runs(engine, NOW + timedelta(days=4), limit=9) == 1


def test_a_clock_that_is_set_back_during_a_run_puts_no_start_into_the_future(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain's start that is too late would count as a look after the window."""
    behind = timedelta()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls.fromtimestamp((datetime.now(tz) - behind).timestamp(), tz)

    def set_back(*_: object) -> Report:
        nonlocal behind
        behind = timedelta(hours=1)
        return Report("monitor", outcome="ok", stopped_by="empty", counts={}, reasons={}, elapsed_seconds=0.0)

    make_tables(database_url)
    monkeypatch.setattr(monitor, "monitor", set_back)
    for module in (jobs, run_log):
        monkeypatch.setattr(module, "datetime", Clock)
    loaded = settings.load({"database_url": database_url}, {"DLQBATCH_CONFIG": "/dev/null"})
    jobs.run("monitor", loaded, jobs.RunOptions())
    (found,) = recent_runs(create_engine_for(database_url, connect_timeout=30), "monitor")
    assert abs(datetime.now(UTC) - found.started_at) < timedelta(minutes=1)
    assert timedelta() <= found.ended_at - found.started_at < timedelta(minutes=1)


def test_a_database_without_the_table_keeps_no_runs_and_says_nothing(empty_url: str) -> None:
    with writing(create_engine_for(empty_url, connect_timeout=30, create=True)) as connection:
        connection.execute(text("CREATE TABLE dlq_event_config (id int PRIMARY KEY)"))
    assert record(empty_url, run()) == NOT_KEPT


def test_a_sqlite_file_that_is_not_there_is_not_made(sqlite_url: str) -> None:
    assert record(sqlite_url, run()) == NOT_KEPT
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


@pytest.fixture
def reader_url(database_url: str) -> Iterator[str]:
    """A login that may SELECT from every table and nothing else."""
    make_tables(database_url)
    parsed = sqlalchemy.make_url(database_url)
    role = f"reader_{parsed.database}"
    with psycopg.connect(parsed.set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'open-sesame'")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        connection.commit()
        yield parsed.set(username=role, password="open-sesame").render_as_string(hide_password=False)
        connection.execute(f"DROP OWNED BY {role}")
        connection.execute(f"DROP ROLE {role}")


def test_a_role_that_may_only_read_keeps_no_runs_and_is_told_the_right(reader_url: str, database_url: str) -> None:
    kept = record(reader_url, run())
    assert not kept.is_kept
    assert f"GRANT INSERT ON dlq_runs TO {sqlalchemy.make_url(reader_url).username}`" in (kept.warning or "")
    assert recent_runs(create_engine_for(database_url, connect_timeout=30)) == []


def test_a_role_that_may_add_but_not_delete_keeps_its_run(reader_url: str, database_url: str) -> None:
    with writing(create_engine_for(database_url, connect_timeout=30)) as connection:
        connection.execute(text(f"GRANT INSERT ON dlq_runs TO {sqlalchemy.make_url(reader_url).username}"))
    assert record(reader_url, run(NOW - 2 * KEPT_FOR)) == KEPT
    assert record(reader_url, run()) == KEPT
    assert len(recent_runs(create_engine_for(database_url, connect_timeout=30))) == 2


def test_a_standby_keeps_no_runs_and_says_nothing(database_url: str) -> None:
    store_at(database_url)
    name = sqlalchemy.make_url(database_url).database
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert record(database_url, run()) == NOT_KEPT


def test_a_sqlite_file_that_may_only_be_read_keeps_no_runs_and_says_nothing(sqlite_url: str) -> None:
    make_tables(sqlite_url)
    with Path(sqlite_url.removeprefix("sqlite:///")).open("r+b") as file:
        file.seek(18)
        file.write(b"\x03")  # the version that writers need: one from the future, which even root may not write
    assert record(sqlite_url, run()) == NOT_KEPT


def test_an_unreachable_database_is_a_warning_without_the_password() -> None:
    found = record("postgresql://u:open-sesame@127.0.0.1:1/d", run())
    assert not found.is_kept
    assert found.warning is not None
    assert "refused" in found.warning
    assert "open-sesame" not in found.warning


def test_a_server_that_says_nothing_is_given_up_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        found = record(f"postgresql://u:p@127.0.0.1:{silent.getsockname()[1]}/d", run())
    assert found.warning is not None
    assert time.monotonic() - started < 60  # libpq itself would wait for ever


def test_a_locked_table_is_a_warning_after_the_wait(database_url: str) -> None:
    engine = store_at(database_url)
    with writing(engine) as connection:
        connection.execute(text("LOCK TABLE dlq_runs"))
        found = record(database_url, run(), seconds=0.2)
    assert not found.is_kept
    assert "timeout" in (found.warning or "")


def test_a_locked_file_is_a_warning_after_the_wait(sqlite_url: str) -> None:
    with writing(store_at(sqlite_url)):
        found = record(sqlite_url, run(), seconds=0.1)
    assert not found.is_kept
    assert "locked" in (found.warning or "")


@pytest.mark.parametrize("content", [b"not a database" * 100, None], ids=["file", "folder"])
def test_what_is_no_database_is_a_warning(sqlite_url: str, content: bytes | None) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert record(sqlite_url, run()).warning


def test_a_wrong_url_is_a_warning() -> None:
    warning = record("open-sesame", run()).warning or ""
    assert warning.startswith("this run is not in the log of runs: the database URL cannot be parsed")
    assert "open-sesame" not in warning


def test_a_report_that_says_anything_at_all_is_kept(url: str) -> None:
    odd = {"n": float("nan"), "b": b"\xff", "s": {1}, "d": {3: NOW}, "long": "x" * 1_000_000}
    assert record(url, RunRecord("j" * 1_000, NOW, NOW, "ok", "empty", [], odd)) == KEPT
    with reading(create_engine_for(url, connect_timeout=30)) as connection:
        assert connection.scalar(select(func.length(RUNS.c.job))) == 255


def test_a_path_with_odd_characters_is_the_one_that_the_engine_uses(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c?\N{LATIN SMALL LETTER A WITH DIAERESIS}"
    folder.mkdir()
    url = f"sqlite:///{tmp_path}/a%20b%23c%3F\N{LATIN SMALL LETTER A WITH DIAERESIS}/x.sqlite3"
    make_tables(url)
    assert record(url, run()) == KEPT
    with sqlite3.connect(folder / "x.sqlite3") as connection:
        assert connection.execute("SELECT count(*) FROM dlq_runs").fetchone() == (1,)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p@h:5433/d",
        "postgres://h/d",
        "postgresql+psycopg://u@h/d?sslmode=require&application_name=x",
        "postgresql://u:p%40%2F%3A%25@h/d%20e",
        "postgresql://u:p/#x@h/d",
        "postgresql://[::1]:5433/d",
        "postgresql:///d?host=/var/run/postgresql",
        "postgresql://u:p@/d?host=a:1&host=b:2",
        "postgresql://u:p@/d?host=a,b&port=1,2",
        "postgresql://",
    ],
)
def test_a_url_means_the_same_as_to_the_engine(url: str) -> None:
    parsed = parse(url)
    _, theirs = parsed.get_dialect()().create_connect_args(parsed)
    by_sqlalchemy = make_url(url).set(drivername="postgresql+psycopg")
    assert parsed.get_dialect()().create_connect_args(by_sqlalchemy)[1] == theirs
    assert database_url.parse(url).for_libpq() == {name: str(value) for name, value in theirs.items()}


def test_it_loads_neither_sqlalchemy_nor_the_other_driver(url: str) -> None:
    script = (
        "import sys; from datetime import datetime, UTC; from dlqbatch.store.run_log import RunRecord, record; "
        "now = datetime.now(UTC); run = RunRecord('drain', now, now, 'ok', 'empty', [], {}); "
        "assert record(sys.argv[1], run).is_kept; "
        "print(*sorted({'sqlalchemy', 'alembic', 'psycopg', 'sqlite3'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, url], check=True, capture_output=True, text=True, timeout=HANGS_AFTER
    )
    assert done.stdout.split() == ["sqlite3" if url.startswith("sqlite") else "psycopg"]
