from __future__ import annotations

import pytest

from dlqbatch.topology.kinds import Pipeline
from dlqbatch.topology.model import Binding, Exchange

CLASSIC = {"x-queue-type": "classic"}
STEP = Pipeline("settlement.requested", "settlements")


def test_the_topology_is_the_originals() -> None:
    topology = STEP.topology()
    assert set(topology.exchanges) == {
        Exchange("settlement.requested", "fanout"),
        Exchange("dlq.settlement.requested", "fanout"),
    }
    assert {queue.name: dict(queue.arguments) for queue in topology.queues} == {
        "settlements": CLASSIC | {"x-dead-letter-exchange": "dlq.settlement.requested", "x-message-ttl": 300_000},
        "dlq.settlement.requested": CLASSIC,
    }
    assert set(topology.bindings) == {
        Binding("settlement.requested", "", "settlements"),
        Binding("dlq.settlement.requested", "", "dlq.settlement.requested"),
    }


@pytest.mark.parametrize("unlimited", [False, True])
def test_a_quorum_queue_counts_three_more_deliveries_and_its_dead_letters_none(unlimited: bool) -> None:
    step = Pipeline("e", "q", queue_type="quorum")
    arguments = {queue.name: queue.arguments for queue in step.topology(unlimited_deliveries=unlimited).queues}
    assert arguments["q"] == {
        "x-dead-letter-exchange": "dlq.e",
        "x-message-ttl": 300_000,
        "x-queue-type": "quorum",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-delivery-limit": 3,
    }
    assert arguments["dlq.e"] == {"x-queue-type": "quorum"} | ({"x-delivery-limit": -1} if unlimited else {})


def test_only_its_dead_letters_are_ours() -> None:
    assert STEP.own_queues == {"dlq.settlement.requested"}
    assert STEP.own_exchanges == {"dlq.settlement.requested"}
    assert STEP.dead_letter_queues == ("dlq.settlement.requested",)
    assert STEP.delay_queues == ()
