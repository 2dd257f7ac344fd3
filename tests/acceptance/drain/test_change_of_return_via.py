"""docs/return-via.md: the way back is changed while messages are in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from program import RETRY_QUEUE

if TYPE_CHECKING:
    from program import Client, Program

pytestmark = pytest.mark.usefixtures("on_every_broker")
ORIGIN, AUDIT, KEY = "events", "audit", "orders.created"
RETURN = f"dlqbatch.return.{ORIGIN}"


def come_back(program: Program, team: Client) -> None:
    """What is in the retry queue waits for its delay, and is returned."""
    assert program.run("drain", "--json").told["counts"]["delayed"] == 1
    team.await_depth("retry-queue-1", 1)
    bring_back(program)


def bring_back(program: Program) -> None:
    done = program.run("drain", "--json")
    assert (done.code, done.told["counts"]["returned"]) == (0, 1), done.said


def exchanges(team: Client, queue: str) -> list[tuple[str, str]]:
    return [(message.exchange, message.routing_key) for message in team.contents(queue)]


@pytest.fixture
def ways(program: Program, team: Client) -> dict[str, Program]:
    team.make_origin(ORIGIN, "shop")
    team.channel.queue_declare(AUDIT, durable=True)
    return {way: program.but(return_via=way) for way in ("queue", "exchange")}


def fail(team: Client, key: str) -> None:
    """Nobody else has got it yet."""
    team.fail(ORIGIN, key, b"1", exchange="shop")
    team.channel.queue_bind(AUDIT, "shop", "#")


def test_what_came_back_to_its_queue_goes_through_its_exchange_from_then_on(
    ways: dict[str, Program], team: Client
) -> None:
    fail(team, KEY)
    come_back(ways["queue"], team)
    assert (exchanges(team, ORIGIN), team.depth(AUDIT)) == ([(RETURN, KEY)], 0)
    team.reject_all(ORIGIN)
    team.await_depth(RETRY_QUEUE, 1)
    (failed,) = team.contents(RETRY_QUEUE)
    assert failed.headers["dlqbatch-retries"] == 1

    assert ways["exchange"].run("drain", "--json").told["counts"]["delayed"] == 1
    team.await_depth("retry-queue-2", 1)
    bring_back(ways["exchange"])
    assert exchanges(team, ORIGIN) == exchanges(team, AUDIT) == [("shop", KEY)]
    (returned,) = team.contents(ORIGIN)
    assert returned.headers["dlqbatch-retries"] == 2


def test_what_waits_for_its_delay_takes_the_way_of_the_run_that_returns_it(
    ways: dict[str, Program], team: Client
) -> None:
    fail(team, KEY)
    assert ways["queue"].run("drain", "--json").told["counts"]["delayed"] == 1
    team.await_depth("retry-queue-1", 1)
    bring_back(ways["exchange"])
    assert exchanges(team, ORIGIN) == exchanges(team, AUDIT) == [("shop", KEY)]


def test_what_came_through_its_exchange_goes_to_its_queue_alone_from_then_on(
    ways: dict[str, Program], team: Client
) -> None:
    fail(team, KEY)
    come_back(ways["exchange"], team)
    team.channel.queue_purge(AUDIT)
    team.reject_all(ORIGIN)
    team.await_depth(RETRY_QUEUE, 1)
    assert ways["queue"].run("drain", "--json").told["counts"]["delayed"] == 1
    team.await_depth("retry-queue-2", 1)
    bring_back(ways["queue"])
    assert (exchanges(team, ORIGIN), team.depth(AUDIT)) == ([(RETURN, KEY)], 0)


def test_what_is_in_the_dead_store_takes_the_new_way(ways: dict[str, Program], team: Client) -> None:
    fail(team, "payment.taken")
    assert ways["queue"].run("drain", "--json").told["counts"]["dead_lettered"] == 1
    assert ways["queue"].run("ingest", "--json").told["counts"]["recorded"] == 1
    done = ways["exchange"].run("messages", "replay", "1")
    assert done.code == 0, done.said
    team.await_depth(AUDIT, 1)
    assert exchanges(team, ORIGIN) == exchanges(team, AUDIT) == [("shop", "payment.taken")]
