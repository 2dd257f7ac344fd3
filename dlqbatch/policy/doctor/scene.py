"""The facts with what follows from them: who feeds whom, and what a queue is for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dlqbatch.policy.doctor import commands
from dlqbatch.policy.doctor.routing import Routes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlqbatch.policy.doctor.facts import BrokerFacts, Deployment, Map, QueueFacts


@dataclass(frozen=True)
class Scene:
    broker: BrokerFacts
    there: Map
    deployment: Deployment

    @cached_property
    def routes(self) -> Routes:
        return Routes(self.there)

    @cached_property
    def kept(self) -> tuple[QueueFacts, ...]:
        """Queues that others may use, without streams: those delete by their own rules."""
        every = sorted(self.there.queues.values(), key=_name)
        return tuple(queue for queue in every if not queue.exclusive and queue.type != "stream")

    @cached_property
    def _led_to(self) -> Mapping[str, frozenset[str]]:
        """By queue, where its dead letters are sure to arrive."""
        found = {}
        for queue in self.there.queues.values():
            exchange = queue.dead_letter_exchange
            if exchange is None:
                continue
            if queue.dead_letter_key is not None:
                keys: tuple[str | None, ...] = (queue.dead_letter_key,)
            else:
                keys = (None, *self.routes.keys_of(queue))
            led = frozenset().union(*(self.routes.certain(exchange, key) for key in keys))
            only = self.routes.possible(exchange, queue.dead_letter_key) if exchange else frozenset[str]()
            found[queue.name] = led | only if len(only) == 1 else led
        return found

    @cached_property
    def origins(self) -> frozenset[str]:
        """Queues whose failures arrive where a drain takes them."""
        feeding = {name for name, led in self._led_to.items() if led & self.deployment.first_stage}
        return frozenset(feeding) - self.deployment.first_stage

    @cached_property
    def ends(self) -> frozenset[str]:
        """Queues that dead letters come to, and have no way out of but a consumer."""
        led = frozenset().union(*self._led_to.values())
        queues = (self.there.queues[name] for name in led if name in self.there.queues)
        return frozenset(queue.name for queue in queues if queue.dead_letter_exchange is None and not queue.consumers)

    @cached_property
    def holding(self) -> frozenset[str]:
        """Queues whose messages nobody wants to lose, however long they wait: dead letters and retries."""
        return (self.deployment.read | self.ends) - self.delays

    @cached_property
    def delays(self) -> frozenset[str]:
        """Ours, and whatever else works as one: a TTL, a way out, and nobody that takes."""
        ours = frozenset().union(*(part.delay_queues for part in self.deployment.parts))
        others = {
            queue.name
            for queue in self.kept
            if queue.ttl is not None and queue.dead_letter_exchange is not None
            if queue.consumers == 0 and not queue.delivered
        }
        return ours | (others - self.deployment.own_queues)

    @property
    def dead_letter_queue(self) -> str:
        return self.deployment.dead_letter_queue

    def to_retry(self, queue: QueueFacts) -> str:
        """Have its failures retried; without a ladder, keep them."""
        exchange, key = self.deployment.retry or ("", self.dead_letter_queue)
        policy = commands.set_policy(
            self.broker, queue, {"dead-letter-exchange": exchange, "dead-letter-routing-key": key}
        )
        is_there = exchange in self.there.exchanges if exchange else key in self.there.queues
        return policy if is_there else f"{commands.APPLY} && {policy}"


def _name(queue: QueueFacts) -> str:
    return queue.name
