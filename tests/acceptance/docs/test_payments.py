"""The payments example as its script runs it: what it says is read again from the broker, the store and the ledger."""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from program import ROOT, Program
from sqlalchemy import text

from dlqbatch.store.engine import create_engine_for
from scripts.servers.server import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from program import Client

    from scripts.servers.management import Management

RUN = ("env", f"PYTHONPATH={ROOT}", sys.executable, str(ROOT / "examples" / "payments" / "run.py"))
# pip itself warns, so warnings are no errors here.
SCRIPT = ("env", "-u", "PYTHONWARNINGS", str(ROOT / "scripts" / "payments"))
REQUESTED = {f"payment-{count:06}" for count in range(1, 201)}


def rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def running_in(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PAYMENTS_FOLDER") == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def made_on(management: Management) -> list[str]:
    return [one["name"] for one in (*management.exchanges(), *management.queues())]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_every_payment_is_settled_once_or_dead_and_the_monitor_saw_the_dead(
    request: pytest.FixtureRequest, broker_url: str, team: Client, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "kept"
    given = ["--quorum", "--database", str(request.getfixturevalue("database_url"))] if kind == "quorum" else []
    done = Program({"broker_url": broker_url}, SCRIPT).run(
        "--payments=200", "--failure-rate=0.3", "--seed=7", "--timeout=600", "--json", f"--keep={folder}", *given
    )
    assert done.code == 0, done.said
    told = done.told

    transfers = rows(folder / "bank.sqlite3", "SELECT key, cents FROM transfers ORDER BY key")
    settlements = rows(folder / "ledger.sqlite3", "SELECT payment_id, cents FROM settlements ORDER BY payment_id")
    assert transfers == settlements, "money moved that is not in the ledger, or the other way round"
    settled = dict(settlements)
    assert len(settled) == len(settlements)

    engine = create_engine_for(given[2] if given else f"sqlite:///{folder / 'dlqbatch.sqlite3'}", connect_timeout=30)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT body, error_type, status FROM dlq_messages")).all()
        alerts = connection.execute(text("SELECT name FROM dlq_alerts")).scalars().all()
    engine.dispose()
    bodies = [json.loads(bytes(body)) for body, _, _ in found]
    dead = {body["payment_id"] for body in bodies}
    assert len(dead) == len(found)
    assert settled.keys() | dead == REQUESTED
    assert not settled.keys() & dead
    assert all(body["account"] in {"declined", "closed"} for body in bodies)
    errors = Counter(error for _, error, _ in found)
    assert set(errors) == {"bank.TransferDeclined", "bank.AccountClosed", "ledger.UnknownCurrency"}

    assert (told["requested"], told["settled"], told["dead"]) == (200, len(settled), len(dead))
    assert told["dead_by_error"] == told["monitor"]["metrics"]["errors_last_day"] == errors
    assert {status for _, _, status in found} == {"manual"}
    assert told["monitor"]["metrics"]["states"]["manual"] == told["dead_messages"] == len(found)
    assert {group["error_type"]: group["messages"] for group in told["groups"]} == errors
    assert Counter(alerts)["NewGroupNeedsPerson"] == len(errors) == 3

    # It was not all too easy: a client asked twice, a worker was killed while money moved, the transfer was repeated.
    assert told["requests"] > 200
    assert told["workers_restarted"] == told["transfers_asked_again"] == 1

    assert len(told["left_in_queues"]) == 4
    assert {queue: team.depth(queue) for queue in told["left_in_queues"]} == dict.fromkeys(told["left_in_queues"], 0)
    assert running_in(folder) == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_and_nothing_stays_on_the_broker(
    broker_url: str, management: Management
) -> None:
    run = Program({"broker_url": broker_url}, RUN)
    first = run.run("--payments=12", "--failure-rate=1", "--seed=3", "--timeout=600", "--json")
    again = run.run("--payments=12", "--failure-rate=1", "--seed=3", "--timeout=600")
    assert (first.code, again.code) == (0, 0), first.said + again.said
    settled, dead = first.told["settled"], first.told["dead"]
    assert 0 < settled < 12
    assert again.out.endswith(f"settled + dead = {settled} + {dead}, requested 12: equal\n")
    assert made_on(management) == []


def test_stopped_on_the_way_it_stops_its_processes_and_deletes_what_it_made(
    broker_url: str, management: Management, tmp_path: Path
) -> None:
    with Program({"broker_url": broker_url}, ("env", f"TMPDIR={tmp_path}", *RUN[1:])).start() as running:
        assert running.stderr is not None
        while "payments go to" not in running.stderr.readline():
            assert running.poll() is None
        (folder,) = tmp_path.iterdir()
        assert len(running_in(folder)) == 3
        running.send_signal(signal.SIGTERM)
        running.communicate()
    assert running.returncode == 128 + signal.SIGTERM
    assert running_in(folder) == []
    assert list(tmp_path.iterdir()) == []
    assert made_on(management) == []


def test_what_cannot_end_in_time_does_not_add_up(broker_url: str, management: Management) -> None:
    done = Program({"broker_url": broker_url}, RUN).run("--payments=30", "--timeout=0.1", "--json")
    assert done.code == 1
    assert not done.told["adds_up"]
    assert made_on(management) == []


def test_without_a_broker_it_says_so_and_ends_with_4() -> None:
    nowhere = f"amqp://someone:hidden@127.0.0.1:{free_port()}/%2F"
    done = Program({"broker_url": nowhere}, RUN).run("--payments=1")
    assert done.code == 4
    assert "no connection to the broker at 127.0.0.1:" in done.err
    assert "hidden" not in done.said


def test_a_folder_with_something_in_it_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").touch()
    done = Program({}, RUN).run(f"--keep={tmp_path}")
    assert done.code == 2
    assert "is not empty" in done.err
