"""What a group is doing, from counts and times alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

NEW_FOR: Final = timedelta(hours=1)
"""A group is new for so long after its first message."""
QUIET_AFTER: Final = timedelta(hours=24)
"""A group is quiet when nothing of it has arrived for so long."""
RECENT: Final = timedelta(hours=1)
BEFORE: Final = timedelta(hours=24)
"""What arrived in the last hour is compared with the hours of this time before it."""
GROWS_BY: Final = 2
"""A group grows when the last hour has so many times the messages of an hour before."""
GROWS_FROM: Final = 10
"""Fewer messages in the last hour are no growth."""


class GroupState(StrEnum):
    NEW = "new"
    ONGOING = "ongoing"
    GROWING = "growing"
    REGRESSED = "regressed"
    QUIET = "quiet"
    ACKNOWLEDGED = "acknowledged"


@dataclass(frozen=True, slots=True)
class Arrivals:
    first: datetime
    last: datetime
    recent: int
    """Messages of the last hour."""
    before: int
    """Messages of the 24 hours before that."""
    resolved: datetime | None
    """When a message of the group was first resolved; None: none is."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    at: datetime
    until: datetime | None
    more: int | None
    """It ends when so many messages have arrived since."""
    arrived_since: int


def state_of(arrivals: Arrivals, acknowledged: Acknowledged | None, now: datetime) -> GroupState:
    """The first of these that holds: acknowledged, quiet, regressed, new, growing, ongoing."""
    if acknowledged is not None and still_acknowledged(acknowledged, arrivals, now):
        return GroupState.ACKNOWLEDGED
    if now - arrivals.last >= QUIET_AFTER:
        return GroupState.QUIET
    if arrivals.resolved is not None and arrivals.last > arrivals.resolved:
        return GroupState.REGRESSED
    if now - arrivals.first < NEW_FOR:
        return GroupState.NEW
    return GroupState.GROWING if grows(arrivals) else GroupState.ONGOING


def grows(arrivals: Arrivals) -> bool:
    """Whether the last hour has more than twice the messages of an hour before, and no few."""
    hours = BEFORE / RECENT
    return arrivals.recent >= GROWS_FROM and arrivals.recent * hours > arrivals.before * GROWS_BY


def still_acknowledged(acknowledged: Acknowledged, arrivals: Arrivals, now: datetime) -> bool:
    """Until its time, or so many more messages; without either, until it grows."""
    if acknowledged.until is not None and now >= acknowledged.until:
        return False
    if acknowledged.more is not None and acknowledged.arrived_since >= acknowledged.more:
        return False
    has_bound = acknowledged.until is not None or acknowledged.more is not None
    # What was growing when somebody acknowledged it stays so for a while: only what came since is growth.
    return has_bound or acknowledged.arrived_since < GROWS_FROM or not grows(arrivals)
