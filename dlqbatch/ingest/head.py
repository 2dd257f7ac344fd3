"""Take the message at the head of a queue into the dead store, on hold: a poison, which kills whoever consumes it.

A poison comes back to the head of its queue whenever a consumer dies of it, and nothing behind it is handled. As in
every ingest, its row is committed before it is acknowledged: a run that is cut in between leaves it in the queue, and
the next one finds that it is the same.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy import Connection as DatabaseConnection
from sqlalchemy import select, update

from dlqbatch.amqp.delivery import Delivery, Gather, open_envelope
from dlqbatch.amqp.fields import Fields
from dlqbatch.amqp.identity import digest_of
from dlqbatch.amqp.origin import Trust, at_its_consumer
from dlqbatch.amqp.table import to_bytes
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.queue_types import quorum_queues, types_by_api, why_looking_costs
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Tally
from dlqbatch.broker.versions import LIMITS_DELIVERIES
from dlqbatch.errors import BrokerLost, DlqbatchError, SettingsError, so_far
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.examine import Examined, examine
from dlqbatch.ingest.job import check_named, ingestion
from dlqbatch.ingest.rows import DUPLICATE, Ingestion
from dlqbatch.jobs import RunOptions, bounds_of, scope_of, unread
from dlqbatch.settings import Settings
from dlqbatch.store import action_log, holds, journal
from dlqbatch.store.access import StoreClock, check_schema, engine_for, store_of
from dlqbatch.store.action_log import ActionRow, Request, check_person, last_transitions
from dlqbatch.store.engine import keeping, reading
from dlqbatch.store.filters import action_name
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES
from dlqbatch.store.text import key
from dlqbatch.topology.declare import trust_of

TAKEN_FROM_HEAD: Final = "taken-from-head"
_ERROR_TYPE: Final = "TakenFromHead"
_WAITS_FOR: Final = 10.0
"""Seconds to wait for a moment without a consumer: what has died is started again by its supervisor."""
_LOOKS_EVERY: Final = 0.02
_M: Final = MESSAGES.c


class HeadNotTaken(DlqbatchError):
    """The message at the head of the queue, if there is one, stays there."""

    def __init__(self, queue: str, why: str) -> None:
        self.queue, self.why = queue, why
        super().__init__(f"nothing was taken out of '{queue}': {why}")


class QueueMissing(HeadNotTaken):
    """It is a queue of the applications, which `topology apply` does not make."""

    exit_code = 2

    def __init__(self, queue: str, virtual_host: str) -> None:
        super().__init__(
            queue,
            f"the virtual host '{virtual_host}' has no such queue. `rabbitmqctl list_queues -p "
            f"{shlex.quote(virtual_host)}` shows the names; dlqbatch.broker-url ends with the virtual host",
        )


class QueueHasConsumers(HeadNotTaken):
    def __init__(self, queue: str, consumers: int) -> None:
        super().__init__(
            queue,
            f"it has {consumers} consumer(s), and one of them may hold the message that was first. "
            "Stop them, then run the same command again",
        )


class _PutBack(DlqbatchError):
    """A dry run has seen enough."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of the message; of a dry run what would."""

    id: int | None
    """Its row. On a dry run None, unless a replay has sent it."""
    attempt: int | None
    """The attempt of this row that it is."""
    is_known: bool
    """The row was there, and this was noted: a run that was cut had stored it, or it is a copy."""
    status: Status | None
    group: str
    """The group of its own, which is on hold."""
    action: str | None
    """What lifts the hold: `dlqbatch undo A-17`."""
    message: Examined
    warning: str = ""

    def as_dict(self) -> dict[str, object]:
        shown = {name: value for name, value in asdict(self).items() if name != "message"}
        return {"queue": self.message.source_queue, "dry_run": self.action is None, **shown}


