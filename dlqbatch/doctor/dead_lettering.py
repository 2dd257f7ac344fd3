"""Dead-lettering that leads nowhere, or in a circle.

No fix bypasses the ladder: failures are sent there, and only what has passed it is sent to the dead-letter queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from dlqbatch.broker.facts import QueueFacts, listed
from dlqbatch.broker.routing import BY_KEY
from dlqbatch.broker.versions import KEEPS_IN_STREAMS
from dlqbatch.doctor import commands
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.virtual_host import VirtualHost

_ANY_KEY: Final = "#"


def examine(vhost: VirtualHost) -> Iterator[Finding]:
    for queue in vhost.shared_queues:
        exchange = queue.dead_letter_exchange
        if exchange is None:
            continue
        if exchange and exchange not in vhost.there.exchanges:
            what = f"its dead-letter exchange '{exchange}' does not exist: whatever it dead-letters is deleted"
            yield Finding(Code.DEAD_LETTER_EXCHANGE_MISSING, queue.name, what, _make_exchange(vhost, queue, exchange))
            continue
        yield from _lost_in_stream(vhost, queue, exchange)
        if queue.dead_letter_key is not None:
            yield from _unrouted(vhost, queue, exchange, queue.dead_letter_key)
        else:
            yield from _unrouted_with_own_key(vhost, queue, exchange)
    yield from _cycles(vhost)


def _lost_in_stream(vhost: VirtualHost, queue: QueueFacts, exchange: str) -> Iterator[Finding]:
    """An old broker writes to a stream what clients publish, and nothing that it dead-letters itself."""
    key = queue.dead_letter_key
    if vhost.broker.version >= KEEPS_IN_STREAMS or (not exchange and key is None):
        return
    reached = sorted(vhost.routes.possible(exchange, key))
    queues = vhost.there.queues
    streams = [name for name in reached if name in queues and queues[name].type == "stream"]
    if streams:
        what = f"its dead letters lead to {listed(streams)}, a stream: RabbitMQ 3.10 deletes them on their way there"
        yield Finding(Code.DEAD_LETTERS_LOST_IN_STREAM, queue.name, what, vhost.to_retry(queue))


def _make_exchange(vhost: VirtualHost, queue: QueueFacts, exchange: str) -> str:
    if exchange in vhost.deployment.own_exchanges:
        return commands.APPLY
    bound = _bind(vhost, queue, exchange, queue.dead_letter_key or "")
    return f"{commands.make_exchange(vhost.broker, exchange)} && {bound}"


def _bind(vhost: VirtualHost, queue: QueueFacts, exchange: str, key: str) -> str:
    """Bind the exchange to the queue that the dead letters should reach."""
    target = vhost.next_stage(queue)
    return vhost.with_queue(target, commands.bind(vhost.broker, exchange, key, target))


def _unrouted(vhost: VirtualHost, queue: QueueFacts, exchange: str, key: str) -> Iterator[Finding]:
    if vhost.routes.possible(exchange, key):
        return
    what = f"the {_named(exchange)} leads its dead-letter key '{key}' nowhere: whatever it dead-letters is deleted"
    if not exchange:
        fix = commands.APPLY if key in vhost.deployment.own_queues else vhost.to_retry(queue)
    elif any((one.source, one.key) == (exchange, key) for part in vhost.deployment.parts for one in part.bindings):
        fix = commands.APPLY
    elif exchange in vhost.deployment.own_exchanges:
        fix = _with_key_of_ours(vhost, queue, exchange)
    else:
        fix = _bind(vhost, queue, exchange, key)
    yield Finding(Code.DEAD_LETTER_KEY_UNROUTED, queue.name, what, fix)


def _unrouted_with_own_key(vhost: VirtualHost, queue: QueueFacts, exchange: str) -> Iterator[Finding]:
    """Without a dead-letter routing key a dead letter keeps the key that it arrived with."""
    routes, named = vhost.routes, _named(exchange)
    if exchange and not routes.possible(exchange, None):
        what = f"the {named} has no binding: whatever it dead-letters is deleted"
        yield Finding(Code.DEAD_LETTER_KEY_UNROUTED, queue.name, what, _with_key(vhost, queue, exchange, [_ANY_KEY]))
        return
    exact = routes.keys_of(queue)
    patterns = [routes.pattern(one) for one in routes.arrivals(queue.name) if one.key not in exact]
    lost = [key for key in exact if not routes.possible(exchange, key)]
    lost += [one for one in dict.fromkeys(patterns) if one is not None and not routes.reached(exchange, one)]
    if lost:
        what = f"the {named} leads nowhere what arrives here with the key {listed(lost)}, and a dead letter keeps it"
        yield Finding(Code.DEAD_LETTER_KEY_UNROUTED, queue.name, what, _with_key(vhost, queue, exchange, lost))
    elif None in patterns and exchange and routes.binds_exact_keys_only(exchange) and not _is_sure(vhost, exchange):
        what = (
            f"it is bound to an exchange that does not look at routing keys, so any key may arrive; a dead letter "
            f"keeps it, and the {named} leads on certain keys only: all others are deleted"
        )
        yield Finding(Code.DEAD_LETTER_KEY_UNKNOWN, queue.name, what, _with_key(vhost, queue, exchange, [None]))


def _is_sure(vhost: VirtualHost, exchange: str) -> bool:
    return bool(vhost.routes.certain(exchange, None))


def _with_key(vhost: VirtualHost, queue: QueueFacts, exchange: str, keys: Sequence[str | None]) -> str:
    """Give the dead letters a key that is bound; an exchange that is not ours may get bindings for their own keys."""
    if not exchange:
        return vhost.to_retry(queue)
    if exchange in vhost.deployment.own_exchanges:
        return _with_key_of_ours(vhost, queue, exchange)
    kind = vhost.there.exchanges[exchange].type
    if kind not in BY_KEY:
        return _bind(vhost, queue, exchange, "")
    known = [key for key in keys if key is not None]
    if len(known) == len(keys) and (kind == "topic" or set(known) <= set(vhost.routes.keys_of(queue))):
        return " && ".join(_bind(vhost, queue, exchange, key) for key in known)
    key = vhost.deployment.retry[1] if vhost.deployment.retry is not None else queue.name
    return f"{_bind(vhost, queue, exchange, key)} && {vhost.dead_letter_to(queue, exchange, key)}"


def _with_key_of_ours(vhost: VirtualHost, queue: QueueFacts, exchange: str) -> str:
    """Give the dead letters the key by which this exchange of ours leads to a queue that a job takes from."""
    ends = vhost.deployment.first_stage | vhost.deployment.dead_letter_queues
    bindings = (one for part in vhost.deployment.parts for one in part.bindings)
    entrance = next((one for one in bindings if one.source == exchange and one.destination in ends), None)
    if entrance is None:
        return vhost.to_retry(queue)
    if "x-dead-letter-routing-key" not in queue.arguments:
        return vhost.dead_letter_to(queue, exchange, entrance.key)
    # No policy changes a declared key; one binding more from the same exchange to the same queue harms nobody.
    command = commands.bind(vhost.broker, exchange, queue.dead_letter_key or "", entrance.destination)
    return vhost.with_queue(entrance.destination, command)


def _named(exchange: str) -> str:
    return f"dead-letter exchange '{exchange}'" if exchange else "default exchange"


def _cycles(vhost: VirtualHost) -> Iterator[Finding]:
    reported: set[frozenset[str]] = set()
    for queue in vhost.shared_queues:
        start: tuple[str | None, ...] = (None,) if queue.dead_letter_key is not None else vhost.routes.keys_of(queue)
        for key in start:
            circle = _circle(vhost, queue, key)
            if circle is None or frozenset(circle) in reported:
                continue
            reported.add(frozenset(circle))
            way = " → ".join(f"'{name}'" for name in (*circle, circle[0]))
            what = f"what expires goes round in {way} with no rejection: the broker takes it for a cycle and deletes it"
            yield Finding(Code.DEAD_LETTER_CYCLE, circle[0], what, _break_circle(vhost, circle))
        yield from _to_itself(vhost, queue)


def _circle(vhost: VirtualHost, queue: QueueFacts, key: str | None) -> tuple[str, ...] | None:
    """The queues of a circle through this queue that a message goes round in by expiring only."""
    ways: list[tuple[tuple[str, ...], str | None]] = [((queue.name,), key)]
    seen: set[tuple[str, str | None]] = set()
    while ways:
        way, arrived = ways.pop()
        here = vhost.there.queues[way[-1]]
        exchange = here.dead_letter_exchange
        if here.ttl is None or exchange is None or (here.name, arrived) in seen:
            continue
        seen.add((here.name, arrived))
        leaves = here.dead_letter_key if here.dead_letter_key is not None else arrived
        if leaves is None:
            continue
        for name in sorted(vhost.routes.certain(exchange, leaves)):
            if name == queue.name:
                return way
            if name in vhost.there.queues and name not in way:
                ways.append(((*way, name), leaves))
    return None


def _break_circle(vhost: VirtualHost, circle: tuple[str, ...]) -> str:
    """Take the TTL off a queue of retries or dead letters; without one, redirect the dead letters of another queue."""
    kept = vhost.holding | vhost.deployment.first_stage
    for name in circle:
        if name in kept:
            return vhost.without_option(vhost.there.queues[name], "message-ttl")
    for name in reversed(circle):
        queue = vhost.there.queues[name]
        if "x-dead-letter-exchange" not in queue.arguments and name not in vhost.deployment.own_queues:
            return vhost.to_retry(queue)
    return vhost.without_option(vhost.there.queues[circle[0]], "message-ttl")


def _to_itself(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """A queue that dead-letters to itself by the default exchange: the key of its dead letters is its name."""
    if queue.dead_letter_exchange != "" or queue.ttl is not None:
        return
    key = queue.dead_letter_key
    if key == queue.name or (key is None and not vhost.routes.arrivals(queue.name)):
        what = "it dead-letters into itself: what is rejected comes back for ever, and what expires is deleted"
        yield Finding(Code.DEAD_LETTER_CYCLE, queue.name, what, vhost.to_retry(queue))
