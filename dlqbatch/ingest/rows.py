"""Arrivals become rows: who each message is, what its coming back means, all of a batch in one transaction."""

from __future__ import annotations

import itertools
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Engine, Row, select

from dlqbatch.amqp.identity import digest_of
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.ingest import known_rows
from dlqbatch.ingest.arrivals import (
    Arrival,
    AttemptFailed,
    Duplicate,
    Meaning,
    NewRow,
    Republished,
    meaning_of_arrival,
    meaning_of_republished,
)
from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.known_rows import PossibleDuplicates
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import LIMITS, close_attempts
from dlqbatch.lifecycle.backoff_and_off_peak import Options, next_retry
from dlqbatch.lifecycle.breaker import Limits
from dlqbatch.lifecycle.max_attempts import MAX_ATTEMPTS, MAX_TRIPS, after_failed_attempt
from dlqbatch.store.engine import writing
from dlqbatch.store.journal import RowMove, arrive, move_locked, note_many
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import MESSAGES
from dlqbatch.store.text import key

RECORDED: Final = "recorded"
DUPLICATE: Final = "duplicate"
_ACTOR: Final = "ingest"
_AT_ONCE: Final = 500  # rows named in one statement
_DEADLOCK: Final = "40P01"
# Runs that store the same messages can wait for each other in a circle; nothing is written then, and one goes on.
_TRIES: Final = 4


Also = Callable[[Connection, Mapping[int, int]], None]  # gets the row of each message, by its place in the batch


