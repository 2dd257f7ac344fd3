"""The command and the event as their users have them."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from program import HANDLER, ROOT, Client, Finished, Program

from dlqbatch.check.job import _bounds
from dlqbatch.jobs import RunOptions
from dlqbatch.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripts.servers.management import Management

TARGET = "permanent_failure_queue"
COMMAND = (sys.executable, HANDLER, "check")


@pytest.fixture
def settings(broker_url: str, management: Management) -> dict[str, str]:
    host, port = management._address
    return {
        "broker_url": broker_url,
        "management_url": f"http://{host}:{port}",
        "database_url": "sqlite:////dev/null",
        "log_level": "error",
    }


@pytest.fixture
def check(settings: dict[str, str]) -> Callable[..., Finished]:
    return Program(settings, COMMAND).run


@pytest.fixture
def dead(team: Client) -> None:
    """A message that its consumer rejected once, and one that it rejected five times."""
    team.channel.queue_declare("dlq.orders", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dlq.orders"}
    team.channel.queue_declare("orders", durable=True, arguments=arguments)
    team.publish("", "orders", b"once")
    team.reject_all("orders")
    team.await_depth("dlq.orders", 1)
    team.publish("", "dlq.orders", b"often", {"x-death": [{"count": 5, "queue": "orders", "reason": "rejected"}]})
    team.await_depth("dlq.orders", 2)


@pytest.mark.quick
def test_a_check_moves_what_failed_too_often_and_says_where(
    check: Callable[..., Finished], team: Client, dead: None
) -> None:
    done = check("dlq.*", "--to", "dead.*", "--max-deaths", "3")
    assert done.code == 0, done.said
    assert "check: ok, stopped by empty" in done.out
    assert "dlq.orders" in done.out
    assert "target dead.orders, got 2, moved 1" in done.out
    [moved] = team.contents("dead.orders")
    assert moved.body == b"often"
    assert moved.headers["dlqbatch-reason"] == "too-many-deaths: 5 by x-death, at most 3 are allowed"
    assert moved.headers["dlqbatch-origin-queue"] == "orders"
    team.await_depth("dlq.orders", 1)


def test_a_question_mark_stands_for_one_character(check: Callable[..., Finished], team: Client, dead: None) -> None:
    team.channel.queue_declare("dlq.orders2", durable=True)
    done = check("dlq?orde??", "--to", "dead?orde??", "--json")
    assert done.code == 0, done.said
    assert done.told["queues"].keys() == {"dlq.orders"}
    assert [message.body for message in team.contents("dead.orders")] == [b"often"]


def test_a_queue_that_nobody_can_get_from_is_named_with_what_to_do(
    settings: dict[str, str], team: Client, sqlite_url: str
) -> None:
    team.channel.queue_declare(
        "dlq.single", durable=True, arguments={"x-queue-type": "quorum", "x-single-active-consumer": True}
    )
    team.publish("", "dlq.single", b"stays")
    program = Program(settings | {"database_url": sqlite_url})
    assert program.run("db", "upgrade").code == 0
    for job in (("check", "dlq.single", "--to", "dead"), ("ingest", "dlq.single")):
        done = program.run(*job, "--allow-delivery-cost" if job[0] == "check" else "--json", "--json")
        assert (done.code, done.told["stopped_by"]) == (3, "failure"), done.said
        assert any("without x-single-active-consumer" in warning for warning in done.told["warnings"]), done.said
    assert team.depth("dlq.single") == 1


def test_a_dry_run_lists_what_would_move(check: Callable[..., Finished], team: Client, dead: None) -> None:
    done = check("dlq.orders", "--dry-run")
    assert done.code == 0, done.said
    assert "dlq.orders:  from orders -> moved (5 by x-death)" in done.out
    assert f"key '{TARGET}'" in done.out
    team.await_depth("dlq.orders", 2)
    assert not team.exists(TARGET)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no queue to check"),
        (("dlq.*", "--to", "dlq.dead"), "is a source itself"),
        (("dlq.orders", "--max-deaths", "-1"), "max-deaths"),
        (("dlq.nowhere",), "dlq.nowhere"),
        (("",), "a queue's name is empty"),
        (("dlq.orders", " "), "a queue's name is empty"),
        (("dlq.orders", "--to", ""), "--check-target (command line) is empty"),
        (("dlq.orders", "--max-bytes", ""), "--max-bytes (command line) is empty"),
        (("-s", "check_queues="), "-s check_queues (command line) is empty"),
    ],
)
def test_what_is_asked_wrongly_ends_with_2_and_moves_nothing(
    settings: dict[str, str], team: Client, dead: None, arguments: tuple[str, ...], said: str
) -> None:
    named = {"check_queues": "dlq.*"} if said.endswith("empty") else {}
    done = Program(settings | named, COMMAND).run(*arguments)
    assert done.code == 2, done.said
    assert said in done.err
    team.await_depth("dlq.orders", 2)


@pytest.mark.parametrize("job", ["check", "ingest"])
def test_a_name_that_no_queue_can_have_is_told_before_anything_is_connected_to(job: str) -> None:
    away = Program({"broker_url": "amqp://127.0.0.1:1/", "connect_timeout_seconds": "0.1"})
    done = away.run(job, "q" * 256)
    assert done.code == 2, done.said
    assert "256 bytes" in done.err


def test_a_report_names_a_queue_as_it_is(check: Callable[..., Finished], team: Client) -> None:
    team.channel.queue_declare("dead_letters_of_orders", durable=True)
    team.publish("", "dead_letters_of_orders")
    done = check("dead_letters_of_orders")
    assert done.code == 0, done.said
    assert "  dead_letters_of_orders " in done.out


@pytest.mark.parametrize("max_seconds", ["1", "50", "86400"])
def test_nothing_is_held_until_the_broker_loses_patience_with_its_consumer(max_seconds: str) -> None:
    given = {"settle_seconds": "3600", "max_seconds": max_seconds}
    bounds = _bounds(load(given, {"DLQBATCH_CONFIG": os.devnull}), RunOptions())
    assert 25 * 60 < bounds.end_at - time.monotonic() < 30 * 60
    assert bounds.give_up_after > 60
    shorter = _bounds(load(given | {"settle_seconds": "7"}, {"DLQBATCH_CONFIG": os.devnull}), RunOptions())
    assert shorter.give_up_after == 7


def test_an_error_of_an_event_that_names_a_hostile_queue_is_harmless(settings: dict[str, str], team: Client) -> None:
    limited = {"x-queue-type": "quorum", "x-delivery-limit": 2}
    team.channel.queue_declare("dlq.\x1b]0;pwn\x07\u202e", durable=True, arguments=limited)
    script = (
        f"import json, sys; sys.path.insert(0, {str(ROOT)!r}); from handler import handler\n"
        "try:\n    handler({'job': 'check', 'check_queues': ['dlq.*']})\n"
        "except Exception as error:\n    print(json.dumps([type(error).__name__, str(error)]))"
    )
    kind, text = Program(settings, (sys.executable, "-c", script)).run().told
    assert kind == "SettingsError"
    assert text.startswith(r"the quorum queue 'dlq.\x1b]0;pwn\x07\u202e' is not checked")


@pytest.fixture
def stream(team: Client) -> None:
    """A stream with a message, and beside it a queue that is deeper."""
    team.channel.queue_declare("dlq.s", durable=True, arguments={"x-queue-type": "stream"})
    team.publish("", "dlq.s")
    team.channel.queue_declare("dlq.z", durable=True)
    for number in range(5):
        team.publish("", "dlq.z", b"%d" % number, {"x-death": [{"count": 9, "queue": "z", "reason": "rejected"}]})
    team.await_depth("dlq.z", 5)


@pytest.mark.usefixtures("on_every_broker", "stream")
def test_a_stream_that_a_wildcard_matches_keeps_no_other_queue_from_being_checked(
    check: Callable[..., Finished], team: Client
) -> None:
    done = check("dlq.*", "--to", "dead.*", "--json")
    assert (done.code, done.told["outcome"]) == (0, "ok"), done.said
    assert done.told["queues"]["dlq.z"]["moved"] == 5
    assert "'dlq.s' is a stream and is left out" in done.told["warnings"]
    team.await_depth("dead.z", 5)


@pytest.mark.usefixtures("on_every_broker", "stream")
def test_a_stream_given_by_name_ends_a_check_before_anything_moves(
    check: Callable[..., Finished], team: Client
) -> None:
    done = check("dlq.s", "dlq.z")
    assert done.code == 2, done.said
    assert "'dlq.s' is a stream" in done.err
    team.await_depth("dlq.z", 5)


def test_an_event_starts_a_check(settings: dict[str, str], team: Client, dead: None) -> None:
    event: dict[str, Any] = {"job": "check", "check_queues": ["dlq.orders"], "check_max_deaths": 4}
    script = (
        f"import json, sys; sys.path.insert(0, {str(ROOT)!r}); from handler import handler; "
        f"print(json.dumps(handler({event!r}, None)))"
    )
    done = Program(settings, (sys.executable, "-c", script)).run()
    assert done.code == 0, done.said
    report = json.loads(done.out)
    assert (report["job"], report["counts"]["moved"], report["counts"]["left"]) == ("check", 1, 1)
    assert report["queues"] == {"dlq.orders": {"target": TARGET, "got": 2, "moved": 1, "within_limit": 1, "left": 0}}


def test_a_moved_message_is_understood_by_ingest(
    check: Callable[..., Finished], settings: dict[str, str], sqlite_url: str, team: Client, dead: None
) -> None:
    assert check("dlq.orders").code == 0
    store = Program(settings | {"database_url": sqlite_url})
    assert store.run("db", "upgrade").code == 0
    assert store.run("ingest", TARGET).code == 0
    [row] = store.run("messages", "list", "--json").told["messages"]
    assert row["origin_queue"] == "orders"
    assert row["error_type"] == "rejected"
