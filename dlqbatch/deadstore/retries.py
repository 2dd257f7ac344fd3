"""What a lifecycle run does with its rows: take over, claim, begin attempts, mark them sent, give rows back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select, text

from dlqbatch.deadstore import attempts, breakers, claim
from dlqbatch.deadstore.attempts import OUTGOING, Outgoing
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.tables import HAS_LEASE, IS_DUE, MESSAGES, WAITS_FOR_ITS_TIME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import ColumnElement, Engine, TextClause

    from dlqbatch.deadstore.engine import Kept
    from dlqbatch.policy.breaker import Limits
    from dlqbatch.policy.lifecycle import Back, Claimed
    from dlqbatch.policy.strategy import Strategy

_M: Final = MESSAGES.c


@dataclass(frozen=True, slots=True)
class Retries:
    """Each call commits on its own; `now` is when the caller asks."""

    engine: Engine | Kept
    worker: str
    lease: timedelta
    limits: Limits
    """Of the circuit breakers."""

    def take_over(self, limit: int, now: datetime) -> Sequence[Claimed]:
        """Rows whose worker has let its lease run out."""
        return claim.take_over(self.engine, self.worker, now, min(limit, claim.LIMIT), self.lease)

    def claim(self, limit: int, now: datetime) -> Sequence[Claimed]:
        """Due rows, highest priority first; none also while other workers are taking all there are."""
        return claim.claim(self.engine, self.worker, now, min(limit, claim.LIMIT), self.lease)

    def admit(self, rows: Iterable[Claimed], now: datetime) -> set[int]:
        """The ids of those that the circuit breakers of their origins let through."""
        with writing(self.engine) as connection:
            return breakers.admit(connection, _by_origin(rows), now, self.limits)

    def begin(self, rows: Mapping[int, tuple[str, Strategy | None]], now: datetime) -> Sequence[Outgoing]:
        """Commit an attempt for each row, by its token, and fetch what is to be published; not those that were lost."""
        tokens = {row_id: token for row_id, (token, _) in rows.items()}
        strategies = {row_id: strategy for row_id, (_, strategy) in rows.items()}
        with writing(self.engine) as connection:
            numbers = attempts.begin(connection, tokens, strategies, self.worker, now, self.lease)
            return attempts.content_of(connection, {row_id: numbers[row_id] for row_id in rows if row_id in numbers})

    def mark_sent(self, numbers: Mapping[int, int], now: datetime) -> None:
        """The broker has confirmed these attempts, by row id; may be repeated."""
        attempts.mark_sent(self.engine, numbers, now, self.limits)

    def give_back(self, rows: Mapping[int, Back], now: datetime) -> set[int]:
        """The ids of the rows that went back; another worker has taken over the rest."""
        return claim.give_back(self.engine, rows, now)


class Preview:
    """What a run would find, as it stands; nothing is claimed, and no breaker is asked to let a probe through."""

    def __init__(self, engine: Engine | Kept, limits: Limits) -> None:
        self._engine = engine
        self._limits = limits

    def due(self, limit: int, now: datetime) -> Sequence[Claimed]:
        """Expired leases first, then what is due, then what would become due."""
        expired = (text(HAS_LEASE), _M.lease_until < now, ~attempts.IS_SENT)
        ways: tuple[tuple[tuple[ColumnElement[bool] | TextClause, ...], tuple[ColumnElement[Any], ...]], ...] = (
            (expired, (_M.lease_until,)),
            ((text(IS_DUE),), (_M.priority.desc(), _M.created_at, _M.id)),
            ((text(WAITS_FOR_ITS_TIME), _M.next_retry_at <= now, _M.plan_id.is_(None)), (_M.next_retry_at,)),
        )
        found: list[Claimed] = []
        with reading(self._engine) as connection:
            for conditions, order in ways:
                asking = select(*claim.CLAIMED, claim.HAS_ATTEMPT).where(*conditions).order_by(*order)
                rows = connection.execute(asking.limit(limit - len(found))).all()
                found += [claim.claimed(row, "", has_attempt=row.has_attempt) for row in rows]
        return found

    def admit(self, rows: Iterable[Claimed], now: datetime) -> set[int]:
        with reading(self._engine) as connection:
            return breakers.admit(connection, _by_origin(rows), now, self._limits, keep=False)

    def outgoing(self, row_ids: Sequence[int]) -> Sequence[Outgoing]:
        """As an attempt would publish them; the body is left out, since no decision reads it."""
        columns = [_M[name] for name in OUTGOING if name != "body"]
        with reading(self._engine) as connection:
            found = connection.execute(select(*columns).where(among(connection, _M.id, row_ids)))
            rows: dict[int, tuple[Any, ...]] = {row.id: (*tuple(row)[1:], b"") for row in found}
        return [Outgoing(row_id, 1, None, *rows[row_id]) for row_id in row_ids if row_id in rows]


def _by_origin(rows: Iterable[Claimed]) -> dict[str, list[int]]:
    """Where nobody knows the origin there is no breaker, and the sending will say so."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for row in rows:
        found[row.origin or ""].append(row.row_id)
    return found
