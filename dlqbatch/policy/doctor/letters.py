"""Dead-lettering that leads nowhere, or round in a circle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlqbatch.policy.doctor import commands
from dlqbatch.policy.doctor.facts import listed
from dlqbatch.policy.doctor.finding import Code, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.policy.doctor.facts import QueueFacts
    from dlqbatch.policy.doctor.scene import Scene


def examine(scene: Scene) -> Iterator[Finding]:
    for queue in scene.kept:
        exchange = queue.dead_letter_exchange
        if exchange is None:
            continue
        if exchange and exchange not in scene.there.exchanges:
            what = f"its dead-letter exchange '{exchange}' does not exist: whatever it dead-letters is deleted"
            yield Finding(Code.DEAD_LETTER_EXCHANGE_MISSING, queue.name, what, _make(scene, queue, exchange))
        else:
            yield from _unrouted(scene, queue, exchange)
    yield from _cycles(scene)


def _make(scene: Scene, queue: QueueFacts, exchange: str) -> str:
    if exchange in scene.deployment.own_exchanges:
        return commands.APPLY
    return f"{commands.make_exchange(scene.broker, exchange)} && {_lead(scene, exchange, queue.dead_letter_key or '')}"


def _lead(scene: Scene, exchange: str, key: str) -> str:
    """Into the queue of the dead letters, which is made if need be."""
    target = scene.dead_letter_queue
    binding = commands.bind(scene.broker, exchange, key, target)
    return binding if target in scene.there.queues else f"{commands.APPLY} && {binding}"


def _unrouted(scene: Scene, queue: QueueFacts, exchange: str) -> Iterator[Finding]:
    named = f"dead-letter exchange '{exchange}'" if exchange else "default exchange"
    key, routes = queue.dead_letter_key, scene.routes
    if key is not None:
        if not routes.possible(exchange, key):
            what = f"the {named} leads its dead-letter key '{key}' nowhere: whatever it dead-letters is deleted"
            yield Finding(Code.DEAD_LETTER_KEY_UNROUTED, queue.name, what, _route(scene, exchange, key))
        return
    if exchange and not routes.possible(exchange, None):
        what = f"the {named} has no binding: whatever it dead-letters is deleted"
        yield Finding(Code.DEAD_LETTER_KEY_UNROUTED, queue.name, what, _route(scene, exchange, None))
        return
    lost = [one for one in routes.exact_keys(queue.name) if not routes.possible(exchange, one)]
    if lost:
        what = f"the {named} leads nowhere what arrives here with the key {listed(lost)}, and a dead letter keeps it"
        fix = " && ".join(_route(scene, exchange, one) for one in lost)
        yield Finding(Code.DEAD_LETTER_KEY_UNROUTED, queue.name, what, fix)


def _route(scene: Scene, exchange: str, key: str | None) -> str:
    if exchange in scene.deployment.own_exchanges:
        ours = (binding for part in scene.deployment.parts for binding in part.bindings)
        if any(binding.source == exchange and binding.key == key for binding in ours):
            return commands.APPLY
    if not exchange:
        return commands.make_queue(scene.broker, key or "")
    kind = scene.there.exchanges[exchange].type
    if key is None:
        key = "#" if kind == "topic" else ""
    return _lead(scene, exchange, key)


def _cycles(scene: Scene) -> Iterator[Finding]:
    told: set[frozenset[str]] = set()
    for queue in scene.kept:
        start: tuple[str | None, ...] = (None,) if queue.dead_letter_key is not None else scene.routes.keys_of(queue)
        for key in start:
            circle = _circle(scene, queue, key)
            if circle is None or frozenset(circle) in told:
                continue
            told.add(frozenset(circle))
            way = " → ".join(f"'{name}'" for name in (*circle, circle[0]))
            what = f"what expires goes round in {way} with no rejection: the broker takes it for a cycle and deletes it"
            yield Finding(Code.DEAD_LETTER_CYCLE, circle[0], what, _cut(scene, circle))
        yield from _into_itself(scene, queue)


def _circle(scene: Scene, queue: QueueFacts, key: str | None) -> tuple[str, ...] | None:
    """The queues of a circle through this one that a message passes by expiring alone."""
    ways: list[tuple[tuple[str, ...], str | None]] = [((queue.name,), key)]
    seen: set[tuple[str, str | None]] = set()
    while ways:
        way, arrived = ways.pop()
        here = scene.there.queues[way[-1]]
        exchange = here.dead_letter_exchange
        if here.ttl is None or exchange is None or (here.name, arrived) in seen:
            continue
        seen.add((here.name, arrived))
        leaves = here.dead_letter_key if here.dead_letter_key is not None else arrived
        if leaves is None:
            continue
        for name in sorted(scene.routes.certain(exchange, leaves)):
            if name == queue.name:
                return way
            if name in scene.there.queues and name not in way:
                ways.append(((*way, name), leaves))
    return None


def _cut(scene: Scene, circle: tuple[str, ...]) -> str:
    """Let the dead letters of its last queue end; where its declaration says otherwise, let nothing expire there."""
    for name in reversed(circle):
        queue = scene.there.queues[name]
        if "x-dead-letter-exchange" not in queue.arguments:
            wanted = {"dead-letter-exchange": "", "dead-letter-routing-key": scene.dead_letter_queue}
            return commands.set_policy(scene.broker, queue, wanted)
    queue = scene.there.queues[circle[0]]
    return commands.without_option(scene.broker, queue, scene.routes.into(queue.name), "message-ttl")


def _into_itself(scene: Scene, queue: QueueFacts) -> Iterator[Finding]:
    """The default exchange without a key: the name of this queue is the only key that anything arrives with."""
    if queue.dead_letter_exchange != "" or queue.ttl is not None or scene.routes.into(queue.name):
        return
    if queue.dead_letter_key in {None, queue.name}:
        what = "it dead-letters into itself: what is rejected comes back for ever, and what expires is deleted"
        fix = (
            commands.declare_anew(scene.broker, queue, (), {"x-dead-letter-routing-key": scene.dead_letter_queue})
            if "x-dead-letter-exchange" in queue.arguments
            else commands.set_policy(scene.broker, queue, {"dead-letter-routing-key": scene.dead_letter_queue})
        )
        yield Finding(Code.DEAD_LETTER_CYCLE, queue.name, what, fix)
