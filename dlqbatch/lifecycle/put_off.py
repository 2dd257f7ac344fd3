"""Due rows whose conditions are not met are put off before anybody leases them.

To claim such a row and to give it back is to write it twice more and two lines of the journal, in every recheck of a
long outage, and it would use up the run. A row that is put off is written once, and its journal has one line for all
the time that it waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Row, exists, select, update

from dlqbatch.lifecycle import breaker
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.leases import ACTOR, CLAIMED, claimed
from dlqbatch.lifecycle.strategy import Back, Choice, Claimed
from dlqbatch.store import journal
from dlqbatch.store.bulk import in_list, values_table
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import MESSAGES, TRANSITIONS

_M: Final = MESSAGES.c
_T: Final = TRANSITIONS.c


class PutOff:
    """Puts off conditional rows while the circuit breaker of their origin is open, or this machine is too busy."""

    def __init__(self, choice: Choice, limits: breaker.Limits) -> None:
        self.counted: Counter[tuple[str, str | None]] = Counter()
        """What the rows that were put off count as, and why."""
        self._choice = choice
        self._limits = limits

    def __call__(self, connection: Connection, rows: Sequence[Row[*tuple[Any, ...]]], now: datetime) -> set[int]:
        """The ids of those that were put off, of rows that this transaction has locked."""
        origins = {row.id: breakers.place(row.origin_queue, row.origin_exchange, row.origin_key) for row in rows}
        doubtful = breakers.not_closed(connection, {origin for origin in origins.values() if origin is not None})
        # Only these are looked at: to hold a failure against every rule costs more than all else here.
        asked = [row.id for row in rows if row.strategy == Strategy.CONDITIONAL or origins[row.id] in doubtful]
        if not asked:
            return set()
        looked_at = connection.execute(select(*CLAIMED).where(in_list(connection, _M.id, asked)))
        found = {row.id: claimed(row, "") for row in looked_at}

        def admit(those: Sequence[Claimed]) -> set[int]:
            # Without becoming the probe by it: that happens when one of them is claimed.
            return breakers.admit(connection, by_origin(those), now, self._limits, keep=False)

        _, back = self._choice.decide([found[row_id] for row_id in asked], admit, now)
        later = {row_id: each for row_id, each in back.items() if each[0].strategy is Strategy.CONDITIONAL}
        self.counted.update((counts_as, reason) for _, counts_as, reason in later.values())
        _write(connection, {row_id: decided for row_id, (decided, *_) in later.items()}, now)
        return set(later)


def by_origin(rows: Iterable[Claimed]) -> dict[str, list[int]]:
    """Row ids by the key of their circuit breaker."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for row in rows:
        # A row without a known origin has no breaker; it is held as origin-unknown when it is sent.
        found[row.origin or ""].append(row.row_id)
    return found


def _write(connection: Connection, later: dict[int, Back], now: datetime) -> None:
    if not later:
        return
    times = values_table(
        connection, {_M.id: list(later), _M.next_retry_at: [decided.next_retry_at for decided in later.values()]}
    )
    # `updated_at` stays: nothing has changed for a plan that holds the row.
    waiting = update(MESSAGES).where(_M.id == times.c.id)
    connection.execute(waiting.values(next_retry_at=times.c.next_retry_at, strategy=Strategy.CONDITIONAL))
    is_told = exists().where(
        _T.message_id == _M.id,
        _T.at >= _M.status_since,
        _T.actor == ACTOR,
        _T.from_status == Status.PENDING,
        _T.to_status == Status.PENDING,
    )
    first = connection.scalars(select(_M.id).where(in_list(connection, _M.id, later), ~is_told)).all()
    journal.note_many(connection, {row_id: later[row_id].reason for row_id in first}, now, ACTOR)
