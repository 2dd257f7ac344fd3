"""Reading a topology back: by AMQP whether a part is there and as wanted, by the management API what else it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from dlqbatch import logs
from dlqbatch.broker.connection import Connection, Scratch
from dlqbatch.broker.management import Api, NoReply, pages
from dlqbatch.broker.refusals import NO_PERMISSION, NOT_FOUND, mismatch
from dlqbatch.errors import BrokerUnreachable, ChannelRefused
from dlqbatch.topology.model import DEAD_LETTER_EXCHANGE, QUEUE_TYPE, Binding, Topology
from dlqbatch.topology.plan import Difference, Reading, differing

_log = logs.get(__name__)


_AnyReader = TypeVar("_AnyReader", bound="Reader")
Answer = TypeVar("Answer")
_Parts = dict[tuple[str, str], tuple[Difference, ...] | None]
"""How the parts that are there differ, by kind and name; None where that may not be asked."""


def sensible(ask: Callable[[_AnyReader], Answer | None]) -> Callable[[_AnyReader], Answer | None]:
    """Take an answer of other types than the broker's for none: what listens there is not asked again."""

    @wraps(ask)
    def checked(reader: _AnyReader) -> Answer | None:
        try:
            return ask(reader)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reader.silent = reader.silent or f"the management API's answer makes no sense ({type(error).__name__})"
            return None

    return checked


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
        number = self._of_queue(queue, "messages")
        return number if isinstance(number, int) else None

    def arguments(self, queue: str) -> dict[str, object] | None:
        arguments = self._of_queue(queue, "arguments")
        return arguments if isinstance(arguments, dict) else None

    def _of_queue(self, queue: str, name: str) -> object:
        found = self._get("queues", self._api.vhost, queue)
        return found.get(name) if isinstance(found, dict) else None

    @sensible
    def exchanges(self) -> tuple[str, ...] | None:
        found = self._get("exchanges", self._api.vhost, query="columns=name")
        return tuple(str(one["name"]) for one in found) if isinstance(found, list) else None

    @sensible
    def dead_lettering(self) -> dict[str, str] | None:
        """The dead-letter exchange that is in effect for each queue in the virtual host that has one."""
        if self.silent is not None and time.monotonic() < self._silent_until:
            return None
        found: dict[str, str] = {}
        try:
            for queue in pages(self._api, "name,arguments,effective_policy_definition"):
                arguments, policy = queue.get("arguments"), queue.get("effective_policy_definition")
                exchange = (arguments.get(DEAD_LETTER_EXCHANGE) if isinstance(arguments, dict) else None) or (
                    policy.get("dead-letter-exchange") if isinstance(policy, dict) else None
                )
                if exchange:
                    found[queue["name"]] = str(exchange)
        except BrokerUnreachable as silence:
            self.silent = silence.why
            return None
        return found

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
        """The content of the answer; None for what is not there, and for everything while it counts as silent."""
        if self.silent is not None and time.monotonic() < self._silent_until:
            return None
        self.silent = None
        try:
            return self._api.ask(*path, query=query).content
        except NoReply as silence:
            if silence.code != NOT_FOUND:
                self.silent = silence.why
                self._silent_until = time.monotonic() + self._asks_again_after
                _log.info("what only the management API can tell stays unknown", why=silence.why)
        return None


def read(connection: Connection, topology: Topology, reader: Reader) -> Reading:
    """Makes nothing: a part is only compared once it is known to be there."""
    parts: _Parts = {}
    with connection.scratch() as scratch:
        for exchange in topology.exchanges:
            _compare(scratch, parts, "exchange", exchange.name, exchange_type=exchange.type)
        for queue in topology.queues:
            _compare(scratch, parts, "queue", queue.name, arguments=dict(queue.arguments))
    for queue in topology.queues:
        # The broker's refusal names the first argument that differs; the API knows them all.
        if parts.get(("queue", queue.name), ()) != () and (arguments := reader.arguments(queue.name)) is not None:
            every = differing(queue.arguments, arguments)
            parts["queue", queue.name] = _joined(parts["queue", queue.name] or (), every)
    bindings = [reader.bindings_from(one.name) for one in topology.exchanges if ("exchange", one.name) in parts]
    known = [binding for some in bindings if some is not None for binding in some]
    return Reading(parts, None if None in bindings else frozenset(known))


def _compare(scratch: Scratch, parts: _Parts, kind: str, name: str, **wanted: Any) -> None:
    """Note how a part differs that is there."""
    try:
        if not scratch.is_there(kind, name):
            return
    except ChannelRefused as refused:
        if refused.code != NO_PERMISSION:
            raise
    try:
        scratch.call(f"{kind}_declare", durable=True, **{kind: name}, **wanted)
        parts[kind, name] = ()
    except ChannelRefused as refused:
        differs = mismatch(refused)
        if differs is None and refused.code != NO_PERMISSION:
            raise
        one = differs and Difference(differs.argument, differs.found, differs.wanted)
        parts[kind, name] = (one,) if one else None


def _joined(by_broker: tuple[Difference, ...], by_api: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """The type of a queue may be a default that neither side wrote down: there the broker's own word counts."""
    named = {difference.argument for difference in by_broker}
    every = {one.argument: one for one in by_api if one.argument != QUEUE_TYPE or one.argument in named}
    return (*(one for one in by_broker if one.argument not in every), *every.values())
