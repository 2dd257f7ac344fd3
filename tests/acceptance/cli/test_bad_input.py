from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

import pika
import psycopg
import pytest
from program import DLQ, RETRY_QUEUE, Client, Finished, Program, RawHeaders, header_entry, slowdown

from scripts.servers.management import Management, quoted
from scripts.servers.server import free_port

if TYPE_CHECKING:
    from pathlib import Path

ORIGIN = "orders-queue"
EVENT = "orders.created"
PASSWORD = "p4ssW0rd-nobody-may-see"


@pytest.fixture
def failed(program: Program, team: Client) -> list[Any]:
    """Three messages that failed and wait in the retry queue."""
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, EVENT, b"one", b"two", b"three")
    return team.contents(RETRY_QUEUE)


def assert_refused(done: Finished, code: int, *words: str) -> None:
    assert done.code == code, done.said
    assert done.out == ""
    assert PASSWORD not in done.said
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


def assert_untouched(team: Client, failed: list[Any]) -> None:
    assert team.contents(RETRY_QUEUE) == failed
    assert [team.depth(queue) for queue in (DLQ, "queue.delay.1", "retry-queue-1", ORIGIN)] == [0, 0, 0, 0]


# --- the configuration -----------------------------------------------------------------------------------------------


def properties(folder: Path, text: bytes) -> dict[str, str]:
    file = folder / "application.properties"
    file.write_bytes(text)
    return {"config": str(file), "log_format": "text"}


def test_an_unknown_key_in_the_properties_is_named_with_its_line_and_what_was_meant(
    program: Program, team: Client, failed: list[Any], tmp_path: Path
) -> None:
    where = properties(tmp_path, b"# ours\ndlqbatch.max-mesages=5\n")
    done = program.but(**where).run()
    assert_refused(done, 2, "dlqbatch.max-mesages", f"{tmp_path}/application.properties:2", "dlqbatch.max-messages")
    assert_untouched(team, failed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"dlqbatch.max-messages=\\u12\n", ("application.properties:1", "broken \\u escape")),
        (b"\n\xff\xfed\x00l\x00q\x00", ("application.properties", "not a text file", "save it as UTF-8")),
        (b"dlqbatch.max-messages=many\n", ("dlqbatch.max-messages", "'many'", "a whole number of at least 1")),
        (b"dlqbatch.max-trips=1\ndlqbatch.max.trips=2\n", ("application.properties:2", "already set in line 1")),
        (b"dlqbatch.events.a=b\n", ("dlqbatch.events.a", "no number of retries")),
    ],
)
def test_a_broken_properties_file_is_an_error_that_says_where(
    program: Program, team: Client, failed: list[Any], tmp_path: Path, text: bytes, words: tuple[str, ...]
) -> None:
    assert_refused(program.but(**properties(tmp_path, text)).run(), 2, *words)
    assert_untouched(team, failed)


def test_a_properties_file_that_is_not_there_is_an_error(program: Program, team: Client, failed: list[Any]) -> None:
    assert_refused(program.but(config="/nowhere/application.properties").run(), 2, "/nowhere/", "does not exist")
    assert_refused(program.run("drain", "--config", "/nowhere/other.properties"), 2, "/nowhere/other", "does not exist")
    assert_untouched(team, failed)


def test_every_problem_is_told_at_once_and_without_the_password(program: Program, team: Client) -> None:
    wrong = f"amqp://user:{PASSWORD}@host:port/"
    done = program.but(broker_url=wrong, max_messages="0", queue_type="stream").run()
    assert_refused(done, 2, "DLQBATCH_BROKER_URL", "DLQBATCH_MAX_MESSAGES", "DLQBATCH_QUEUE_TYPE", "classic or quorum")


# --- the broker ------------------------------------------------------------------------------------------------------


def test_an_unreachable_broker_ends_the_run_within_the_time_out(program: Program) -> None:
    port = free_port()
    url = f"amqp://guest:{PASSWORD}@127.0.0.1:{port}/"
    done = program.but(broker_url=url, connect_timeout_seconds="1").run()
    assert_refused(done, 4, f"127.0.0.1:{port}", "refused", "Nothing was taken")
    assert done.seconds < 9 * slowdown()


