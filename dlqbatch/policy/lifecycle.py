"""What state a dead message may go to, what its return means, and when it counts as resolved.

The one table of allowed moves is `MOVES`; the CHECK of dlq_transitions and the drawing in docs/dead-store.md say the
same. Nothing here writes: a decision is taken, and whoever asked carries it out in one conditional update.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch.errors import DlqbatchError
from dlqbatch.policy.strategy import Options, Strategy, next_retry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime, timedelta

MAX_ATTEMPTS: Final = 5
"""So many failed attempts end in failed."""
_LARGEST_COUNT: Final = 2**31 - 1
"""What a column of integers holds; a row may have come in with it."""


class Status(StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    RESOLVED = "resolved"
    FAILED = "failed"
    MANUAL = "manual"
    ARCHIVED = "archived"


class Move(NamedTuple):
    start: Status
    end: Status


ARRIVALS: Final = frozenset({Status.PENDING, Status.MANUAL})

MOVES: Final = {
    Status.PENDING: frozenset({Status.PROCESSING, Status.PENDING}),
    Status.PROCESSING: frozenset({Status.RESOLVED, Status.PENDING, Status.FAILED, Status.MANUAL}),
    Status.MANUAL: frozenset({Status.PROCESSING, Status.ARCHIVED}),
    Status.FAILED: frozenset({Status.ARCHIVED, Status.PROCESSING}),
    Status.RESOLVED: frozenset({Status.PENDING}),
    Status.ARCHIVED: frozenset({Status.MANUAL}),
}

PERSONS_MOVES: Final = frozenset(
    {
        Move(Status.MANUAL, Status.PROCESSING),
        Move(Status.MANUAL, Status.ARCHIVED),
        Move(Status.FAILED, Status.PROCESSING),
        Move(Status.ARCHIVED, Status.MANUAL),
    }
)
"""Only a person makes them; no run does so of its own accord."""


class MoveRefused(DlqbatchError):
    """A move that is not in the table, or that only a person makes."""

    exit_code = 2

    def __init__(self, message_id: int | str | None, start: Status | None, end: Status, *, by_person: bool) -> None:
        self.message_id, self.start, self.end = message_id, start, end
        which = "a message" if message_id is None else f"message {message_id}"
        then = sorted(MOVES[start] if start is not None else ARRIVALS)
        ways = ", ".join(each for each in then if by_person or start is None or Move(start, each) not in PERSONS_MOVES)
        needs_person = start is not None and end in then
        super().__init__(
            f"{which} cannot go from {start or 'arrival'} to {end}{' without a person' if needs_person else ''}; "
            f"from there it can go to: {ways or 'nowhere'}. Look at it again: somebody may have moved it."
        )


def allowed(start: Status | None, end: Status, *, by_person: bool = True) -> bool:
    """Whether the table has the move; no start is an arrival."""
    if start is None:
        return end in ARRIVALS
    return end in MOVES[start] and (by_person or Move(start, end) not in PERSONS_MOVES)


def check(start: Status | None, end: Status, *, message_id: int | str | None = None, by_person: bool = False) -> None:
    if not allowed(start, end, by_person=by_person):
        raise MoveRefused(message_id, start, end, by_person=by_person)


def pairs() -> tuple[tuple[str | None, str], ...]:
    """Every allowed move in a fixed order, arrivals first with None: what a CHECK has to say."""
    arrivals = [(None, end.value) for end in Status if end in ARRIVALS]
    return (*arrivals, *((start.value, end.value) for start in Status for end in Status if end in MOVES[start]))


def path(start: Status, end: Status, *, by_person: bool) -> tuple[Move, ...]:
    """The fewest allowed moves that lead there, none if it is there already; MoveRefused if no way does."""
    ways: dict[Status, tuple[Move, ...]] = {start: ()}
    frontier = [start]
    while frontier and end not in ways:
        reached: list[Status] = []
        for place in frontier:
            for following in Status:
                if following not in ways and allowed(place, following, by_person=by_person):
                    ways[following] = (*ways[place], Move(place, following))
                    reached.append(following)
        frontier = reached
    if end not in ways:
        raise MoveRefused(None, start, end, by_person=by_person)
    return ways[end]


def path_of_discard(status: Status) -> tuple[Move, ...]:
    """The moves that discard a message from any state, to be journalled one by one in one transaction."""
    if status is Status.ARCHIVED or Status.ARCHIVED in MOVES[status]:
        return path(status, Status.ARCHIVED, by_person=True)
    # Through manual, where a person decides; through failed would be as short, and untrue.
    return (*path(status, Status.MANUAL, by_person=True), *path(Status.MANUAL, Status.ARCHIVED, by_person=True))


# --- A row that a worker holds


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row that is a worker's until its lease ends, as far as it matters for what is to become of it."""

    row_id: int
    token: str
    identity: str
    error_type: str | None
    error_message: str | None
    event: str | None
    origin: str | None
    """What its circuit breaker is kept under; None: nobody knows where it failed."""
    failed_attempts: int
    next_retry_at: datetime | None
    body_size: int
    has_attempt: bool = False
    """It was taken over with an attempt that may have been published: that one goes on."""


