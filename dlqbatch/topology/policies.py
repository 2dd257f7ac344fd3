"""Policies of ours for delayed retry: whether one can be set, and whether it has its effect.

One policy of users applies to a queue, so ours would take away what another one says: where there is another one, ours
is refused. What counts is the effect: where others set the same options, nothing is to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from dlqbatch.broker.facts import Policies, QueueFacts, QueuePolicy
from dlqbatch.broker.versions import DELAYS_BY_POLICY
from dlqbatch.errors import DlqbatchError
from dlqbatch.topology.model import QUEUE_TYPE, Policy
from dlqbatch.topology.plan import DIFFERENT, NONE, REFUSED, SAME, TO_CREATE, Difference, Standing, differing

_NEEDED: Final = "RabbitMQ 4.3.1 or later"
INSTEAD: Final = "a ladder delays on every broker and for every queue (docs/which-topology.md)"


class PolicyRefused(DlqbatchError):
    exit_code = 2

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"the policy '{name}' was not set: {why.rstrip('.')}. No message was moved.")


def too_old(version: tuple[int, ...]) -> str:
    """Why this broker cannot delay retries by a policy; empty if it can."""
    if version >= DELAYS_BY_POLICY:
        return ""
    return f"only {_NEEDED} delays retries by a policy, and this is {_dotted(version)}; {INSTEAD}"


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def examine(policy: Policy, version: tuple[int, ...], policies: Policies, queue: QueueFacts | None) -> Standing:
    """How the policy stands on a broker of this version; `queue` is None while there is no such queue."""
    found = policies.named(policy.name)
    if impossible := _impossible(policy, version, found, queue):
        return impossible
    queue = queue or QueueFacts(policy.queue, "quorum")
    matching = policies.matching(policy.queue, "quorum")
    # Which of several policies with the same priority applies is the broker's to choose.
    first = [each for each in matching if each.priority == matching[0].priority]
    now = [_differences(policy, version, queue, each) for each in first or (None,)]
    if not any(now):
        return Standing(SAME)
    missing = next(filter(None, now))
    others = [each for each in matching if each.name != policy.name]
    if others:
        return Standing(REFUSED, missing, _other_policy(policy, others[0]))
    if fixed := _differences(policy, version, queue, QueuePolicy(policy.name, definition=policy.definition)):
        names = " and ".join(each.argument for each in fixed)
        why = (
            f"{names} of queue '{policy.queue}' is set by its declaration or by an operator policy, and that goes "
            "before a policy: declare it anew without that (docs/which-topology.md#by-arguments), or take it out there"
        )
        return Standing(REFUSED, fixed, why)
    return Standing(TO_CREATE if found is None else DIFFERENT, missing)


def _impossible(
    policy: Policy, version: tuple[int, ...], found: Mapping[str, object] | None, queue: QueueFacts | None
) -> Standing | None:
    """The refusal of a policy that this broker or this queue cannot have, or whose name somebody else has taken."""
    if why := too_old(version):
        return Standing(REFUSED, (Difference("RabbitMQ", _dotted(version), _NEEDED),), why)
    if queue is not None and queue.type != "quorum":
        why = f"queue '{queue.name}' is a {queue.type} queue, and only a quorum queue delays retries; {INSTEAD}"
        return Standing(REFUSED, (Difference(QUEUE_TYPE, queue.type, "quorum"),), why)
    if found is None or policy.is_form_of(found):
        return None
    shown = {part: found.get(part) for part in ("pattern", "apply-to", "definition")}
    differences = differing({part: policy.body[part] for part in shown}, shown)
    why = "dlqbatch has not made the policy that has this name, and does not replace it; give that one another name"
    return Standing(REFUSED, differences, why)


def _other_policy(policy: Policy, other: QueuePolicy) -> str:
    both = json.dumps({**other.definition, **policy.definition})
    return (
        f"policy '{other.name}' (priority {other.priority}) is for queue '{policy.queue}' too, and only one policy "
        f"applies to a queue: put these options into that one, or into one for this queue alone with a higher "
        f"priority: {both}"
    )


def _differences(
    policy: Policy, version: tuple[int, ...], queue: QueueFacts, applying: QueuePolicy | None
) -> tuple[Difference, ...]:
    """Every option of the policy that is not in effect on the queue while `applying` is the policy that applies."""
    queue = replace(queue, policy=applying)
    return differing(policy.definition, {name: _in_effect(queue, name, version) for name in policy.definition})


def _in_effect(queue: QueueFacts, name: str, version: tuple[int, ...]) -> object:
    found: Mapping[str, object] = {
        "delayed-retry-type": queue.delayed_retry_type,
        "delayed-retry-min": queue.retry_delay("delayed-retry-min"),
        "delayed-retry-max": queue.retry_delay("delayed-retry-max"),
        "delivery-limit": queue.delivery_limit(version),
        "overflow": queue.overflow,
        "dead-letter-strategy": queue.text("dead-letter-strategy") or "at-most-once",
    }
    value = found[name] if name in found else queue.text(name)
    return NONE if value is None else value
