"""Retries that the broker itself delays (RabbitMQ 4.3.1): everything that keeps them from being so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from dlqbatch.broker.facts import BrokerFacts, QueueFacts, listed
from dlqbatch.doctor import commands
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.virtual_host import Deployment, VirtualHost
from dlqbatch.topology.model import Policy
from dlqbatch.topology.plan import REFUSED, SAME, TO_CREATE
from dlqbatch.topology.policies import examine as standing_of
from dlqbatch.topology.policies import too_old

_FEWEST_REJECTED: Final = 10
"""Fewer may be a consumer that knows which failures are final."""


def examine(vhost: VirtualHost) -> Iterator[Finding]:
    if too_old(vhost.broker.version):
        return
    for part in vhost.deployment.parts:
        for policy in part.policies:
            yield from _policy(vhost, policy)


def examine_broker(broker: BrokerFacts, deployment: Deployment) -> Iterator[Finding]:
    """Whether the broker can delay retries at all."""
    queues = deployment.native_queues
    if queues and (why := too_old(broker.version)):
        yield Finding(Code.NATIVE_UNSUPPORTED, listed(queues), why, "dlqbatch topology plan ladder")


def _policy(vhost: VirtualHost, policy: Policy) -> Iterator[Finding]:
    queue = vhost.there.queues.get(policy.queue)
    standing = standing_of(policy, vhost.broker.version, vhost.there.policies, queue)
    if queue is None:
        if policy.queue not in vhost.deployment.own_queues:
            what = "there is no such queue, so that nothing is retried; its workers declare it, as a quorum queue"
            yield Finding(Code.NATIVE_QUEUE_MISSING, policy.queue, what, commands.APPLY)
        return
    words = "; ".join(f"{each.argument} is {each.found}, wanted is {each.wanted}" for each in standing.differences)
    if queue.type != "quorum":
        fix = vhost.declare_anew(queue, {"x-queue-type": "quorum"})
        yield Finding(Code.NATIVE_NOT_QUORUM, queue.name, standing.why, fix)
    elif standing.state == TO_CREATE:
        what = f"the policy '{policy.name}' is not there, so that the broker does not delay its retries: {words}"
        yield Finding(Code.NATIVE_POLICY_MISSING, queue.name, what, commands.APPLY)
    elif standing.state != SAME:
        what = f"its retries are not as the settings want them: {words}"
        if standing.why:
            what = f"{what}. {standing.why}"
        yield Finding(Code.NATIVE_POLICY_DIFFERS, queue.name, what, _in_effect(vhost, policy, queue, standing.state))
    else:
        yield from _used_wrongly(vhost, policy, queue)


def _in_effect(vhost: VirtualHost, policy: Policy, queue: QueueFacts, state: str) -> str:
    """The command that takes away what goes before our policy, or gives its options to the policy that applies."""
    if state != REFUSED:
        return commands.APPLY
    declared = [name for name, value in policy.definition.items() if queue.arguments.get(f"x-{name}", value) != value]
    if declared:
        return vhost.declare_anew(queue, {}, *declared)
    operator = {} if queue.operator is None else queue.operator.definition
    options = [name for name, value in policy.definition.items() if operator.get(name, value) != value]
    if options:
        return vhost.without_option(queue, *options)
    # With what the other policy says, also where ours has the same priority and may be the one that applies now.
    others = (each for each in vhost.there.policies.matching(queue.name, queue.type) if each.name != policy.name)
    return commands.set_policy(vhost.broker, replace(queue, policy=next(others, queue.policy)), policy.definition)


def _used_wrongly(vhost: VirtualHost, policy: Policy, queue: QueueFacts) -> Iterator[Finding]:
    """The policy has its effect; its consumers, or a TTL, can still keep a message from being retried."""
    if queue.rejected >= _FEWEST_REJECTED and not queue.redelivered:
        what = (
            f"{queue.rejected} of {queue.delivered} deliveries were rejected without requeue and none was ever tried "
            "again: that goes straight to the dead letters. basic.reject with requeue is what the broker delays and "
            "counts"
        )
        yield Finding(Code.NATIVE_NEVER_RETRIED, queue.name, what, commands.list_consumers(vhost.broker))
    retry = policy.delayed_retry
    if queue.ttl is not None and queue.ttl <= sum(retry.delays):
        what = (
            f"its retries are delayed by {sum(retry.delays)} ms together, and its messages expire after {queue.ttl} "
            "ms: some are dead before their last retry"
        )
        fix = vhost.without_option(queue, "message-ttl")
        yield Finding(Code.NATIVE_TTL_SHORT, queue.name, what, fix)
