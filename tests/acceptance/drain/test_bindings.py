"""A binding that is gone is found before a message is delayed into a queue that leads nowhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from limited_users import EVERYTHING, World, documented, load
from program import RETRY_QUEUE, Client, Program, eventually

from dlqbatch import jobs
from dlqbatch.drain.job import _declared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

ORIGIN = "orders-queue"
WAY_OUT = ("retry-queue-1", "retry-exchange-1", "retry.#.1")
SET = {
    "ladder": "false",
    "topology.shop.kind": "per-queue",
    "topology.shop.ttl": "100ms",
    "topology.shop.queue": "checkout",
    "topology.shop.exchange": "shop",
}


@pytest.fixture
def world(broker_url: str, management: Management, team: Client, policy_file: Path, tmp_path: Path) -> World:
    return World(broker_url, management, team, policy_file, tmp_path)


@contextmanager
def login(world: World, name: str, **lacks: str) -> Iterator[dict[str, str]]:
    grant = EVERYTHING if name == "everything" else documented()[name]
    with world.user(grant._replace(**lacks)) as given:
        yield given | {"tier_ttls": "100ms,1h,1h"}


def drained(given: dict[str, str]) -> dict[str, Any]:
    report = jobs.run("drain", load(given), jobs.RunOptions()).as_dict()
    report["counts"] = {name: number for name, number in report["counts"].items() if number}  # type: ignore[attr-defined]
    return report


@pytest.mark.parametrize("name", ["everything", "drain", "drain-plain"])
def test_who_may_bind_binds_again_before_a_message_is_delayed(world: World, name: str) -> None:
    with login(world, name) as given:
        world.furnish(tier_ttls=given["tier_ttls"])
        drained(given)  # from here on it is a warm start
        for was_warm in (True, False):
            if not was_warm:
                _declared.clear()
            world.team.channel.queue_unbind(*WAY_OUT)
            world.team.fail(ORIGIN, "orders.created", b"warm" if was_warm else b"cold")
            told = drained(given)
            assert (told["outcome"], told["counts"]) == ("ok", {"got": 1, "delayed": 1}), told
            world.team.await_depth("retry-queue-1", 1)
            assert drained(given)["counts"] == {"got": 1, "returned": 1}
            world.team.channel.queue_purge(ORIGIN)


@pytest.mark.usefixtures("on_every_broker")
def test_who_may_not_bind_asks_the_management_api_and_else_delays_nothing(world: World) -> None:
    write = r"^(route-delay|dlq-exchange|dlqbatch\.return\.orders-queue|orders-queue)$"
    team = world.team
    with login(world, "drain", write=write, tags="management") as given:
        world.furnish(tier_ttls=given["tier_ttls"])
        team.fail(ORIGIN, "orders.created", b"1")
        team.fail(ORIGIN, "nobody.knows", b"2")
        team.channel.queue_unbind(*WAY_OUT)
        told = drained(given)
        assert (told["outcome"], told["counts"]) == ("partial", {"got": 2, "dead_lettered": 1, "left": 1}), told
        assert told["reasons"]["binding-missing"] == 1
        assert any("'retry-exchange-1' is not bound to 'retry-queue-1'" in one for one in told["warnings"]), told
        # Nobody answers: nothing is known, and nothing is delayed.
        told = drained(given | {"management_url": "http://127.0.0.1:9"})
        assert (told["outcome"], told["reasons"]) == ("partial", {"binding-not-seen": 1}), told
        assert any("docs/permissions.md" in one for one in told["warnings"]), told
        # It is bound again, and the API says so.
        queue, exchange, key = WAY_OUT
        team.channel.queue_bind(queue, exchange, key)
        told = drained(given)
        assert (told["outcome"], told["counts"]) == ("ok", {"got": 1, "delayed": 1}), told
    team.await_depth("retry-queue-1", 1)


def test_the_binding_of_a_queue_with_a_delay_of_its_own_is_made_again(world: World) -> None:
    with login(world, "drain-per-queue") as given:
        given.update(SET)
        world.furnish(**SET)
        drained(given)
        world.team.channel.queue_unbind("checkout", "shop", "checkout")
        death = {"queue": "checkout", "exchange": "shop", "routing-keys": ["orders.created"], "reason": "rejected"}
        world.team.publish("", "checkout.retry", b"1", {"x-death": [death | {"count": 1}]})
        told = drained(given)
        assert told["counts"] == {"got": 1, "delayed": 1}, told
        world.team.await_depth("checkout", 1)


def test_a_delay_queue_that_lost_its_binding_costs_one_run_and_no_message(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"1")
    team.channel.queue_unbind("queue.delay.1", "route-delay", "binding.#.1")
    done = program.run("drain", "--json")
    assert (done.code, done.told["reasons"]) == (3, {"unroutable": 1}), done.said
    done = program.run("drain", "--json")
    assert (done.code, done.told["counts"]["delayed"]) == (0, 1), done.said
    assert eventually(lambda: team.depth("retry-queue-1") == 1)
    assert team.depth(RETRY_QUEUE) == 0
