"""After its fifth failed attempt a dead message is `failed`; before that it is tried again, or waits for a person."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dlqbatch.lifecycle.backoff_and_off_peak import Options, next_retry
from dlqbatch.store.states import Move, Status, Strategy, path

MAX_ATTEMPTS: Final = 5
MAX_TRIPS: Final = 100
"""After so many retries that consumers published as new messages, a person decides."""
_LARGEST_COUNT: Final = 2**31 - 1  # what a column of integers holds; a row may have come in with it


@dataclass(frozen=True, slots=True)
class AfterFailure:
    """The new state of a row whose attempt failed; its moves are journalled one by one, in one transaction."""

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
    asked: int = 0,
) -> AfterFailure:
    """Failed after the last attempt, manual if its strategy has no time for the next one, else pending.

    `status` is processing, or resolved for what came back late; `failed_before` does not count this attempt; `asked` is
    how many seconds the failure asked to wait.
    """
    failed = min(failed_before + 1, _LARGEST_COUNT)
    due = next_retry(strategy, failed, now, options, jitter=jitter, asked=asked)
    if failed >= max_attempts:
        end, due = Status.FAILED, None
    else:
        # Pending without a time would be a row that nothing ever picks up and nobody is shown.
        end = Status.MANUAL if due is None else Status.PENDING
    return AfterFailure(path(status, end, by_person=False), failed, due)