@dataclass(slots=True)
class Ingestion:
    """What one run stores; it remembers which rows are its own until their acknowledgements are certain."""

    engine: Engine
    options: Options = field(default_factory=Options)
    system_state: Callable[[], Mapping[str, object]] = dict
    """CPU and memory of this machine as the run began; asked once, for the first row."""
    max_attempts: int = MAX_ATTEMPTS
    max_trips: int = MAX_TRIPS  # before what a consumer makes of each retry needs a person
    limits: Limits = LIMITS
    """The limits of the circuit breakers."""
    jitter: Callable[[], float] = float
    """A random number from 0 to 1; by default 0."""
    _matched: set[int] = field(default_factory=set)
    """Rows of other runs that a message was taken for."""
    _returned: set[bytes] = field(default_factory=set)
    """The digests of messages that were found to be a row's by their framework's id."""
    _run: str = field(default_factory=lambda: secrets.token_hex(12))
    """How the identities begin that this run gives."""
    _is_announced: bool = False
    _state: Mapping[str, object] | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def store(
        self, batch: Sequence[Examined], now: datetime, also: Also = lambda *_: None
    ) -> list[tuple[str, str | None]]:
        """Committed when it returns: for each message what it counts as, and why.

        An empty batch finds out whether the store is there. `also` writes more in the same transaction.
        """
        for _ in range(_TRIES - 1):
            try:
                return self._store(batch, now, also)
            except DatabaseUnreadable as error:
                if getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) != _DEADLOCK:
                    raise
        return self._store(batch, now, also)

    def acknowledged(self) -> None:
        """The broker has seen every acknowledgement of this run: none of its messages can be delivered again."""
        rows = sorted(self._matched)
        for start in range(0, len(rows), _AT_ONCE):
            with writing(self.engine) as connection:
                some = rows[start : start + _AT_ONCE]
                known_rows.prove(connection, some)
                known_rows.flag(connection, some, possible_duplicate=False)
        self._matched.clear()
        if self._is_announced:
            with writing(self.engine) as connection:
                known_rows.prove_run(connection, self._run)
            self._run, self._is_announced = secrets.token_hex(12), False

    def _store(self, batch: Sequence[Examined], now: datetime, also: Also) -> list[tuple[str, str | None]]:
        done = _Done(returned=set(self._returned))
        with writing(self.engine) as connection:
            if not self._is_announced and any(not each.id for each in batch):
                known_rows.announce(connection, self._run, now)
            if not batch:
                connection.execute(select(MESSAGES.c.id).limit(1))
            for wave in _waves(batch):
                self._store_wave(connection, wave, now, done)
            # Breakers last, after every message of every wave.
            breakers.count_failed(connection, done.failures, now, self.limits)
            also(connection, done.rows)
        self._matched |= done.matched
        self._returned = done.returned
        self._is_announced = self._is_announced or any(not each.id for each in batch)
        return [done.results[place] for place in range(len(batch))]

    def _store_wave(self, connection: Connection, wave: Mapping[int, Examined], now: datetime, done: _Done) -> None:
        """Messages with distinct ids; one that somebody else stores in the same moment is looked at again."""
        pending = dict(wave)
        while pending:
            rows = known_rows.rows_by_identity(connection, [each.id for each in pending.values() if each.id])
            known = known_rows.known_of(connection, rows.values())
            alike = known_rows.rows_by_framework_id(connection, pending.values())
            duplicates = known_rows.possible_duplicates_of(
                connection, pending.values(), self._run, self._matched | done.matched
            )
            new: dict[int, tuple[Examined, NewRow]] = {}
            returned: list[_Returned] = []
            reopened: dict[int, str] = {}
            notes: dict[int, str] = {}
            for place, each in pending.items():
                row = rows.get(key(each.id)) if each.id else None
                candidates = _candidates(connection, each, row, duplicates)
                meaning = meaning_of_arrival(
                    self._arrival(connection, each, row),
                    known[row.id] if row is not None else None,
                    unproven_duplicates=len(candidates),
                    in_doubt=any(candidates.values()),
                )
                if isinstance(meaning, NewRow) and each.framework_id is not None and not each.id:
                    same = alike[key(each.framework_id)]
                    meaning, row = _if_republished(connection, each, meaning, same, done.returned)
                if isinstance(meaning, NewRow):
                    new[place] = (each, replace(meaning, status=Status.MANUAL) if each.needs_person else meaning)
                    if meaning.possible_duplicate:
                        known_rows.flag(connection, candidates)
                    continue
                if isinstance(meaning, Duplicate):
                    done.results[place] = DUPLICATE, None
                    row_id = done.rows[place] = row.id if row is not None else done.match(candidates)
                    (reopened if meaning.reopens else notes)[row_id] = meaning.why
                elif row is not None:
                    done.results[place] = RECORDED, "attempt-failed"
                    done.rows[place] = row.id
                    returned.append(_Returned(each, meaning, row))
            self._fail_attempts(connection, returned, now, done)
            self._reopen(connection, reopened, now)
            # From its commit on such a row stands for this message, and no other can be taken for it.
            known_rows.flag(connection, done.matched)
            ids = self._insert(connection, new, now)
            for place in new:
                if place in ids:
                    done.results[place], done.rows[place] = (RECORDED, None), ids[place]
            note_many(connection, notes, now, _ACTOR)
            pending = {place: each for place, (each, _) in new.items() if place not in ids}

    def _arrival(self, connection: Connection, each: Examined, row: Row[*tuple[Any, ...]] | None) -> Arrival:
        return Arrival(
            bool(each.id),
            each.redelivered,
            each.attempt,
            each.digest,
            row is not None and known_rows.is_elsewhere(connection, each.origin, row),
            each.parent is not None and each.trips > self.max_trips,
        )

    def _reopen(self, connection: Connection, reopened: Mapping[int, str], now: datetime) -> None:
        """Resolved messages, by row id and why, came again."""
        again = next_retry(Strategy.IMMEDIATE, 0, now, self.options)
        moves = (
            RowMove(row_id, Status.RESOLVED, Status.PENDING, None, why, {"next_retry_at": again})
            for row_id, why in reopened.items()
        )
        move_locked(connection, list(moves), now, _ACTOR)

    def _fail_attempts(self, connection: Connection, returned: Sequence[_Returned], now: datetime, done: _Done) -> None:
        """Close the attempts and take their rows along every move that follows, one statement for all alike.

        No row is named twice: messages that tell of one row have an id in common, and are in different waves.
        """
        numbers = {row.id: failed.number for _, failed, row in returned}
        origins = {row.id: (row.origin_queue, row.origin_exchange, row.origin_key) for *_, row in returned}
        done.failures += breakers.failures_of(connection, numbers, origins, now)
        on_time = {each.row.id: each.failed.number for each in returned if not each.failed.late}
        close_attempts(connection, on_time, "failed", now)
        late = {each.row.id: each.failed.number for each in returned if each.failed.late}
        close_attempts(connection, late, "failed", now, was="succeeded")
        ways = [self._way(each, now) for each in returned]
        for step in range(max(map(len, ways), default=0)):
            move_locked(connection, [way[step] for way in ways if step < len(way)], now, _ACTOR)

    def _way(self, returned: _Returned, now: datetime) -> list[RowMove]:
        """The moves of a row whose attempt failed, in their order."""
        each, failed, row = returned
        outcome = after_failed_attempt(
            row.status,
            row.dlq_retry_count,
            Strategy.MANUAL if each.needs_person else row.strategy or Strategy.IMMEDIATE,
            now,
            self.options,
            jitter=self.jitter(),
            max_attempts=self.max_attempts,
            asked=each.asked,
        )
        token = row.lock_token
        why = f"attempt {failed.number} failed" + (", seen late" if failed.late else "")
        way: list[RowMove] = []
        for step in outcome.moves:
            columns: dict[str, Any] = {}
            if step.end is Status.PROCESSING:
                columns = {"lock_token": secrets.token_hex(8), "lock_owner": _ACTOR}
            if step.end is outcome.status:
                columns |= {
                    "dlq_retry_count": outcome.dlq_retry_count,
                    "next_retry_at": outcome.next_retry_at,
                    "last_failed_at": each.last_failed_at,
                    **_way_back(each, row),
                    **_failure(each),
                }
                if row.plan_id is None:
                    columns["strategy"] = row.strategy or Strategy.IMMEDIATE
                if not each.id:
                    columns["returned_digest"] = _returned_digest(each)
            way.append(RowMove(row.id, step.start, step.end, token, why, columns))
            token = columns.get("lock_token")
        return way

    def _new_identity(self) -> str:
        """An identity that sorts in the order of arrival, as rows are written in the order of their identities."""
        return f"{self._run}{next(self._numbers):08x}"

    def _insert(
        self, connection: Connection, new: Mapping[int, tuple[Examined, NewRow]], now: datetime
    ) -> dict[int, int]:
        """Row ids by place, without those whose identity somebody else has taken meanwhile."""
        identities: dict[str, int] = {}
        state = self._state = dict(self.system_state() if self._state is None else self._state)
        by_reason: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for place, (each, meaning) in new.items():
            due = next_retry(Strategy.IMMEDIATE, 0, now, self.options, asked=each.asked)
            identity = each.id if each.id and not meaning.is_child else self._new_identity()
            identities[key(identity)] = place
            by_reason[meaning.why].append(
                {
                    **_columns(each),
                    "identity": identity,
                    "parent": each.id if meaning.is_child else meaning.parent or each.parent,
                    "status": meaning.status,
                    "dlq_retry_count": min(meaning.dlq_retry_count, 2**31 - 1),
                    "next_retry_at": due if meaning.status is Status.PENDING else None,
                    "possible_duplicate": meaning.possible_duplicate,
                    "system_state": state,
                    "fields": each.fields,
                    "created_at": now + timedelta(microseconds=place),  # in the order of arrival, which a replay keeps
                }
            )
        found: dict[int, int] = {}
        for why, rows in sorted(by_reason.items()):
            for identity, row_id in arrive(connection, rows, now, _ACTOR, why).items():
                found[identities[identity]] = row_id
        return found