def take_head(
    settings: Settings,
    run_options: RunOptions,
    queue: str,
    *,
    actor: str,
    reason: str,
    note: str | None = None,
    takes_any: bool = False,
    verified: bool = False,
) -> Taken:
    """Take one message; without `takes_any` only one that a retry of the dead store has sent there."""
    check_person(actor, reason)
    check_named(settings)
    bounds = bounds_of(settings, run_options)
    check_schema(engine_for(settings))
    connection = connect(access_to(settings, "dlqbatch ingest --head", bounds))
    try:
        scope = scope_of(settings, connection)
        with keeping(store_of(settings, scope, dry_run=run_options.dry_run)) as engine:
            trust = trust_of(settings, connection)
            if queue in trust.own_queues:
                raise SettingsError(
                    f"'{queue}' belongs to dlqbatch itself: --head is for a queue that your consumers take from. "
                    "Nothing was taken"
                )
            with connection.scratch_for(queue) as scratch:
                if not scratch.is_there("queue", queue):
                    raise QueueMissing(queue, connection.virtual_host)
            is_quorum = _is_quorum(settings, connection, queue)
            putting_back = is_quorum and _why_putting_back_costs(settings, connection, queue)
            if putting_back and (run_options.dry_run or not takes_any):
                raise HeadNotTaken(
                    queue,
                    f"it is a quorum queue, and a message that is not what you want cannot simply be put back: "
                    f"{putting_back}. --any takes what is at its head, whatever it is",
                )
            session = Session(connection, Origins(connection, touch=False), bounds)
            clock, fields = StoreClock(engine), Fields(settings.fields)
            store, dry_run = ingestion(settings, engine), run_options.dry_run
            head = _Head(queue, session, store, clock, actor, reason, note, takes_any, verified, dry_run, is_quorum)
            return head.take(lambda delivery: Gather(_examined(delivery, trust, clock(), fields, reason)))
    finally:
        connection.close()


def _examined(delivery: Delivery, trust: Trust, now: datetime, fields: Fields, reason: str) -> Examined:
    """The message as one that failed now in this queue; no death of it is written in it yet."""
    queue = delivery.receipt.queue
    envelope = open_envelope(
        delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
    )
    journey, origin = at_its_consumer(queue, envelope, delivery.digest)
    each = examine(delivery, trust, now, fields)
    return replace(
        each,
        id=journey.id,
        parent=journey.parent,
        attempt=journey.attempt,
        origin=origin,
        reason=TAKEN_FROM_HEAD,
        failure=Failure(_ERROR_TYPE, f"taken from the head of '{queue}': {reason}"),
        # A hold is of a group: it gets one of its own.
        fingerprint=digest_of(b"head", to_bytes(journey.id) or each.full_digest).hex()[:16],
        last_failed_at=now,
        needs_person=True,
    )


def _is_quorum(settings: Settings, connection: Connection, queue: str) -> bool:
    known = types_by_api(management_api(settings, quickly=True), [queue])
    otherwise = settings.queue_type == "quorum"
    return bool(quorum_queues(connection, [queue], otherwise=otherwise, known=known, refuse_streams=True))


def _why_putting_back_costs(settings: Settings, connection: Connection, queue: str) -> str | None:
    """What it does to a message of a quorum queue; None if it stays as it was, in its place."""
    if costs := why_looking_costs(connection, queue, management_api(settings)):
        return costs
    return "it would go to the end of the queue" if connection.version < LIMITS_DELIVERIES else None


