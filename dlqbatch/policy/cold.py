"""Which dead messages are due for cold storage or for deletion, and how many of them go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime, timedelta

MOST_TOGETHER: Final = 1_000
MOST_BYTES_TOGETHER: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Keep:
    """How long a message is kept, counted from the moment it entered its state."""

    resolved: timedelta
    failed: timedelta
    archived: timedelta

    def before(self, now: datetime) -> Mapping[Status, datetime]:
        """By state: who entered it before that is due. What is missing here is kept until a person acts."""
        return {
            Status.RESOLVED: now - self.resolved,
            Status.FAILED: now - self.failed,
            Status.ARCHIVED: now - self.archived,
        }


class Due(NamedTuple):
    """A row whose time has come, as it was when it was looked at; whoever changes it later demands it unchanged."""

    id: int
    status: Status
    updated_at: datetime
    last_step: int
    """The newest line of its journal."""
    size: int
    """Bytes."""
    part: str | None
    """Where its last cold copy is."""


def batches(
    due: Iterable[Due], most: int = MOST_TOGETHER, most_bytes: int = MOST_BYTES_TOGETHER
) -> Iterator[tuple[Due, ...]]:
    """In order; a row that is larger than a batch may be goes alone."""
    batch: list[Due] = []
    size = 0
    for each in due:
        if batch and (len(batch) >= most or size + each.size > most_bytes):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(each)
        size += each.size
    if batch:
        yield tuple(batch)
