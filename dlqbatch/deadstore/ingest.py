"""Arrivals become rows: who each message is, what its coming back means, all of a batch in one transaction."""

from __future__ import annotations

import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select, update

from dlqbatch.deadstore.attempts import close_attempt
from dlqbatch.deadstore.engine import writing
from dlqbatch.deadstore.states import RowMove, arrive, move_many, note_many
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES
from dlqbatch.deadstore.text import key
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.policy.lifecycle import (
    Arrival,
    AttemptFailed,
    Duplicate,
    Known,
    NewRow,
    Status,
    after_failed_attempt,
    meaning_of_arrival,
)
from dlqbatch.policy.strategy import Options, Strategy, next_retry

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Engine, Row

    from dlqbatch.policy.examine import Examined

RECORDED: Final = "recorded"
DUPLICATE: Final = "duplicate"
_ACTOR: Final = "ingest"
_AT_ONCE: Final = 500
"""Rows named in one statement."""
_DEADLOCK: Final = "40P01"
_TRIES: Final = 4
"""Runs that store the same messages can wait for each other in a circle; nothing is written then, and one goes on."""


@dataclass(slots=True)
class Ingestion:
    """What one run stores; it remembers which rows are its own until their acknowledgements are certain."""

    engine: Engine
    options: Options = field(default_factory=Options)
    system_state: Mapping[str, object] = field(default_factory=dict)
    """CPU and memory of this machine when the run began."""
    _stored: set[int] = field(default_factory=set)

    def store(self, batch: Sequence[Examined], now: datetime) -> list[tuple[str, str | None]]:
        """Committed when it returns: for each message what it counts as, and why.

        An empty batch finds out whether the store is there.
        """
        for _ in range(_TRIES - 1):
            try:
                return self._store(batch, now)
            except DatabaseUnreadable as error:
                if not _is_deadlock(error):
                    raise
        return self._store(batch, now)

    def acknowledged(self) -> None:
        """The broker has seen every acknowledgement of this run: none of its messages can be delivered again."""
        rows = sorted(self._stored)
        for start in range(0, len(rows), _AT_ONCE):
            with writing(self.engine) as connection:
                _prove(connection, rows[start : start + _AT_ONCE])
        self._stored.clear()

    def _store(self, batch: Sequence[Examined], now: datetime) -> list[tuple[str, str | None]]:
        results: dict[int, tuple[str, str | None]] = {}
        stored: set[int] = set()
        with writing(self.engine) as connection:
            if not batch:
                connection.execute(select(MESSAGES.c.id).limit(1))
            for wave in _waves(batch):
                self._store_wave(connection, wave, now, results, stored)
        self._stored |= stored
        return [results[place] for place in range(len(batch))]

    def _store_wave(
        self,
        connection: Connection,
        wave: Mapping[int, Examined],
        now: datetime,
        results: dict[int, tuple[str, str | None]],
        stored: set[int],
    ) -> None:
        """Messages with distinct ids; one that somebody else stores in the same moment is looked at again."""
        pending = dict(wave)
        while pending:
            rows = _rows(connection, [each.id for each in pending.values() if each.id])
            known = _known(connection, rows.values())
            twins = _twins(connection, pending.values(), self._stored | stored)
            matched: list[int] = []
            new: dict[int, tuple[Examined, NewRow]] = {}
            notes: dict[int, str] = {}
            for place, each in pending.items():
                row = rows.get(key(each.id)) if each.id else None
                own_twins = twins[_likeness(each)] if not each.id and each.redelivered else []
                meaning = meaning_of_arrival(
                    Arrival(bool(each.id), each.redelivered, each.attempt, each.digest),
                    known[row.id] if row is not None else None,
                    unproven_twins=len(own_twins),
                )
                if isinstance(meaning, NewRow):
                    new[place] = (each, meaning)
                    if meaning.possible_duplicate:
                        _flag(connection, own_twins)
                    continue
                if row is not None:
                    results[place] = self._apply(connection, each, meaning, row, now, notes)
                elif isinstance(meaning, Duplicate):
                    matched.append(own_twins.pop())
                    notes[matched[-1]] = meaning.why
                    results[place] = DUPLICATE, None
            # From its commit on such a row stands for this message, and no other can be taken for it.
            _prove(connection, matched)
            ids = self._insert(connection, new, now)
            for place in new:
                if place in ids:
                    results[place] = (RECORDED, None)
            stored.update(row_id for place, row_id in ids.items() if not new[place][0].id)
            note_many(connection, notes, now, _ACTOR)
            pending = {place: each for place, (each, _) in new.items() if place not in ids}

    def _apply(
        self,
        connection: Connection,
        each: Examined,
        meaning: AttemptFailed | Duplicate,
        row: Row[*tuple[Any, ...]],
        now: datetime,
        notes: dict[int, str],
    ) -> tuple[str, str | None]:
        if isinstance(meaning, AttemptFailed):
            self._fail_attempt(connection, each, meaning, row, now)
            return RECORDED, "attempt-failed"
        if meaning.reopens:
            again = next_retry(Strategy.IMMEDIATE, 0, now, self.options)
            reopening = RowMove(row.id, Status.RESOLVED, Status.PENDING, None, meaning.why, {"next_retry_at": again})
            move_many(connection, [reopening], now, _ACTOR)
        else:
            notes[row.id] = meaning.why
        return DUPLICATE, None

    def _fail_attempt(
        self, connection: Connection, each: Examined, failed: AttemptFailed, row: Row[*tuple[Any, ...]], now: datetime
    ) -> None:
        """Close the attempt and take the row along every move that follows, one by one."""
        close_attempt(connection, row.id, failed.number, "failed", now, was="succeeded" if failed.late else None)
        outcome = after_failed_attempt(
            row.status, row.dlq_retry_count, row.strategy or Strategy.IMMEDIATE, now, self.options
        )
        token = row.lock_token
        why = f"attempt {failed.number} failed" + (", seen late" if failed.late else "")
        for step in outcome.moves:
            columns: dict[str, Any] = {}
            if step.end is Status.PROCESSING:
                columns = {"lock_token": secrets.token_hex(8), "lock_owner": _ACTOR}
            if step.end is outcome.status:
                columns |= {
                    "dlq_retry_count": outcome.dlq_retry_count,
                    "next_retry_at": outcome.next_retry_at,
                    "last_failed_at": each.last_failed_at,
                    **_failure(each),
                }
            move_many(connection, [RowMove(row.id, step.start, step.end, token, why, columns)], now, _ACTOR)
            token = columns.get("lock_token")

    def _insert(
        self, connection: Connection, new: Mapping[int, tuple[Examined, NewRow]], now: datetime
    ) -> dict[int, int]:
        """Row ids by place, without those whose identity somebody else has taken meanwhile."""
        identities: dict[str, int] = {}
        by_reason: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        first_retry = next_retry(Strategy.IMMEDIATE, 0, now, self.options)
        for place, (each, meaning) in new.items():
            identity = each.id if each.id and not meaning.is_child else secrets.token_hex(16)
            identities[key(identity)] = place
            by_reason[meaning.why].append(
                {
                    **_columns(each),
                    "identity": identity,
                    "parent": each.id if meaning.is_child else each.parent,
                    "status": meaning.status,
                    "dlq_retry_count": min(meaning.dlq_retry_count, 2**31 - 1),
                    "next_retry_at": first_retry if meaning.status is Status.PENDING else None,
                    "possible_duplicate": meaning.possible_duplicate,
                    "system_state": dict(self.system_state),
                }
            )
        found: dict[int, int] = {}
        for why, rows in sorted(by_reason.items()):
            for identity, row_id in arrive(connection, rows, now, _ACTOR, why).items():
                found[identities[identity]] = row_id
        return found


