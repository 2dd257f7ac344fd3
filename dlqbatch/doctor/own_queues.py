"""Our own queues and exchanges: what others have done to them, and what we have left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from dlqbatch.amqp.retry_headers import RETURN_PREFIX
from dlqbatch.broker.facts import BindingFacts, BrokerFacts, QueueFacts, listed
from dlqbatch.doctor import commands
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.virtual_host import Deployment, Part, VirtualHost

_UNLIMITED: Final = ("x-delivery-limit", -1)
_TTL: Final = "x-message-ttl"
_TIER: Final = re.compile(r"(.+[.-])\d+")
_DELETED_AT_ONCE: Final = 100
"""Exchanges in one command; the next look names the rest."""


def examine(vhost: VirtualHost) -> Iterator[Finding]:
    for queue in vhost.kept:
        yield from _cut_short(vhost, queue)
        yield from _coming_back(vhost, queue)
        yield from _taken_by_others(vhost, queue)
        yield from _overheard(vhost, queue)
        yield from _only_a_delay(vhost, queue)
    for binding in vhost.there.bindings:
        yield from _bound_by_others(vhost, binding)
    yield from _returns_left_behind(vhost)
    yield from _tiers_left_behind(vhost)


def examine_topologies(broker: BrokerFacts, deployment: Deployment) -> Iterator[Finding]:
    """What is missing of our topologies, or differs from the settings."""
    for part in deployment.parts:
        yield from _part(broker, part)


def _part(broker: BrokerFacts, part: Part) -> Iterator[Finding]:
    where = f"topology '{part.name}'"
    wanted = {("exchange", name) for name in part.exchanges} | {("queue", name) for name in part.queues}
    missing = wanted & broker.missing
    if missing == wanted:
        what = "nothing of it is on the broker; the first drain declares it, if it may"
        yield Finding(Code.TOPOLOGY_NOT_APPLIED, where, what, commands.APPLY)
        return
    unbound: list[BindingFacts] = []
    if broker.map is not None:
        there = frozenset(broker.map.bindings)
        unbound = [one for one in part.bindings if one not in there and not _relayed(broker, one)]
    if missing:
        what = f"not on the broker: {listed(name for _, name in missing)}"
        yield Finding(Code.TOPOLOGY_INCOMPLETE, where, what, commands.APPLY)
    elif unbound:
        names = listed(f"{one.source} --{one.key}--> {one.destination}" for one in unbound)
        what = f"bindings are missing, so that what is published there goes nowhere: {names}"
        yield Finding(Code.TOPOLOGY_INCOMPLETE, where, what, commands.APPLY)
    if broker.map is None:
        return
    for name, kind in part.exchanges.items():
        exchange = broker.map.exchanges.get(name)
        if exchange is not None and exchange.type != kind:
            what = f"the exchange is {exchange.type}, the settings want {kind}: a run that declares it ends with 2"
            path = ["exchanges", broker.vhost, name]
            fix = f"{commands.make(broker, path, {}, 'DELETE')}?if-unused=true && {commands.APPLY}"
            yield Finding(Code.TOPOLOGY_DIFFERS, name, what, fix)
    for name, arguments in part.queues.items():
        queue = broker.map.queues.get(name)
        if queue is not None:
            yield from _differences(broker, part, queue, arguments)


def _relayed(broker: BrokerFacts, binding: BindingFacts) -> bool:
    """While a delay is being changed its binding leads to another queue."""
    relay = BindingFacts(binding.source, binding.key, f"{binding.destination}.relay")
    return broker.map is not None and relay in broker.map.bindings


def _differences(
    broker: BrokerFacts, part: Part, queue: QueueFacts, arguments: Mapping[str, object]
) -> Iterator[Finding]:
    found = {name: value for name, value in queue.arguments.items() if name != "x-queue-type"}
    wanted = {name: value for name, value in arguments.items() if name != "x-queue-type"}
    if _UNLIMITED[0] not in found and wanted.get(_UNLIMITED[0]) == _UNLIMITED[1]:
        # Declared by an older broker, which knew no such argument; the drain takes it as it is.
        del wanted[_UNLIMITED[0]]
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    words = [f"{name} is {found.get(name, 'none')}, the settings want {wanted.get(name, 'none')}" for name in differing]
    kind = arguments.get("x-queue-type")
    if kind is not None and kind != queue.type:
        words.append(f"it is {queue.type}, the settings want {kind}")
    if not queue.durable:
        words.append("it is not durable")
    if not words:
        return
    if differing == [_TTL] and len(words) == 1 and queue.name in part.delay_queues:
        fix = f"{commands.APPLY} --change-ttl"
    else:
        fix = f"{commands.delete_if_empty(broker, queue)} && {commands.APPLY}"
    yield Finding(Code.TOPOLOGY_DIFFERS, queue.name, f"{'; '.join(words)}: a run that declares it ends with 2", fix)


def _cut_short(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    if queue.name not in vhost.deployment.delay_queues:
        return
    declared = queue.arguments.get("x-message-ttl")
    if isinstance(declared, int) and queue.ttl is not None and queue.ttl < declared:
        what = f"a policy lets its messages leave after {queue.ttl} ms, though it is declared with {declared} ms"
        fix = vhost.without_option(queue, "message-ttl")
        yield Finding(Code.DELAY_CUT_SHORT, queue.name, what, fix)


def _coming_back(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """What waits to be returned, or is a dead letter, must not fail once more by itself."""
    own = vhost.deployment.inner_queues & vhost.deployment.read
    exchange = queue.dead_letter_exchange
    if exchange is None or queue.name not in own - vhost.deployment.first_stage:
        return
    keys: tuple[str | None, ...] = (queue.dead_letter_key,)
    if queue.dead_letter_key is None:
        keys = vhost.routes.keys_of(queue) or (None,)
    led = frozenset[str]().union(*(vhost.routes.possible(exchange, key) for key in keys))
    back = led & vhost.deployment.first_stage
    if back:
        what = (
            f"what leaves it by a TTL, a bound or a rejection goes back to {listed(back)} and is taken for a new "
            "failure there: so a message goes round for ever"
        )
        fix = vhost.without_option(queue, "dead-letter-exchange", "dead-letter-routing-key", "message-ttl")
        yield Finding(Code.DEAD_LETTERS_RETURN, queue.name, what, fix)


def _taken_by_others(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    ours = vhost.deployment.inner_queues - vhost.deployment.dead_letter_queues
    if queue.name in ours and queue.strangers:
        what = f"{queue.strangers} consumers that are not dlqbatch take what is to be retried; what they take is gone"
        fix = commands.rabbitmqctl(vhost.broker, "list_consumers", "queue_name", "channel_pid", "consumer_tag")
        yield Finding(Code.CONSUMER_ON_OURS, queue.name, what, fix)


def _overheard(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """What leaves a delay queue of a per-queue set comes to every queue that is bound with the same key."""
    exchange, key = queue.dead_letter_exchange, queue.dead_letter_key
    if exchange is None or queue.name not in vhost.deployment.delay_queues:
        return
    declared = (one for part in vhost.deployment.parts for one in part.bindings)
    homes = {one.destination for one in declared if (one.source, one.key) == (exchange, key)}
    others = vhost.routes.possible(exchange, key) - homes - vhost.deployment.inner_queues
    if homes and others:
        what = (
            f"each message that returns to {listed(homes)} by exchange '{exchange}' with key '{key}' also comes to "
            f"{listed(others)}, once more for every retry"
        )
        fix = commands.rabbitmqctl(vhost.broker, "list_bindings", "source_name", "routing_key", "destination_name")
        yield Finding(Code.RETURNS_OVERHEARD, queue.name, what, fix)


def _only_a_delay(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """A queue of the user's that holds dead letters for a while before it hands them on to the ladder."""
    feeders = vhost.fed.get(queue.name, frozenset()) - vhost.deployment.inner_queues
    if queue.name not in vhost.origins & vhost.delays or queue.name in vhost.deployment.own_queues or not feeders:
        return
    what = (
        f"it has a TTL and no consumer and only hands on the dead letters of {listed(feeders)}: a delay before the "
        "ladder, not a queue that messages return to"
    )
    fixes = (vhost.to_retry(vhost.there.queues[name]) for name in sorted(feeders) if name in vhost.there.queues)
    yield Finding(Code.ORIGIN_ONLY_DELAYS, queue.name, what, " && ".join(fixes))