@pytest.fixture
def silent_server() -> Any:
    """Accepts every connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_broker_that_accepts_and_says_nothing_ends_the_run_within_the_time_out(
    program: Program, silent_server: int
) -> None:
    url = f"amqp://guest:{PASSWORD}@127.0.0.1:{silent_server}/"
    done = program.but(broker_url=url, connect_timeout_seconds="1").run()
    assert_refused(done, 4, f"127.0.0.1:{silent_server}", "Nothing was taken")
    assert done.seconds < 9 * slowdown()


def test_a_host_name_that_nobody_knows_is_said_so(program: Program) -> None:
    done = program.but(broker_url="amqp://guest:x@no-such-host.invalid/", connect_timeout_seconds="1").run()
    assert_refused(done, 4, "no-such-host.invalid", "Nothing was taken")
    assert done.seconds < 9 * slowdown()


def test_a_wrong_password_is_said_so_and_not_shown(
    program: Program, team: Client, failed: list[Any], broker_url: str
) -> None:
    done = program.but(broker_url=broker_url.replace("guest:guest", f"guest:{PASSWORD}")).run()
    assert_refused(done, 4, "login was refused", "Nothing was taken")
    assert done.seconds < 9 * slowdown()  # it is of no use to try again until the time is up
    assert_untouched(team, failed)


def test_a_missing_virtual_host_is_said_so(program: Program, broker_url: str) -> None:
    done = program.but(broker_url=broker_url.rpartition("/")[0] + "/no-such-vhost").run()
    assert_refused(done, 4, "'no-such-vhost'", "does not exist", "Nothing was taken")


def test_a_user_without_any_right_is_told_what_was_refused(
    program: Program, team: Client, failed: list[Any], management: Management, broker_url: str
) -> None:
    user = f"bare-{management.vhost}"
    management.put(f"users/{user}", {"password": PASSWORD, "tags": ""})
    try:
        nothing = {"configure": "^$", "write": "^$", "read": "^$"}
        management.put(f"permissions/{quoted(management.vhost)}/{user}", nothing)
        done = program.but(broker_url=broker_url.replace("guest:guest", f"{user}:{PASSWORD}")).run()
        # What it may not read, it must not call empty.
        assert done.code in (1, 3), done.said
        assert "ACCESS_REFUSED" in done.err
        assert "retry-queue" in done.err
        assert PASSWORD not in done.said
    finally:
        management.delete(f"users/{user}")
    assert_untouched(team, failed)


@pytest.mark.parametrize(
    ("queue", "arguments", "words"),
    [
        ("retry-queue-2", {"x-max-length": 5}, ("'retry-queue-2'", "x-max-length", "5", "none")),
        (
            "queue.delay.2",
            {
                "x-dead-letter-exchange": "retry-exchange-2",
                "x-dead-letter-routing-key": "retry.#.2",
                "x-message-ttl": 999,
            },
            ("'queue.delay.2'", "x-message-ttl", "999", "50"),
        ),
    ],
)
def test_a_queue_that_differs_is_named_with_the_argument_the_value_found_and_the_value_wanted(
    program: Program, team: Client, failed: list[Any], queue: str, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    team.channel.queue_delete(queue)
    team.channel.queue_declare(queue, durable=True, arguments=arguments)
    assert_refused(program.run(), 2, *words, "Nothing was moved")
    assert_untouched(team, failed)


def test_an_exchange_of_another_type_is_named(program: Program, team: Client, failed: list[Any]) -> None:
    team.channel.exchange_delete("route-delay")
    team.channel.exchange_declare("route-delay", "fanout", durable=True)
    assert_refused(program.run(), 2, "exchange 'route-delay'", "type", "fanout", "topic")
    assert_untouched(team, failed)


# --- the database ----------------------------------------------------------------------------------------------------


def test_a_database_that_is_not_there_stops_the_run(program: Program, team: Client, failed: list[Any]) -> None:
    port = free_port()
    url = f"postgresql://somebody:{PASSWORD}@127.0.0.1:{port}/orders"
    done = program.but(database_url=url, connect_timeout_seconds="2").run()
    assert_refused(done, 4, f"127.0.0.1:{port}", "No message was moved")
    assert done.seconds < 8 * slowdown()
    assert_untouched(team, failed)


@pytest.fixture
def role(database_url: str) -> Any:
    """A role that may connect, and nothing else."""
    name = database_url.rpartition("/")[2] + "_reader"
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
        yield name
        connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def as_role(database_url: str, role: str) -> str:
    scheme, _, place = database_url.partition("://")
    return f"{scheme}://{role}:{PASSWORD}@{place.rpartition('@')[2]}"


def test_a_role_that_may_not_read_the_table_stops_the_run_and_select_is_all_it_needs(
    program: Program, team: Client, failed: list[Any], database_url: str, role: str
) -> None:
    owner = program.but(database_url=database_url)
    assert owner.run("db", "upgrade").code == 0
    assert owner.run("events", "set", EVENT, "3").code == 0
    reader = program.but(database_url=as_role(database_url, role))

    assert_refused(reader.run(), 2, "permission denied", "dlq_event_config", "No message was moved")
    assert_untouched(team, failed)

    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"GRANT SELECT ON dlq_event_config TO {role}")
    done = reader.run("drain", "--json")
    assert done.code == 0, done.said
    assert done.told["counts"]["delayed"] == 3


def test_a_missing_table_stops_the_run_and_the_way_to_make_it_is_told(
    program: Program, team: Client, failed: list[Any], database_url: str
) -> None:
    done = program.but(database_url=database_url).run()
    assert_refused(done, 2, "dlq_event_config", "db upgrade", "Nothing was moved")
    assert_untouched(team, failed)


def test_a_missing_sqlite_file_stops_the_run_and_is_not_made(
    program: Program, team: Client, failed: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "typo.sqlite3"
    done = program.but(database_url=f"sqlite:///{file}").run()
    assert_refused(done, 2, str(file), "db upgrade", "Nothing was moved")
    assert not file.exists()
    assert_untouched(team, failed)


def test_a_file_that_is_no_database_stops_the_run(
    program: Program, team: Client, failed: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "text.sqlite3"
    file.write_text("this is no database, whatever its name says" * 50)
    assert_refused(program.but(database_url=f"sqlite:///{file}").run(), 4, str(file), "No message was moved")
    assert_untouched(team, failed)


def test_an_empty_policy_stops_the_run_unless_it_is_meant(
    program: Program, team: Client, failed: list[Any], tmp_path: Path
) -> None:
    empty = program.but(database_url=f"sqlite:///{tmp_path / 'empty.sqlite3'}")
    assert empty.run("db", "upgrade").code == 0
    assert_refused(empty.run(), 2, "not a single event", "events set", "--allow-empty-policy", "Nothing was moved")
    assert_untouched(team, failed)

    done = empty.run("drain", "--allow-empty-policy", "--json")
    assert done.code == 0, done.said
    assert done.told["counts"]["dead_lettered"] == 3
    assert done.told["reasons"] == {"not-configured": 3}
    assert team.depth(DLQ) == 3


# --- messages --------------------------------------------------------------------------------------------------------


def drain_beside_good_ones(program: Program, team: Client, *, bad: int = 1) -> Any:
    """Drain what is in the retry queue with good messages around it; the bad ones must not cost those anything."""
    team.fail(ORIGIN, EVENT, b"good one", b"good two")
    done = program.run("drain", "--json")
    assert done.code == 0, done.said
    told = done.told
    assert told["counts"]["got"] == bad + 3
    assert told["counts"]["delayed"] == 3
    assert told["counts"]["dead_lettered"] == bad
    team.await_depth("retry-queue-1", 3)
    dead = team.contents(DLQ)
    assert len(dead) == bad
    return told, dead


@pytest.fixture
def good(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, EVENT, b"good zero")


def test_a_message_whose_origin_was_deleted_becomes_a_dead_letter(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.make_origin("kept-queue", key="orders.kept")
    team.fail(ORIGIN, EVENT, b"homeless")
    team.channel.queue_unbind(ORIGIN, "orders", "#")
    team.fail("kept-queue", "orders.kept", b"at home")
    assert program.run().code == 0
    team.await_depth("retry-queue-1", 2)
    team.channel.queue_delete(ORIGIN)

    done = program.run("drain", "--json")

    assert done.code == 0, done.said
    assert done.told["counts"] == {"got": 2, "returned": 1, "dead_lettered": 1} | dict.fromkeys(
        ("delayed", "recorded", "moved", "left"), 0
    )
    assert done.told["reasons"] == {"origin-gone": 1}
    (dead,) = team.contents(DLQ)
    assert dead.body == b"homeless"
    assert dead.headers["dlqbatch-reason"] == "origin-gone"
    assert dead.headers["dlqbatch-origin-queue"] == ORIGIN
    assert not team.exists(ORIGIN)
    assert [one.body for one in team.contents("kept-queue")] == [b"at home"]


def test_a_message_without_any_headers_becomes_a_dead_letter_of_unknown_origin(
    program: Program, team: Client, good: None
) -> None:
    team.publish("retry-exchange", "retry-routing-key", b"bare", pika.BasicProperties())
    told, (dead,) = drain_beside_good_ones(program, team)
    assert told["reasons"] == {"origin-unknown": 1}
    assert dead.body == b"bare"
    assert dead.headers["dlqbatch-reason"].startswith("origin-unknown")
    assert dead.headers["dlqbatch-id"]


def test_an_x_death_of_the_wrong_type_is_no_origin_and_harms_nobody(program: Program, team: Client, good: None) -> None:
    oddities: list[object] = ["a text", 7, [1, 2, 3], [], {"count": 1}, [{"queue": 5, "routing-keys": "x"}]]
    for x_death in oddities:
        headers = {"x-death": x_death, "kept": "yes"}
        team.publish("retry-exchange", "retry-routing-key", repr(x_death).encode(), headers)
    told, dead = drain_beside_good_ones(program, team, bad=len(oddities))
    assert told["reasons"] == {"origin-unknown": len(oddities)}
    assert sorted(one.body for one in dead) == sorted(repr(x_death).encode() for x_death in oddities)
    assert {one.headers["kept"] for one in dead} == {"yes"}


@pytest.mark.parametrize("retries", [-1, "three", True, None, [3]], ids=str)
def test_a_retry_count_that_cannot_be_makes_a_message_malformed_and_stays_as_evidence(
    program: Program, team: Client, good: None, retries: object
) -> None:
    team.fail(ORIGIN, EVENT, b"odd", headers={"dlqbatch-retries": retries})
    told, (dead,) = drain_beside_good_ones(program, team)
    assert told["reasons"] == {"malformed": 1}
    assert dead.body == b"odd"
    assert dead.headers["dlqbatch-reason"] == "malformed"
    assert dead.headers["dlqbatch-retries"] == retries


def test_half_a_retry_makes_a_message_malformed(program: Program, team: Client, good: None) -> None:
    half = RawHeaders(header_entry("dlqbatch-retries", b"d", struct.pack(">d", 1.5)))
    team.fail(ORIGIN, EVENT, b"odd", headers=half)
    told, (dead,) = drain_beside_good_ones(program, team)
    assert told["reasons"] == {"malformed": 1}
    assert (dead.body, dead.headers["dlqbatch-reason"]) == (b"odd", "malformed")


def test_a_retry_count_of_a_quintillion_is_a_number_so_exhausted(program: Program, team: Client, good: None) -> None:
    team.fail(ORIGIN, EVENT, b"odd", headers={"dlqbatch-retries": 10**18})
    told, (dead,) = drain_beside_good_ones(program, team)
    assert told["reasons"] == {"retries-exhausted": 1}
    assert (dead.body, dead.headers["dlqbatch-retries"]) == (b"odd", 10**18)


def test_many_bad_messages_among_good_ones_stop_none_of_them(program: Program, team: Client, good: None) -> None:
    for retries in (-1, "three", True, 10**18):
        team.fail(ORIGIN, EVENT, b"odd", headers={"dlqbatch-retries": retries})
    team.publish("retry-exchange", "retry-routing-key", b"bare", pika.BasicProperties())
    told, _ = drain_beside_good_ones(program, team, bad=5)
    assert told["reasons"] == {"malformed": 3, "origin-unknown": 1, "retries-exhausted": 1}
