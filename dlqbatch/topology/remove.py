"""Taking a topology away: nothing that still holds a message or is used by somebody, unless that is asked for."""

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
from dlqbatch.topology.model import Topology
from dlqbatch.topology.plan import DIFFERENT, Plan

_IN_USE: Final = "somebody uses it, or it is no longer empty"
_UNKNOWN: Final = (
    "only the management API can tell whether it is empty: {}. Set dlqbatch.management-url, or delete it whatever it "
    "holds, --with-messages"
)
_NO_COUNT: Final = "it does not say how many messages the queue holds"
_COUNTED_WITHIN: Final = 15.0
"""Seconds in which a new queue gets a count: RabbitMQ 3.10 took seven."""
_ASKS_EVERY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Removal:
    kind: str
    name: str
    is_gone: bool = False
    why: str = ""
    """Why it stays, if it does."""

    def as_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "name": self.name, "deleted": self.is_gone, "why": self.why}


def foresee(
    connection: Connection, topology: Topology, plan: Plan, reader: Reader, *, with_messages: bool
) -> tuple[Removal, ...]:
    """What there is to be taken away, and of each part why it may not be; looks only."""
    differing = {(item.kind, item.name) for item in plan.of(DIFFERENT)}
    # To wait for counts can take seconds, so what the broker itself knows is asked for afterwards.
    queues = () if with_messages else declare.existing(connection, (queue.name for queue in topology.queues))
    counts = _counts(connection, queues, reader)
    found = []
    with connection.scratch() as scratch:
        for queue in topology.queues:
            why = _obstacle(scratch, queue.name, counts, reader, with_messages=with_messages)
            if why is not None:
                differs = "is not as described, so it may be somebody else's"
                found.append(Removal("queue", queue.name, why=differs if ("queue", queue.name) in differing else why))
        users = _dead_lettering(topology, reader)
        for exchange in topology.exchanges:
            if scratch.is_there("exchange", exchange.name):
                why = "is of another type" if ("exchange", exchange.name) in differing else users.get(exchange.name, "")
                found.append(Removal("exchange", exchange.name, why=why))
    return tuple(found)


def _dead_lettering(topology: Topology, reader: Reader) -> dict[str, str]:
    """Why an exchange has to stay: other queues dead-letter to it, as far as the management API tells."""
    doomed = {queue.name for queue in topology.queues}
    queues: dict[str, list[str]] = {}
    for queue, exchange in sorted((reader.dead_lettering() or {}).items()):
        if queue not in doomed:
            queues.setdefault(exchange, []).append(queue)
    lost = "would lose what it dead-letters: take its dead-letter exchange away first"
    return {exchange: f"{listed(names)} {lost}" for exchange, names in queues.items()}


def _counts(connection: Connection, queues: Iterable[str], reader: Reader) -> dict[str, int | None]:
    """All that each queue holds by the management API, which has no count of a new one for some seconds."""
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
    # What somebody has taken and not settled does not count as ready, nor what a quorum queue could not hand to its
    # dead-letter exchange yet. The API's count is up to ten seconds old, so what became hidden since is missed. A
    # change of a delay works under load, and watches for that long; who deletes has ended all use (docs/topology.md).
    counted = counts.get(queue)
    if held := max(int(answer.message_count), counted or 0):
        return f"holds {held} message(s)"
    return "" if counted is not None else _UNKNOWN.format(reader.silent or _NO_COUNT)


def remove(
    connection: Connection, foreseen: Iterable[Removal], quorum: frozenset[str], *, with_messages: bool
) -> tuple[Removal, ...]:
    """Queues first; an exchange that others are still bound to stays."""
    done = []
    with connection.scratch() as scratch:
        for one in foreseen:
            conditions: dict[str, bool] = {"if_unused": True}
            if one.kind == "queue":
                # A quorum queue knows neither condition: asking for one would close the connection.
                is_free = one.name in quorum
                conditions = {"if_unused": not is_free, "if_empty": not (is_free or with_messages)}
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
    """The way back to each of the queues, and by the management API every way back whose queue is gone."""
    names = {return_exchange(queue) for queue in queues}
    with connection.scratch() as scratch:
        found = {name for name in names if scratch.is_there("exchange", name)}
    for name in reader.exchanges() or ():
        if name.startswith(RETURN_PREFIX) and reader.bindings_from(name) == ():
            found.add(name)
    return tuple(Removal("exchange", name) for name in sorted(found))
