"""What people do to dead messages: the command line calls it, and so can a web console."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Final

from sqlalchemy import Connection, Engine, select

from dlqbatch.logs import masked
from dlqbatch.messages import queries as messages
from dlqbatch.messages.changes import Changes, change_many
from dlqbatch.messages.discard import discard_some, restore_some
from dlqbatch.messages.queries import WAITING, Groups, Record
from dlqbatch.messages.selection import check_number, choose, not_left_out
from dlqbatch.messages.shown import Reveal, Shown, masked_record, reveal, shown
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import Request, check_person
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filter_conditions import exchanges_named, near, values_not_found
from dlqbatch.store.filters import LARGEST_ID, Filters, NoSuchMessage, NotUnderstood, Place
from dlqbatch.store.reservation import hash_of
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import TRANSITIONS

JOURNAL_LOOKED_THROUGH: Final = 200_000
"""Without a message, so many of the newest entries of the journal are searched for an actor."""
_T: Final = TRANSITIONS.c


@dataclass(frozen=True, slots=True)
class Listing:
    messages: tuple[Record, ...]
    next: str | None
    """What the next page begins after; None: there is nothing behind."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal."""

    id: int
    message_id: int
    from_status: Status | None
    to_status: Status
    at: datetime
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Journal:
    entries: tuple[Entry, ...]
    """The newest first."""
    is_complete: bool
    """False: only the newest entries were looked through for this actor."""


