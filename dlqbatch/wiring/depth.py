"""How much waits for a drain: the messages ready in every queue that it serves, by passive declare.

The counts are the queues' own, at the price of one small question each; statistics lag by seconds. What a drain has
taken and not settled is not counted. A quorum queue without a leader answers 0 until it has one.

One connection is kept where looks come often. Nobody serves it between two looks, so no heartbeat leaves it: looks
further apart than half the heartbeat would each find it dead, and the broker would log that for every one of them.
There each look has a connection of its own, closed at its end.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from pika.exceptions import AMQPError, ChannelClosedByBroker

from dlqbatch import logs
from dlqbatch.broker.connection import Connection, all_of, describe, parameters
from dlqbatch.errors import BrokerLost, BrokerUnreachable, ChannelRefused, DlqbatchError
from dlqbatch.topology.kinds import Drained
from dlqbatch.wiring.access import access_to
from dlqbatch.wiring.ladders import kinds_of

if TYPE_CHECKING:
    from pika.channel import Channel

    from dlqbatch.settings import Settings

log = logs.get(__name__)

NAME: Final = "dlqbatch depth"
"""Of the connection, as the broker's own lists show it."""
_TO_CONNECT: Final = 0.8
"""Of the time that a read may take: connecting must leave some for asking."""
_TO_CLOSE: Final = 0.5
"""Seconds for a polite end; without one the broker complains in its log."""


class Depth:
    """May be used from several threads; one reads at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queues = queues_of(settings)
        self._keeps = settings.trigger_interval.total_seconds() < settings.heartbeat_seconds / 2
        self._seconds = settings.connect_timeout_seconds
        self._lock = Lock()
        self._connection: Connection | None = None
        self._channel: _Channel | None = None
        self._is_away = False

    def read(self) -> int | None:
        """The sum over all queues; None if the broker cannot be asked, which is told once until it answers again.

        A queue that is not there holds nothing: the first drain declares it. One whose depth cannot be learned, for a
        missing permission or a node that is down, is told of and left out: the others can be deep enough by themselves.
        It returns within `connect_timeout_seconds`, and half a second for closing.
        """
        with self._lock:
            try:
                depth, problem = self._read(time.monotonic() + self._seconds)
            except (DlqbatchError, AMQPError, OSError) as error:
                self._drop()
                depth, problem = None, str(error)
            if not self._keeps:
                self._drop()
            self._tell(problem)
            return depth

    def close(self) -> None:
        """A read that is waiting for a silent broker is not waited for: it closes at its own end."""
        self._keeps = False
        if self._lock.acquire(timeout=_TO_CLOSE):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _read(self, deadline: float) -> tuple[int | None, str | None]:
        if not self._queues:
            return 0, None
        was_kept = self._connection is not None
        try:
            return self._sum(deadline)
        except (BrokerLost, AMQPError):
            # One that is kept may have died since the last look, which says nothing about the broker now. One that
            # only stays silent is not tried twice: it has had its time.
            if not was_kept or self._connection is None or not self._connection.is_closing:
                raise
            self._drop()
            return self._sum(deadline)

    def _sum(self, deadline: float) -> tuple[int | None, str | None]:
        channel = self._open(deadline)
        known: list[int] = []
        problem: str | None = None
        for queue in self._queues:
            try:
                known.append(channel.depth(queue, deadline))
            except ChannelRefused as refused:
                if refused.is_gone:
                    known.append(0)
                else:
                    problem = f"the depth of '{queue}' cannot be learned: {refused.text}"
        return (sum(known) if known else None), problem

    def _open(self, deadline: float) -> _Channel:
        if self._connection is None or self._channel is None:
            self._connection = self._connect(deadline)
            self._channel = _Channel(self._connection)
        return self._channel

    def _connect(self, deadline: float) -> Connection:
        """Each host once: the next look is the next try, and says nothing while the broker stays away."""
        access = access_to(self._settings, NAME)
        failures: list[BrokerUnreachable] = []
        for tried, url in enumerate(access.urls):
            left = (deadline - time.monotonic()) * _TO_CONNECT
            try:
                return Connection(parameters(url, access, max(left / (len(access.urls) - tried), 0.1)))
            except BrokerUnreachable as error:
                failures.append(error)
        raise all_of(failures)

    def _drop(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            connection.close(_TO_CLOSE)

    def _tell(self, problem: str | None) -> None:
        if problem is not None and not self._is_away:
            log.warning("the depth of the queues is not known: no drain is started for it", why=problem)
        elif problem is None and self._is_away:
            log.info("the depth of the queues is known again")
        self._is_away = problem is not None


class _Channel:
    """Asks for depths on one channel; a refusal closes it, and the next question opens another."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Channel | None = None
        self._refusals: list[BaseException] = []

    def depth(self, queue: str, deadline: float) -> int:
        answers: list[Any] = []
        self._open(deadline).queue_declare(queue, passive=True, callback=answers.append)
        self._wait(answers, deadline)
        if answers:
            return int(answers[0].method.message_count)
        error, self._channel = self._refusals[0], None
        if isinstance(error, ChannelClosedByBroker):
            raise ChannelRefused(error.reply_code, error.reply_text) from error
        raise BrokerLost(describe(error)) from error

    def _open(self, deadline: float) -> Channel:
        if self._channel is None:
            opened: list[Channel] = []
            self._refusals = []
            self._connection.wire.channel(on_open_callback=opened.append)
            self._wait(opened, deadline)
            opened[0].add_on_close_callback(lambda _, error: self._refusals.append(error))
            self._channel = opened[0]
        return self._channel

    def _wait(self, answers: list[Any], deadline: float) -> None:
        left = max(deadline - time.monotonic(), 0.1)
        self._connection.wait(lambda: answers or self._refusals, "queue.declare", left)


def queues_of(settings: Settings) -> tuple[str, ...]:
    """Those that a drain takes from, each once."""
    drained = (kind for kind in kinds_of(settings) if isinstance(kind, Drained))
    return tuple(dict.fromkeys(source.queue for kind in drained for source in kind.sources))
