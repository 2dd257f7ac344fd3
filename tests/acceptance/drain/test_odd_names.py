"""Origins with names that a broker cannot speak of, or should not be asked about: they stop no other message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import rawamqp
from program import Client, Program, client
from rawamqp import Message, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
GOOD = [b"good-%d" % each for each in range(5)]

pytestmark = pytest.mark.usefixtures("on_every_broker")


@pytest.fixture
def program(broker_url: str, sqlite_url: str) -> Program:
    program = Program({"broker_url": broker_url, "database_url": sqlite_url, "log_level": "error", "tier_ttls": "50"})
    assert program.run("db", "upgrade").code == 0
    assert program.run("events", "set", "#", "3").code == 0
    assert program.run("topology", "apply").code == 0
    return program


@pytest.fixture
def team(broker_url: str, program: Program) -> Iterator[Client]:
    with client(broker_url) as team:
        team.make_origin("orders")
        yield team


def died(queue: str) -> bytes:
    """As whoever may publish to retry-exchange can write it."""
    last = [(b"x-last-death-queue", rawamqp.text(queue)), (b"x-last-death-reason", rawamqp.text("rejected"))]
    return rawamqp.properties([rawamqp.death(queue, b"orders.a", exchange="orders"), *last])


def fails(team: Client, waiting: int = 0) -> None:
    """The five fail beside so many others, and wait out their delay."""
    team.fail("orders", "orders.a", *GOOD)
    team.await_depth("retry-queue", len(GOOD) + waiting)


@pytest.mark.parametrize("name", ["ü" * 102, "a" + "ü" * 120], ids=["short enough to be cut", "cut inside a character"])
def test_a_queue_that_is_gone_and_had_a_long_name_that_is_not_ascii(
    program: Program, team: Client, name: str, broker_release: str
) -> None:
    team.make_origin(name, "shop")
    team.fail(name, "orders.a", b"odd", exchange="shop")
    fails(team, waiting=1)
    assert program.run("drain").code == 0
    team.await_depth("retry-queue-1", 6)
    team.channel.queue_delete(name)
    told = program.run("drain", "--json").told
    assert team.depth("orders") == len(GOOD)
    if broker_release == "4.3":
        assert (told["counts"]["left"], told["reasons"]) == (1, {"origin-check-failed": 1})
    else:
        assert (told["counts"]["dead_lettered"], told["reasons"]) == (1, {"origin-gone": 1})


def test_an_exclusive_queue_whose_name_is_not_ascii(program: Program, team: Client, broker_url: str) -> None:
    name = "antworten-für-bürogebäude-nord-und-süd-0001"
    with client(broker_url) as owner:
        owner.channel.exchange_declare("shop", "topic", durable=True)
        owner.channel.queue_declare(name, exclusive=True, arguments=RETRY)
        owner.channel.queue_bind(name, "shop", "#")
        owner.publish("shop", "orders.a", b"odd")
        owner.reject_all(name)
        fails(team, waiting=1)
        assert program.run("drain").code == 0
        team.await_depth("retry-queue-1", 6)
        program.run("drain")
        assert team.depth("orders") == len(GOOD)


@pytest.mark.parametrize("name", ["amq.rabbitmq.reply-to.g1h2AAA.BBB", "or\nders", "or\rders"])
def test_a_forged_death_in_what_is_no_queue(program: Program, team: Client, broker_url: str, name: str) -> None:
    with Peer(broker_url) as peer:
        peer.publish([Message("retry-exchange", b"retry-routing-key", died(name), b"odd")])
    fails(team, waiting=1)
    done = program.run("drain", "--json")
    assert (done.code, done.told["reasons"]) == (0, {"origin-unknown": 1})
    team.await_depth("retry-queue-1", len(GOOD))
    assert program.run("drain").code == 0
    assert (team.depth("orders"), team.depth("dlq-queue")) == (len(GOOD), 1)


def test_a_dry_run_sees_a_return_exchange_that_is_none_of_ours(program: Program, team: Client) -> None:
    team.channel.exchange_declare("dlqbatch.return.orders", "topic", durable=True)
    fails(team)
    assert program.run("drain").code == 0
    team.await_depth("retry-queue-1", len(GOOD))
    foreseen = program.run("drain", "--dry-run", "--json").told
    done = program.run("drain", "--json").told
    assert (foreseen["counts"], foreseen["reasons"]) == (done["counts"], done["reasons"])
    assert done["reasons"] == {"origin-check-failed": len(GOOD)}


@pytest.mark.parametrize("size", [20, 120, 170, 240])
def test_a_look_that_costs_deliveries_is_refused_however_long_the_queues_name(
    program: Program, team: Client, size: int
) -> None:
    """Without the management API: what a look costs is not known then."""
    name = "q" * size
    team.channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 3})
    team.publish("", name, b"one")
    alone = program.but(management_url="http://127.0.0.1:1/")
    done = alone.run("check", name, "--to", "over")
    assert (done.code, team.depth(name)) == (2, 1), done.said
    assert "is not checked" in done.said


@pytest.mark.parametrize("command", [["check", "--to", "over"], ["ingest"]], ids=["check", "ingest"])
def test_a_queue_that_is_there_and_whose_name_is_long_and_not_ascii(
    program: Program, team: Client, command: list[str], broker_release: str, request: pytest.FixtureRequest
) -> None:
    _, api = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    program = program.but(management_url=api)
    name = "dlq." + "ü" * 80
    for queue in (name, "dlq.plain"):
        team.channel.queue_declare(queue, durable=True)
        team.publish("", queue, b"one")
    done = program.run(command[0], name, "dlq.plain", *command[1:], "--json")
    assert (done.code, done.told["counts"]["got"], done.told["counts"]["left"]) == (0, 2, 2 * (command[0] == "check"))


def test_a_dead_message_of_a_queue_that_is_gone_and_had_such_a_name(
    program: Program, team: Client, broker_release: str
) -> None:
    for number, queue in enumerate(("a" + "ü" * 115, "orders")):
        headers = {"dlqbatch-id": f"id-{number}", "dlqbatch-retries": 3, "dlqbatch-trips": 3}
        headers |= {"dlqbatch-origin-queue": queue, "dlqbatch-origin-exchange": "", "dlqbatch-origin-key": "k"}
        failure = {"x-exception-message": "connection timed out", "x-exception-stacktrace": "TimeoutError: late"}
        team.publish("", "dlq-queue", b"one", headers | failure)
    quick = program.but(retry_delays="1ms")
    assert quick.run("ingest", "dlq-queue").code == 0
    planned = quick.run("replay", "plan", "--all", "--reason", "mended", "--json")
    assert planned.code == 0, planned.said
    assert quick.run("replay", "abort", planned.told["hash"]).code == 0
    counts = quick.run("lifecycle", "--json").told["counts"]
    assert (counts["sent"], counts["left"], counts["manual"]) == ((1, 1, 0) if broker_release == "4.3" else (1, 0, 1))
    assert team.depth("orders") == 1