class _Returned(NamedTuple):
    """A message that is a failed attempt of a row, which this transaction has locked."""

    each: Examined
    failed: AttemptFailed
    row: Row[*tuple[Any, ...]]


@dataclass(slots=True)
class _Done:
    """What has come of the messages of one transaction, by their places in the batch."""

    results: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    matched: set[int] = field(default_factory=set)
    returned: set[bytes] = field(default_factory=set)
    failures: list[breakers.Failed] = field(default_factory=list)

    def match(self, candidates: dict[int, bool]) -> int:
        """The only row that a message without an id may be; no other message is taken for it from here on."""
        row_id, _ = candidates.popitem()
        self.matched.add(row_id)
        return row_id


def _waves(batch: Sequence[Examined]) -> list[dict[int, Examined]]:
    """The batch so that no wave holds an id twice; what comes later in it finds the rows of what came before."""
    waves: list[dict[int, Examined]] = []
    seen: defaultdict[tuple[str, str], int] = defaultdict(int)
    for place, each in enumerate(batch):
        # As rows have them: ids that differ only in what cannot be shown are one there.
        ids = [(kind, key(value)) for kind, value in (("ours", each.id), ("framework's", each.framework_id)) if value]
        turn = max((seen[one] for one in ids), default=0)
        seen.update(dict.fromkeys(ids, turn + 1))
        if turn == len(waves):
            waves.append({})
        waves[turn][place] = each
    return waves


