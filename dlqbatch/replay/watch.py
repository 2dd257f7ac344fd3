"""Watches the queues that a replay sends to, and stops the plan when guard.py sees harm in one of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final

from dlqbatch import logs
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection, NoAnswer
from dlqbatch.broker.management import Unanswered
from dlqbatch.broker.readings import Readings
from dlqbatch.errors import ChannelRefused, DlqbatchError, so_far
from dlqbatch.replay.guard import Harm, Look, harm
from dlqbatch.settings import Settings

_log = logs.get(__name__)

_LOOKS_EVERY: Final = 0.2
"""Seconds between two looks at the numbers of consumers and of waiting messages."""
_ASKS_EVERY: Final = 1.0
"""Seconds between two questions to the management API, which shows each consumer and counts redeliveries."""
_MOST_QUEUES: Final = 50
_MOST_LOOKS: Final = 400
"""Looks of one queue that are kept: more than a minute."""
_FOR_EVER: Final = 10 * 365 * 86_400.0
_TRIES_EVERY: Final = 2.0


class Watch:
    """The looks at the queues of these origins.

    `stop` stops the plan for a reason and a queue. It returns False if the apply need not end: somebody has paused or
    stopped it.
    """

    def __init__(
        self,
        settings: Settings,
        origins: Sequence[Origin],
        stop: Callable[[str, str], bool],
        advice: Callable[[str], str],
    ) -> None:
        self.harm: str | None = None
        """Why the plan was stopped."""
        self._settings, self._origins, self._stop, self._advice = settings, origins, stop, advice
        self._found: Harm | None = None
        self._looks: dict[str, deque[Look]] = {}
        self._is_over = threading.Event()
        self._has_looked = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Watch]:
        """Until the end of the block; the first look comes before the block, so that a change since is seen."""
        thread = threading.Thread(target=self._run, name="guard", daemon=True)
        thread.start()
        self._has_looked.wait(_TRIES_EVERY)
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()

    def _run(self) -> None:
        has_warned = False
        while not self._is_over.is_set() and self.harm is None:
            try:
                connection = connect(access_to(self._settings, "dlqbatch replay, watching"))
                try:
                    self._watch(connection)
                finally:
                    connection.close(0.5)
            except DlqbatchError as error:
                if not has_warned:
                    _log.warning("nobody watches the queues of the replay for the moment", why=so_far(error))
                has_warned = True
                self._is_over.wait(_TRIES_EVERY)
            finally:
                self._has_looked.set()

    def _watch(self, connection: Connection) -> None:
        readings = Readings(management_api(self._settings, quickly=True), connection, seconds=_FOR_EVER)
        queues = self._queues(readings)
        asks_at = 0.0
        while not self._is_over.is_set():
            asks = time.monotonic() >= asks_at
            for queue in queues:
                self._look_at(queue, connection, readings, asks=asks)
            if asks:
                asks_at = time.monotonic() + _ASKS_EVERY
            self._has_looked.set()
            if self._found is not None and self._stops(self._found):
                return
            connection.pause(_LOOKS_EVERY)

    def _stops(self, found: Harm) -> bool:
        why = f"{found.why}. {self._advice(found.queue)}"
        try:
            is_stopped = self._stop(why, found.queue)
        except DlqbatchError:
            is_stopped = True  # this apply ends in any case
        if is_stopped:
            self.harm = why
        self._found = None
        self._looks.clear()
        return is_stopped

    def _queues(self, readings: Readings) -> list[str]:
        found: dict[str, None] = {}
        for origin in self._origins[:_MOST_QUEUES]:
            found.update(dict.fromkeys(readings.target(origin).queues))
        return list(found)[:_MOST_QUEUES]

    def _look_at(self, queue: str, connection: Connection, readings: Readings, *, asks: bool) -> None:
        try:
            with connection.scratch_for(queue) as scratch:
                seen = scratch.look("queue", queue)
        except (ChannelRefused, NoAnswer, UnicodeEncodeError):
            return  # it cannot be looked at, or is gone, which the publish says
        channels, redelivered, acknowledged = None, None, None
        if asks:
            with suppress(Unanswered, AttributeError, LookupError, TypeError, ValueError):
                channels, redelivered, acknowledged = _details(readings.describe(queue))
        look = Look(
            queue,
            datetime.now(UTC),
            int(seen.message_count),
            int(seen.consumer_count),
            channels,
            redelivered,
            acknowledged,
        )
        looks = self._looks.setdefault(queue, deque(maxlen=_MOST_LOOKS))
        looks.append(look)
        self._found = self._found or harm(looks)


def _details(described: tuple[Any, Any] | None) -> tuple[frozenset[str] | None, int | None, int | None]:
    if described is None:
        return None, None, None
    answer = described[1]
    stats = answer.get("message_stats") or {}
    channels = frozenset(str(each["channel_details"]["name"]) for each in answer.get("consumer_details") or ())
    settled = sum(int(stats.get(name, 0)) for name in ("ack", "deliver_no_ack", "get_no_ack"))
    return channels, int(stats.get("redeliver", 0)), settled
