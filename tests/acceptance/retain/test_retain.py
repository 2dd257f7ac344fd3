"""`dlqbatch retain` as a scheduler runs it, in processes of its own."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from dead_rows import add, row, store_at
from program import ROOT, Program, environment
from sqlalchemy import select, update

from dlqbatch.store.engine import reading, writing
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def installed(url: str, folder: Path) -> Program:
    return Program({"database_url": url, "cold_storage": str(folder)})


def old(engine: Engine, status: str, number: int = 1, **columns: object) -> list[int]:
    ids = add(engine, *(row(**columns) for _ in range(number)), at=LONG_AGO)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(ids)).values(status=status))
    return ids


def statuses(engine: Engine) -> dict[int, str]:
    with reading(engine) as connection:
        return {each.id: each.status.value for each in connection.execute(select(MESSAGES.c.id, MESSAGES.c.status))}


@pytest.mark.quick
def test_a_retain_archives_deletes_and_tells_and_the_copy_can_be_read_with_common_tools(
    engine: Engine, installed: Program, folder: Path
) -> None:
    (failed,) = old(engine, "failed", body=b"\0body\xff")
    kept = {failed: "archived"} | {old(engine, status)[0]: status for status in ("pending", "manual")}
    old(engine, "resolved", 3)
    old(engine, "archived", 2)

    planned = installed.run("retain", "--dry-run", "--json")
    assert (planned.code, planned.told["counts"]["archived"], planned.told["counts"]["deleted"]) == (0, 1, 5)
    assert not folder.exists()

    done = installed.run("retain", "--json")
    assert done.code == 0, done.said
    assert done.told["counts"] == {"got": 6, "archived": 1, "deleted": 5, "skipped": 0, "left": 0}
    assert done.told["reasons"] == {"archived": 2, "resolved": 3}
    assert statuses(engine) == kept

    manifests = {each: json.loads(each.read_bytes()) for each in folder.rglob("*.manifest.json")}
    assert sum(manifest["count"] for manifest in manifests.values()) == 3
    for path, manifest in manifests.items():
        data = folder / f"{manifest['part']}.jsonl.gz"
        assert path.parent == data.parent == folder / f"{datetime.now(UTC):%Y/%m/%d}"
        assert hashlib.sha256(data.read_bytes()).hexdigest() == manifest["file_sha256"]
        content = gzip.decompress(data.read_bytes())
        assert hashlib.sha256(content).hexdigest() == manifest["content_sha256"]
        assert len([json.loads(line) for line in content.splitlines()]) == manifest["count"]
        assert {stat.S_IMODE(each.stat().st_mode) for each in (path, data)} == {0o600}

    again = installed.run("retain")
    assert (again.code, "retain: ok, stopped by empty" in again.out) == (0, True)


def test_without_cold_storage_it_says_what_waits_for_one(engine: Engine, url: str) -> None:
    kept = {old(engine, "failed")[0]: "failed"}
    old(engine, "resolved")
    done = Program({"database_url": url}).run("retain")
    assert (done.code, "1 failed or archived message(s) are due" in done.out) == (0, True)
    assert statuses(engine) == kept


def test_a_cold_storage_that_cannot_be_written_is_partial(engine: Engine, installed: Program, tmp_path: Path) -> None:
    kept = {old(engine, "failed")[0]: "failed"}
    done = installed.but(cold_storage=str(tmp_path / "missing" / "cold")).run("retain", "--json")
    assert (done.code, done.told["counts"]["left"], done.told["reasons"]) == (3, 1, {"not-copied": 1})
    assert "cannot be used" in done.told["warnings"][0]
    assert statuses(engine) == kept


def test_a_disk_without_room_is_partial_and_nothing_is_lost(
    engine: Engine, installed: Program, folder: Path, database_url: str
) -> None:
    if engine.dialect.name == "sqlite":
        # The limit would hold for the database's own file as well.
        engine, installed = store_at(database_url), installed.but(database_url=database_url)
    kept = dict.fromkeys(old(engine, "failed", body=os.urandom(200_000)), "failed")
    limited = Program(installed.settings, ("bash", "-c", 'ulimit -f 64 && exec "$0" "$@"', *installed.command))
    done = limited.run("retain", "--json")
    assert (done.code, done.told["reasons"]) == (3, {"not-copied": 1}), done.said
    assert "File too large" in done.told["warnings"][0]
    assert statuses(engine) == kept
    assert not [each for each in folder.rglob("*") if each.is_file()]
    assert installed.run("retain", "--json").told["counts"]["archived"] == 1


def test_the_database_has_to_be_named_and_reachable(tmp_path: Path) -> None:
    done = Program({"cold_storage": str(tmp_path)}).run("retain", "--json")
    assert (done.code, "DLQBATCH_DATABASE_URL" in done.err) == (2, True)
    away = Program({"database_url": "postgresql://nobody@127.0.0.1:1/none"}).run("retain", "--json")
    assert away.code == 4


def test_only_a_bound_of_its_own_bounds_it(engine: Engine, installed: Program) -> None:
    """The bounds of the other jobs are far too small for what a day brings."""
    old(engine, "resolved", 9)
    small = installed.but(max_messages="2", max_seconds="0.001")
    asked = small.run("retain", "--json", "--max-messages", "3")
    assert (asked.code, asked.told["counts"]["deleted"], asked.told["still_due"]["resolved"]) == (0, 3, 6), asked.said
    assert "6 message(s) are still due (6 resolved): the next run goes on" in asked.told["warnings"][0]
    code = "import json, handler; print(json.dumps(handler.handler({'job': 'retain', 'max_messages': 2})))"
    command, settings = [sys.executable, "-c", code], environment(**small.settings)
    by_event = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, check=True)
    assert json.loads(by_event.stdout)["counts"]["deleted"] == 2
    done = small.run("retain", "--json")
    assert (done.told["stopped_by"], done.told["counts"]["deleted"]) == ("empty", 4), done.said
    assert statuses(engine) == {}


def test_an_event_can_ask_for_it(engine: Engine, installed: Program) -> None:
    old(engine, "resolved")
    done = installed.but(job="retain").run()
    assert (done.code, "retain: ok" in done.out) == (0, True)
    assert statuses(engine) == {}
