"""The queues of the broker as a page shows them: depths, consumers, rates, and what looks like trouble."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import Any, Final

from dlqbatch.broker.access import management_api
from dlqbatch.broker.management import Api, pages
from dlqbatch.errors import DlqbatchError
from dlqbatch.monitor.queue_depths import DRAIN, INGEST, Depth
from dlqbatch.settings import Settings

_COLUMNS: Final = (
    "name,consumers,messages_ready,messages_unacknowledged,messages_delayed,"
    "message_stats.ack_details.rate,message_stats.redeliver_details.rate,message_stats.publish_details.rate"
)
_REMEMBERED: Final = 24
"""Looks, which are a few seconds apart."""
_FALLS: Final = 3
_STANDS_FOR: Final = 30.0
_SECONDS: Final = 3.0
_MOST_QUEUES: Final = 20_000


@dataclass(frozen=True, slots=True)
class QueueNow:
    ready: int
    unacknowledged: int | None = None
    """None, as with the others: AMQP alone does not tell."""
    delayed: int | None = None
    consumers: int | None = None
    acknowledged_rate: float | None = None
    redelivered_rate: float | None = None
    published_rate: float | None = None

    @property
    def total(self) -> int:
        return self.ready + (self.unacknowledged or 0) + (self.delayed or 0)


@dataclass(frozen=True, slots=True)
class Look:
    """The queues at one time; `problem` says why there is none, or why only depths are known."""

    at: datetime
    queues: Mapping[str, QueueNow] = field(default_factory=dict)
    problem: str = ""

    @property
    def depths(self) -> dict[str, int]:
        return {name: queue.total for name, queue in self.queues.items()}


def trouble(looks: Sequence[tuple[float, QueueNow]]) -> str:
    """What is wrong with a queue in a few words, by its last looks (the newest last); empty if nothing is.

    A time is in seconds. One look says little: consumers of a rolling deployment come and go once.
    """
    if not looks:
        return ""
    at, last = looks[-1]
    if last.consumers == 0 and last.total:
        return "no consumer"
    counts = [queue.consumers for _, queue in looks if queue.consumers is not None]
    if sum(later < earlier for earlier, later in pairwise(counts)) >= _FALLS:
        return "consumers come and go"
    if last.redelivered_rate:
        return "its head is redelivered"
    window = [queue for when, queue in looks if at - when <= _STANDS_FOR]
    is_long = at - looks[0][0] >= _STANDS_FOR
    if (
        is_long
        and last.total
        and min(queue.total for queue in window) >= looks[0][1].total
        and not last.acknowledged_rate
    ):
        return "its depth does not fall"
    return ""


class QueueWatch:
    """Looks at the broker; one thread at a time calls `look`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._api: Api = management_api(settings)
        self._depth: Depth | None = None
        self._history: dict[str, deque[tuple[float, QueueNow]]] = {}
        self.last: Look | None = None

    @property
    def is_named(self) -> bool:
        return "broker_url" in self._settings.model_fields_set

    def look(self) -> Look:
        """By the management API; where it does not answer, by AMQP the depths of the queues that the jobs serve."""
        now = datetime.now(UTC)
        try:
            found = {queue["name"]: _queue(queue) for queue in islice(pages(self._api, _COLUMNS), _MOST_QUEUES)}
            look = Look(now, found)
        except DlqbatchError as error:
            look = self._by_amqp(now, str(error))
        at = time.monotonic()
        for name, queue in look.queues.items():
            self._history.setdefault(name, deque(maxlen=_REMEMBERED)).append((at, queue))
        for name in self._history.keys() - look.queues.keys():
            del self._history[name]
        self.last = look
        return look

    def trouble_of(self, queue: str) -> str:
        return trouble(tuple(self._history.get(queue, ())))

    def close(self) -> None:
        if self._depth is not None:
            self._depth.close()

    def _by_amqp(self, now: datetime, why: str) -> Look:
        if self._depth is None:
            self._depth = Depth(self._settings, (DRAIN, INGEST), _SECONDS)
        reading = self._depth.read()
        if reading is None:
            return Look(now, problem="the broker does not answer")
        return Look(now, {name: QueueNow(depth) for name, depth in reading.depths.items()}, why)


def _queue(answer: Mapping[str, Any]) -> QueueNow:
    def count(name: str) -> int | None:
        found = answer.get(name)
        return found if isinstance(found, int) else None

    stats = answer.get("message_stats")

    def rate(name: str) -> float | None:
        details = stats.get(f"{name}_details") if isinstance(stats, dict) else None
        found = details.get("rate") if isinstance(details, dict) else None
        return float(found) if isinstance(found, int | float) else None

    return QueueNow(
        count("messages_ready") or 0,
        count("messages_unacknowledged"),
        count("messages_delayed"),
        count("consumers"),
        rate("ack"),
        rate("redeliver"),
        rate("publish"),
    )


def troubles(watch: QueueWatch, queues: Collection[str]) -> dict[str, str]:
    return {queue: found for queue in queues if (found := watch.trouble_of(queue))}