class Back(NamedTuple):
    """What becomes of a claimed row that is not sent."""

    token: str
    to: Status
    reason: str
    next_retry_at: datetime | None = None
    strategy: Strategy | None = None
    """What it was classified as; None: what it was before."""


# --- After an attempt that failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a row; its moves are `moves`, each to be written and journalled, in one transaction."""

    moves: tuple[Move, ...]
    dlq_retry_count: int
    next_retry_at: datetime | None

    @property
    def status(self) -> Status:
        return self.moves[-1].end


def after_failed_attempt(
    status: Status,
    failed_before: int,
    strategy: Strategy,
    now: datetime,
    options: Options,
    *,
    jitter: float = 0.0,
    max_attempts: int = MAX_ATTEMPTS,
) -> Outcome:
    """Failed if that was the last attempt it gets, manual if no strategy says when to try again, else pending.

    `status` is processing, or resolved for what came back late; `failed_before` does not count this attempt.
    """
    failed = min(failed_before + 1, _LARGEST_COUNT)
    due = next_retry(strategy, failed, now, options, jitter=jitter)
    if failed >= max_attempts:
        end, due = Status.FAILED, None
    elif due is None:
        # Pending without a time would be a row that nothing ever picks up and nobody is shown.
        end = Status.MANUAL
    else:
        end = Status.PENDING
    return Outcome(path(status, end, by_person=False), failed, due)


# --- What an arrival means


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message from a dead-letter queue, as far as its identity goes."""

    has_id: bool
    redelivered: bool
    attempt: int | None
    """The number in its attempt header."""
    digest: bytes
    """Of body and message_id."""
    is_elsewhere: bool = False
    """It failed in a queue that the row's message never went to."""


@dataclass(frozen=True, slots=True)
class Known:
    """The row with the arrival's id."""

    status: Status
    digest: bytes
    open_attempt: int | None = None
    failed_attempts: frozenset[int] = frozenset()
    """Numbers of the attempts closed as failed."""
    resolved_by: int | None = None
    """The attempt that was closed as succeeded."""