def _waves(batch: Sequence[Examined]) -> list[dict[int, Examined]]:
    """The batch so that no wave holds an id twice; what comes later in it finds the rows of what came before."""
    waves: list[dict[int, Examined]] = []
    seen: defaultdict[str, int] = defaultdict(int)
    for place, each in enumerate(batch):
        turn = 0
        if each.id:
            # As a row's name: ids that differ only in what cannot be shown are one there.
            name = key(each.id)
            turn = seen[name]
            seen[name] += 1
        if turn == len(waves):
            waves.append({})
        waves[turn][place] = each
    return waves


def _likeness(each: Examined) -> tuple[bytes, str]:
    return each.full_digest, key(each.source_queue)


def _twins(
    connection: Connection, arrivals: Iterable[Examined], own: Container[int]
) -> defaultdict[tuple[bytes, str], list[int]]:
    """Rows that a redelivered message without an id may be, for their acknowledgement is not proven.

    Never one of this run's `own`: their messages are still under way, so that an equal one is another.
    """
    twins: defaultdict[tuple[bytes, str], list[int]] = defaultdict(list)
    digests = {each.full_digest for each in arrivals if not each.id and each.redelivered}
    if digests:
        # Locked, for another run may hold another message that is like the same row.
        found = connection.execute(
            select(MESSAGES.c.id, MESSAGES.c.full_digest, MESSAGES.c.source_queue)
            .where(MESSAGES.c.full_digest.in_(digests), ~MESSAGES.c.ack_proven, ~MESSAGES.c.had_id)
            .order_by(MESSAGES.c.id)
            .with_for_update()
        )
        for row_id, digest, queue in found:
            if row_id not in own:
                twins[bytes(digest), queue].append(row_id)
    return twins


