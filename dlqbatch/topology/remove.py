"""`topology delete`: what is used stays, and without --with-messages every queue that holds a message stays too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dlqbatch.amqp.retry_headers import RETURN_PREFIX, return_exchange
from dlqbatch.broker.connection import Connection, Scratch
from dlqbatch.broker.facts import listed
from dlqbatch.broker.refusals import PRECONDITION_FAILED
from dlqbatch.errors import ChannelRefused
from dlqbatch.topology import declare
from dlqbatch.topology.inspect import Reader
from dlqbatch.topology.model import Policy, Topology
from dlqbatch.topology.plan import DIFFERENT, Plan

_IN_USE: Final = "somebody uses it, or it is no longer empty"
_UNKNOWN: Final = (
    "only the management API can tell whether it is empty: {}. Set dlqbatch.management-url, or delete it whatever it "
    "holds, --with-messages"
)
_NO_COUNT: Final = "it does not say how many messages the queue holds"
_COUNTED_WITHIN: Final = 15.0
"""Seconds within which the management API counts the messages of a new queue; RabbitMQ 3.10 took seven."""
_ASKS_EVERY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Removal:
    kind: str
    name: str
    is_gone: bool = False
    why: str = ""
    """Why it stays; empty if it is deleted."""

    def as_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "name": self.name, "deleted": self.is_gone, "why": self.why}


def foresee(
    connection: Connection, topology: Topology, plan: Plan, reader: Reader, *, with_messages: bool
) -> tuple[Removal, ...]:
    """What would be deleted, and for each part that has to stay the reason. Nothing is deleted."""
    differing = {(item.kind, item.name) for item in plan.of(DIFFERENT)}
    # First the counts, which can take seconds; what AMQP tells has to be newer.
    names = dict.fromkeys([*(one.name for one in topology.queues), *(one.queue for one in topology.policies)])
    queues = () if with_messages else declare.existing(connection, names)
    counts = _counts(connection, queues, reader)
    found = []
    with connection.scratch() as scratch:
        for queue in topology.queues:
            why = _obstacle(scratch, queue.name, counts, reader, with_messages=with_messages)
            if why is not None:
                differs = "is not as described, so it may be somebody else's"
                found.append(Removal("queue", queue.name, why=differs if ("queue", queue.name) in differing else why))
        for policy in topology.policies:
            why = _policy_obstacle(scratch, policy, counts, reader, with_messages=with_messages)
            if why is not None:
                found.append(Removal("policy", policy.name, why=why))
        users = _dead_lettering(topology, reader)
        for exchange in topology.exchanges:
            if scratch.is_there("exchange", exchange.name):
                why = "is of another type" if ("exchange", exchange.name) in differing else users.get(exchange.name, "")
                found.append(Removal("exchange", exchange.name, why=why))
    return tuple(found)


def _policy_obstacle(
    scratch: Scratch, policy: Policy, counts: Mapping[str, int | None], reader: Reader, *, with_messages: bool
) -> str | None:
    """Why a policy has to stay; empty if it may go, None if it is not there.

    Without it a failure in its queue is deleted after 20 deliveries: so nobody may use the queue, as if it were to go.
    """
    policies = reader.policies()
    if policies is None:
        return f"only the management API knows it: {reader.silent}. Set dlqbatch.management-url"
    found = policies.named(policy.name)
    if found is None:
        return None
    if not policy.is_form_of(found):
        return "is not as dlqbatch sets it, so it may be somebody else's"
    why = _obstacle(scratch, policy.queue, counts, reader, with_messages=with_messages)
    return f"queue '{policy.queue}': {why}" if why else ""


def _dead_lettering(topology: Topology, reader: Reader) -> dict[str, str]:
    """For each exchange that other queues dead-letter to, why it has to stay; empty without the management API."""
    doomed = {queue.name for queue in topology.queues} | {policy.queue for policy in topology.policies}
    queues: dict[str, list[str]] = {}
    for queue, exchange in sorted((reader.dead_lettering() or {}).items()):
        if queue not in doomed:
            queues.setdefault(exchange, []).append(queue)
    lost = "would lose what it dead-letters: take its dead-letter exchange away first"
    return {exchange: f"{listed(names)} {lost}" for exchange, names in queues.items()}


def _counts(connection: Connection, queues: Iterable[str], reader: Reader) -> dict[str, int | None]:
    """The messages of each queue by the management API, which has no count of a new queue for some seconds."""
    names, until = tuple(queues), time.monotonic() + _COUNTED_WITHIN
    counts = {queue: reader.messages(queue) for queue in names}
    while None in counts.values() and reader.silent is None and time.monotonic() < until:
        connection.pause(_ASKS_EVERY)
        counts = {queue: reader.messages(queue) for queue in names}
    return counts


def _obstacle(
    scratch: Scratch, queue: str, counts: Mapping[str, int | None], reader: Reader, *, with_messages: bool
) -> str | None:
    """Why the queue may not be deleted; empty if it may, None if it is not there."""
    try:
        answer = scratch.look("queue", queue)
    except ChannelRefused as refused:
        if refused.is_gone:
            return None
        raise
    if answer.consumer_count:
        return f"has {answer.consumer_count} consumer(s)"
    if with_messages:
        return ""
    # Messages that are unacknowledged, or that a quorum queue could not dead-letter yet, do not count as ready. The
    # API counts them too, but up to ten seconds late: whoever deletes has to end all use before (docs/topology.md).
    counted = counts.get(queue)
    if held := max(int(answer.message_count), counted or 0):
        return f"holds {held} message(s)"
    return "" if counted is not None else _UNKNOWN.format(reader.silent or _NO_COUNT)


def remove(
    connection: Connection, foreseen: Iterable[Removal], quorum: frozenset[str], *, with_messages: bool
) -> tuple[Removal, ...]:
    """Delete the queues, then the exchanges; an exchange with a binding left stays."""
    done = []
    with connection.scratch() as scratch:
        for one in foreseen:
            if one.kind == "policy":
                done.append(Removal(one.kind, one.name, is_gone=True))
                continue
            conditions: dict[str, bool] = {"if_unused": True}
            if one.kind == "queue":
                # For a quorum queue either condition would close the connection.
                is_quorum = one.name in quorum
                conditions = {"if_unused": not is_quorum, "if_empty": not (is_quorum or with_messages)}
            try:
                scratch.call(f"{one.kind}_delete", **{one.kind: one.name}, **conditions)
            except ChannelRefused as refused:
                if refused.code != PRECONDITION_FAILED:
                    raise
                done.append(Removal(one.kind, one.name, why=_IN_USE))
            else:
                done.append(Removal(one.kind, one.name, is_gone=True))
    return tuple(done)


def return_exchanges(connection: Connection, queues: Iterable[str], reader: Reader) -> tuple[Removal, ...]:
    """The return exchanges of these queues, and those without a binding that the management API shows."""
    names = {return_exchange(queue) for queue in queues}
    with connection.scratch() as scratch:
        found = {name for name in names if scratch.is_there("exchange", name)}
    for name in reader.exchanges() or ():
        if name.startswith(RETURN_PREFIX) and reader.bindings_from(name) == ():
            found.add(name)
    return tuple(Removal("exchange", name) for name in sorted(found))
