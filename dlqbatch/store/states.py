"""The closed sets that the tables hold, and what state a dead message may go to from which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from dlqbatch.errors import DlqbatchError


class Strategy(StrEnum):
    IMMEDIATE = "immediate"
    SCHEDULED = "scheduled"
    CONDITIONAL = "conditional"
    MANUAL = "manual"


class Phase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class On(StrEnum):
    TYPE = "type"
    TEXT = "text"
    ANY = "any"


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
    Status.ARCHIVED: frozenset({Status.MANUAL, Status.PENDING, Status.FAILED}),
}
PERSONS_MOVES: Final = frozenset(
    {
        Move(Status.MANUAL, Status.PROCESSING),
        Move(Status.MANUAL, Status.ARCHIVED),
        Move(Status.FAILED, Status.PROCESSING),
        Move(Status.ARCHIVED, Status.MANUAL),
        Move(Status.ARCHIVED, Status.PENDING),
        Move(Status.ARCHIVED, Status.FAILED),
    }
)
"""Only a person makes them; no run does so of its own accord."""


# A replay plan; stopped is a plan of which too much came back, and planned again one that did nothing yet.
#
# planned ──apply──▶ applying ──every item is sent or skipped──▶ done
#    ▲                │   │ ▲
#    └─refused at once┘   │ └──apply --resume-stopped──┐
#                         └───too much came back──▶ stopped
# planned, applying and stopped ──abort──▶ aborted
PLAN_MOVES: Final[Mapping[str, frozenset[str]]] = {
    "planned": frozenset({"applying", "aborted"}),
    "applying": frozenset({"planned", "done", "stopped", "aborted"}),
    "stopped": frozenset({"applying", "aborted"}),
    "done": frozenset(),
    "aborted": frozenset(),
}
# A message in a plan.
#
# waiting ──the broker confirmed it, or it came back──▶ sent
#    └──────it changed, or cannot be sent──▶ skipped
ITEM_MOVES: Final[Mapping[str, frozenset[str]]] = {
    "waiting": frozenset({"sent", "skipped"}),
    "sent": frozenset(),
    "skipped": frozenset(),
}


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


def way(start: Status, end: Status) -> tuple[Move, ...]:
    """The moves by which a person brings a message from one state to another."""
    return path_of_discard(start) if end is Status.ARCHIVED else path(start, end, by_person=True)


def path_of_discard(status: Status) -> tuple[Move, ...]:
    """The moves that discard a message from any state, to be journalled one by one in one transaction."""
    if status is Status.ARCHIVED or Status.ARCHIVED in MOVES[status]:
        return path(status, Status.ARCHIVED, by_person=True)
    # Through manual, where a person decides; through failed would be as short, and untrue.
    return (*path(status, Status.MANUAL, by_person=True), *path(Status.MANUAL, Status.ARCHIVED, by_person=True))


NEW_GROUP: Final = "NewGroupNeedsPerson"


Outcome = Literal["failed", "succeeded", "abandoned"]
"""How an attempt ended."""
