"""The way back to each origin, prepared once per run on a channel where a refusal does no harm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pika import BasicProperties

from dlqbatch import logs
from dlqbatch.broker.connection import NoAnswer
from dlqbatch.broker.publisher import is_of_one_key
from dlqbatch.errors import ChannelRefused
from dlqbatch.message.delivery import Route
from dlqbatch.message.returns import return_exchange
from dlqbatch.message.table import LONGEST_NAME, to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlqbatch.broker.connection import Connection, Scratch
    from dlqbatch.message.envelope import Origin

_log = logs.get(__name__)

_NO_PERMISSION, _LOCKED, _PRECONDITION = 403, 405, 406


class _Way(NamedTuple):
    exchange: str
    key: str | None = None
    """None: the message's own."""


def _place(origin: Origin) -> str:
    """What has to be looked up once, whatever the routing key."""
    if origin.queue is not None:
        return f"queue {origin.queue}"
    return f"exchange {origin.exchange}" if origin.exchange else f"queue {origin.key} by the default exchange"


class Origins:
    """What is known of each origin in this run; None from `route` means that it was not asked for, or is not there."""

    def __init__(self, connection: Connection, *, touch: bool = True) -> None:
        self._connection = connection
        self._touch = touch
        """Make return exchanges; a dry run only looks whether the origin is there, and what we may do."""
        self._ways: dict[str, _Way] = {}
        self._gone: set[str] = set()
        self._failed: set[str] = set()
        self._probed: dict[str, ChannelRefused] = {}
        self._unwritable: frozenset[str] = frozenset()
        self.warnings: dict[str, None] = {}

    def route(self, origin: Origin) -> Route | None:
        way = self._ways.get(_place(origin))
        return None if way is None else Route(way.exchange, origin.key if way.key is None else way.key)

    def is_gone(self, origin: Origin) -> bool:
        return _place(origin) in self._gone

    def is_unclear(self, origin: Origin) -> bool:
        """It was asked for, and the answer was neither yes nor no."""
        return _place(origin) in self._failed

    def forget(self, origin: Origin) -> None:
        place = _place(origin)
        self._ways.pop(place, None)
        self._gone.discard(place)

    def prepare(self, origin: Origin) -> None:
        place = _place(origin)
        if place in self._ways or place in self._gone or place in self._failed:
            return
        name = origin.queue if origin.queue is not None else origin.exchange or origin.key
        if len(to_bytes(name)) > LONGEST_NAME:
            self._gone.add(place)
            _log.warning("origin is gone", place=place, why="no broker has a name this long")
            return
        try:
            with self._connection.asking(name) as scratch:
                self._ways[place] = self._find(origin, scratch)
        except ChannelRefused as error:
            if not error.is_gone:
                self._doubt(place, error.text)
                return
            self._gone.add(place)
            _log.warning("origin is gone", place=place, why=error.text)
        except (NoAnswer, UnicodeEncodeError) as error:
            # One queue that does not answer, or whose name pika cannot write, must not stop the others.
            self._doubt(place, str(error))

    def _doubt(self, place: str, why: str) -> None:
        self._failed.add(place)
        _log.warning("origin cannot be checked", place=place, why=why)

    def unwritable(self, exchanges: Iterable[str]) -> frozenset[str]:
        """Those that take nothing from us. To learn that from a message would double what is under way beside it."""
        with self._connection.scratch() as scratch:
            found = {exchange: self._why_not(exchange, scratch) for exchange in sorted(exchanges)}
        refused = {exchange: why for exchange, why in found.items() if why is not None}
        for exchange, why in refused.items():
            name = f"the exchange '{exchange}'" if exchange else "the default exchange (amq.default)"
            self.warnings[
                f"{name} takes nothing from us, and what belongs there is left: give this login write permission on it "
                f"(docs/permissions.md): {why.text}"
            ] = None
        self._unwritable = frozenset(refused)
        return self._unwritable

    def refuses(self, exchange: str) -> bool:
        """It is one of those."""
        return exchange in self._unwritable

    def _find(self, origin: Origin, scratch: Scratch) -> _Way:
        if origin.queue is None:
            return self._through_exchange(origin, scratch)
        exchange = return_exchange(origin.queue)
        try:
            if not self._touch:
                return self._foreseen(origin.queue, exchange, scratch)
            # First of all, so that nothing is made for a queue that is gone.
            scratch.call_later("queue_declare", queue=origin.queue, passive=True)
            scratch.call_later("exchange_declare", exchange=exchange, exchange_type="fanout", durable=True)
            scratch.call_later("queue_bind", queue=origin.queue, exchange=exchange)
            # There is no such binding to undo; but whoever may undo it may also publish to the exchange.
            scratch.call("exchange_unbind", destination=exchange, source=exchange)
            return _Way(exchange)
        except ChannelRefused as error:
            if error.code not in {_NO_PERMISSION, _LOCKED}:
                raise
            why = error.text
        way = self._directly(origin.queue, scratch)
        self.warnings[
            f"returned to '{origin.queue}' through the default exchange, so with the queue's name as routing key: {why}"
        ] = None
        return way

    def _foreseen(self, queue: str, exchange: str, scratch: Scratch) -> _Way:
        """As good as can be told without making it; whether we may make it cannot."""
        scratch.call("queue_declare", queue=queue, passive=True)
        why = self._why_not(exchange, scratch)
        if why is None:
            # It is there, so that this makes nothing: it says whether it is one of ours.
            scratch.call("exchange_declare", exchange=exchange, exchange_type="fanout", durable=True)
        elif not why.is_gone:
            raise why
        return _Way(exchange)

    def _directly(self, queue: str, scratch: Scratch) -> _Way:
        try:
            scratch.call("queue_declare", queue=queue, passive=True)
        except ChannelRefused as error:
            # An exclusive queue is there; only its own connection may ask for it.
            if error.code != _LOCKED:
                raise
        if self._why_not("", scratch) is not None:
            raise ChannelRefused(_NO_PERMISSION, "no permission to write to the default exchange")
        return _Way("", queue)

    def _through_exchange(self, origin: Origin, scratch: Scratch) -> _Way:
        exchange = origin.exchange or ""
        if not exchange:
            return self._directly(origin.key, scratch)
        scratch.call("exchange_declare", exchange=exchange, passive=True)
        if self._why_not(exchange, scratch) is not None:
            raise ChannelRefused(_NO_PERMISSION, f"no permission to write to '{exchange}'")
        return _Way(exchange)

    def _why_not(self, exchange: str, scratch: Scratch) -> ChannelRefused | None:
        """What keeps us from writing there; learned from a publish that the broker must refuse before it routes it.

        It goes out on a channel of its own: a refusal on the publishing channel would cost every publish that is under
        way there.
        """
        if exchange not in self._probed:
            self._probed[exchange] = scratch.provoke(
                "basic_publish", exchange=exchange, routing_key="", body=b"", properties=_NEVER_ACCEPTED
            )
        return _refusal(self._probed[exchange])


def _refusal(answer: ChannelRefused) -> ChannelRefused | None:
    """None if it is about the message; or about its key, by a topic permission: then the exchange itself is allowed."""
    return None if answer.code == _PRECONDITION or is_of_one_key(answer.text) else answer


_NEVER_ACCEPTED: Final = BasicProperties(expiration="not a number")