@dataclass(frozen=True, slots=True)
class NewRow:
    status: Status
    why: str
    dlq_retry_count: int = 0
    is_child: bool = False
    """It takes an identity of its own; its parent is the id that it came with."""
    possible_duplicate: bool = False
    """So is every row that it could be the same as."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt is closed as failed; `after_failed_attempt` says what becomes of the row."""

    number: int
    late: bool = False
    """The row was already resolved by it."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """It is here already: a note, and counted; nothing else of the row changes unless it is reopened."""

    why: str
    reopens: bool = False
    """The row is resolved and becomes pending."""


Meaning = NewRow | AttemptFailed | Duplicate


def meaning_of_arrival(
    arrival: Arrival, known: Known | None, *, unproven_twins: int = 0, in_doubt: bool = False
) -> Meaning:
    """The first row of the design's Ingest table that matches.

    `unproven_twins` counts rows with the same full digest: of a message without an id those whose acknowledgement is
    not proven, else those that the same id is the parent of. `in_doubt`: one of the first kind was taken for such a
    message before.
    """
    if not arrival.has_id:
        return _without_id(arrival, unproven_twins, in_doubt=in_doubt)
    if known is None:
        return _unknown_id(arrival)
    if known.digest != arrival.digest or arrival.is_elsewhere:
        # Another subscriber's copy, or an id that somebody wrote into it: neither may speak for the row.
        # With an attempt it is what a consumer made of a retry of ours. Pending, and it would be retried, changed and
        # taken as new again, for ever.
        status = Status.PENDING if arrival.attempt is None else Status.MANUAL
        return _child(status, "its id belongs to another message", arrival, unproven_twins)
    if arrival.attempt is None:
        return Duplicate("the same message again", reopens=known.status is Status.RESOLVED)
    return _return(arrival, arrival.attempt, known, unproven_twins)


def _child(status: Status, why: str, arrival: Arrival, twins: int) -> NewRow:
    """Its identity is made here, so that it cannot tell whether it came before."""
    doubtful = arrival.redelivered and twins > 0
    return NewRow(status, why, arrival.attempt or 0, is_child=True, possible_duplicate=doubtful)


def _without_id(arrival: Arrival, twins: int, *, in_doubt: bool) -> Meaning:
    if arrival.redelivered and twins == 1 and not in_doubt:
        return Duplicate("the same message again, without an id")
    # A retry of ours that lost its id on the way cannot be told from the first one, and would circle.
    status = Status.PENDING if arrival.attempt is None else Status.MANUAL
    doubtful = arrival.redelivered and twins > 0
    return NewRow(status, "it has no id", arrival.attempt or 0, possible_duplicate=doubtful)


def _unknown_id(arrival: Arrival) -> NewRow:
    if arrival.attempt is None:
        return NewRow(Status.PENDING, "its id is new")
    return NewRow(Status.MANUAL, f"attempt {arrival.attempt} of a message that was deleted", arrival.attempt)


def _return(arrival: Arrival, attempt: int, known: Known, twins: int) -> Meaning:
    is_processing = known.status is Status.PROCESSING
    if is_processing and known.open_attempt == attempt:
        return AttemptFailed(attempt)
    if attempt in known.failed_attempts:
        return Duplicate(f"attempt {attempt} came back before")
    if known.status is Status.RESOLVED and known.resolved_by == attempt:
        return AttemptFailed(attempt, late=True)
    if is_processing and known.open_attempt is not None:
        return Duplicate(f"attempt {attempt} came back while attempt {known.open_attempt} is open")
    return _child(Status.MANUAL, f"attempt {attempt} of a message that is {known.status}", arrival, twins)


# --- When a retry counts as a success


class Watch(NamedTuple):
    """A run that looked: a row of dlq_runs."""

    started_at: datetime
    ended_at: datetime | None
    """None while it runs."""
    emptied: Collection[str]
    """The queues that it saw empty."""


def watched_since(
    drains: Iterable[Watch], ingests: Iterable[Watch], sources: Collection[str], dead_letter_queues: Collection[str]
) -> datetime | None:
    """When the newest drain began that, with an ingest after it, looked everywhere; None if there was none.

    `sources` are all of the ladder, and one drain has to have seen them all: a message may pass from one to another.
    `dead_letter_queues` are the ladder's own and the one the row came from.
    """
    latest = emptied_since(ingests, dead_letter_queues)
    if not sources or latest is None:
        # Nothing is drained: what fails goes straight to the queue it came from.
        return latest
    # What a drain dead-letters in its last moment is seen only by an ingest that began when that drain was over.
    looked = (run for run in drains if run.ended_at is not None and run.ended_at < latest and _saw(run, sources))
    return max((run.started_at for run in looked), default=None)


def emptied_since(ingests: Iterable[Watch], queues: Collection[str]) -> datetime | None:
    """When each of the queues had begun to be looked at for the last time; None if one was never seen empty.

    Each may have an ingest of its own, as long as each began when the drain was over.
    """
    ended = [run for run in ingests if run.ended_at is not None]
    newest = [max((run.started_at for run in ended if queue in run.emptied), default=None) for queue in queues]
    begun = [started_at for started_at in newest if started_at is not None]
    return min(begun) if begun and len(begun) == len(newest) else None


def _saw(run: Watch, queues: Collection[str]) -> bool:
    return all(queue in run.emptied for queue in queues)


def is_resolved(
    sent_at: datetime,
    now: datetime,
    window: timedelta,
    watched: datetime | None,
    *,
    origin_consumers: int | None,
    origin_messages: int | None,
) -> bool:
    """Whether a sent attempt stayed away while somebody looked; `watched` is from `watched_since`.

    An origin that could not be looked at has None for its counts; then nothing is resolved.
    """
    over = sent_at + window
    if watched is None or now < over or watched <= over:
        return False
    return bool(origin_consumers) or origin_messages == 0