class MessageActions:
    """Each call is on its own; it holds no connection in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def page(self, filters: Filters, limit: int = 50, after: str | None = None, by: Reveal | None = None) -> Listing:
        """Masked, unless `by` says who sees it unmasked and why."""
        place = None if after is None else Place.parse(after)
        with self._showing(by) as connection:
            page = messages.find(connection, filters, limit, place)
            if by is not None:
                reveal(connection, [record.id for record in page.records], by, StoreClock(self._engine)())
        records = page.records if by is not None else tuple(map(masked_record, page.records))
        return Listing(records, page.next and page.next.token)

    def groups(self, filters: Filters, limit: int = 50) -> Groups:
        with reading(self._engine, is_snapshot=True) as connection:
            found = messages.groups(connection, filters, limit)
        groups = tuple(replace(group, sample=masked_record(group.sample)) for group in found.groups)
        return replace(found, groups=groups)

    def near(self, filters: Filters) -> list[str]:
        """Why nothing matches: which names no message has, and the names most like them."""
        with reading(self._engine) as connection:
            return near(connection, filters)

    def values_not_found(self, filters: Filters) -> list[str]:
        """Which ids, values and unwanted names no message has, and which queues an exchange was taken for."""
        if not (filters.ids or filters.fields or filters.origins or filters.unwanted):
            return []
        with reading(self._engine) as connection:
            missing = [*values_not_found(connection, filters), *not_left_out(connection, filters)]
            return [*exchanges_named(connection, filters), *missing]

    def show(self, row_id: int, by: Reveal | None = None) -> Shown:
        """Masked, unless `by` says who sees it unmasked and why."""
        with self._showing(by) as connection:
            if by is not None:
                reveal(connection, [min(row_id, LARGEST_ID)], by, StoreClock(self._engine)())
            detail = messages.get(connection, row_id) if 0 < row_id <= LARGEST_ID else None
            plan = None if detail is None else hash_of(connection, detail.record.plan_id)
        if detail is None:
            raise NoSuchMessage(row_id)
        return shown(detail, plan, is_revealed=by is not None)

    def _showing(self, by: Reveal | None) -> AbstractContextManager[Connection]:
        if by is None:
            return reading(self._engine)
        check_person(by.actor, by.reason)
        return writing(self._engine)

    def journal(
        self, row_id: int | None = None, *, actor: str | None = None, since: datetime | None = None, limit: int = 50
    ) -> Journal:
        conditions = [] if row_id is None else [_T.message_id == min(max(row_id, 0), LARGEST_ID)]
        if since is not None:
            conditions.append(_T.at >= since)
        # A message's lines are few and in the order of their ids; all others are found by their time.
        newest = (_T.id.desc(),) if row_id is not None else (_T.at.desc(), _T.id.desc())
        query = select(*(_T[field.name] for field in fields(Entry))).where(*conditions).order_by(*newest)
        with reading(self._engine) as connection:
            if row_id is None:
                conditions.append(own(connection, _T.scope_id))
                query = query.where(own(connection, _T.scope_id))
            edge = None
            if actor is not None:
                if row_id is None:
                    # No index knows the actors: what is behind the edge is not looked at.
                    behind = select(_T.at).where(*conditions).order_by(*newest).offset(JOURNAL_LOOKED_THROUGH).limit(1)
                    edge = connection.scalar(behind)
                if edge is not None:
                    query = query.where(_T.at >= edge)
                query = query.where(_T.actor == actor)
            found = connection.execute(query.limit(limit))
            entries = tuple(Entry(*row) for row in found)
        return Journal(tuple(replace(each, reason=masked(each.reason)) for each in entries), edge is None)

    def discard(
        self,
        row_ids: Sequence[int] = (),
        filters: Filters | None = None,
        *,
        actor: str,
        reason: str,
        now: datetime | None = None,
        everything: bool = False,
        expect: int | None = None,
        dry_run: bool = False,
        verified: bool = False,
    ) -> Changes:
        """Archive these, or all that match; a filter without a status means what is not over yet.

        More than a hundred that a filter matches are discarded only where `expect` is their number. Without a time it
        is the store's: how long a message is kept counts from there.
        """
        now = StoreClock(self._engine)() if now is None else now
        filters = None if filters == Filters() else filters
        if row_ids and (filters is not None or everything):
            raise NotUnderstood("name messages by their ids or by a filter, not both. Nothing was changed.")
        if not row_ids and filters is None and not everything:
            raise NotUnderstood(
                "nothing says which messages to discard: give ids or a filter, or --all --yes for everything that is "
                "not over yet. Nothing was changed."
            )
        check_person(actor, reason)
        chosen = None if row_ids else choose(self._engine, filters or Filters(), WAITING)
        if chosen is not None and (not dry_run or expect is not None):
            check_number(chosen.split, expect)
        request = Request("discard", actor, reason, verified, _shown(row_ids, filters or Filters()))
        some = partial(discard_some, actor=actor, reason=reason, now=now, dry_run=dry_run)
        ids = dict.fromkeys(row_ids) if chosen is None else chosen.row_ids
        done = change_many(self._engine, ids, request, now, some, dry_run=dry_run)
        return done if chosen is None else replace(done, split=chosen.split)

    def restore(
        self,
        row_ids: Sequence[int] = (),
        filters: Filters | None = None,
        *,
        actor: str,
        reason: str,
        now: datetime | None = None,
        dry_run: bool = False,
        verified: bool = False,
    ) -> Changes:
        """Archived messages to manual, where a person decides about them again; without a time at the store's.

        What an edit has replaced is restored only by its id: its edit may have been sent, and it would go out too.
        """
        now = StoreClock(self._engine)() if now is None else now
        filters = None if filters == Filters() else filters
        if bool(row_ids) == (filters is not None):
            raise NotUnderstood("name messages by their ids, or by a filter. Nothing was changed.")
        if filters is not None and set(filters.statuses) - {Status.ARCHIVED}:
            raise NotUnderstood("only what is archived can be restored; leave --status out. Nothing was changed.")
        check_person(actor, reason)
        are_named = filters is None
        ids = dict.fromkeys(row_ids) if filters is None else choose(self._engine, filters, [Status.ARCHIVED]).row_ids
        request = Request("restore", actor, reason, verified, _shown(row_ids, filters or Filters()))
        some = partial(restore_some, actor=actor, reason=reason, now=now, dry_run=dry_run, are_named=are_named)
        return change_many(self._engine, ids, request, now, some, dry_run=dry_run)


def _shown(row_ids: Sequence[int], filters: Filters) -> dict[str, object]:
    return {"ids": len(row_ids)} if row_ids else filters.shown() or {"all": True}
