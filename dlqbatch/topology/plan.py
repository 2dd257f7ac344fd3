"""What `topology plan` shows: for each part whether it exists on the broker, and how it differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from dlqbatch.topology.kinds import Ladder
from dlqbatch.topology.model import TTL, Binding, Topology

_NAMED_DELAY: Final = re.compile(r"[0-9]+m?s")
TO_CREATE: Final = "to create"
SAME: Final = "the same"
DIFFERENT: Final = "different"
NOT_KNOWN: Final = "not known"
REFUSED: Final = "refused"
"""A policy that would have no effect, or take the effect of somebody else's; its topology is not applied."""
NONE: Final = "none"


class Difference(NamedTuple):
    argument: str
    found: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Standing:
    """How a policy of ours stands on the broker."""

    state: str
    differences: tuple[Difference, ...] = ()
    """Each option of its queue that is not as wanted, whoever sets it."""
    why: str = ""
    """Why it is refused, and what to do."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a broker reports of the parts of a topology."""

    parts: Mapping[tuple[str, str], tuple[Difference, ...] | None]
    """The differences of each part that exists, by kind and name; None where this login may not declare it."""
    bindings: frozenset[Binding] | None
    """None where the management API did not answer: AMQP cannot show a binding."""
    policies: Mapping[str, Standing] | None = None
    """How each policy stands, by its name; None where the management API did not answer."""


@dataclass(frozen=True, slots=True)
class Item:
    kind: str
    """exchange, queue, binding or policy."""
    name: str
    state: str
    differences: tuple[Difference, ...] = ()
    why: str = ""
    """Why a policy is refused, and what to do."""

    def as_dict(self) -> dict[str, object]:
        differences = [difference._asdict() for difference in self.differences]
        row: dict[str, object] = {"kind": self.kind, "name": self.name, "state": self.state, "differences": differences}
        return {**row, "why": self.why} if self.why else row


@dataclass(frozen=True, slots=True)
class Plan:
    items: tuple[Item, ...]

    @property
    def is_done(self) -> bool:
        """Nothing is to do, as far as the broker shows."""
        return all(item.state in (SAME, NOT_KNOWN) for item in self.items)

    def of(self, state: str) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.state == state)

    def ttl_changes(self, delay_queues: Iterable[str]) -> tuple[str, ...]:
        """The delay queues that differ by nothing but their TTL."""
        candidates = frozenset(delay_queues)
        return tuple(
            item.name
            for item in self.of(DIFFERENT)
            if item.kind == "queue"
            and item.name in candidates
            and [difference.argument for difference in item.differences] == [TTL]
        )


def compare(wanted: Topology, found: Reading) -> Plan:
    items = [_part("exchange", one.name, found) for one in wanted.exchanges]
    items += [_part("queue", one.name, found) for one in wanted.queues]
    items += [_binding(one, found) for one in wanted.bindings]
    for policy in wanted.policies:
        standing = Standing(NOT_KNOWN) if found.policies is None else found.policies[policy.name]
        items.append(Item("policy", policy.name, standing.state, standing.differences, standing.why))
    return Plan(tuple(items))


def _part(kind: str, name: str, found: Reading) -> Item:
    if (kind, name) not in found.parts:
        return Item(kind, name, TO_CREATE)
    differences = found.parts[kind, name]
    if differences is None:
        return Item(kind, name, NOT_KNOWN)
    return Item(kind, name, DIFFERENT if differences else SAME, differences)


def _binding(binding: Binding, found: Reading) -> Item:
    name = binding.in_words
    ends = {("exchange", binding.exchange), ("queue", binding.queue)}
    if not ends <= found.parts.keys():
        return Item("binding", name, TO_CREATE)
    if found.bindings is None:
        return Item("binding", name, NOT_KNOWN)
    return Item("binding", name, SAME if binding in found.bindings else TO_CREATE)


def differing(wanted: Mapping[str, object], found: Mapping[str, object]) -> tuple[Difference, ...]:
    """Every argument that differs, in the order of their names."""
    names = sorted(wanted.keys() | found.keys())
    return tuple(
        Difference(name, str(found.get(name, NONE)), str(wanted.get(name, NONE)))
        for name in names
        if found.get(name) != wanted.get(name)
    )


def definitions(topology: Topology, vhost: str) -> dict[str, object]:
    """The topology as definitions that RabbitMQ can import."""
    place = {"vhost": vhost}
    durable = {"durable": True, "auto_delete": False}
    parts: dict[str, object] = {
        "exchanges": [
            {"name": one.name, **place, "type": one.type, **durable, "internal": False, "arguments": {}}
            for one in topology.exchanges
        ],
        "queues": [{"name": one.name, **place, **durable, "arguments": dict(one.arguments)} for one in topology.queues],
        "bindings": [
            {
                "source": one.exchange,
                **place,
                "destination": one.queue,
                "destination_type": "queue",
                "routing_key": one.key,
                "arguments": {},
            }
            for one in topology.bindings
        ],
    }
    if topology.policies:
        parts["policies"] = [{"name": one.name, **place, **one.body} for one in topology.policies]
    return parts


def is_left_behind(queue: str, dead_letters_to: str | None, ladders: Iterable[Ladder]) -> bool:
    """Whether it is the delay queue of a delay that was once in the settings of one of these ladders."""
    for ladder in ladders:
        name = queue.removeprefix(f"{ladder.delay_queue}.")
        if name != queue and _NAMED_DELAY.fullmatch(name) and queue not in ladder.delay_queues:
            return dead_letters_to == ladder.ways_out[1].exchange
    return False