def _if_republished(
    connection: Connection,
    each: Examined,
    otherwise: NewRow,
    rows: Sequence[Row[*tuple[Any, ...]]],
    returned: set[bytes],
) -> tuple[Meaning, Row[*tuple[Any, ...]] | None]:
    """What a message means whose framework's id these rows have, and the row that it is about."""
    arrival = Republished(_returned_digest(each), each.redelivered, each.last_failed_at)
    same_id = known_rows.of_same_framework_id(connection, each, rows)
    meaning, row_id = meaning_of_republished(arrival, otherwise, same_id, returned)
    if row_id is not None:
        returned.add(arrival.digest)
    return meaning, next((row for row in rows if row.id == row_id), None)


def _returned_digest(each: Examined) -> bytes:
    return digest_of(each.digest, each.last_failed_at.isoformat().encode())


def _candidates(
    connection: Connection, each: Examined, row: Row[*tuple[Any, ...]] | None, duplicates: PossibleDuplicates
) -> dict[int, bool]:
    """The rows that it may be already, and whether they are flagged."""
    if not each.redelivered:
        return {}
    if not each.id:
        return duplicates[known_rows.content_key(each)]
    return known_rows.children_like(connection, each) if row is not None else {}


def _columns(each: Examined) -> dict[str, Any]:
    origin = each.origin
    event = origin.event if origin is not None else None
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
        "framework_id": each.framework_id,
        "origin_queue": origin.queue if origin is not None else None,
        "origin_exchange": origin.exchange if origin is not None else None,
        "origin_key": origin.key if origin is not None else None,
        "event": event,
        "retry_count": each.retries,
        "first_failed_at": each.first_failed_at,
        "last_failed_at": each.last_failed_at,
        "priority": each.priority,
        "tags": tags,
        "source": each.app_id,
        **_failure(each),
    }


def _way_back(each: Examined, row: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    """The queue where the row's next retry will be looked for.

    It stays as it was if the message has failed where only a plan had sent it, or was taken out of its origin itself.
    """
    queue = each.origin.queue if each.origin is not None else None
    is_back = queue is not None and key(queue) == row.origin_queue and queue != each.source_queue
    return {"source_queue": each.source_queue} if is_back else {}


def _failure(each: Examined) -> dict[str, Any]:
    return {
        "reason": each.reason,
        "error_type": each.failure.type,
        "error_message": each.failure.message,
        "error_stack": each.failure.stack,
        "fingerprint": each.fingerprint,
    }
