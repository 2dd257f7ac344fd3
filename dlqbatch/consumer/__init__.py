"""For workers written in Python: it counts failures, and dead-letters with the reason what failed too often.

    consumer = Consumer("amqp://…", queue="settlement.requested", max_retries=3)

    @consumer.on("settlement.requested")
    def settle(body: bytes, context: Context) -> None: ...

    consumer.run()

A handler that returns has done its work, and the message is acknowledged. When it raises, the message is tried again up
to `max_retries` times; then it goes to the dead-letter exchange with the exception in its headers. Nothing is
acknowledged before its copy was confirmed. Handlers run singly in a thread of their own, so that a long handler costs
no heartbeat.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Final

from dlqbatch import logs
from dlqbatch.amqp.patterns import TopicTrie
from dlqbatch.broker.access import Access, connect
from dlqbatch.consumer.message import Context
from dlqbatch.consumer.run import Link
from dlqbatch.errors import BrokerLost, BrokerUnreachable, ChannelRefused, LoginRefused, TopologyMissing

__all__ = ["Consumer", "Context"]

log = logs.get(__name__)

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds between two attempts to connect."""
_TICK: Final = 0.05
"""Seconds after which such a wait checks whether the consumer was stopped."""
ONE_REQUEST_SECONDS: Final = 1.0
"""Seconds in which a second SIGTERM is ignored: `timeout 60 python worker.py` signals the process and its group."""


_LATE: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class Consumer:
    """A worker of a queue; `run` blocks until a signal or `stop`."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        queue: str,
        dead_letters: str | None = None,
        max_retries: int = 3,
        prefetch: int = 1,
        heartbeat: int = 20,
    ) -> None:
        """`dead_letters` is an exchange, by default `dlq.QUEUE`; several urls are tried in turn."""
        if not queue or dead_letters == "" or max_retries < 0 or not 1 <= prefetch < 1 << 16:
            raise ValueError("queue and dead_letters are names, max_retries is at least 0, prefetch from 1 to 65535")
        self.queue = queue
        self.dead_letters = f"dlq.{queue}" if dead_letters is None else dead_letters
        self.max_retries = max_retries
        self.prefetch = prefetch
        urls = (url,) if isinstance(url, str) else tuple(url)
        self._access = Access(urls, heartbeat=heartbeat, name=f"dlqbatch consumer of {queue}")
        self._handlers: dict[str, Callable[[bytes, Context], object]] = {}
        self._topics = TopicTrie()
        # No threading.Event: a signal's handler would wait for ever for its lock, held by the thread it interrupts.
        self._is_stopping = False

    def on(self, event: str) -> Callable[[Callable[[bytes, Context], object]], Callable[[bytes, Context], object]]:
        """Handle this routing key, or what this topic pattern (`orders.*`, `payment.#`) matches most specifically."""

        def register(handler: Callable[[bytes, Context], object]) -> Callable[[bytes, Context], object]:
            if event in self._handlers:
                raise ValueError(f"'{event}' has a handler already")
            if any(is_late(handler) for is_late in _LATE):
                # A call would run nothing of it, and its message would be acknowledged.
                raise TypeError(f"the handler of '{event}' is a coroutine or a generator; run it from a plain function")
            self._handlers[event] = handler
            self._topics = TopicTrie(self._handlers)
            return handler

        return register

    def handler_of(self, key: str) -> Callable[[bytes, Context], object] | None:
        exact = self._handlers.get(key)
        if exact is not None:
            return exact
        best = self._topics.best(key)
        return None if best is None else self._handlers[best]

    def stop(self) -> None:
        """End `run` when the current handler has finished; callable from any thread."""
        self._is_stopping = True

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def run(self) -> None:
        """Work until stopped; connect again whenever the connection is lost.

        An error from the start (a refused login, no such queue or exchange, no right to read) is raised.
        """
        wait, has_worked = _FIRST_WAIT, False
        with _signals(self), ThreadPoolExecutor(1, "dlqbatch-handler") as thread:
            while not self.is_stopping:
                began = time.monotonic()
                try:
                    connection = connect(self._access)
                    try:
                        link = Link(self, connection, thread)
                        try:
                            link.serve()
                        finally:
                            has_worked = has_worked or link.has_begun
                    finally:
                        connection.close()
                except (LoginRefused, TopologyMissing, BrokerLost, BrokerUnreachable, ChannelRefused) as error:
                    if not has_worked and isinstance(error, (LoginRefused, TopologyMissing, ChannelRefused)):
                        raise
                    log.warning("the worker lost its broker and connects again", queue=self.queue, why=str(error))
                    wait = _FIRST_WAIT if time.monotonic() - began > _LONGEST_WAIT else min(wait * 2, _LONGEST_WAIT)
                    self._pause(wait * random.uniform(0.5, 1))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.is_stopping and time.monotonic() < until:
            time.sleep(_TICK)


@contextmanager
def _signals(consumer: Consumer) -> Iterator[None]:
    """SIGTERM and SIGINT stop the consumer; a second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            consumer.stop()
        elif number != signal.SIGTERM or now - asked_at > ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
