"""The monitor as cron runs it: a database, a webhook, a file for Prometheus; no broker."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from broker_client import Side
from dead_rows import add, recent_runs, row, store_at
from program import DLQ, Program, eventually
from sqlalchemy import text, update
from webhook_receiver import OK, hang, hook

from dlqbatch.monitor.alert_rules import QUEUE_DEEP, RUNS_BOUNDED
from dlqbatch.store.engine import create_engine_for, writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ALERT_RECEIVERS

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


@pytest.fixture
def installed(url: str) -> Program:
    return Program({"database_url": url, "broker_url": NOBODY, "no_proxy": "127.0.0.1"})


def arrive(engine: Engine, number: int, **columns: Any) -> list[int]:
    at = datetime.now(UTC) - timedelta(seconds=5)
    return add(engine, *(row(**columns) for _ in range(number)), at=at)


def test_a_run_measures_tells_and_writes_the_file(engine: Engine, installed: Program, tmp_path: Path) -> None:
    evil = "\x1b[31mred <!channel> amqp://me:open-sesame@host/"
    arrive(engine, 3, status=Status.MANUAL, error_type="TimeoutError", error_message=evil, fingerprint="f" * 16)
    file = tmp_path / "dlqbatch.prom"
    with hook(OK) as other:
        program = installed.but(alert_backlog="2", webhook_url=other.url, prometheus_file=str(tmp_path / "not here"))
        first = program.run("monitor", "--json", "--prometheus", str(file))
        again = program.run("monitor", "--json", "--prometheus", str(file))
        shown = program.run("monitor", "--prometheus", str(file))
    assert (first.code, again.code, shown.code) == (0, 0, 0), first.said
    told = first.told
    assert (told["job"], told["outcome"], told["counts"]["got"]) == ("monitor", "ok", 0)
    assert (told["metrics"]["backlog"], told["metrics"]["states"]["manual"]) == (3, 3)
    assert told["metrics"]["ingested_last_minute"] == 3
    assert [one["name"] for one in told["alerts"]["fired"]] == ["DLQBacklogGrowing", "NewGroupNeedsPerson"]
    assert again.told["alerts"]["fired"] == []
    assert len(again.told["alerts"]["active"]) == 2
    (heard,) = other.told
    assert [one["name"] for one in heard["alerts"]] == ["DLQBacklogGrowing", "NewGroupNeedsPerson"]
    assert f"dlqbatch messages list --group {'f' * 16}" in heard["text"]
    said = first.said + again.said + shown.said + json.dumps(heard)
    assert "open-sesame" not in said
    assert "SECRET" not in said
    assert "\x1b" not in said
    assert first.err.count('"alert fired"') == 2
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=file.read_bytes(), capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "dlqbatch_backlog 3\n" in file.read_text(encoding="utf-8")
    assert "backlog" in shown.out
    assert "active: new group" in shown.out
    assert "got" in shown.out
    assert [run.job for run in recent_runs(engine)] == ["monitor"] * 3


def test_a_webhook_that_hangs_delays_a_run_and_makes_it_partial(engine: Engine, installed: Program) -> None:
    arrive(engine, 1, status=Status.MANUAL)
    with hook(hang) as other:
        done = installed.but(webhook_url=other.url).run("monitor", "--json")
    assert (done.code, done.told["outcome"]) == (3, "partial"), done.said
    assert "was not told: no answer" in done.told["warnings"][0]
    assert 4 < done.told["elapsed_seconds"] < 60  # the other side would never end
    assert "SECRET" not in done.said
    with writing(engine) as connection:  # a minute later
        connection.execute(update(ALERT_RECEIVERS).values(next_try_at=datetime.now(UTC)))
    with hook(OK) as other:
        assert installed.but(webhook_url=other.url).run("monitor").code == 0
        assert len(other.requests) == 1


def test_a_file_that_cannot_be_written_makes_the_run_partial(engine: Engine, installed: Program) -> None:
    arrive(engine, 1, status=Status.MANUAL)
    done = installed.run("monitor", "--json", "--prometheus", "/no such folder/x.prom")
    assert (done.code, done.told["outcome"]) == (3, "partial")
    assert "could not be written to /no such folder/x.prom" in done.told["warnings"][0]
    assert len(done.told["alerts"]["fired"]) == 1


def test_a_dry_run_tells_nobody_and_writes_nothing(engine: Engine, installed: Program, tmp_path: Path) -> None:
    arrive(engine, 1, status=Status.MANUAL)
    file = tmp_path / "x.prom"
    with hook(OK) as other:
        program = installed.but(webhook_url=other.url)
        done = program.run("monitor", "--dry-run", "--json", "--prometheus", str(file))
    assert (done.code, done.told["dry_run"], len(done.told["alerts"]["fired"])) == (0, True, 1), done.said
    assert (other.requests, file.exists(), recent_runs(engine)) == ([], False, [])
    assert len(installed.run("monitor", "--json").told["alerts"]["fired"]) == 1


def test_a_database_without_tables_says_what_to_do(url: str, installed: Program) -> None:
    for command in ("monitor", "status"):
        done = installed.run(command, "--json")
        assert done.code == 2
        assert "dlqbatch db upgrade" in done.told["error"]["message"]
    with writing(create_engine_for(url, connect_timeout=30, create=True)) as connection:
        connection.execute(text("CREATE TABLE dlq_event_config (id int PRIMARY KEY)"))
    for command in ("monitor", "status"):
        done = installed.run(command)
        assert (done.code, done.out) == (2, "")
        assert "dlqbatch db upgrade" in done.err


def test_it_is_a_job_like_the_others(engine: Engine, installed: Program) -> None:
    arrive(engine, 1)
    assert "monitor: ok" in installed.but(job="monitor").run().out


@pytest.mark.quick
def test_a_queue_that_stays_deep_and_runs_that_do_not_keep_up_are_told_once_and_ended_once(
    engine: Engine, installed: Program, broker_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "dlqbatch.prom"
    program = installed.but(
        broker_url=broker_url,
        ingest_queues=DLQ,
        prometheus_file=str(file),
        alert_queue_depth="2",
        alert_queue_deep_for="1s",
        alert_bounded_runs="2",
        alert_new_groups="false",
    )
    told: list[tuple[str, str, str]] = []

    def look() -> bool:
        alerts = program.run("monitor", "--json").told["alerts"]
        told.extend((each["state"], each["name"], each["subject"]) for each in [*alerts["fired"], *alerts["resolved"]])
        return bool(alerts["fired"] or alerts["resolved"])

    with closing(Side(broker_url)) as team:
        team.queue(DLQ)
        team.fill(DLQ, [b"%d" % number for number in range(5)])
        assert not look()  # it was never seen before, so that nobody knows for how long
        assert eventually(look)
        assert told == [("fired", QUEUE_DEEP, DLQ)]
        assert f'dlqbatch_queue_depth{{queue="{DLQ}"}} 5\n' in file.read_text(encoding="utf-8")

        # One message a run: after the second one, two in a row ended at their bound, and the queue still holds three.
        for _ in range(2):
            assert program.run("ingest", "--max-messages", "1").code == 0
        assert look()
        assert told[1:] == [("fired", RUNS_BOUNDED, "ingest")]
        assert not look()
        shown = program.but(broker_url=NOBODY).run("status").out
        assert re.search(rf"queues      3 in {DLQ} \d+ s ago; 2 ingests in a row at their bound", shown)

        # As ingest has left it: here the monitor reaches no broker, and knows of it by the log of runs alone.
        assert program.run("ingest").code == 0
        away = program.but(broker_url=NOBODY).run("monitor", "--json")
        assert {each["name"] for each in away.told["alerts"]["resolved"]} == {QUEUE_DEEP, RUNS_BOUNDED}
        assert away.told["metrics"]["queues"][DLQ]["depth"] == 0
        assert not look()
        assert "queues      all were empty" in program.run("status").out
