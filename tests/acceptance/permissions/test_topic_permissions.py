"""A login that may publish with exactly our routing keys, by topic permissions, can do all that a drain has to."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from program import DLQ, RETRY_QUEUE, Client, Program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.servers.management import Management

pytestmark = pytest.mark.usefixtures("on_every_broker")

ORIGIN = "orders-queue"


@pytest.fixture
def limited(program: Program, broker_url: str, management: Management) -> Iterator[Program]:
    """The program as such a user."""
    name = f"user-{secrets.token_hex(4)}"
    management.put(f"users/{name}", {"password": name, "tags": ""})
    management.put(f"permissions/{management.vhost}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    for exchange, keys in (("route-delay", r"^binding\."), ("dlq-exchange", "^dlq-routing-key$")):
        rights = {"exchange": exchange, "write": keys, "read": ".*"}
        management.put(f"topic-permissions/{management.vhost}/{name}", rights)
    yield program.but(broker_url=broker_url.replace("guest:guest", f"{name}:{name}"))
    management.delete(f"users/{name}")


def test_a_drain_with_topic_permissions_for_its_keys_moves_everything(limited: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"delayed")
    team.fail(ORIGIN, "payment.card", b"exhausted")
    team.await_depth(RETRY_QUEUE, 2)
    told = limited.run("drain", "--json").told
    assert (told["outcome"], told["counts"]["delayed"], told["counts"]["dead_lettered"]) == ("ok", 1, 1), told
    assert "warnings" not in told
    team.await_depth("retry-queue-1", 1)
    assert limited.run("drain", "--json").told["counts"]["returned"] == 1
    assert [message.body for message in team.contents(ORIGIN)] == [b"delayed"]
    assert [message.body for message in team.contents(DLQ)] == [b"exhausted"]


def test_a_single_key_that_is_forbidden_is_left_and_stops_no_other(limited: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"delayed")
    team.fail(ORIGIN, "payment.card", b"exhausted")
    team.await_depth(RETRY_QUEUE, 2)
    told = limited.but(dlq_routing_key="dlq-exchange").run("drain", "--json").told
    assert (told["counts"]["delayed"], told["reasons"]) == (1, {"publish-refused": 1}), told
