"""`dlqbatch status`: everything on one screen, whatever the store holds and whatever the terminal can show."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from dead_rows import add, row, store_at
from program import Program, environment
from sqlalchemy import insert, select, update

from dlqbatch.cli.status import bar, sparkline
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.store.states import Phase, Status
from dlqbatch.store.tables import ALERTS, ATTEMPTS, BREAKERS, MESSAGES, RUNS, UNPROVEN_RETRIES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

EVIL = "\x1b[31mred\x1b]0;title\x07\rover\nnext\x9b2J ä 漢"
JOBS = ("check", "drain", "ingest", "lifecycle", "monitor", "replay", "retain")


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


@pytest.fixture
def installed(url: str) -> Program:
    return Program({"database_url": url})


def make_busy(engine: Engine, url: str) -> None:
    now = datetime.now(UTC)
    for number in range(30):
        kind = {"error_type": f"{EVIL}{number}", "error_message": EVIL, "event": EVIL, "fingerprint": f"{number:016}"}
        status = Status.MANUAL if number % 2 else Status.PENDING
        rows = (row(**kind, status=status, next_retry_at=now + timedelta(hours=1)) for _ in range(30 - number))
        add(engine, *rows, at=now - timedelta(hours=number % 20, minutes=1))
    for number, job in enumerate(JOBS):
        began = now - timedelta(minutes=number)
        report = {"counts": {"got": 5, "delayed": 3, "dead_lettered": 2}, "hit_bound": True}
        report["queues"] = {f"{EVIL}{queue}": {"found": 9, "left": queue} for queue in range(5)}
        record(url, RunRecord(job, began, began, "partial" if number % 2 else "ok", "empty", [], report))
    counts = dict.fromkeys(("sent", "failed", "sent_before", "failed_before"), 1)
    with writing(engine) as connection:
        values = {"origin": EVIL, "phase": Phase.OPEN, "since": now, "updated_at": now}
        connection.execute(insert(BREAKERS).values(**values, **counts))


def test_a_busy_store_fits_the_screen(engine: Engine, url: str, installed: Program) -> None:
    make_busy(engine, url)
    assert installed.run("monitor", "--json").code == 0
    done = installed.run("status")
    lines = done.out.splitlines()
    assert done.code == 0, done.said
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 100
    for part in ("465 messages; 15 groups need a person", "pending", "new, 24 h", "errors, 24 h", "ALERTS", "and "):
        assert part in done.out
    for job in JOBS:
        assert f"{job:>9} " in done.out
    assert "circuit breakers 1 open: \\x1b[31mred" in done.out
    assert "in 60 min" in done.out
    assert "\nqueues      4 in \\x1b[31mred" in done.out
    assert "drains dead-lettered 40%" in done.out
    assert "█" in done.out
    assert {c for c in done.out if not c.isprintable()} <= {"\n"}


def add_more_troubles(engine: Engine) -> None:
    """Retries to five origins that are not proven, and messages of every state that are kept for too long."""
    now = datetime.now(UTC)
    ages = [now - timedelta(hours=number) for number in range(1, 6)]
    retried = add(engine, *(row(status=Status.PENDING) for _ in ages), at=ages[-1])
    kept = add(engine, *(row(status=Status.PENDING) for _ in range(3)), at=ages[-1])
    with writing(engine) as connection:
        for number, (message, at) in enumerate(zip(retried, ages, strict=True)):
            attempt = {"message_id": message, "number": 1, "worker": "w", "created_at": at, "sent_at": at}
            connection.execute(insert(ATTEMPTS).values(**attempt))
            missing = {"retries": 1, "acknowledged": False, "missing": f"no consumer: {EVIL}"}
            values = {"place": f"origin-{number}", "sent_at": at, "at": now, **missing}
            connection.execute(insert(UNPROVEN_RETRIES).values(**values))
        for message, status in zip(kept, (Status.RESOLVED, Status.FAILED, Status.ARCHIVED), strict=True):
            old = {"status": status, "status_since": now - timedelta(days=3_650)}
            connection.execute(update(MESSAGES).where(MESSAGES.c.id == message).values(**old))


def test_a_store_with_every_trouble_fits_the_screen(engine: Engine, url: str, installed: Program) -> None:
    make_busy(engine, url)
    add_more_troubles(engine)
    assert installed.run("monitor", "--json").code == 0
    done = replace(installed, command=("env", "COLUMNS=80", *installed.command)).run("status")
    lines = done.out.splitlines()
    assert done.code == 0, done.said
    assert len(lines) <= 23, done.out
    # What a person needs stays: what is wrong, where, since when; and how much more there is than examples of it.
    alerts = next(place for place, line in enumerate(lines) if line.startswith("ALERTS"))
    assert " more: dlqbatch status --json" in lines[alerts + 3]
    for job in JOBS:
        assert f"{job:>9} " in done.out
    for part in (
        "groups need a person",
        "\noverdue     ",
        "circuit breakers 1 open",
        "\nqueues      4 in",
        "\ngroups ",
    ):
        assert part in done.out
    sent = lines.index("sent        5 retries not resolved, the first 5 h ago; unproven at 5 origins")
    assert lines[sent + 1].startswith(f"{1:>21} to origin-4: no consumer: ")
    errors = next(place for place, line in enumerate(lines) if line.startswith("errors, 24 h"))
    assert " with other errors: dlqbatch status --json" in lines[errors + 1]


def test_narrow_terminals_cut_lines_and_ascii_ones_see_ascii(engine: Engine, url: str, installed: Program) -> None:
    make_busy(engine, url)
    narrow = replace(installed, command=("env", "COLUMNS=80", *installed.command)).run("status")
    assert max(map(len, narrow.out.splitlines())) <= 80
    plain = replace(installed, command=("env", "PYTHONIOENCODING=ascii", *installed.command)).run("status")
    assert (plain.code, plain.out.isascii()) == (0, True), plain.said
    assert "####" in plain.out


def test_an_empty_store_is_a_quiet_screen(engine: Engine, installed: Program) -> None:
    done = installed.run("status")
    assert done.code == 0, done.said
    for part in ("0 messages", "alerts           none", "none known", "nothing ended", "no circuit breaker open"):
        assert part in done.out
    assert environment()["COLUMNS"] == "100"


def test_json_tells_all_of_it(engine: Engine, url: str, installed: Program, tmp_path: Path) -> None:
    make_busy(engine, url)
    installed.run("monitor")
    file = tmp_path / "x.prom"
    told = installed.run("status", "--json", "--prometheus", str(file)).told
    assert told["metrics"]["backlog"] == sum(range(1, 31))
    assert (len(told["ingested_by_hour"]), sum(told["ingested_by_hour"])) == (24, 465)
    assert (told["groups"][0]["size"], told["groups"][0]["fingerprint"]) == (30, "0" * 16)
    assert len(told["alerts"]) == 15
    assert [run["job"] for run in told["metrics"]["last_runs"]] == list(JOBS)
    assert "dlqbatch_backlog 465\n" in file.read_text(encoding="utf-8")
    assert json.dumps(told)


def test_it_only_reads(engine: Engine, installed: Program) -> None:
    add(engine, row(status=Status.MANUAL), at=datetime.now(UTC))
    assert installed.run("status").code == 0
    with reading(engine) as connection:
        assert connection.execute(select(ALERTS)).all() == []
        assert connection.execute(select(RUNS)).all() == []
    away = installed.but(database_url="postgresql://nobody@127.0.0.1:1/none").run("status")
    assert away.code == 4
    bad = installed.run("status", "--prometheus", "/no such folder/x.prom")
    assert (bad.code, "could not be written" in bad.err) == (1, True)


def test_charts_show_what_is_not_zero_and_what_is_largest() -> None:
    assert sparkline([0, 1, 500, 1_000], ascii_only=False) == "▁▂▅█"
    assert sparkline([0, 0], ascii_only=True) == "__"
    assert sparkline([], ascii_only=False) == ""
    assert sparkline([0, 1, 1_000], ascii_only=True) == "_.#"
    assert bar(1, 1_000_000, 10, ascii_only=False) == "▏"
    assert bar(10, 10, 10, ascii_only=False) == "█" * 10
    assert (bar(0, 10, 10, ascii_only=True), bar(1, 1_000, 10, ascii_only=True)) == ("", "#")
