"""What the arrival of a dead letter means: a new row, a failed attempt, or the same message again.

Dramatiq and remoulade retry by publishing a new message, without a header of ours; only the id in its body stays. If
the retry that we sent fails and its framework tries again before it gives up, what dies in the end can only be known
by that id: `meaning_of_republished` decides about it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from dlqbatch.store.states import Status


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message from a dead-letter queue, as far as its identity goes."""

    has_id: bool
    redelivered: bool
    attempt: int | None
    """The number in its attempt header."""
    digest: bytes
    """The digest of body and message_id."""
    is_elsewhere: bool = False
    """It failed in a queue that the row's message never went to."""
    circles: bool = False
    """A consumer has made it of a retry of ours, that of another one, and so on: retried, it would be made for ever."""


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
    """It may be the same message as another row, which is marked too."""
    parent: str | None = None
    """The identity of a row that it may have come of; it has none of its own to say so."""


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
    arrival: Arrival, known: Known | None, *, unproven_duplicates: int = 0, in_doubt: bool = False
) -> Meaning:
    """What the arrival means, given the row that has its id.

    `unproven_duplicates` counts rows with the same full digest: of a message without an id those whose acknowledgement
    is not proven, else those that the same id is the parent of. `in_doubt` says that one of the first kind was taken
    for such a message before.
    """
    if not arrival.has_id:
        return _without_id(arrival, unproven_duplicates, in_doubt=in_doubt)
    if known is None:
        if arrival.attempt is None:
            return NewRow(Status.MANUAL if arrival.circles else Status.PENDING, "its id is new")
        return NewRow(Status.MANUAL, f"attempt {arrival.attempt} of a message that was deleted", arrival.attempt)
    if known.digest != arrival.digest or arrival.is_elsewhere:
        # Another subscriber's copy, or an id that somebody wrote into it: neither may speak for the row.
        # With an attempt it is what a consumer made of a retry of ours. Pending, and it would be retried, changed and
        # taken as new again, for ever.
        status = Status.PENDING if arrival.attempt is None else Status.MANUAL
        return _child(status, "its id belongs to another message", arrival, unproven_duplicates)
    if arrival.attempt is None:
        return Duplicate("the same message again", reopens=known.status is Status.RESOLVED)
    return _return(arrival, arrival.attempt, known, unproven_duplicates)


def _child(status: Status, why: str, arrival: Arrival, duplicates: int) -> NewRow:
    """Its identity is made here, so that it cannot tell whether it came before."""
    doubtful = arrival.redelivered and duplicates > 0
    return NewRow(status, why, arrival.attempt or 0, is_child=True, possible_duplicate=doubtful)


def _without_id(arrival: Arrival, duplicates: int, *, in_doubt: bool) -> Meaning:
    if arrival.redelivered and duplicates == 1 and not in_doubt:
        return Duplicate("the same message again, without an id")
    # A retry of ours that lost its id on the way cannot be told from the first one, and would circle.
    status = Status.PENDING if arrival.attempt is None and not arrival.circles else Status.MANUAL
    doubtful = arrival.redelivered and duplicates > 0
    return NewRow(status, "it has no id", arrival.attempt or 0, possible_duplicate=doubtful)


def _return(arrival: Arrival, attempt: int, known: Known, duplicates: int) -> Meaning:
    is_processing = known.status is Status.PROCESSING
    if is_processing and known.open_attempt == attempt:
        return AttemptFailed(attempt)
    if attempt in known.failed_attempts:
        return Duplicate(f"attempt {attempt} came back before")
    if known.status is Status.RESOLVED and known.resolved_by == attempt:
        return AttemptFailed(attempt, late=True)
    if is_processing and known.open_attempt is not None:
        return Duplicate(f"attempt {attempt} came back while attempt {known.open_attempt} is open")
    return _child(Status.MANUAL, f"attempt {attempt} of a message that is {known.status}", arrival, duplicates)


# The time of a death is the broker's, the time when an attempt began is the database's; they may differ by so much.
_CLOCKS_DIFFER: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Republished:
    """A dead message without an id of ours that has one of its framework's."""

    digest: bytes
    """A digest of its content and the time of its death: a delivery count that the broker adds does not change it."""
    redelivered: bool
    died_at: datetime


@dataclass(frozen=True, slots=True)
class SameFrameworkId:
    """A row whose body has the same framework's id, and which failed in the same place."""

    row_id: int
    identity: str
    known: Known
    begun: Mapping[int, datetime]
    """When each of its attempts was written down, by number."""
    returned_digest: bytes | None
    """The digest of the last message that was found to be it in this way."""


def meaning_of_republished(
    arrival: Republished, otherwise: NewRow, same_id: Sequence[SameFrameworkId], seen: Collection[bytes]
) -> tuple[Meaning, int | None]:
    """What it means, and for which row; `otherwise` is what it means if no row has the same id.

    `seen` are the digests of what this run has found to be a row's already: these are not acknowledged yet, so
    that an equal message is another. What died before an attempt began is not its failure: it is a copy that the
    framework made, which it may do when a worker is cut off.
    """
    if arrival.redelivered and arrival.digest not in seen:
        again = [row for row in same_id if row.returned_digest == arrival.digest]
        if again:
            return Duplicate("a message that its framework had published anew came again"), again[0].row_id
    started = arrival.died_at + _CLOCKS_DIFFER
    under_way, over = [], []
    for row in same_id:
        status, number, resolved_by = row.known.status, row.known.open_attempt, row.known.resolved_by
        if status is Status.PROCESSING and number is not None and row.begun[number] <= started:
            under_way.append((row.begun[number], row.row_id, number))
        elif status is Status.RESOLVED and resolved_by is not None and row.begun[resolved_by] <= started:
            over.append((row.begun[resolved_by], row.row_id, resolved_by))
    if under_way:
        # Of several that are alike each takes one failure, the oldest first.
        _, row_id, number = min(under_way)
        return AttemptFailed(number), row_id
    if over:
        _, row_id, number = max(over)
        return AttemptFailed(number, late=True), row_id
    if not same_id:
        return otherwise, None
    tried = [row for row in same_id if row.begun]
    if not tried:
        newest = max(same_id, key=lambda row: row.row_id)
        why = f"its framework has published message {newest.row_id} anew, before any retry from here"
        return replace(otherwise, why=why, parent=newest.identity), None
    newest = max(tried, key=lambda row: (max(row.begun.values()), row.row_id))
    why = f"its framework has published message {newest.row_id} anew, which is {newest.known.status}"
    return replace(otherwise, status=Status.MANUAL, why=why, parent=newest.identity), None
