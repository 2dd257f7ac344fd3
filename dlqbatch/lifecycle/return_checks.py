"""Whether a message that failed again would have been seen by now, wherever it can come back.

It may have gone to a queue of its framework. Dramatiq and remoulade do not reject what they will try again: they
publish it into NAME.DQ, acknowledge it in NAME, and publish it into NAME anew when its time has come, which may take
days. So that NAME is empty proves nothing, nor that NAME.DQ is: a message may go from one to the other between two
readings. What proves it is that nothing was published into NAME.DQ for a while, by its counter, and that the message
was in neither queue then.

Else it was dead-lettered. Then a drain that began since has to have seen its queues empty, and an ingest after it the
dead-letter queues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import NamedTuple

from dlqbatch.lifecycle.proof import Sighting, is_empty


class LoggedRun(NamedTuple):
    """A row of dlq_runs."""

    started_at: datetime
    ended_at: datetime | None
    """None while it runs."""
    emptied: Collection[str]
    """The queues that it saw empty."""


def unseen(
    drains: Iterable[LoggedRun],
    ingests: Sequence[LoggedRun],
    sources: Collection[str],
    dead_letter_queues: Collection[str],
    since: datetime,
) -> str:
    """What has to be looked into yet; empty if a drain that began since, and the ingests after it, saw all empty.

    `sources` are all of the ladder, and one drain has to have seen them all: a message may pass from one to another.
    Without sources nothing passes through a drain: what fails goes straight to the queue it came from.
    `dead_letter_queues` are the ladder's own and the one the row came from.
    """
    missing = [queue for queue in sorted(dead_letter_queues) if (emptied_since(ingests, [queue]) or since) <= since]
    if missing:
        more = f" (nor {len(missing) - 1} more)" if len(missing) > 1 else ""
        return f"no ingest that saw '{missing[0]}' empty has begun since{more}"
    watched = latest = emptied_since(ingests, dead_letter_queues)
    if sources and latest is not None:
        # What a drain dead-letters in its last moment is seen only by an ingest that began when that drain was over.
        over = (run for run in drains if run.ended_at is not None and run.ended_at < latest)
        watched = max((run.started_at for run in over if set(sources) <= set(run.emptied)), default=None)
    if watched is None or watched <= since:
        names = ", ".join(f"'{name}'" for name in sorted(sources))
        return f"no drain that saw {names} empty has begun since, with an ingest after it"
    return ""


def emptied_since(ingests: Iterable[LoggedRun], queues: Collection[str]) -> datetime | None:
    """The start of the newest ingest that saw each queue empty, the earliest of them; None if one was never seen empty.

    Each may have an ingest of its own, as long as each began when the drain was over.
    """
    ended = [run for run in ingests if run.ended_at is not None]
    newest = [max((run.started_at for run in ended if queue in run.emptied), default=None) for queue in queues]
    begun = [started_at for started_at in newest if started_at is not None]
    return min(begun) if begun and len(begun) == len(newest) else None


def left_both(
    queue: Iterable[Sighting],
    delay: Iterable[Sighting],
    begun_at: datetime,
    acknowledged_at: datetime,
    lag: timedelta,
) -> datetime | None:
    """By when a retry had left a framework's queue and its delay queue for good; None if it may be in one of them.

    It was begun and acknowledged in the queue at these times. A reading shows what was true at some instant of the
    `lag` before it, its counter and its depth each at one of its own.
    """
    counted = (
        (each, each.reading.counters)
        for each in delay
        if each.reading.by_management and each.reading.counters is not None
    )
    for _, group in groupby(counted, key=lambda pair: (pair[0].counted_from, pair[1].published)):
        still = [each for each, _ in group]
        first, last = still[0].at, still[-1].at - lag
        # Nothing was published into the delay between these two.
        if first <= begun_at and acknowledged_at <= last:
            return acknowledged_at
        empty = next((each.at for each in still if each.at >= first + lag and is_empty(each.reading)), None)
        if empty is None:
            continue
        since = max(empty, acknowledged_at) + lag
        gone = next((each.at for each in queue if each.at >= since and is_empty(each.reading)), None)
        if gone is not None and gone <= last:
            return gone
    return None


class UnprovenRetries(NamedTuple):
    """Retries to one origin that are sent and not resolved, and what the newest look found missing."""

    place: str
    retries: int
    sent_at: datetime
    """When the first of them was."""
    acknowledged: bool
    """It was acknowledged; what is missing is a look where it would come back."""
    missing: str
    queue: str | None
    ready: int | None
    unacknowledged: int | None
    delayed: int | None
    consumers: int | None
    at: datetime
    """When somebody looked."""

    def as_dict(self) -> dict[str, object]:
        return {**self._asdict(), "sent_at": self.sent_at.isoformat(), "at": self.at.isoformat()}
