"""The way back to each origin: its return exchange is declared and bound once per run, where a refusal does no harm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from dlqbatch import logs
from dlqbatch.amqp.delivery import Route
from dlqbatch.amqp.retry_headers import Origin, return_exchange
from dlqbatch.amqp.table import LONGEST_NAME, to_bytes
from dlqbatch.broker.connection import Connection, NoAnswer, PublishingBlocked, Scratch
from dlqbatch.broker.refusals import LOCKED, NO_PERMISSION, NOT_FOUND, is_of_one_key
from dlqbatch.errors import ChannelRefused

_log = logs.get(__name__)

_LOGGED_OF_A_KIND: Final = 20
_SHOWN: Final = 100
"""Characters of a name that a refusal has room for."""


class _Way(NamedTuple):
    exchange: str
    key: str | None = None
    """The routing key; None for the message's own."""


def _place(origin: Origin) -> str:
    """The queue or exchange that is looked for once, whatever the routing key."""
    if origin.queue is not None:
        return f"queue {origin.queue}" + (" as by the default exchange" if _came_by_default_exchange(origin) else "")
    return f"exchange {origin.exchange}" if origin.exchange else f"queue {origin.key} by the default exchange"


def _came_by_default_exchange(origin: Origin) -> bool:
    return origin.exchange == "" and origin.queue == origin.key


