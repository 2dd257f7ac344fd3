"""The same failure as several programs describe it: with a stack or without, the type with its package or without it.

Each description is a group of its own, because a fingerprint must not depend on what else there is. To a person they
are one failure in one queue: one line of `dlqbatch groups list`, and what is decided about one of them holds for all.
What arrives later in another description takes over what was decided before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, and_, select

from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.fingerprint import masked, simple_type
from dlqbatch.store import holds
from dlqbatch.store.bulk import in_list, values_table
from dlqbatch.store.counts import groups_of_queue, queues_of_group
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES
from dlqbatch.store.text import key, visible

MOST_GROUPS: Final = 1_000
"""The largest groups of a queue that are compared with one."""
_MOST_QUEUES: Final = 100
_M: Final = MESSAGES.c


class Description(NamedTuple):
    """What all descriptions of one failure have in common."""

    type: str
    """Without its package."""
    message: str
    """Without its variable parts."""


def description(error_type: str | None, error_message: str | None) -> Description | None:
    """None: too little was told to say that two failures are the same."""
    found = Description(simple_type(error_type or ""), masked(error_message or ""))
    return found if all(found) else None


def groups_alike(connection: Connection, fingerprint: str, queue: str = "") -> list[str]:
    """The other groups that describe the failure of this one, in this queue or in any where this one failed.

    Of each group its newest message in the queue tells. A queue is named as holds name it; '' is any.
    """
    found: set[str] = set()
    for name in [queue] if queue else _queues(connection, fingerprint):
        # Messages of which only an exchange is known are counted under the queue ''.
        others = {*groups_of_queue(connection, name, MOST_GROUPS), *groups_of_queue(connection, "", MOST_GROUPS)}
        told = _descriptions(connection, {fingerprint, *others}, name)
        mine = told.get(fingerprint)
        found.update(each for each, other in told.items() if mine is not None and other == mine)
    return sorted(found - {fingerprint})


def _queues(connection: Connection, fingerprint: str) -> list[str]:
    names = queues_of_group(connection, fingerprint, _MOST_QUEUES)
    if "" not in names:
        return names
    rows = select(_M.origin_exchange).distinct().where(*_in_scope(connection), _M.fingerprint == fingerprint)
    only_exchange = rows.where(_M.origin_queue.is_(None), _M.origin_exchange.is_not(None)).limit(_MOST_QUEUES)
    return [*(name for name in names if name), *connection.scalars(only_exchange)]


def _descriptions(connection: Connection, fingerprints: Collection[str], queue: str) -> dict[str, Description]:
    """The description in the newest message of each of these groups that failed in this queue."""
    if not fingerprints:
        return {}
    wanted = values_table(connection, {_M.fingerprint: sorted(fingerprints)})
    mine = (*_in_scope(connection), _M.fingerprint == wanted.c.fingerprint)
    ids: set[int] = set()
    for place in (_M.origin_queue == queue, and_(_M.origin_queue.is_(None), _M.origin_exchange == queue)):
        looks = (
            select(_M.id)
            .where(*mine, place, _M.status == status)
            .order_by(_M.origin_queue.desc(), _M.created_at.desc())  # as the index is, which is looked at once for each
            .limit(1)
            .correlate(wanted)
            .scalar_subquery()
            for status in Status
        )
        for row in connection.execute(select(*looks).select_from(wanted)):
            ids.update(each for each in row if each is not None)
    columns = (_M.fingerprint, _M.error_type, _M.error_message)
    newest_last = select(*columns).where(in_list(connection, _M.id, ids)).order_by(_M.created_at, _M.id)
    told = {row.fingerprint: description(row.error_type, row.error_message) for row in connection.execute(newest_last)}
    return {fingerprint: each for fingerprint, each in told.items() if each is not None}


def _in_scope(connection: Connection) -> tuple[Any, ...]:
    return (_M.scope_id == scope_of(connection),)


class _Arrived(NamedTuple):
    fingerprint: str
    queue: str
    told: Description


@dataclass(slots=True)
class Newcomers:
    """What arrives in a group takes over what is decided about the same failure in another description."""

    _compared: dict[_Arrived, datetime] = field(default_factory=dict)
    """Up to which decision each was compared in vain, so that a run does so once."""

    def take_over(self, connection: Connection, batch: Iterable[Examined]) -> None:
        """In the transaction that stores these messages, so that none of them is claimed without its hold."""
        arrived = {each for each in map(_arrived, batch) if each is not None}
        if not arrived:
            return
        decided = holds.decided_in(connection, {each.queue for each in arrived}, MOST_GROUPS)
        if decided:
            for each in sorted(arrived):
                self._take_over(connection, each, decided)

    def _take_over(self, connection: Connection, each: _Arrived, decided: Sequence[Any]) -> None:
        """`decided` holds the newest decision first."""
        here = [row for row in decided if row.queue in {"", each.queue}]
        if any(row.fingerprint == each.fingerprint for row in here):
            return  # somebody has decided about it
        since = self._compared.get(each)
        others = [row for row in here if since is None or since < row.updated_at]
        if not others:
            return
        told = _descriptions(connection, {row.fingerprint for row in others}, each.queue)
        taken: set[str] = set()
        for row in others:
            if told.get(row.fingerprint) == each.told and row.queue not in taken:
                holds.take_over(connection, each.fingerprint, row)
                taken.add(row.queue)
        if not taken:
            self._compared[each] = others[0].updated_at


def _arrived(each: Examined) -> _Arrived | None:
    # As the row has them.
    kind, said = each.failure.type, each.failure.message
    told = description(kind and key(kind), said and visible(said))
    place = each.origin and (each.origin.queue or each.origin.exchange)
    return None if told is None or not place else _Arrived(each.fingerprint, key(place), told)
