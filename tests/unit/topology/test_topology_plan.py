from __future__ import annotations

from dlqbatch.topology.kinds import Ladder
from dlqbatch.topology.model import Binding, Exchange, Queue, Topology
from dlqbatch.topology.plan import (
    DIFFERENT,
    NOT_KNOWN,
    SAME,
    TO_CREATE,
    Difference,
    Reading,
    compare,
    definitions,
    differing,
)

TOPOLOGY = Topology((Exchange("e"),), (Queue("q", {"x-message-ttl": 5}),), (Binding("e", "k", "q"),))
ALL_THERE = {("exchange", "e"): (), ("queue", "q"): ()}


def states(reading: Reading) -> list[str]:
    return [item.state for item in compare(TOPOLOGY, reading).items]


def test_on_an_empty_broker_everything_is_to_be_created() -> None:
    plan = compare(TOPOLOGY, Reading({}, None))
    assert [item.state for item in plan.items] == [TO_CREATE] * 3
    assert not plan.is_done


def test_what_is_there_and_equal_needs_nothing() -> None:
    plan = compare(TOPOLOGY, Reading(ALL_THERE, frozenset(TOPOLOGY.bindings)))
    assert [item.state for item in plan.items] == [SAME] * 3
    assert plan.is_done


def test_a_binding_that_is_missing_is_to_be_created_and_one_nobody_tells_of_is_not_known() -> None:
    assert states(Reading(ALL_THERE, frozenset())) == [SAME, SAME, TO_CREATE]
    assert states(Reading(ALL_THERE, None)) == [SAME, SAME, NOT_KNOWN]


def test_what_may_not_be_compared_is_not_known() -> None:
    assert states(Reading({**ALL_THERE, ("queue", "q"): None}, None))[1] == NOT_KNOWN


def test_only_a_delay_queue_of_which_nothing_but_the_ttl_differs_can_be_changed() -> None:
    ttl, other = Difference("x-message-ttl", "9", "5"), Difference("x-overflow", "none", "reject-publish")
    plan = compare(TOPOLOGY, Reading({**ALL_THERE, ("queue", "q"): (ttl,)}, None))
    assert [item.name for item in plan.of(DIFFERENT)] == ["q"]
    assert plan.ttl_changes(["q"]) == ("q",)
    assert plan.ttl_changes(["another"]) == ()
    plan = compare(TOPOLOGY, Reading({**ALL_THERE, ("queue", "q"): (ttl, other)}, None))
    assert plan.ttl_changes(["q"]) == ()


def test_every_argument_that_differs_is_named_with_both_values() -> None:
    assert differing({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "d": "x"}) == (
        Difference("b", "9", "2"),
        Difference("c", "none", "3"),
        Difference("d", "x", "none"),
    )


def test_definitions_hold_every_part_of_the_topology() -> None:
    told = definitions(Ladder().topology(), "v")
    assert {kind: len(parts) for kind, parts in told.items()} == {"exchanges": 6, "queues": 8, "bindings": 9}  # type: ignore[arg-type,misc]
