"""The schema and the policy's table as people meet them before anything is there."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from program import Program

from dlqbatch.store import migrate


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


def test_a_dry_run_of_an_upgrade_says_from_where_to_where(url: str) -> None:
    installed, newest = Program({"database_url": url}), migrate.latest()
    planned = installed.run("db", "upgrade", "--dry-run", "--json").told[0]
    assert (planned["before"], planned["after"]) == (None, newest)
    shown = installed.run("db", "upgrade", "--dry-run").out
    assert "none" in shown
    assert "would be upgraded" in shown

    before = installed.run("db", "current")
    assert (before.code, "none" in before.out, newest in before.out) == (0, True, True), before.said
    assert "`dlqbatch db upgrade` brings it up to date" in before.err
    told = installed.run("db", "current", "--json").told[0]
    assert (told["version"], told["newest"]) == (None, newest)

    assert "upgraded" in installed.run("db", "upgrade").out
    assert "up to date already" in installed.run("db", "upgrade", "--dry-run").out
    after = installed.run("db", "current")
    assert (after.out.split().count(newest), after.err) == (2, "")


def test_a_dry_run_refuses_what_the_upgrade_would_refuse(sqlite_url: str) -> None:
    installed = Program({"database_url": sqlite_url})
    assert installed.run("db", "upgrade").code == 0
    file = sqlite_url.removeprefix("sqlite:///")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE dlqbatch_version SET version_num = '9999'")
    connection.close()
    for call in (("db", "upgrade", "--dry-run"), ("db", "upgrade")):
        done = installed.run(*call)
        assert (done.code, "install the newer dlqbatch" in done.err) == (4, True), done.said


def test_a_sqlite_file_that_is_missing_is_named(sqlite_url: str) -> None:
    installed = Program({"database_url": sqlite_url})
    file = sqlite_url.removeprefix("sqlite:///")
    for call in (("messages", "list"), ("messages", "discard", "1", "--reason", "r")):
        done = installed.run(*call)
        assert (done.code, file in done.err, "dlqbatch db upgrade" in done.err) == (2, True, True), done.said
        assert "dlq_event_config" not in done.err
    done = installed.run("events", "list")
    assert (done.code, "dlq_event_config" in done.err) == (2, True), done.said
    assert not Path(file).exists()


def test_to_remove_an_event_that_is_not_there_says_so(url: str) -> None:
    installed = Program({"database_url": url})
    assert installed.run("db", "upgrade").code == 0
    for call in (("events", "remove", "nope"), ("events", "remove", "nope", "--dry-run")):
        done = installed.run(*call)
        assert (done.code, "the table does not hold it" in done.out) == (1, True), done.said
    assert installed.run("events", "set", "orders", "1").code == 0
    assert "would be removed" in installed.run("events", "remove", "orders", "--dry-run").out
    removed = installed.run("events", "remove", "orders")
    assert (removed.code, "removed" in removed.out) == (0, True)
