"""Which delay queue a retry takes: by the delays of its event, and no sooner than the failure asks with `Retry-After`.

A delay queue is known by its number, counted from 1 as in `Ladder.delays`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from dlqbatch.amqp.headers import RETRY_AFTER, Headers
from dlqbatch.amqp.patterns import TopicTrie, is_pattern
from dlqbatch.amqp.retry_after import seconds_asked

_REMEMBERED = 8192  # routing keys whose delays are kept at hand; bounded, for anyone can invent routing keys


class EventDelays:
    """The delays of every event that has its own, by name or by topic pattern; the settings alone say them."""

    find: Callable[[str], str | None]
    """The name or pattern whose delays the event has, or None if it has those of the tiers."""

    def __init__(self, by_event: Mapping[str, Sequence[int]]) -> None:
        self.by_event = by_event
        self._patterns = TopicTrie(name for name in by_event if is_pattern(name))
        self.find = lru_cache(maxsize=_REMEMBERED)(self._find)

    def _find(self, event: str) -> str | None:
        return event if event in self.by_event else self._patterns.best(event)

    def of(self, event: str) -> Sequence[int] | None:
        """Milliseconds before each retry; the last one repeats. None: as the tiers of the ladder say."""
        name = self.find(event)
        return None if name is None else self.by_event[name]


def together(delays: Sequence[int], retries: int) -> int:
    """Milliseconds that a message is delayed until the last of so many retries; the last delay repeats."""
    return sum(delays[:retries]) + max(retries - len(delays), 0) * delays[-1]


class DelayQueues:
    """The delay queues of one ladder, and which of them a message takes."""

    def __init__(
        self, delays: Sequence[int], tiers: int, events: EventDelays, *, follows: bool, asked: Sequence[int] = ()
    ) -> None:
        """`delays` are the milliseconds of each queue, tiers first. Without `follows` no `Retry-After` is followed.

        `asked` are the delays that the settings allow a `Retry-After`; the longest is the most. Without them it is the
        longest of all.
        """
        self._delays, self._tiers = delays, tiers
        numbers: dict[int, int] = {}
        for number, delay in enumerate(delays, 1):
            numbers.setdefault(delay, number)
        self._numbers = numbers
        self._sorted = sorted(numbers)
        self._most = max(asked, default=self._sorted[-1])
        self._follows = follows
        by_name = {name: tuple(numbers[delay] for delay in its) for name, its in events.by_event.items()}
        self._by_name = by_name
        self._find = events.find

    def number(self, event: str, retries: int, headers: Headers, now: int) -> int:
        """The queue for the retry after so many; `now` is in seconds since 1970."""
        name = self._find(event) if self._by_name else None
        if name is None:
            number = min(retries + 1, self._tiers)
        else:
            its = self._by_name[name]
            number = its[min(retries, len(its) - 1)]
        if self._follows and (headers.claims or RETRY_AFTER in headers.ours):
            return self._no_sooner(number, seconds_asked(headers, now))
        return number

    def _no_sooner(self, number: int, seconds: int) -> int:
        """The shortest delay that is not below what is asked, nor below its own."""
        asked = min(seconds * 1000, self._most)
        if asked <= self._delays[number - 1]:
            return number
        return self._numbers[self._sorted[bisect_left(self._sorted, asked)]]
