"""Whether a policy of ours for delayed retry can be set, and whether it has its effect: no broker is asked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.broker.facts import Policies, QueueFacts
from dlqbatch.topology.kinds import Native
from dlqbatch.topology.model import DelayedRetry, Policy
from dlqbatch.topology.plan import DIFFERENT, REFUSED, SAME, TO_CREATE
from dlqbatch.topology.policies import examine

(POLICY,) = Native("orders", 1_000, 30_000).topology().policies
RELEASE = (4, 3, 1)
QUORUM = {"name": "orders", "type": "quorum"}


def state(users: list[dict[str, Any]], operators: list[dict[str, Any]] | None = None, **queue: Any) -> str:
    policies = Policies(users, operators or [])
    return examine(POLICY, RELEASE, policies, policies.on(QUORUM | queue)).state


def made(name: str, priority: int = 0, **definition: object) -> dict[str, Any]:
    options = {option.replace("_", "-"): value for option, value in definition.items()}
    return {"name": name, "pattern": "^orders$", "apply-to": "queues", "priority": priority, "definition": options}


OURS = {"name": POLICY.name, **POLICY.body}


def test_it_is_to_create_the_same_or_with_other_values() -> None:
    assert state([]) == TO_CREATE
    assert state([OURS]) == SAME
    assert state([OURS | {"definition": {**POLICY.definition, "delivery-limit": 9}}]) == DIFFERENT


def test_a_lesser_policy_of_others_beside_ours_in_effect_is_no_matter() -> None:
    assert state([OURS, made("theirs", 0, max_length=5)]) == SAME
    assert state([OURS, made("theirs", 1, max_length=5)]) == REFUSED
    assert state([made("theirs", 0, max_length=5)]) == REFUSED


@pytest.mark.parametrize("release", [(3, 10, 8), (4, 2, 9), (4, 3, 0), (2, 4, 1)])
def test_no_broker_before_4_3_1(release: tuple[int, ...]) -> None:
    standing = examine(POLICY, release, Policies([], []), QueueFacts("orders", "quorum"))
    assert standing.state == REFUSED
    assert "only RabbitMQ 4.3.1 or later" in standing.why


@given(
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.integers(1, 30),
    st.dictionaries(
        st.sampled_from(["delayed-retry-min", "delayed-retry-max", "delivery-limit"]), st.integers(1, 10_000)
    ),
    st.booleans(),
)
def test_what_is_the_same_or_to_create_has_its_effect_once_it_is_there(
    least: int, more: int, limit: int, theirs: dict[str, int], by_operator: bool
) -> None:
    """As RabbitMQ 4.3.6 joins a policy and an operator policy: the larger minimum, the smaller maximum and limit."""
    policy = Policy("orders", DelayedRetry(least, least + more, limit))
    ours = {"name": policy.name, **policy.body}
    other = {**made("theirs", 0), "definition": theirs}
    policies = Policies([ours] if by_operator else [ours, other], [other] if by_operator else [])
    standing = examine(policy, RELEASE, policies, QueueFacts("orders", "quorum", operator=policies.on(QUORUM).operator))
    in_effect = {
        "delayed-retry-min": max(least, theirs.get("delayed-retry-min", 0)),
        "delayed-retry-max": min(least + more, theirs.get("delayed-retry-max", 20_000)),
        "delivery-limit": min(limit, theirs.get("delivery-limit", 10_000)),
    }
    wanted = {option: policy.definition[option] for option in in_effect}
    assert (standing.state == SAME) == (not by_operator or in_effect == wanted)


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_its_pattern_matches_its_queue_alone(queue: str, other: str) -> None:
    policy = Policy(queue, DelayedRetry(1, 1, 1))
    policies = Policies([{"name": policy.name, **policy.body}], [])
    assert len(policies.matching(queue, "quorum")) == 1
    assert bool(policies.matching(other, "quorum")) == (other in (queue, f"{queue}\n"))
    assert not policies.matching(queue, "classic")
