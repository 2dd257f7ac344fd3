"""Whether a retry has succeeded: it stayed away for long enough, while somebody looked where it would come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from dlqbatch.policy.lifecycle import Status, emptied_since, is_resolved, watched_since

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from datetime import datetime, timedelta

    from dlqbatch.message.envelope import Origin
    from dlqbatch.policy.lifecycle import Watch

_AT_ONCE: Final = 500
_PAGES: Final = 20
"""At most so many rows, those sent longest ago, are looked at in one run."""

Way = tuple[int, str, str, str]
"""What went the same way meets the same end, or none: a plan that named a queue or 0, the origin, the source queue."""


class Seen(NamedTuple):
    """What the broker tells of an origin."""

    consumers: int
    messages: int
    is_gone: bool = False
    """There is no such queue or exchange."""


class Observed(Protocol):
    """A sent attempt that is still open."""

    @property
    def row_id(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def sent_at(self) -> datetime: ...
    @property
    def attempt_id(self) -> int: ...
    @property
    def source_queue(self) -> str: ...
    @property
    def sent_to(self) -> Origin | None: ...
    @property
    def is_elsewhere(self) -> bool:
        """Nobody knows through which queue it would come back."""

    @property
    def way(self) -> Way: ...


class Observations(Protocol):
    def looks(self, job: str, before: datetime | None = None) -> Sequence[Watch]:
        """The newest runs of drain or ingest that began before that time."""

    def sent_before(
        self,
        time: datetime,
        limit: int,
        after: tuple[datetime, int] | None = None,
        without: AbstractSet[Way] = frozenset(),
    ) -> Sequence[Observed]:
        """Those sent longest ago, but for what went these ways; `after` is where the page before ended."""

    def resolve(self, attempts: Mapping[int, tuple[int, str]], now: datetime) -> set[int]:
        """Committed: the rows of these attempts (number and why) are resolved, but for those that changed meanwhile."""

    def leave_to_person(self, attempts: Mapping[int, tuple[int, str]], now: datetime) -> set[int]:
        """The same for rows of which nobody can tell: they are manual, and their attempts abandoned."""


@dataclass(slots=True)
class Observation:
    observations: Observations
    look_at: Callable[[Origin], Seen | None]
    """None if it cannot be looked at."""
    sources: Collection[str]
    """All that a drain takes from."""
    dead_letter_queues: Collection[str]
    """Where a drain sends what it gives up."""
    window: timedelta
    is_over: Callable[[], bool]
    """The time of the run."""
    _seen: dict[Origin, Seen | None] = field(default_factory=dict)
    _watched: dict[frozenset[str], datetime | None] = field(default_factory=dict)
    _drains: dict[datetime, Sequence[Watch]] = field(default_factory=dict)

    def resolve(self, now: datetime, *, dry_run: bool = False) -> tuple[int, list[str]]:
        """How many were resolved, and what a reader has to know of the others."""
        ingests = self.observations.looks("ingest")
        everywhere = frozenset(queue for run in ingests for queue in run.emptied)
        newest = self._watched_since(frozenset(), ingests) if self.dead_letter_queues else now
        resolved = left = waiting = 0
        after: tuple[datetime, int] | None = None
        stuck: set[Way] = set()
        for _ in range(_PAGES if newest is not None else 0):
            page = self.observations.sent_before(min(newest or now, now) - self.window, _AT_ONCE, after, stuck)
            if not page or self.is_over():
                break
            after = (page[-1].sent_at, page[-1].attempt_id)
            ends: dict[Status, dict[int, tuple[int, str]]] = {Status.RESOLVED: {}, Status.MANUAL: {}}
            for each in page:
                own = frozenset([each.source_queue])
                watched = self._watched_since(own | everywhere if each.is_elsewhere else own, ingests)
                end = self._end(each, now, watched)
                if end is None:
                    # What was sent later went no better: a page full of these must not hide what is behind it.
                    stuck.add(each.way)
                    waiting += 1
                else:
                    ends[end[0]][each.row_id] = (each.attempt, end[1])
            stayed, gone = ends[Status.RESOLVED], ends[Status.MANUAL]
            resolved += len(stayed) if dry_run else len(self.observations.resolve(stayed, now))
            left += len(gone) if dry_run else len(self.observations.leave_to_person(gone, now))
        warnings = []
        if left:
            warnings.append(
                f"{left} sent message(s) are left to a person: nobody has seen them come back, and the queue or "
                "exchange that they were sent to is gone"
            )
        if waiting:
            warnings.append(
                f"at least {waiting} sent message(s) stay under observation though their time is over: their origin "
                "holds messages and has no consumer, or it cannot be looked at, or no ingest has since emptied the "
                "queue they came from"
            )
        # Twice the window: between its end and the next look nothing is wrong.
        edge = None if newest is None else (newest - self.window, 0)
        if self.observations.sent_before(now - 2 * self.window, 1, edge):
            warnings.append(
                "sent messages wait to be resolved, and nobody has looked since: it takes a drain that saw its queues "
                f"empty, and after it an ingest that has seen {', '.join(self.dead_letter_queues)} empty"
            )
        return resolved, warnings

    def _watched_since(self, queues: frozenset[str], ingests: Sequence[Watch]) -> datetime | None:
        """As the function of the policy, of these queues and those where a drain sends what it gives up."""
        if queues not in self._watched:
            wanted = queues | frozenset(self.dead_letter_queues)
            edge = emptied_since(ingests, wanted)
            if edge is not None and edge not in self._drains:
                # Only these count, however many drains there were since.
                self._drains[edge] = self.observations.looks("drain", edge)
            drains = self._drains[edge] if edge is not None else ()
            self._watched[queues] = watched_since(drains, ingests, self.sources, wanted)
        return self._watched[queues]

    def _end(self, each: Observed, now: datetime, watched: datetime | None) -> tuple[Status, str] | None:
        """Resolved or manual, and why; None while it stays under observation."""
        origin = each.sent_to
        found = None if origin is None else self._look_at(origin)
        if origin is None or found is None:
            return None
        consumers, messages, is_gone = found
        if not is_resolved(
            each.sent_at, now, self.window, watched, origin_consumers=consumers, origin_messages=messages
        ):
            return None
        why = f"attempt {each.attempt} stayed away"
        if is_gone:
            return Status.MANUAL, f"{why}, and '{origin.name}' is gone: nobody can tell whether it was handled there"
        if origin.queue is None:
            # The broker had a queue for it; a late return opens the row again.
            why += f" (nobody can look behind exchange '{origin.exchange}')"
        return Status.RESOLVED, why

    def _look_at(self, origin: Origin) -> Seen | None:
        """Asked once in a run."""
        place = origin._replace(key="")
        if place not in self._seen:
            self._seen[place] = self.look_at(place)
        return self._seen[place]