class Origins:
    """What is known of each origin in this run; `route` is None before `prepare`, and where the origin is not there."""

    def __init__(self, connection: Connection, *, touch: bool = True) -> None:
        self._connection = connection
        self._touch = touch
        """Make return exchanges; a dry run only looks whether the origin is there, and whether we may publish."""
        self._ways: dict[str, _Way] = {}
        self._gone: set[str] = set()
        self._failed: set[str] = set()
        self._probed: dict[str, ChannelRefused | None] = {}
        self._unwritable: frozenset[str] = frozenset()
        self.warnings: dict[str, None] = {}
        self.finds_alarms = False
        """The first way that is prepared also shows whether the broker takes publishes at all: PublishingBlocked."""
        self.knows_homes = False
        """The run knows which queue a message failed in, also where its exchange led it nowhere."""
        self._nowhere: set[tuple[str, str]] = set()
        """Exchanges and keys that messages came back from as unroutable."""
        self._only_looked_for: set[str] = set()
        self._there: set[str] = set()
        self._left_over: list[str] = []
        """Our exchanges whose queue is gone."""
        self._logged: Counter[str] = Counter()

    def route(self, origin: Origin) -> Route | None:
        way = self._ways.get(_place(origin))
        if way is None or (self._nowhere and self.leads_nowhere(origin)):
            return None
        return Route(way.exchange, origin.key if way.key is None else way.key)

    def leads_nowhere(self, origin: Origin) -> bool:
        """The exchange is there, and led no message of this key to a queue."""
        return (_place(origin), origin.key) in self._nowhere

    def is_there(self, origin: Origin) -> bool:
        """The origin was looked for and found; a way to it may not have been made."""
        place = _place(origin)
        return place in self._there or place in self._ways

    def only_look_for(self, origin: Origin) -> None:
        """When it is prepared next, nothing is made for it."""
        self._only_looked_for.add(_place(origin))

    def unroutable(self, origin: Origin) -> bool:
        """A message came back from it twice; whether it is worth asking what else could become of it."""
        if not self.knows_homes or origin.queue is not None or not origin.exchange:
            return False
        self._nowhere.add((_place(origin), origin.key))
        return True

    def is_gone(self, origin: Origin) -> bool:
        return _place(origin) in self._gone

    def is_unclear(self, origin: Origin) -> bool:
        """The origin was looked for, and the answer was neither yes nor no."""
        return _place(origin) in self._failed

    def forget(self, origin: Origin) -> None:
        place = _place(origin)
        self._ways.pop(place, None)
        self._gone.discard(place)

    def prepare(self, origin: Origin) -> None:
        place = _place(origin)
        if place in self._ways or place in self._gone or place in self._failed or place in self._there:
            return
        name = origin.name
        if len(to_bytes(name)) > LONGEST_NAME:
            self._gone.add(place)
            self._log_some("origin is gone", place, "no broker has a name this long")
            return
        try:
            with self._connection.scratch_for(name) as scratch:
                if place in self._only_looked_for:
                    scratch.look("queue", name)
                    self._there.add(place)
                    return
                way = self._find(origin, scratch)
                if self.finds_alarms and not self._probed:
                    self._publish_refusal(way.exchange, scratch)
                self._ways[place] = way
        except ChannelRefused as error:
            if not error.is_gone:
                self._fail(place, error.text)
                return
            self._gone.add(place)
            self._log_some("origin is gone", place, error.text)
            if origin.queue is not None and self._touch:
                self._left_over.append(return_exchange(origin.queue))
        except (NoAnswer, UnicodeEncodeError) as error:
            # One queue that does not answer, or whose name pika cannot write, must not stop the others.
            self._fail(place, str(error))

    def _fail(self, place: str, why: str) -> None:
        self._failed.add(place)
        self._log_some("origin cannot be checked", place, why)

    def _log_some(self, what: str, place: str, why: str) -> None:
        """A log line, until there are too many of a kind to be read."""
        self._logged[what] += 1
        if self._logged[what] <= _LOGGED_OF_A_KIND:
            _log.warning(what, place=place, why=why)

    def tidy(self, until: float) -> None:
        """Delete return exchanges whose queues are gone, until that time; only when nothing is under way.

        A return exchange that is bound again stays: somebody has declared the queue anew.
        """
        left_over, self._left_over = self._left_over, []
        with self._connection.scratch() as scratch:
            for exchange in left_over:
                if time.monotonic() > until or self._connection.blocked:
                    return
                try:
                    scratch.call("exchange_delete", exchange=exchange, if_unused=True)
                except ChannelRefused as refused:
                    if refused.code == NO_PERMISSION:
                        return

    def unwritable(self, exchanges: Iterable[str]) -> frozenset[str]:
        """The exchanges that we may not publish to. A refused message would double what is under way with it."""
        with self._connection.scratch() as scratch:
            found = {exchange: self._publish_refusal(exchange, scratch) for exchange in sorted(exchanges)}
        refused = {exchange: why for exchange, why in found.items() if why is not None}
        for exchange, why in refused.items():
            name = f"the exchange '{exchange}'" if exchange else "the default exchange (amq.default)"
            self.warnings[
                f"{name} takes nothing from us, and what belongs there is left: give this login write permission on it "
                f"(docs/permissions.md): {why.text}"
            ] = None
        self._unwritable = frozenset(refused)
        return self._unwritable

    def is_blocked(self) -> bool:
        """The broker takes no publishes from anybody: a memory or disk alarm."""
        with self._connection.scratch() as scratch:
            try:
                self._publish_refusal("", scratch)
            except PublishingBlocked:
                return True
        return False

    def refuses(self, exchange: str) -> bool:
        """The exchange was found to take nothing from us."""
        return exchange in self._unwritable

    def _find(self, origin: Origin, scratch: Scratch) -> _Way:
        if origin.queue is None:
            return self._through_exchange(origin, scratch)
        if _came_by_default_exchange(origin) and self._publish_refusal("", scratch) is None:
            # Its consumer sees exactly the first delivery. A consumer that publishes to the exchange of a delivery, as
            # Celery does for a retry, needs no right on an exchange of ours.
            return self._directly(origin.queue, scratch)
        exchange = return_exchange(origin.queue)
        try:
            if not self._touch:
                return self._foreseen(origin.queue, exchange, scratch)
            # First of all, so that nothing is made for a queue that is gone.
            scratch.call_later("queue_declare", queue=origin.queue, passive=True)
            scratch.call_later("exchange_declare", exchange=exchange, exchange_type="fanout", durable=True)
            scratch.call_later("queue_bind", queue=origin.queue, exchange=exchange)
            # There is no such binding; but who may unbind it may also publish to the exchange.
            scratch.call("exchange_unbind", destination=exchange, source=exchange)
            return _Way(exchange)
        except ChannelRefused as error:
            if error.is_gone and f"'{exchange[:_SHOWN]}" in error.text:
                # Another run has just deleted it, because the queue was gone for a moment.
                raise ChannelRefused(NOT_FOUND, "its way back was deleted meanwhile") from error
            if error.code not in {NO_PERMISSION, LOCKED}:
                raise
            why = error.text
        way = self._directly(origin.queue, scratch)
        self.warnings[
            f"returned to '{origin.queue}' through the default exchange, so with the queue's name as routing key: {why}"
        ] = None
        return way

    def _foreseen(self, queue: str, exchange: str, scratch: Scratch) -> _Way:
        """The way that a run would make; whether it may make it is not known without trying."""
        scratch.look("queue", queue)
        why = self._publish_refusal(exchange, scratch)
        if why is None:
            # It is there, so this declares nothing new: it shows whether the exchange is ours.
            scratch.call("exchange_declare", exchange=exchange, exchange_type="fanout", durable=True)
        elif not why.is_gone:
            raise why
        return _Way(exchange)

    def _directly(self, queue: str, scratch: Scratch) -> _Way:
        try:
            scratch.look("queue", queue)
        except ChannelRefused as error:
            # An exclusive queue is there; only its own connection may ask for it.
            if error.code != LOCKED:
                raise
        if self._publish_refusal("", scratch) is not None:
            raise ChannelRefused(NO_PERMISSION, "no permission to write to the default exchange")
        return _Way("", queue)

    def _through_exchange(self, origin: Origin, scratch: Scratch) -> _Way:
        exchange = origin.exchange or ""
        if not exchange:
            return self._directly(origin.key, scratch)
        scratch.look("exchange", exchange)
        if self._publish_refusal(exchange, scratch) is not None:
            raise ChannelRefused(NO_PERMISSION, f"no permission to write to '{exchange}'")
        return _Way(exchange)

    def _publish_refusal(self, exchange: str, scratch: Scratch) -> ChannelRefused | None:
        """The broker's refusal of a publish to this exchange, which is rolled back; None if it takes it.

        The publish goes out on a channel of its own: a refusal on the publishing channel would cost every publish that
        is under way there.
        """
        if exchange not in self._probed:
            self._probed[exchange] = None
            try:
                scratch.try_publish(exchange)
            except PublishingBlocked:
                del self._probed[exchange]
                raise
            except ChannelRefused as refused:
                # A refusal that is about the key alone comes from a topic permission: the exchange is allowed.
                self._probed[exchange] = None if is_of_one_key(refused.text) else refused
        return self._probed[exchange]
