"""Declaring a topology, looking whether it is there, and telling what differs."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.errors import ChannelRefused, TopologyMismatch, TopologyMissing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlqbatch.broker.connection import Connection, Scratch
    from dlqbatch.topology.model import Topology

_log = logs.get(__name__)

_NO_PERMISSION, _PRECONDITION = 403, 406
_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for (?P<kind>\w+) '(?P<name>.*)' in vhost '.*': "
    r"received (?P<wanted>.*) but current is (?P<found>.*)"
)
_CUT: Final = re.compile(r"inequivalent arg '(?P<argument>[^']+)' for (?P<kind>\w+) '(?P<name>.*)")
"""A refusal has at most 255 bytes: beside a long name there is no room for the values."""
_TYPE: Final = re.compile(r" of queue type (?:rabbit_)?(?P<type>[a-z]+)")
_VALUE: Final = re.compile(r"(?:the value )?'(?P<value>.*?)'(?: of type '\w+')?")


def declare(connection: Connection, topology: Topology) -> None:
    """Make what is missing; TopologyMismatch if something is there and differs. Declaring twice changes nothing."""
    try:
        with connection.scratch() as scratch:
            _declare_all(scratch, topology)
            for binding in topology.bindings:
                scratch.call_later(
                    "queue_bind", queue=binding.queue, exchange=binding.exchange, routing_key=binding.key
                )
            scratch.call("basic_qos")
    except ChannelRefused as refused:
        if refused.code == _NO_PERMISSION:
            _log.info("may not declare the topology, so only looks whether it is there", why=refused.text)
            look(connection, topology)
            return
        raise mismatch(refused) or refused from refused


def _declare_all(scratch: Scratch, topology: Topology) -> None:
    """Unanswered unless refused, so that the whole topology costs one round trip."""
    for exchange in topology.exchanges:
        scratch.call_later("exchange_declare", exchange=exchange.name, exchange_type=exchange.type, durable=True)
    for queue in topology.queues:
        scratch.call_later("queue_declare", queue=queue.name, durable=True, arguments=dict(queue.arguments))


def compare(connection: Connection, topology: Topology) -> None:
    """TopologyMissing or TopologyMismatch as `declare` would meet it, without making anything."""
    look(connection, topology)
    try:
        with connection.scratch() as scratch:
            # All of it is there, so that declaring it only compares; bindings cannot be compared, and are left alone.
            _declare_all(scratch, topology)
            scratch.call("basic_qos")
    except ChannelRefused as refused:
        if refused.code == _NO_PERMISSION:
            return
        raise mismatch(refused) or refused from refused


def existing(connection: Connection, queues: Iterable[str]) -> dict[str, int]:
    """Those of the queues that are there, with their depths."""
    found = {}
    for queue in queues:
        with connection.scratch() as scratch, suppress(ChannelRefused):
            found[queue] = int(scratch.call("queue_declare", queue=queue, passive=True).message_count)
    return found


def mismatch(refused: ChannelRefused) -> TopologyMismatch | None:
    """What the broker's words for a differing queue or exchange say; None if they say something else."""
    if refused.code != _PRECONDITION:
        return None
    found = _INEQUIVALENT.search(refused.text)
    if found is not None:
        return TopologyMismatch(
            found["kind"], found["name"], found["argument"], _value(found["found"]), _value(found["wanted"])
        )
    cut = _CUT.search(refused.text)
    return cut and TopologyMismatch(cut["kind"], cut["name"], cut["argument"], "another value", "what they say")


def _value(text: str) -> str:
    match = _VALUE.fullmatch(text.strip())
    return match["value"] if match else text.strip()


def look(connection: Connection, topology: Topology) -> None:
    """TopologyMissing names the first exchange or queue that is not there."""
    with connection.scratch() as scratch:
        for exchange in topology.exchanges:
            _look_for(scratch, "exchange", exchange.name)
        for queue in topology.queues:
            _look_for(scratch, "queue", queue.name)


def depths(connection: Connection, queues: Iterable[str], exchanges: Iterable[str]) -> dict[str, int]:
    """Messages ready in each queue, by the queue's own count and not by statistics.

    The exchanges are only looked for: a publish to a missing one would cost the channel and all that is under way.
    """
    counts = {}
    with connection.scratch() as scratch:
        for exchange in exchanges:
            _look_for(scratch, "exchange", exchange)
        for queue in queues:
            try:
                counts[queue] = int(scratch.call("queue_declare", queue=queue, passive=True).message_count)
            except ChannelRefused as refused:
                raise (TopologyMissing("queue", queue) if refused.is_gone else refused) from refused
    return counts


def _look_for(scratch: Scratch, kind: str, name: str) -> None:
    try:
        scratch.call(f"{kind}_declare", passive=True, **{kind: name})
    except ChannelRefused as refused:
        if refused.is_gone:
            raise TopologyMissing(kind, name) from refused
        # From 4.3 on even looking takes some permission; for what we neither read nor write we need not have one.
        if refused.code != _NO_PERMISSION:
            raise


def quorum_queues(connection: Connection, queues: Iterable[str], *, otherwise: bool) -> frozenset[str]:
    """Which of our queues are quorum queues: with a default queue type, what was declared need not say so.

    No method asks for a queue's type, but the refusal of a consumer that only a stream could serve names it; declaring
    the queue as another type would say the same only if no other argument differed. `otherwise` is the answer where
    the broker does not say.
    """
    found = set()
    for queue in queues:
        with connection.scratch() as scratch:
            kind = None
            try:
                scratch.call("basic_qos", prefetch_count=1)
                scratch.call(
                    "basic_consume", queue=queue, on_message_callback=_ignore, arguments={"x-stream-offset": "next"}
                )
            except ChannelRefused as refused:
                kind = _TYPE.search(refused.text)
            if otherwise if kind is None else kind["type"] == "quorum":
                found.add(queue)
    return frozenset(found)


def _ignore(*_: object) -> None:
    """Of a consumer that no broker is known to accept; what it might get goes back as its channel closes."""
