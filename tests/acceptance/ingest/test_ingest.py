"""From a failure to a row: the program, a broker and PostgreSQL."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from program import DLQ, HANGS_AFTER, ROOT, Client, Program

from dlqbatch import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.servers.management import Management

ORIGIN = "payment-queue"


@pytest.fixture
def store(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    done = Program({"database_url": database_url}).run("db", "upgrade")
    assert done.code == 0, done.said
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection


@pytest.fixture
def ingest(program: Program, database_url: str, store: Any) -> Program:
    return program.but(database_url=database_url)


@pytest.fixture
def dead(program: Program, team: Client) -> int:
    """Payments are not retried: they fail, and the drain dead-letters them."""
    team.make_origin(ORIGIN, key="payment.#")
    team.fail(ORIGIN, "payment.card", b"1", b"2", b"\xff\0")
    done = program.run("drain", "--json")
    assert done.told["counts"]["dead_lettered"] == 3, done.said
    team.await_depth(DLQ, 3)
    return 3


def counted(report: Any) -> dict[str, int]:
    counts = dict(report["counts"])
    assert counts["got"] == sum(number for name, number in counts.items() if name != "got"), report
    return {name: number for name, number in counts.items() if number}


def bodies(store: psycopg.Connection[Any]) -> list[bytes]:
    return [row[0] for row in store.execute("SELECT body FROM dlq_messages ORDER BY body")]


@pytest.mark.quick
def test_what_no_retry_saved_becomes_a_row_and_a_copy_of_it_a_duplicate(
    ingest: Program, team: Client, dead: int, store: psycopg.Connection[Any]
) -> None:
    copy = team.contents(DLQ)[0]
    team.publish("", DLQ, copy.body, copy.headers)

    done = ingest.run("ingest", "--json")

    assert done.code == 0, done.said
    assert (done.told["outcome"], done.told["stopped_by"]) == ("ok", "empty")
    assert counted(done.told) == {"got": 4, "recorded": 3, "duplicate": 1}
    team.await_depth(DLQ, 0)
    assert bodies(store) == [b"1", b"2", b"\xff\0"]
    found = store.execute(
        "SELECT status, origin_queue, origin_exchange, origin_key, event, reason, error_type, source_queue, had_id, "
        "ack_proven, retry_count, next_retry_at > created_at FROM dlq_messages"
    ).fetchall()
    place = (ORIGIN, "orders", "payment.card", "payment.card")
    assert found == [("pending", *place, "retries-exhausted", "rejected", DLQ, True, True, 0, True)] * dead
    journal = store.execute("SELECT from_status, to_status, actor FROM dlq_transitions").fetchall()
    assert sorted(journal, key=str) == [("pending", "pending", "ingest"), *[(None, "pending", "ingest")] * dead]


def test_each_run_is_in_the_log_of_runs_with_what_it_emptied(
    ingest: Program, team: Client, dead: int, store: psycopg.Connection[Any]
) -> None:
    assert ingest.run("ingest", "--max-messages", "1").code == 0
    assert ingest.run("ingest").code == 0
    assert ingest.run("ingest").code == 0
    logged = store.execute("SELECT job, outcome, stopped_by, emptied, report FROM dlq_runs ORDER BY id").fetchall()
    assert [each[:4] for each in logged] == [
        ("ingest", "ok", "messages", []),
        ("ingest", "ok", "empty", [DLQ]),
        ("ingest", "ok", "empty", [DLQ]),
    ]
    reports = [each[4] for each in logged]
    assert [counted(report)["got"] if report["counts"]["got"] else 0 for report in reports] == [1, 2, 0]
    assert len({report["run_id"] for report in reports}) == len({report["pid"] for report in reports}) == len(reports)
    assert {report["version"] for report in reports} == {__version__}
    depths = [(report["hit_bound"], report["queues"][DLQ]) for report in reports]
    assert depths == [
        (True, {"found": dead, "left": dead - 1}),
        (False, {"found": dead - 1, "left": 0}),
        (False, {"found": 0, "left": 0}),
    ]


def test_a_dry_run_moves_nothing(ingest: Program, team: Client, dead: int, store: psycopg.Connection[Any]) -> None:
    done = ingest.run("ingest", "--dry-run", "--json")
    assert (done.code, done.told["dry_run"]) == (0, True), done.said
    assert counted(done.told) == {"got": 3, "recorded": 3}
    team.await_depth(DLQ, 3)
    assert bodies(store) == []
    assert store.execute("SELECT count(*) FROM dlq_runs").fetchone() == (0,)


def test_equal_messages_without_an_id_that_a_dry_run_has_touched_stay_two(
    ingest: Program, team: Client, store: psycopg.Connection[Any]
) -> None:
    for _ in range(2):
        team.publish("", DLQ, b"beat")
    assert ingest.run("ingest", "--dry-run").code == 0
    team.await_depth(DLQ, 2)
    assert counted(ingest.run("ingest", "--json").told) == {"got": 2, "recorded": 2}
    assert bodies(store) == [b"beat"] * 2


def test_a_database_that_nobody_named_takes_no_message(program: Program, team: Client, dead: int) -> None:
    settings = {name: value for name, value in program.settings.items() if name != "database_url"}
    done = Program(settings).run("ingest")
    assert done.code == 2, done.said
    assert "DLQBATCH_DATABASE_URL" in done.err
    team.await_depth(DLQ, 3)


def test_a_database_that_is_down_takes_no_message(program: Program, team: Client, dead: int) -> None:
    down = program.but(database_url="postgresql://nobody@127.0.0.1:1/none", connect_timeout_seconds="2")
    done = down.run("ingest")
    assert done.code == 4, done.said
    assert "No message was moved" in done.err
    team.await_depth(DLQ, 3)
    # Not even touched: none of them has to count as delivered before.
    method, _, _ = team.channel.basic_get(DLQ)
    assert method is not None
    assert not method.redelivered


def test_a_database_without_its_tables_says_how_to_make_them(
    program: Program, team: Client, dead: int, database_url: str
) -> None:
    done = program.but(database_url=database_url).run("ingest")
    assert done.code == 2, done.said
    assert "db upgrade" in done.err
    team.await_depth(DLQ, 3)


def test_wildcards_are_asked_of_the_management_api(
    ingest: Program, team: Client, store: psycopg.Connection[Any], management: Management, broker_addresses: Any
) -> None:
    for queue in ("dlq.a", "dlq.b", "orders"):
        team.channel.queue_declare(queue, durable=True)
        team.publish("", queue, queue.encode())
    wild = ingest.but(ingest_queues="dlq.*", management_url=broker_addresses[1])
    done = wild.run("ingest", "--json")
    assert counted(done.told) == {"got": 2, "recorded": 2}, done.said
    assert bodies(store) == [b"dlq.a", b"dlq.b"]
    team.await_depth("orders", 1)


def test_a_wrong_password_for_the_management_api_takes_no_message(
    ingest: Program, team: Client, broker_addresses: Any
) -> None:
    team.channel.queue_declare("dlq.a", durable=True)
    team.publish("", "dlq.a")
    wrong = broker_addresses[1].replace("guest:guest@", "guest:not-it@")
    done = ingest.but(ingest_queues="dlq.*", management_url=wrong).run("ingest")
    assert done.code == 4, done.said
    assert "401" in done.err
    assert "not-it" not in done.said
    team.await_depth("dlq.a", 1)


def test_a_quorum_queue_is_ingested_to_its_end(ingest: Program, team: Client, store: psycopg.Connection[Any]) -> None:
    team.channel.queue_declare("dlq.quorum", durable=True, arguments={"x-queue-type": "quorum"})
    for number in range(300):
        team.publish("", "dlq.quorum", b"%d" % number, {"dlqbatch-id": f"q-{number}"})
    done = ingest.but(ingest_queues="dlq.quorum").run("ingest", "--json")
    assert (done.code, done.told["stopped_by"]) == (0, "empty"), done.said
    assert counted(done.told) == {"got": 300, "recorded": 300}
    assert len(set(bodies(store))) == 300
    team.await_depth("dlq.quorum", 0)


def test_an_event_starts_an_ingest(ingest: Program, team: Client, dead: int, store: psycopg.Connection[Any]) -> None:
    script = (
        f"import json, sys; sys.path.insert(0, {str(ROOT)!r}); from handler import handler; "
        "print(json.dumps(handler({'job': 'ingest', 'max_messages': 2}, None)))"
    )
    process = Program(ingest.settings, (sys.executable, "-c", script)).start()
    output, errors = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 0, errors
    assert counted(json.loads(output)) == {"got": 2, "recorded": 2}
    team.await_depth(DLQ, 1)
