"""Clients for Node as their own documentation sets them up, and dlqbatch beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from client_loop import DYING, ONCE, WORKERS, assert_one_group_for_each_cause

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
