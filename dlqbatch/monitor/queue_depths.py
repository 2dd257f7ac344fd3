"""The depths of the queues that drain and ingest serve: the messages ready in each, by passive declare.

That is one small request for each queue; the statistics of the management API lag by seconds. Unacknowledged messages
are not counted. A quorum queue without a leader answers 0 until it has one.

Frequent reads share a connection, which sends no heartbeats between them. If the time between two reads is more than
half the heartbeat, the broker would close it and log that each time: then each read has a connection of its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import Final

from pika.exceptions import AMQPError

from dlqbatch import logs
from dlqbatch.amqp.patterns import is_wildcard
from dlqbatch.broker.access import access_to, connect_once, management_api
from dlqbatch.broker.connection import Connection, Scratch
from dlqbatch.errors import BrokerLost, ChannelRefused, DlqbatchError
from dlqbatch.settings import Settings
from dlqbatch.topology.declare import dead_letter_queues, kinds_of
from dlqbatch.topology.kinds import Drained

log = logs.get(__name__)

# The name of the connection in the broker's own lists.
NAME: Final = "dlqbatch depth"
DRAIN: Final = "drain"
INGEST: Final = "ingest"
# Connecting takes at most this share of the time of a read, so that some is left for asking.
_TO_CONNECT: Final = 0.8
# Seconds for closing politely; otherwise the broker complains in its log.
_TO_CLOSE: Final = 0.5
# Seconds for which the queues that match wildcards are kept, because they take requests to the management API.
_WILDCARDS_HOLD: Final = 60.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The depths of queues at one time."""

    at: datetime
    depths: Mapping[str, int]
    """The depth of each queue; without those whose depth cannot be learned."""
    served: Mapping[str, Collection[str]]
    """The queues that each job serves."""

    def of(self, job: str) -> int | None:
        """The sum of the known depths of a job's queues; None if it has queues and no depth is known."""
        queues = self.served.get(job, ())
        known = [self.depths[queue] for queue in queues if queue in self.depths]
        return sum(known) if known or not queues else None


class Depth:
    """May be used from several threads; one reads at a time."""

    def __init__(self, settings: Settings, jobs: Collection[str] = (DRAIN,), seconds: float | None = None) -> None:
        """The queues of `jobs` are looked at; `seconds` bound a read, else `connect_timeout_seconds`."""
        self._settings = settings
        self._served = {job: _SERVED[job](settings) for job in jobs}
        self._matched: tuple[str, ...] = ()
        self._matched_until = 0.0
        self._unmatched: str | None = None
        self._keeps = settings.trigger_interval.total_seconds() < settings.heartbeat_seconds / 2
        self._seconds = settings.connect_timeout_seconds if seconds is None else seconds
        self._lock = Lock()
        self._connection: Connection | None = None
        self._scratch: Scratch | None = None
        self._is_away = False

    def read(self) -> Reading | None:
        """None if the broker does not answer, which is logged once until it does again.

        A queue that is not there holds nothing: the first drain declares it. A queue whose depth cannot be learned,
        because a permission is missing or a node is down, is logged and left out, as the others can be deep enough.
        A read takes its seconds at most, and half a second for closing.
        """
        with self._lock:
            try:
                reading, problem = self._read(time.monotonic() + self._seconds)
            except (DlqbatchError, AMQPError, OSError) as error:
                self._drop()
                reading, problem = None, str(error)
            if not self._keeps:
                self._drop()
            self._log(problem)
            return reading

    def close(self) -> None:
        """Close the connection; a read that waits for a silent broker closes it at its own end."""
        self._keeps = False
        if self._lock.acquire(timeout=_TO_CLOSE):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _read(self, deadline: float) -> tuple[Reading, str | None]:
        served, problem = self._queues()
        queues = dict.fromkeys(queue for each in served.values() for queue in each)
        if not queues:
            return Reading(datetime.now(UTC), {}, served), problem
        was_kept = self._connection is not None
        try:
            depths, refused = self._depths(queues, deadline)
        except (BrokerLost, AMQPError):
            # A kept connection may have been closed since the last read, while the broker is well. There is no second
            # try with a broker that only stays silent: the time is over.
            if not was_kept or self._connection is None or not self._connection.is_closing:
                raise
            self._drop()
            depths, refused = self._depths(queues, deadline)
        return Reading(datetime.now(UTC), depths, served), refused or problem

    def _queues(self) -> tuple[dict[str, tuple[str, ...]], str | None]:
        """By job its queues, with those that wildcards match; if the management API is away, as they were last."""
        names = self._served.get(INGEST, ())
        if not any(is_wildcard(name) for name in names):
            return dict(self._served), None
        if time.monotonic() >= self._matched_until:
            self._matched_until = time.monotonic() + _WILDCARDS_HOLD
            from dlqbatch.broker.management import expansion  # noqa: PLC0415  (HTTP, for those who have wildcards)

            try:
                self._matched = expansion(names, management_api(self._settings)).queues
                self._unmatched = None
            except DlqbatchError as error:
                self._unmatched = f"which queues the wildcards match cannot be learned: {error}"
                self._matched = self._matched or tuple(name for name in names if not is_wildcard(name))
        return {**self._served, INGEST: self._matched}, self._unmatched

    def _depths(self, queues: Collection[str], deadline: float) -> tuple[dict[str, int], str | None]:
        if self._connection is None or self._scratch is None:
            access = access_to(self._settings, NAME)
            # Each host once: the next read is the next try.
            self._connection = connect_once(access, deadline - (deadline - time.monotonic()) * (1 - _TO_CONNECT))
            self._scratch = Scratch(self._connection)
        known: dict[str, int] = {}
        problem: str | None = None
        for queue in queues:
            self._connection.answer_within = max(deadline - time.monotonic(), 0.1)
            try:
                known[queue] = self._scratch.call("queue_declare", queue=queue, passive=True).message_count
            except ChannelRefused as refused:
                if refused.is_gone:
                    known[queue] = 0
                else:
                    problem = f"the depth of '{queue}' cannot be learned: {refused.text}"
        return known, problem

    def _drop(self) -> None:
        connection, self._connection, self._scratch = self._connection, None, None
        if connection is not None:
            connection.close(_TO_CLOSE)

    def _log(self, problem: str | None) -> None:
        if problem is not None and not self._is_away:
            log.warning("the depth of the queues is not known", why=problem)
        elif problem is None and self._is_away:
            log.info("the depth of the queues is known again")
        self._is_away = problem is not None


def queues_of(settings: Settings) -> tuple[str, ...]:
    """The queues that a drain takes from, each once."""
    drained = (kind for kind in kinds_of(settings) if isinstance(kind, Drained))
    return tuple(dict.fromkeys(source.queue for kind in drained for source in kind.sources))


def ingested(settings: Settings) -> tuple[str, ...]:
    """The queues and wildcards that an ingest takes from."""
    return settings.ingest_queues or dead_letter_queues(settings)


def look_once(settings: Settings, seconds: float) -> Reading | None:
    """One read for drain and ingest; None if no broker is named, or it does not answer within that time."""
    if "broker_url" not in settings.model_fields_set:
        return None
    depth = Depth(settings, (DRAIN, INGEST), seconds)
    try:
        return depth.read()
    finally:
        depth.close()


_SERVED: Final = {DRAIN: queues_of, INGEST: ingested}
