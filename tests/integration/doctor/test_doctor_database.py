"""What `doctor` says of a real database, PostgreSQL and SQLite."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, add, row
from program import HANGS_AFTER
from ready_store import make_tables
from sqlalchemy import text

from dlqbatch.doctor.database import examine, survey
from dlqbatch.doctor.findings import Code
from dlqbatch.retain.rows import Keep
from dlqbatch.store.engine import create_engine_for, parse, writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.doctor.database import DatabaseFacts
    from dlqbatch.doctor.findings import Finding


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("database_url" if request.param == "postgresql" else "sqlite_url"))


@pytest.fixture
def current_url(url: str) -> str:
    make_tables(url)
    return url


def look(url: str, *, is_default: bool = False, clock: Callable[[], datetime] = now) -> DatabaseFacts:
    return survey(url, is_default=is_default, connect_timeout=30, clock=clock)


def found(url: str) -> dict[Code, Finding]:
    return {one.code: one for one in examine(look(url))}


def execute(url: str, *statements: str) -> None:
    with writing(create_engine_for(url, connect_timeout=30, create=True)) as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_a_database_as_it_should_be_has_nothing_to_be_said_of_it(current_url: str) -> None:
    execute(current_url, "INSERT INTO dlq_event_config VALUES (1, 'orders.created', 3), (2, 'payment.#', NULL)")
    facts = look(current_url)
    assert list(examine(facts)) == []
    assert facts.rows is not None
    assert [row.name for row in facts.rows] == ["orders.created", "payment.#"]


def test_a_default_file_that_nobody_has_made_is_no_fault(sqlite_url: str) -> None:
    assert list(examine(look(sqlite_url, is_default=True))) == []
    assert found(sqlite_url).keys() == {Code.SCHEMA_MISSING}
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


def test_a_database_that_cannot_be_reached(database_url: str, tmp_path: Path) -> None:
    closed = str(parse(database_url).set(port=9).render_as_string(hide_password=False))
    assert found(closed).keys() == {Code.DATABASE_UNREACHABLE}
    file = tmp_path / "no.sqlite3"
    file.write_bytes(b"this is no database, and long enough to be seen as none" * 100)
    assert found(f"sqlite:///{file}").keys() == {Code.DATABASE_UNREACHABLE}


def test_retention_that_is_behind(current_url: str) -> None:
    add(create_engine_for(current_url, connect_timeout=30), *(row() for _ in range(3)), at=NOW)
    execute(current_url, "UPDATE dlq_messages SET status = 'resolved'")
    keep = Keep(timedelta(days=30), timedelta(days=90), timedelta(days=365))
    for days, said in ((29, []), (31, ["retention is 3 messages behind (3 resolved)"])):
        before = keep.before(NOW + timedelta(days=days))
        facts = survey(current_url, is_default=False, connect_timeout=30, clock=now, overdue_before=before)
        behind = [one.what.partition(":")[0] for one in examine(facts) if one.code is Code.RETENTION_BEHIND]
        assert behind == said


def test_a_schema_that_is_missing_old_or_unknown(url: str) -> None:
    execute(url, "CREATE TABLE dlq_event_config (id integer PRIMARY KEY, name varchar(100), max_retries integer)")
    assert found(url).keys() == {Code.SCHEMA_MISSING}
    make_tables(url)
    newest = look(url).newest
    execute(url, "UPDATE dlqbatch_version SET version_num = '0002'")
    old = found(url)
    assert old.keys() == {Code.SCHEMA_OLD}
    assert f"is 0002, this program works with {newest}" in old[Code.SCHEMA_OLD].what
    execute(url, "UPDATE dlqbatch_version SET version_num = '9999'")
    assert found(url).keys() == {Code.SCHEMA_UNKNOWN}


def test_rows_of_the_policy_that_are_not_in_order(current_url: str) -> None:
    execute(
        current_url,
        "INSERT INTO dlq_event_config VALUES "
        "(1, NULL, 3), (2, 'twice', 1), (3, 'twice', 5), (4, 'below', -1), (5, ' blank', 3)",
    )
    told = found(current_url)
    assert told.keys() == {Code.EVENT_NAMELESS, Code.EVENT_DUPLICATE, Code.EVENT_NEGATIVE, Code.EVENT_BLANKS}
    assert told[Code.EVENT_DUPLICATE].fix == "dlqbatch events remove twice && dlqbatch events set twice 5"
    assert told[Code.EVENT_BLANKS].fix == "dlqbatch events remove ' blank' && dlqbatch events set blank 3"


def test_the_statement_that_takes_nameless_rows_away_works_when_pasted(current_url: str) -> None:
    execute(current_url, "INSERT INTO dlq_event_config VALUES (1, NULL, 3), (2, 'kept', 1)")
    fix = found(current_url)[Code.EVENT_NAMELESS].fix
    program = fix.partition(" ")[0]
    if program == "sqlite3" and shutil.which(program) is None:
        # Its command line is not part of every system; the statement is the same.
        execute(current_url, fix.partition("'")[2].removesuffix("'"))
    else:
        subprocess.run(["bash", "-c", fix], check=True, capture_output=True, timeout=HANGS_AFTER)
    assert found(current_url) == {}
    assert [row.name for row in look(current_url).rows or ()] == ["kept"]


def test_a_policy_that_cannot_be_read(sqlite_url: str) -> None:
    make_tables(sqlite_url)
    execute(sqlite_url, "INSERT INTO dlq_event_config VALUES (1, 'orders', 'three')")
    assert found(sqlite_url).keys() == {Code.POLICY_UNREADABLE}


def test_a_rule_that_cannot_be_one(current_url: str) -> None:
    execute(current_url, "INSERT INTO dlq_rules (name, position, match_on, pattern, strategy) VALUES "
            "('broken one', 900, 'any', '(', 'manual'), ('fine', 901, 'any', 'x', 'manual')")  # fmt: skip
    [rule] = [one for one in examine(look(current_url)) if one.code is Code.RULE_BROKEN]
    assert rule.where == "broken one"
    assert rule.fix == "dlqbatch rules remove -- 'broken one'"


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_clock_that_is_off(database_url: str, minutes: int) -> None:
    make_tables(database_url)
    assert found(database_url) == {}
    ours = look(database_url, clock=lambda: now() - timedelta(minutes=minutes))
    [skewed] = examine(ours)
    assert skewed.code is Code.CLOCK_SKEW_DATABASE
    assert f"{'600 s ahead of' if minutes > 0 else '600 s behind'} ours" in skewed.what


def test_nothing_is_written(current_url: str) -> None:
    def rows() -> list[object]:
        with writing(create_engine_for(current_url, connect_timeout=30)) as connection:
            names = ("dlq_runs", "dlq_messages", "dlq_event_config", "dlqbatch_version")
            return [connection.execute(text(f"SELECT * FROM {name}")).all() for name in names]

    before = rows()
    look(current_url)
    assert rows() == before
