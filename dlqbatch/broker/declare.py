"""Declaring a topology, looking whether it is there, and telling what differs."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.broker.connection import NoAnswer
from dlqbatch.errors import ChannelRefused, SettingsError, TopologyMismatch, TopologyMissing
from dlqbatch.topology.model import CHANGING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
# Before these ends stand names, which anybody may choose; a text that was cut ends with dots.
_TYPE: Final = re.compile(r" of queue type (?:rabbit_)?(?P<type>\w+?)(?:_queue)?\Z")
_STREAM_ELSEWHERE: Final = re.compile(
    r"\w+ - queue '.*' does not have a (?:running )?replica on the local node", re.DOTALL
)
"""Nothing but a stream is said to be only on other nodes; a get from it ends the connection all the same."""
_UNTOLD: Final = "untold"
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


def changing(connection: Connection) -> bool:
    """Whether a delay is being changed, so that to declare anything would undo a step of it."""
    with connection.scratch() as scratch:
        try:
            scratch.call("queue_declare", queue=CHANGING, passive=True)
        except ChannelRefused as refused:
            # From 4.3 on even looking takes some right: docs/permissions.md.
            if refused.code == _NO_PERMISSION:
                _log.warning("cannot see whether a delay is being changed", do=f"give read on {CHANGING}")
            return False
    return True


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


def quorum_queues(
    connection: Connection, queues: Iterable[str], *, otherwise: bool, untold: bool | None = None
) -> frozenset[str]:
    """Which of these are quorum queues; `otherwise` is the answer where the broker does not say.

    `untold`, if it is another one, is that for queues that are there and may be used, but have too long a name.
    """
    return _quorum(_types(connection, queues), otherwise, otherwise if untold is None else untold)


def quorum_sources(
    connection: Connection, queues: Iterable[str], *, otherwise: bool, untold: bool | None = None
) -> frozenset[str]:
    """As `quorum_queues`, of queues that somebody has named; SettingsError if one is a stream.

    A get from a stream ends the connection, and with it what is taken from every other queue.
    """
    types = _types(connection, queues)
    streams = [queue for queue, kind in types.items() if kind == "stream"]
    if streams:
        raise SettingsError(
            *(f"'{queue}' is a stream, and from a stream no message can be taken away" for queue in streams),
            "nothing was looked at or moved; leave streams out of the queues that are named",
        )
    return _quorum(types, otherwise, otherwise if untold is None else untold)


def _quorum(types: Mapping[str, str | None], otherwise: bool, untold: bool) -> frozenset[str]:
    answers = {None: otherwise, _UNTOLD: untold}
    return frozenset(queue for queue, kind in types.items() if answers.get(kind, kind == "quorum"))


def _types(connection: Connection, queues: Iterable[str]) -> dict[str, str | None]:
    """The type of each queue; None if it is refused to us or not there, _UNTOLD if the text was cut before the type.

    No method asks for it, but the refusal of a consumer that only a stream can serve names it; declaring the queue as
    another type would say the same only if no other argument differed.
    """
    found: dict[str, str | None] = {}
    for queue in queues:
        try:
            with connection.asking(queue) as scratch:
                scratch.call("basic_qos", prefetch_count=1)
                scratch.call(
                    "basic_consume", queue=queue, on_message_callback=_ignore, arguments={"x-stream-offset": "next"}
                )
            found[queue] = "stream"
        except ChannelRefused as refused:
            found[queue] = _type_of(refused)
        except NoAnswer:
            found[queue] = _UNTOLD
    return found


def _type_of(refused: ChannelRefused) -> str | None:
    told = _TYPE.search(refused.text)
    if told is not None:
        return told["type"]
    if _STREAM_ELSEWHERE.fullmatch(refused.text) is not None:
        return "stream"
    return _UNTOLD if refused.code == _PRECONDITION else None


def _ignore(*_: object) -> None:
    """Of a consumer that only a stream accepts; what it might get is not taken away by that."""