def _prove(connection: Connection, rows: list[int]) -> None:
    if rows:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(rows)).values(ack_proven=True))


def _is_deadlock(error: DatabaseUnreadable) -> bool:
    return getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) == _DEADLOCK


def _rows(connection: Connection, ids: list[str]) -> dict[str, Row[*tuple[Any, ...]]]:
    if not ids:
        return {}
    columns = (
        MESSAGES.c.id,
        MESSAGES.c.identity,
        MESSAGES.c.digest,
        MESSAGES.c.status,
        MESSAGES.c.strategy,
        MESSAGES.c.dlq_retry_count,
        MESSAGES.c.lock_token,
    )
    found = connection.execute(
        select(*columns)
        .where(MESSAGES.c.identity.in_([key(identity) for identity in ids]))
        .order_by(MESSAGES.c.id)  # as everywhere: rows before attempts, in one order, so that nobody waits in a circle
        .with_for_update()
    )
    return {row.identity: row for row in found}


def _known(connection: Connection, rows: Iterable[Row[*tuple[Any, ...]]]) -> dict[int, Known]:
    by_id = {row.id: row for row in rows}
    attempts: defaultdict[int, list[tuple[int, str | None]]] = defaultdict(list)
    if by_id:
        found = connection.execute(
            select(ATTEMPTS.c.message_id, ATTEMPTS.c.number, ATTEMPTS.c.outcome).where(ATTEMPTS.c.message_id.in_(by_id))
        )
        for row_id, number, outcome in found:
            attempts[row_id].append((number, outcome))
    return {
        row_id: Known(
            status=row.status,
            digest=bytes(row.digest),
            open_attempt=max((number for number, outcome in attempts[row_id] if outcome is None), default=None),
            failed_attempts=frozenset(number for number, outcome in attempts[row_id] if outcome == "failed"),
            resolved_by=max((number for number, outcome in attempts[row_id] if outcome == "succeeded"), default=None),
        )
        for row_id, row in by_id.items()
    }


def _flag(connection: Connection, rows: list[int]) -> None:
    connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(rows)).values(possible_duplicate=True))


def _columns(each: Examined) -> dict[str, Any]:
    origin = each.origin
    event = origin.key if origin is not None else None
    tags = [tag for tag in (event.split(".", 1)[0] if event else None, each.app_id) if tag]
    return {
        "digest": each.digest,
        "full_digest": each.full_digest,
        "had_id": bool(each.id),
        # An id tells whether it came before; only without one does it matter what can still be delivered again.
        "ack_proven": bool(each.id),
        "source_queue": each.source_queue,
        "exchange": each.exchange,
        "routing_key": each.routing_key,
        "body": each.body,
        "properties": each.properties,
        "message_id": each.message_id,
        "origin_queue": origin.queue if origin is not None else None,
        "origin_exchange": origin.exchange if origin is not None else None,
        "origin_key": event,
        "event": event,
        "retry_count": each.retries,
        "first_failed_at": each.first_failed_at,
        "last_failed_at": each.last_failed_at,
        "priority": each.priority,
        "tags": tags,
        "source": each.app_id,
        **_failure(each),
    }


def _failure(each: Examined) -> dict[str, Any]:
    return {
        "reason": each.reason,
        "error_type": each.failure.type,
        "error_message": each.failure.message,
        "error_stack": each.failure.stack,
        "fingerprint": each.fingerprint,
    }
