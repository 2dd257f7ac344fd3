"""Our own topologies: what is missing or differs, what others do to our queues, and what is left of older settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from dlqbatch.amqp.retry_headers import RETURN_PREFIX
from dlqbatch.broker.facts import BindingFacts, BrokerFacts, QueueFacts, listed
from dlqbatch.doctor import commands
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.virtual_host import Deployment, Part, VirtualHost
from dlqbatch.topology.model import DELIVERY_LIMIT, QUEUE_TYPE, TTL, relay_of
from dlqbatch.topology.plan import differing, is_left_behind

_DELETED_AT_ONCE: Final = 100
"""The most exchanges in one command; the next run of doctor names the rest."""


def examine(vhost: VirtualHost) -> Iterator[Finding]:
    for queue in vhost.shared_queues:
        yield from _delay_cut_short(vhost, queue)
        yield from _dead_letters_return(vhost, queue)
        yield from _consumer_on_ours(vhost, queue)
        yield from _returns_overheard(vhost, queue)
        yield from _origin_only_delays(vhost, queue)
    for binding in vhost.there.bindings:
        yield from _binding_not_ours(vhost, binding)
    yield from _return_exchange_left(vhost)
    yield from _tier_left_behind(vhost)
    yield from _delay_left_behind(vhost)


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
        unbound = [one for one in part.bindings if there.isdisjoint({one, _to_relay(one)})]
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
            fix = f"{commands.call_api(broker, path, {}, 'DELETE')}?if-unused=true && {commands.APPLY}"
            yield Finding(Code.TOPOLOGY_DIFFERS, name, what, fix)
    for name, arguments in part.queues.items():
        queue = broker.map.queues.get(name)
        if queue is not None:
            yield from _differences(broker, part, queue, arguments)


def _to_relay(binding: BindingFacts) -> BindingFacts:
    """The binding that takes its place while the delay of its queue is being changed."""
    return replace(binding, destination=relay_of(binding.destination))


def _differences(
    broker: BrokerFacts, part: Part, queue: QueueFacts, arguments: Mapping[str, object]
) -> Iterator[Finding]:
    found = {name: value for name, value in queue.arguments.items() if name != QUEUE_TYPE}
    wanted = {name: value for name, value in arguments.items() if name != QUEUE_TYPE}
    if DELIVERY_LIMIT not in found and wanted.get(DELIVERY_LIMIT) == -1:
        # A broker before 4.0 knew no such argument; a drain accepts the queue as it is.
        del wanted[DELIVERY_LIMIT]
    differences = differing(wanted, found)
    words = [f"{one.argument} is {one.found}, the settings want {one.wanted}" for one in differences]
    kind = arguments.get(QUEUE_TYPE)
    if kind is not None and kind != queue.type:
        words.append(f"it is {queue.type}, the settings want {kind}")
    if not queue.durable:
        words.append("it is not durable")
    if not words:
        return
    if [one.argument for one in differences] == [TTL] and len(words) == 1 and queue.name in part.delay_queues:
        fix = f"{commands.APPLY} --change-ttl"
    else:
        fix = f"{commands.delete_if_empty(broker, queue)} && {commands.APPLY}"
    yield Finding(Code.TOPOLOGY_DIFFERS, queue.name, f"{'; '.join(words)}: a run that declares it ends with 2", fix)


def _delay_cut_short(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    if queue.name not in vhost.deployment.delay_queues:
        return
    declared = queue.arguments.get("x-message-ttl")
    if isinstance(declared, int) and queue.ttl is not None and queue.ttl < declared:
        what = f"a policy lets its messages leave after {queue.ttl} ms, though it is declared with {declared} ms"
        fix = vhost.without_option(queue, "message-ttl")
        yield Finding(Code.DELAY_CUT_SHORT, queue.name, what, fix)


def _dead_letters_return(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """A queue of retries or dead letters whose own dead letters arrive as new failures."""
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


def _consumer_on_ours(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    ours = vhost.deployment.inner_queues - vhost.deployment.dead_letter_queues
    if queue.name in ours and queue.strangers:
        what = f"{queue.strangers} consumers that are not dlqbatch take what is to be retried; what they take is gone"
        fix = commands.list_consumers(vhost.broker)
        yield Finding(Code.CONSUMER_ON_OURS, queue.name, what, fix)


def _returns_overheard(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """What leaves the delay queue of a per-queue set reaches every queue that is bound with the same key."""
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


def _origin_only_delays(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """A queue that is not ours and only delays dead letters before they reach the ladder."""
    feeders = vhost.feeders.get(queue.name, frozenset()) - vhost.deployment.inner_queues
    if queue.name not in vhost.origins & vhost.delays or queue.name in vhost.deployment.own_queues or not feeders:
        return
    what = (
        f"it has a TTL and no consumer and only hands on the dead letters of {listed(feeders)}: a delay before the "
        "ladder, not a queue that messages return to"
    )
    fixes = (vhost.to_retry(vhost.there.queues[name]) for name in sorted(feeders) if name in vhost.there.queues)
    yield Finding(Code.ORIGIN_ONLY_DELAYS, queue.name, what, " && ".join(fixes))


def _binding_not_ours(vhost: VirtualHost, binding: BindingFacts) -> Iterator[Finding]:
    """A binding that is not ours brings second copies into our queue, or messages that no run sent there."""
    deployment = vhost.deployment
    declared = [one for part in deployment.parts for one in part.bindings]
    if binding in declared or binding.source.startswith(RETURN_PREFIX) or binding in map(_to_relay, declared):
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


def _tier_left_behind(vhost: VirtualHost) -> Iterator[Finding]:
    """Messages in the queues of a tier that the ladder no longer has."""
    for queue in vhost.shared_queues:
        if queue.name in vhost.old_tiers and queue.messages:
            what = f"holds {queue.messages} message(s) of a tier that the ladder no longer has: nobody takes them"
            fix = "dlqbatch drain  # with dlqbatch.tier-ttls as it was, until the queue is empty"
            yield Finding(Code.TIER_LEFT_BEHIND, queue.name, what, fix)


def _delay_left_behind(vhost: VirtualHost) -> Iterator[Finding]:
    """The queue of a delay that the settings no longer give to an event; it still leads to the first tier's queue."""
    for queue in vhost.shared_queues:
        if is_left_behind(queue.name, queue.dead_letter_exchange, vhost.deployment.ladders):
            holds = (
                f"it holds {queue.messages} message(s), which come back at their time" if queue.messages else "empty"
            )
            what = f"a delay that the settings give to no event any more: {holds}; nothing new is put into it"
            fix = commands.delete_if_empty(vhost.broker, queue)
            yield Finding(Code.DELAY_LEFT_BEHIND, queue.name, what, fix)


def _return_exchange_left(vhost: VirtualHost) -> Iterator[Finding]:
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
