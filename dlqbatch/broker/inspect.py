"""Reading a topology back: by AMQP whether a part is there and as wanted, by the management API what else it is."""

from __future__ import annotations

import math
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlqbatch import logs
from dlqbatch.broker.declare import mismatch
from dlqbatch.broker.management import NoReply
from dlqbatch.errors import ChannelRefused
from dlqbatch.topology.model import Binding
from dlqbatch.topology.plan import Difference, Reading, differing

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.broker.connection import Connection, Scratch
    from dlqbatch.broker.management import Api
    from dlqbatch.topology.model import Topology

_log = logs.get(__name__)

_NO_PERMISSION: Final = 403
_NOT_FOUND: Final = 404


Asked = TypeVar("Asked", bound="Reader")
Told = TypeVar("Told")


def sensible(ask: Callable[[Asked], Told | None]) -> Callable[[Asked], Told | None]:
    """An answer of other types than the broker's is none: whatever listens there is not asked again."""

    @wraps(ask)
    def asked(reader: Asked) -> Told | None:
        try:
            return ask(reader)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reader.silent = reader.silent or f"the management API's answer makes no sense ({type(error).__name__})"
            return None

    return asked


class Reader:
    """The management API as far as it answers; after a failure it is not asked again, at least for some seconds."""

    def __init__(self, api: Api, *, asks_again_after: float = math.inf) -> None:
        self._api = api
        self._asks_again_after = asks_again_after
        self._silent_until = math.inf
        self.silent: str | None = None
        """Why it does not answer, if it does not."""

    def messages(self, queue: str) -> int | None:
        """All that a queue holds, also what it could not dead-letter yet; None if nobody knows."""
        found = self._get("queues", self._api.vhost, queue)
        number = found.get("messages") if isinstance(found, dict) else None
        return number if isinstance(number, int) else None

    def arguments(self, queue: str) -> dict[str, object] | None:
        found = self._get("queues", self._api.vhost, queue)
        arguments = found.get("arguments") if isinstance(found, dict) else None
        return arguments if isinstance(arguments, dict) else None

    @sensible
    def exchanges(self) -> tuple[str, ...] | None:
        found = self._get("exchanges", self._api.vhost, query="columns=name")
        return tuple(str(one["name"]) for one in found) if isinstance(found, list) else None

    def bindings_from(self, exchange: str) -> tuple[Binding, ...] | None:
        found = self._get("exchanges", self._api.vhost, exchange, "bindings", "source")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            return None
        return tuple(
            Binding(exchange, str(one.get("routing_key")), str(one.get("destination")))
            for one in found
            if one.get("destination_type") == "queue"
        )

    def _get(self, *path: str, query: str = "") -> Any:
        """None for what is not there, and for everything while it counts as silent."""
        if self.silent is not None and time.monotonic() < self._silent_until:
            return None
        self.silent = None
        try:
            return self._api.ask(*path, query=query).content
        except NoReply as silence:
            if silence.code != _NOT_FOUND:
                self.silent = silence.why
                self._silent_until = time.monotonic() + self._asks_again_after
                _log.info("what only the management API can tell stays unknown", why=silence.why)
        return None


def read(connection: Connection, topology: Topology, reader: Reader) -> Reading:
    """Makes nothing: a part is only compared once it is known to be there."""
    parts: dict[tuple[str, str], tuple[Difference, ...] | None] = {}
    with connection.scratch() as scratch:
        for exchange in topology.exchanges:
            wanted = {"exchange": exchange.name, "exchange_type": exchange.type, "durable": True}
            _read_part(scratch, "exchange", exchange.name, wanted, parts)
        for queue in topology.queues:
            wanted = {"queue": queue.name, "durable": True, "arguments": dict(queue.arguments)}
            _read_part(scratch, "queue", queue.name, wanted, parts)
    for queue in topology.queues:
        if parts.get(("queue", queue.name)) != () and ("queue", queue.name) in parts:
            _all_differences(queue.name, queue.arguments, parts, reader.arguments)
    return Reading(parts, _bindings(topology, parts, reader))


def _read_part(
    scratch: Scratch,
    kind: str,
    name: str,
    wanted: dict[str, object],
    parts: dict[tuple[str, str], tuple[Difference, ...] | None],
) -> None:
    try:
        scratch.call(f"{kind}_declare", passive=True, **{kind: name})
    except ChannelRefused as refused:
        if refused.is_gone:
            return
        if refused.code != _NO_PERMISSION:
            raise
    try:
        scratch.call(f"{kind}_declare", **wanted)
    except ChannelRefused as refused:
        differs = mismatch(refused)
        if differs is None and refused.code != _NO_PERMISSION:
            raise
        one = None if differs is None else Difference(differs.argument, differs.found, differs.wanted)
        parts[kind, name] = None if one is None else (one,)
    else:
        parts[kind, name] = ()


def _all_differences(
    name: str,
    wanted: Any,
    parts: dict[tuple[str, str], tuple[Difference, ...] | None],
    arguments: Callable[[str], dict[str, object] | None],
) -> None:
    """The broker's refusal names the first argument that differs; the API knows them all."""
    found, told = arguments(name), parts["queue", name]
    if found is None:
        return
    every = differing(wanted, found)
    named = {difference.argument for difference in told or ()}
    # The type of a queue may be a default that neither side wrote down: there the broker's own word counts.
    every = tuple(one for one in every if one.argument != "x-queue-type" or one.argument in named)
    beside = tuple(one for one in told or () if one.argument not in {each.argument for each in every})
    parts["queue", name] = beside + every


def _bindings(
    topology: Topology, parts: dict[tuple[str, str], tuple[Difference, ...] | None], reader: Reader
) -> frozenset[Binding] | None:
    found: set[Binding] = set()
    for exchange in topology.exchanges:
        if ("exchange", exchange.name) not in parts:
            continue
        bindings = reader.bindings_from(exchange.name)
        if bindings is None:
            return None
        found.update(bindings)
    return frozenset(found)
