"""Which message is which, and where it failed, where clients pass on headers and teams have delays of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from program import DLQ, Client, Program, eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pika

QUEUE = "orders-queue"
DELAYS = ("queue.delay.1", "queue.delay.2", "queue.delay.3")

pytestmark = pytest.mark.usefixtures("on_every_broker")


def drained(program: Program) -> dict[str, int]:
    done = program.run("drain", "--json")
    assert done.code == 0, done.said
    return {name: number for name, number in done.told["counts"].items() if number}


def brought_back(program: Program, team: Client, number: int) -> None:
    """What was rejected goes through the ladder, and back."""
    team.await_depth("retry-queue", number)
    assert drained(program) == {"got": number, "delayed": number}
    assert eventually(lambda: not any(team.depth(queue) for queue in DELAYS))
    assert drained(program) == {"got": number, "returned": number}


def taken(team: Client, queue: str = QUEUE) -> Mapping[bytes, tuple[str, str, dict[str, Any], pika.BasicProperties]]:
    """Exchange, key and headers by body; every message is acknowledged."""
    found = {}
    while (got := team.channel.basic_get(queue, auto_ack=True))[0] is not None:
        method, properties, body = got
        found[body] = (method.exchange, method.routing_key, dict(properties.headers), properties)
    return found


@pytest.fixture
def origin(program: Program, team: Client) -> None:
    assert program.run("events", "set", "#", "3").code == 0
    team.make_origin(QUEUE, "orders", "orders.#")


@pytest.mark.usefixtures("origin")
def test_what_a_worker_publishes_with_the_headers_that_it_received_is_a_message_of_its_own(
    program: Program, team: Client
) -> None:
    team.fail(QUEUE, "orders.created", b"created")
    team.fail(QUEUE, QUEUE, b"poll 1", exchange="")
    brought_back(program, team, 2)
    first = taken(team)
    through, key, created, as_received = first[b"created"]
    assert (through, key, created["dlqbatch-retries"]) == (f"dlqbatch.return.{QUEUE}", "orders.created", 1)
    # What had come by the default exchange came back that way: its consumer sees exactly the first delivery.
    through, key, polled, poll_as_received = first[b"poll 1"]
    assert (through, key, polled["dlqbatch-retries"]) == ("", QUEUE, 1)

    team.publish("orders", "orders.paid", b"paid", as_received)
    team.publish("orders", "orders.created", b"created", as_received)
    team.publish("", QUEUE, b"poll 2", poll_as_received)
    assert team.reject_all(QUEUE) == 3
    brought_back(program, team, 3)
    second = taken(team)
    expected = {b"paid": "orders.paid", b"created": "orders.created", b"poll 2": QUEUE}
    assert {body: key for body, (_, key, *_) in second.items()} == expected
    for body, (_, _, headers, _) in second.items():
        received = polled if body == b"poll 2" else created
        assert headers["dlqbatch-id"] not in {created["dlqbatch-id"], polled["dlqbatch-id"]}
        assert headers["dlqbatch-parent"] == received["dlqbatch-id"]
        assert (headers["dlqbatch-retries"], headers["dlqbatch-trips"]) == (1, 2)
        assert len(headers["dlqbatch-history"]) == 2

    # And what does come back is known, and counted on.
    team.publish("", QUEUE, b"poll 2", second[b"poll 2"][3])
    team.reject_all(QUEUE)
    brought_back(program, team, 1)
    _, _, again, _ = taken(team)[b"poll 2"]
    assert (again["dlqbatch-id"], again["dlqbatch-retries"]) == (second[b"poll 2"][2]["dlqbatch-id"], 2)


@pytest.mark.usefixtures("origin")
def test_a_dead_letter_that_is_moved_by_hand_is_still_the_same_message(program: Program, team: Client) -> None:
    assert program.run("events", "set", "#", "0").code == 0
    assert program.run("events", "set", "orders.*", "0").code == 0
    team.fail(QUEUE, "orders.created", b"created")
    assert drained(program) == {"got": 1, "dead_lettered": 1}
    _, _, first, properties = taken(team, DLQ)[b"created"]
    team.publish("", QUEUE, b"created", properties)
    team.reject_all(QUEUE)
    team.await_depth("retry-queue", 1)
    assert drained(program) == {"got": 1, "dead_lettered": 1}
    _, _, again, _ = taken(team, DLQ)[b"created"]
    assert again["dlqbatch-reason"] == "retries-exhausted"
    assert again["dlqbatch-trips"] == first["dlqbatch-trips"] + 1
    for same in ("id", "origin-queue", "origin-exchange", "origin-key"):
        assert again[f"dlqbatch-{same}"] == first[f"dlqbatch-{same}"]


def test_a_delay_of_the_teams_own_is_not_where_a_message_failed(program: Program, team: Client) -> None:
    assert program.run("events", "set", "#", "3").code == 0
    channel = team.channel
    to_ours = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
    for exchange in ("shop", "shop.wait"):
        channel.exchange_declare(exchange, "topic", durable=True)
    channel.queue_declare("checkout.wait", durable=True, arguments={**to_ours, "x-message-ttl": 20})
    channel.queue_declare("checkout", durable=True, arguments={"x-dead-letter-exchange": "shop.wait"})
    channel.queue_bind("checkout.wait", "shop.wait", "#")
    channel.queue_bind("checkout", "shop", "#")
    team.publish("shop", "checkout.created", b"created")
    for retries in (1, 2):
        team.reject_all("checkout")
        brought_back(program, team, 1)
        [message] = team.contents("checkout")
        assert (message.routing_key, message.headers["dlqbatch-retries"]) == ("checkout.created", retries)
    # A queue that nothing dead-letters into is a place of work: what expired there failed there.
    team.publish("shop.wait", "straight.here", b"straight")
    brought_back(program, team, 1)
    assert eventually(lambda: team.depth("retry-queue") == 1)
    assert team.contents("retry-queue")[0].headers["dlqbatch-origin-queue"] == "checkout.wait"


def test_what_another_processor_had_put_into_a_tier_is_returned(
    program: Program, team: Client, broker_release: str
) -> None:
    """It published what had failed with the x-death that it had; from 4.0 the broker takes no notice of that."""
    team.make_origin(QUEUE, "orders", "orders.#")
    team.publish("orders", "orders.created", b"created")
    team.reject_all(QUEUE)
    team.await_depth("retry-queue", 1)
    [(_, _, _, properties)] = taken(team, "retry-queue").values()
    team.publish("route-delay", "binding.orders.created.1", b"created", properties)
    assert eventually(lambda: team.depth("retry-queue-1") == 1)
    if broker_release == "4.3":
        assert drained(program) == {"got": 1, "dead_lettered": 1}
        return
    assert drained(program) == {"got": 1, "returned": 1}
    _, key, headers, _ = taken(team)[b"created"]
    assert (key, headers["dlqbatch-origin-queue"]) == ("orders.created", QUEUE)
