"""Clients for Node as their own documentation sets them up, and dlqbatch beside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from client_loop import DYING, ONCE, WORKERS, assert_one_group_for_each_cause, code_of

if TYPE_CHECKING:
    from client_loop import Loop

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("on_every_broker")
def test_rascal_annotates_a_failure_and_handles_what_comes_back(loop: Loop, node_modules: dict[str, str]) -> None:
    loop.start("node", str(WORKERS / "rascal_worker.js"), ONCE, *DYING, **node_modules)
    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.created"}
    assert rows["declined-1"]["error_type"] == "PaymentDeclined"
    loop.replay("orders")


def start_with_code(
    loop: Loop, variables: dict[str, str], worker: str, page: str, *arguments: str, block: int = 0
) -> None:
    """A worker that runs a block of a page about clients with the recipe for Node."""
    (recipe,) = code_of("../failure-contract.md", "js")
    (loop.folder / "recipe.js").write_text(recipe)
    (loop.folder / "page.js").write_text(code_of(page, "js")[block])
    loop.start("node", str(WORKERS / worker), *arguments, **variables)


def whole_way(loop: Loop, queue: str, event: str) -> None:
    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {event}
    assert rows["declined-1"]["error_type"] == "PaymentDeclined"
    loop.replay(queue)


@pytest.mark.parametrize(("kind", "block"), [("microservices", 0), ("golevelup", 1)])
@pytest.mark.usefixtures("on_every_broker")
def test_nest_hands_over_what_failed_with_its_error(
    loop: Loop, node_modules: dict[str, str], kind: str, block: int
) -> None:
    channel = loop.team.channel
    channel.exchange_declare("shop", "topic", durable=True)
    channel.queue_declare("orders", durable=True)
    channel.queue_bind("orders", "shop", "#")
    for name in (ONCE, *DYING):
        order = {"name": name}
        body = order if kind == "golevelup" else {"pattern": "order.created", "data": order}
        loop.team.publish("shop", "order.created", json.dumps(body).encode())
    start_with_code(loop, node_modules, "nest_worker.js", "nestjs.md", kind, block=block)
    whole_way(loop, "orders", "order.created")


@pytest.mark.usefixtures("on_every_broker")
def test_moleculer_hands_over_what_failed_with_its_error(loop: Loop, moleculers_node_modules: dict[str, str]) -> None:
    loop.program = loop.program.but(origins_allowed="shop.orders")
    start_with_code(loop, moleculers_node_modules, "moleculer_worker.js", "moleculer.md", ONCE, *DYING)
    whole_way(loop, "shop.orders", "")