def _bound_by_others(vhost: VirtualHost, binding: BindingFacts) -> Iterator[Finding]:
    """A second way into a queue of ours makes two of each message, or one that we know nothing of."""
    deployment = vhost.deployment
    declared = [one for part in deployment.parts for one in part.bindings]
    if binding in declared or binding.source.startswith(RETURN_PREFIX) or _is_relay(binding, declared):
        return
    inner = deployment.inner_queues
    if binding.to_queue:
        reached = inner & {binding.destination}
    else:
        pattern = vhost.routes.pattern(binding)
        reached = vhost.routes.reached(binding.destination, "#" if pattern is None else pattern) & inner
    if binding.source in deployment.own_exchanges:
        # An exchange that leads to one queue only makes no copy by leading there under another key as well.
        own = {one.destination for one in declared if one.source == binding.source}
        wrong = reached - own if len(own) == 1 else reached
    else:
        wrong = reached - deployment.first_stage - deployment.dead_letter_queues
    if wrong:
        kind = "queue" if binding.to_queue else "exchange"
        what = (
            f"bound to {kind} '{binding.destination}' with '{binding.key}', which is not ours: it brings "
            f"{listed(wrong)} messages that no run has sent there, or a second copy of those it has"
        )
        yield Finding(Code.BINDING_NOT_OURS, binding.source, what, commands.unbind(vhost.broker, binding))


def _is_relay(binding: BindingFacts, declared: list[BindingFacts]) -> bool:
    """While a delay is being changed its binding leads to another queue."""
    return any(
        (one.source, one.key, f"{one.destination}.relay") == (binding.source, binding.key, binding.destination)
        for one in declared
    )


def _tiers_left_behind(vhost: VirtualHost) -> Iterator[Finding]:
    """A ladder that once had more tiers: nobody takes what is still in them."""
    own = vhost.deployment.own_queues
    names = {tier[1] for name in own if (tier := _TIER.fullmatch(name)) is not None}
    for queue in vhost.kept:
        tier = _TIER.fullmatch(queue.name)
        if tier is not None and tier[1] in names and queue.name not in own and queue.messages:
            what = f"holds {queue.messages} message(s) of a tier that the ladder no longer has: nobody takes them"
            fix = "dlqbatch drain  # with dlqbatch.tier-ttls as it was, until the queue is empty"
            yield Finding(Code.TIER_LEFT_BEHIND, queue.name, what, fix)


def _returns_left_behind(vhost: VirtualHost) -> Iterator[Finding]:
    bound = {binding.source for binding in vhost.there.bindings}
    left = sorted(
        name
        for name in vhost.there.exchanges
        if name.startswith(RETURN_PREFIX) and name not in bound
        if name.removeprefix(RETURN_PREFIX) not in vhost.there.queues
    )
    if left:
        what = f"{len(left)} exchanges by which messages returned to queues that are gone: nobody needs them now"
        fix = commands.delete_unused_exchanges(vhost.broker, left[:_DELETED_AT_ONCE])
        yield Finding(Code.RETURN_EXCHANGE_LEFT, listed(left), what, fix)
