"""Consumers that one message kills, as a message does that its handler cannot survive."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any, Final

import pika
from pika.exceptions import AMQPError
from program import HANGS_AFTER

KINDS: Final[dict[str, dict[str, Any]]] = {
    "for good": {"number": 1, "restarts": False},
    "one of three": {"number": 3, "restarts": False},
    "restarted at once": {"number": 1, "restarts": True},
}
"""How they die: the only one does, each of three in turn does, or the only one does and comes back at once."""


class Workers:
    """Consumers of one queue that lose their connection when they get the poison, as a process that dies does."""

    def __init__(self, url: str, queue: str, poison: bytes, *, number: int, restarts: bool) -> None:
        self.handled: list[int] = []
        self.crashed_at: list[datetime] = []
        self._url, self._queue, self._poison, self._restarts = url, queue, poison, restarts
        self._is_over = threading.Event()
        self._has_begun = threading.Barrier(number + 1)
        self._threads = [threading.Thread(target=self._work) for _ in range(number)]
        for thread in self._threads:
            thread.start()
        self._has_begun.wait(HANGS_AFTER)

    def _work(self) -> None:
        is_first = True
        while (is_first or self._restarts) and not self._is_over.is_set():
            connection = pika.BlockingConnection(pika.URLParameters(self._url))
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1)

            def take(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
                if body == self._poison:
                    self.crashed_at.append(datetime.now(UTC))
                    raise _Died
                self.handled.append(int(body))
                channel.basic_ack(method.delivery_tag)

            channel.basic_consume(self._queue, take)
            if is_first:
                self._has_begun.wait(HANGS_AFTER)
            is_first = False
            try:
                while not self._is_over.is_set():
                    connection.process_data_events(0.05)
            except (_Died, AMQPError):
                pass
            finally:
                connection.close()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(HANGS_AFTER)


class _Died(Exception):
    pass
