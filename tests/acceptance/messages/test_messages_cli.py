"""The dead store as people meet it: `dlqbatch messages`, in processes of its own."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import add, lock, row, store_at
from messages import Value, array, encode_table, long, nested, text, timestamp
from program import Finished, Program

from dlqbatch.store import journal as states
from dlqbatch.store.engine import writing
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

EVIL = "\x1b[31mred\x1b]0;title\x07\rover\nnext\x9b2J"


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


@pytest.fixture
def installed(url: str) -> Program:
    return Program({"database_url": url})


def ask(installed: Program, *arguments: str) -> Finished:
    return installed.run("messages", *arguments)


def headers(*entries: Any) -> bytes:
    table = encode_table(entries)
    return b"\x20\x00" + len(table).to_bytes(4, "big") + table


def test_an_operator_finds_a_message_looks_at_it_and_discards_it(engine: Engine, installed: Program) -> None:
    death = nested(
        (b"queue", text("orders-queue")), (b"reason", text("rejected")), (b"count", long(1)), (b"time", timestamp(10))
    )
    wanted = row(
        error_type="TimeoutError",
        error_message="no answer",
        event="orders.created",
        origin_queue="orders-queue",
        fingerprint="f" * 16,
        body=b'{"order": 7}',
        properties=headers((b"x-death", array(death)), (b"tenant", text("blue"))),
    )
    (row_id,) = add(engine, wanted)
    add(engine, *(row(error_type="Other") for _ in range(3)))

    found = ask(installed, "groups")
    assert found.code == 0, found.said
    assert "TimeoutError: no answer" in found.out
    assert "largest of" not in found.said
    assert "the 1 largest of 2 groups" in ask(installed, "groups", "--limit", "1").err
    found = ask(installed, "list", "--group", "f" * 16, "--status", "pending", "--status", "manual")
    assert (found.code, len(found.out.splitlines())) == (0, 2)
    for arguments in (("search", "NO ANSWER"), ("list", "--event", "orders.created", "--start-date", "2030-01-01")):
        (one,) = ask(installed, *arguments, "--json").told["messages"]
        assert (one["id"], one["status"], one["created_at"]) == (row_id, "pending", "2030-06-01T12:00:00.000000+00:00")

    shown = ask(installed, "show", str(row_id))
    assert shown.code == 0, shown.said
    for part in (
        "1970-01-01 00:00:10  ✗ a consumer of 'orders-queue' rejected it",
        "2030-06-01 12:00:00  ● arrived, pending [ingest]: test",
        '    "order": 7',
        "tenant",
        "orders.created",
    ):
        assert part in shown.out

    planned = ask(installed, "discard", str(row_id), "--reason", "of no use", "--dry-run")
    assert (planned.code, "would be discarded" in planned.out) == (0, True)
    assert ask(installed, "discard", str(row_id), "--reason", "of no use", "--actor", "an operator").code == 0
    assert ask(installed, "discard", str(row_id), "--reason", "of no use").code == 1
    journal = ask(installed, "journal", str(row_id), "--actor", "an operator", "--json").told["entries"]
    assert [(one["to_status"], one["reason"]) for one in journal] == [
        ("archived", "of no use"),
        ("manual", "of no use"),
        ("processing", "of no use"),
    ]
    assert ask(installed, "restore", str(row_id), "--actor", "an operator").code == 0
    assert ask(installed, "list", "--status", "manual", "--json").told["messages"][0]["id"] == row_id


def test_json_of_a_message_is_complete(engine: Engine, installed: Program) -> None:
    body, held = b"\xff\0\x1b raw", headers((b"nul", text("a\0b")), (b"number", long(7)))
    (row_id,) = add(engine, row(body=body, properties=held, message_id=b"\xff"))
    told = ask(installed, "show", str(row_id), "--json").told
    assert base64.b64decode(told["body_base64"]) == body
    assert base64.b64decode(told["properties_base64"]) == held
    assert told["headers"] == {"nul": "a\0b", "number": 7}
    assert told["message_id"] == "\\xff"
    assert [one["to_status"] for one in told["transitions"]] == ["pending"]


def test_a_header_that_holds_nothing_is_shown_all_the_same(sqlite_url: str) -> None:
    engine, installed = store_at(sqlite_url), Program({"database_url": sqlite_url})
    held = headers((b"nothing", Value(b"V", b"")), (b"empty", text("")), (b"list", array()), (b"table", nested()))
    (row_id,) = add(engine, row(properties=held))
    shown = [line.split() for line in ask(installed, "show", str(row_id)).out.splitlines()]
    for line in (["nothing", "null"], ["empty", '""'], ["list", "[]"], ["table", "{}"]):
        assert line in shown
    assert "event" not in [line[0] for line in shown if line]


def test_nothing_in_a_message_reaches_the_terminal_raw(engine: Engine, installed: Program) -> None:
    evil = EVIL.encode()
    places = dict.fromkeys(
        ("error_type", "error_message", "error_stack", "event", "reason", "origin_queue", "source", "message_id"), EVIL
    )
    held = headers((evil, text(evil)), (b"dlqbatch-reason", text(evil)))
    ids = add(
        engine,
        row(**places, body=evil, properties=held, tags=[EVIL]),
        row(**places, body=json.dumps({"k": 1}).encode() + b"\n", identity=EVIL),
        row(body=b'{"k": "\x7f\xc2\x9b2J"}'),
        row(body=evil + b"\xff"),
    )
    calls = [("list",), ("groups",), ("search", EVIL), ("journal",)]
    calls += [("show", str(row_id), *full) for row_id in ids for full in ((), ("--full",))]
    calls += [("discard", str(ids[0]), "--reason", EVIL, "--actor", EVIL), ("journal",), ("list", "--since", EVIL)]
    for call in calls:
        done = ask(installed, *call)
        assert done.code in (0, 2), done.said
        assert {c for c in done.said if not c.isprintable()} <= {"\n"}, call


def test_a_large_body_is_cut_on_the_screen_and_whole_when_asked(engine: Engine, installed: Program) -> None:
    (row_id,) = add(engine, row(body=b"x" * 10_000_000))
    assert len(ask(installed, "show", str(row_id)).out) < 10_000
    masked = ask(installed, "show", str(row_id), "--full").out
    assert "x" * 1_000_000 in masked
    assert "the rest is not shown while secrets are masked" in masked
    revealed = ("--reveal", "--reason", "r")
    assert "x" * 10_000_000 in ask(installed, "show", str(row_id), "--full", *revealed).out
    told = ask(installed, "show", str(row_id), "--json", *revealed).told
    assert (len(base64.b64decode(told["body_base64"])), told["masked"]) == (10_000_000, False)


def test_what_a_filter_discarded_comes_back_by_a_filter(engine: Engine, installed: Program) -> None:
    limited = row(error_type="handlers.RateLimited", event="orders.eu.created", origin_queue="orders")
    others = row(error_type="handlers.RateLimited", event="orders.us.created", origin_queue="orders.us")
    (wanted, _) = add(engine, limited, others)
    these = (
        "--error-type",
        "RateLimited",
        "--event",
        "orders.*.created",
        "--not",
        "origin=orders.us",
        "--since",
        "2020-01-01",
    )
    assert [one["id"] for one in ask(installed, "list", *these, "--json").told["messages"]] == [wanted]
    assert ask(installed, "discard", *these, "--reason", "wrong", "--yes").code == 0
    assert ask(installed, "list", *these, "--status", "manual").code == 1
    assert ask(installed, "restore", *these, "--yes").code == 0
    assert [one["id"] for one in ask(installed, "list", "--status", "manual", "--json").told["messages"]] == [wanted]


@pytest.mark.parametrize("command", [("list",), ("groups",), ("discard", "--reason", "r", "--dry-run")])
def test_a_word_that_nothing_has_is_met_with_the_ones_that_are_there(
    engine: Engine, installed: Program, command: tuple[str, ...]
) -> None:
    add(engine, *(row(error_type="handlers.RateLimited") for _ in range(3)))
    missed = ask(installed, *command, "--error-type", "RateLimted")
    assert missed.code == 1
    assert "no message has the error type 'RateLimted'; there is handlers.RateLimited (3)" in missed.err


def test_pages_are_walked_by_what_the_last_one_names(engine: Engine, installed: Program) -> None:
    ids = add(engine, *(row() for _ in range(5)))
    first = ask(installed, "list", "--limit", "3", "--json").told
    second = ask(installed, "list", "--limit", "3", "--after", first["next"], "--json").told
    assert second["next"] is None
    assert sorted(one["id"] for one in first["messages"] + second["messages"]) == sorted(ids)
    assert f"--after {first['next']}" in ask(installed, "list", "--limit", "3").err


def test_the_exit_code_tells_how_it_went(sqlite_url: str) -> None:
    engine, installed = store_at(sqlite_url), Program({"database_url": sqlite_url})
    free, held = add(engine, row(), row())
    with writing(engine) as connection:
        states.move(
            connection, held, Status.PENDING, Status.PROCESSING, None, row()["first_failed_at"], "w", "why", **lock()
        )
    nothing = ("--event", "no such event")
    filters = [nothing, ("--group", "f" * 16), ("--status", "pending"), ("--until", "2030-01-01"), ("--text", "x")]
    expected = [
        (("list", *nothing), 1),
        (("groups", *nothing), 1),
        (("search", "no such text"), 1),
        (("journal", "999999"), 1),
        (("show", "999999"), 1),
        (("discard", "999999", "--reason", "r"), 1),
        (("restore", str(free)), 1),
        (("list", "--event", ""), 2),
        (("list", "--status", "dead"), 2),
        (("list", "--since", "one day"), 2),
        (("list", "--since", "1h", "--until", "2h"), 2),
        (("list", "--not", "event"), 2),
        (("list", "--after", "x"), 2),
        (("list", "--limit", "0"), 2),
        (("show", "x"), 2),
        (("show", str(2**63)), 2),
        (("discard", str(free)), 2),
        (("discard", str(free), "--reason", ""), 2),
        (("discard", "--reason", "r"), 2),
        (("discard", "--reason", "r", "--all"), 2),
        *((("discard", "--reason", "r", *one), 2) for one in filters),
        *((("discard", "--reason", "r", *nothing, flag), 1) for flag in ("--yes", "--dry-run")),
        (("discard", str(free), "--reason", "r", "--actor", "ingest"), 2),
        (("restore",), 2),
        (("restore", *nothing), 2),
        (("restore", *nothing, "--yes"), 1),
        (("restore", str(free), *nothing), 2),
        (("discard", str(free), str(held), "--reason", "r", "--dry-run"), 3),
        (("discard", "--all", "--reason", "r", "--dry-run"), 3),
        (("discard", "--all", "--yes", "--reason", "r"), 3),
    ]
    for call, code in expected:
        done = ask(installed, *call, "--json")
        assert done.code == code, (call, done.said)
        assert done.told is not None
    for command in (("list",), ("groups",), ("show", "1"), ("journal",), ("discard", "1", "--reason", "r")):
        away = Program({"database_url": "postgresql://nobody@127.0.0.1:1/none"}).run("messages", *command)
        assert away.code == 4, away.said


def test_a_forgotten_address_of_the_database_invites_nobody_to_make_an_empty_store(tmp_path: Path) -> None:
    for arguments in (("messages", "groups"), ("messages", "list"), ("messages", "discard", "1", "--reason", "r")):
        done = Program({}).run(*arguments, cwd=tmp_path)
        assert done.code == 2, done.said
        assert "the database has to be named: set DLQBATCH_DATABASE_URL" in done.err


def test_a_stack_is_shown_once(engine: Engine, installed: Program) -> None:
    stack = "Traceback (most recent call last):\n  File \"shop.py\", line 5, in take\nKeyError: 'price'"
    told = headers((b"MT-Fault-StackTrace", text(stack)), (b"tenant", text("blue")))
    (row_id,) = add(engine, row(error_stack=stack, properties=told))
    shown = ask(installed, "show", str(row_id))
    assert shown.code == 0, shown.said
    assert shown.out.count("shop.py") == 1
    assert "(see Stack)" in shown.out
    assert "blue" in shown.out
    assert "retried it for the last time" not in shown.out
    body = b'{"actor_name":"take","options":{"traceback":"KeyError: 1"},"message_id":"m-1"}'
    (row_id,) = add(engine, row(error_stack="KeyError: 1", body=body))
    assert "(why its framework retried it for the last time; what it died of" in ask(installed, "show", str(row_id)).out
