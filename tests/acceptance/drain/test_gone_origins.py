"""A queue that messages failed in is gone when they are to come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from program import DLQ, Client, Program

if TYPE_CHECKING:
    from scripts.servers.management import Management

ORIGIN = "orders-queue"
pytestmark = pytest.mark.usefixtures("on_every_broker")


def delayed(program: Program, team: Client, *bodies: bytes) -> None:
    """They have failed, and their delay is over."""
    team.fail(ORIGIN, "orders.created", *bodies)
    assert program.run("drain", "--json").told["counts"]["delayed"] == len(bodies)
    team.await_depth("retry-queue-1", len(bodies))


@pytest.mark.quick
def test_behind_an_exchange_that_leads_nowhere_the_queue_is_asked_for(program: Program, team: Client) -> None:
    through = program.but(return_via="exchange")
    team.make_origin(ORIGIN)
    delayed(through, team, b"1", b"2")
    # It is there, and nobody brings it messages any more: that may be mended, so they wait.
    team.channel.queue_unbind(ORIGIN, "orders", "#")
    done = through.run("drain", "--json")
    assert (done.code, done.told["reasons"]) == (3, {"origin-unroutable": 2}), done.said
    assert team.depth("retry-queue-1") == 2
    team.channel.queue_delete(ORIGIN)
    done = through.run("drain", "--json")
    assert (done.code, done.told["reasons"]) == (0, {"origin-gone": 2}), done.said
    assert done.told["counts"]["dead_lettered"] == 2
    assert {message.body for message in team.contents(DLQ)} == {b"1", b"2"}


def test_the_way_back_to_a_queue_that_is_gone_is_taken_away(
    program: Program, team: Client, management: Management
) -> None:
    team.make_origin(ORIGIN, "orders")
    team.make_origin("stays", "others")
    team.fail("stays", "orders.created", b"2", exchange="others")
    team.fail(ORIGIN, "orders.created", b"1")
    assert program.run("drain", "--json").told["counts"]["delayed"] == 2
    team.await_depth("retry-queue-1", 2)
    assert program.run("drain", "--json").told["counts"]["returned"] == 2
    assert team.reject_all("stays") == team.reject_all(ORIGIN) == 1
    team.await_depth("retry-queue", 2)
    assert ways_back(management) == {f"dlqbatch.return.{ORIGIN}", "dlqbatch.return.stays"}
    assert program.run("drain", "--json").told["counts"]["delayed"] == 2
    team.await_depth("retry-queue-2", 2)
    team.channel.queue_delete(ORIGIN)
    done = program.run("drain", "--json")
    assert done.told["reasons"] == {"origin-gone": 1}, done.said
    assert ways_back(management) == {"dlqbatch.return.stays"}


def ways_back(management: Management) -> set[str]:
    return {one["name"] for one in management.exchanges() if one["name"].startswith("dlqbatch.return.")}