@dataclass(slots=True)
class _Head:
    queue: str
    session: Session
    store: Ingestion
    clock: StoreClock
    actor: str
    reason: str
    note: str | None
    takes_any: bool
    verified: bool
    """A login says who it is."""
    dry_run: bool
    is_quorum: bool
    """There a get whose message is not settled yet counts as a consumer."""
    taken: Taken | None = None

    def take(self, handle: Callable[[Delivery], Gather]) -> Taken:
        if not self.dry_run:
            self.store.store((), self.clock())  # a store that is down is found out before anything is taken
        until = min(self.session.bounds.stop_at, time.monotonic() + _WAITS_FOR)
        while True:
            tally = Tally(failure=self._has_consumers())
            if tally.failure is None:
                tally = self.session.transfer({self.queue: 1}, 0, handle, self._store)
            is_over = time.monotonic() >= until or self.session.bounds.stopped()
            if is_over or not isinstance(tally.failure, QueueHasConsumers):
                return self._what_came_of(tally)
            self.session.connection.pause(_LOOKS_EVERY)

    def _what_came_of(self, tally: Tally) -> Taken:
        if tally.failure is not None and not isinstance(tally.failure, _PutBack):
            raise tally.failure
        if self.taken is None:
            if tally.lost is not None:
                raise BrokerLost(tally.lost)
            if tally.refused:
                raise HeadNotTaken(self.queue, unread(tally.refused)[0])
            raise HeadNotTaken(
                self.queue, "it is empty" if tally.stopped_by is None else "a signal, or the time, ended it"
            )
        if self.dry_run:
            return self.taken
        if tally.lost is not None:
            why = f"the connection to the broker was lost: {tally.lost}. If the message is still in the queue, "
            return replace(self.taken, warning=f"{why}the same command takes it away, and knows that it is stored")
        try:
            self.store.acknowledged()
        except DlqbatchError as error:
            why = f"that the acknowledgement arrived could not be noted: {so_far(error)}"
            return replace(self.taken, warning=why)
        return self.taken

    def _has_consumers(self, own: int = 0) -> QueueHasConsumers | None:
        with self.session.connection.scratch_for(self.queue) as scratch:
            consumers = int(scratch.look("queue", self.queue).consumer_count) - own
        return QueueHasConsumers(self.queue, consumers) if consumers > 0 else None

    def _store(self, batch: Sequence[Examined]) -> Sequence[tuple[str, str | None]]:
        """Commit it with its hold and the action, or raise, so that it is put back."""
        (each,) = batch
        # One that came since the first look may hold the message that was first then.
        if (failure := self._has_consumers(own=int(self.is_quorum))) is not None:
            raise failure
        if self.dry_run:
            with reading(self.store.engine) as connection:
                row_id = _sent_from(connection, each)
            attempt = each.attempt if row_id is not None else None
            self.taken = Taken(row_id, attempt, False, None, each.fingerprint, None, each)
            raise _PutBack
        taken: list[Taken] = []
        results = self.store.store(
            batch, self.clock(), lambda connection, rows: taken.append(self._hold(connection, each, rows[0]))
        )
        self.taken = replace(taken[-1], is_known=results[0][0] == DUPLICATE)
        return results

    def _hold(self, connection: DatabaseConnection, each: Examined, row_id: int) -> Taken:
        """In the transaction that stores it."""
        sent_from = _sent_from(connection, each)
        if sent_from is None and not self.takes_any:
            raise HeadNotTaken(
                self.queue,
                "no replay and no retry of dlqbatch has sent the message at its head, which was put back in its place. "
                "--dry-run shows it; --any takes it all the same",
            )
        now = self.clock()
        columns = {"fingerprint": each.fingerprint}
        # Its own headers may not say where it came from; what is sent again goes to the queue where it was.
        columns |= {} if sent_from == row_id else {"moved_to": self.queue}
        changed = update(MESSAGES).where(_M.id == row_id).values(columns).returning(_M.status)
        status: Status = connection.execute(changed).scalar_one()
        values = {"held_at": now, "held_by": self.actor, "held_why": self.reason, "reviving": False}
        values |= {} if self.note is None else {"note": self.note}
        details = holds.decide(connection, each.fingerprint, "", values, now)
        filters = {"queue": self.queue}
        request = Request("take-head", self.actor, self.reason, self.verified, filters, details)
        action_id = action_log.begin(connection, request, now, ended=True)
        why = f"{action_name(action_id)}: taken from the head of '{self.queue}', and on hold: {self.reason}"
        journal.note(connection, row_id, now, self.actor, why)
        last = last_transitions(connection, [row_id])[row_id]
        action_log.add_rows(connection, action_id, [ActionRow(row_id, "done", status, status, why, last_after=last)])
        attempt = each.attempt if sent_from == row_id else None
        return Taken(row_id, attempt, False, status, each.fingerprint, action_name(action_id), each)


def _sent_from(connection: DatabaseConnection, each: Examined) -> int | None:
    """The row whose attempt the message is."""
    if each.attempt is None:
        return None
    query = select(_M.id).join(ATTEMPTS, ATTEMPTS.c.message_id == _M.id)
    this = (own(connection), _M.identity == key(each.id), _M.digest == each.digest, ATTEMPTS.c.number == each.attempt)
    found: int | None = connection.scalar(query.where(*this))
    return found
