"""Dead letters from a stream: nothing can be taken out of it, so what was read is kept in the database.

The offset is written in the transaction that stores the messages up to it. A run that is cut at any instant leaves
both or neither. Of two runs at once only one finds the offset where it expects it; the other stores only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from sqlalchemy import Connection as DatabaseConnection
from sqlalchemy import select, update

from dlqbatch.amqp.delivery import Delivery, Gather, Hold, Instruction, open_envelope
from dlqbatch.amqp.headers import NONE
from dlqbatch.amqp.identity import digest_of
from dlqbatch.amqp.table import to_bytes
from dlqbatch.amqp.x_death import deaths
from dlqbatch.broker.session import Session
from dlqbatch.broker.streams import FIRST, End, StreamFetch, look, offset_of, without_offset
from dlqbatch.broker.transfer import Tally, Transfer
from dlqbatch.errors import BrokerLost, DlqbatchError
from dlqbatch.ingest.examine import Examined
from dlqbatch.ingest.rows import DUPLICATE, RECORDED, Ingestion
from dlqbatch.store.bulk import insert_into
from dlqbatch.store.engine import reading
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.stream_tables import STREAM_OFFSETS

STORED_BEFORE: Final = "stored-by-another-run"
_O: Final = STREAM_OFFSETS.c


class Position(NamedTuple):
    """How far a stream was read."""

    offset: int
    """The offset of the last message that is stored."""
    digest: bytes
    life: int


Also = Callable[[DatabaseConnection, Sequence[Examined]], None]


class OffsetMoved(DlqbatchError):
    """Another run has stored what this one was about to store."""


class StreamReplaced(DlqbatchError):
    def __init__(self, queue: str) -> None:
        super().__init__(
            f"another run has found that '{queue}' was deleted and made anew, and reads it from its beginning. What "
            "this run read since then was not stored; the next run goes on"
        )


class Arrival(NamedTuple):
    message: Examined
    offset: int
    digest: bytes


def digest_in_stream(delivery: Delivery) -> bytes:
    """What tells the message at an offset from that of another stream; no release of the broker shows it otherwise."""
    headers = open_envelope("", "", redelivered=False, body_size=0, properties=delivery.properties).headers or NONE
    died = next((death.time for death in deaths(headers) if death.time is not None), None)
    place = to_bytes(delivery.exchange), to_bytes(delivery.routing_key)
    return digest_of(delivery.digest().encode(), *place, str(died).encode())


def position_of(connection: DatabaseConnection, queue: str) -> Position | None:
    found = connection.execute(
        select(_O.last_offset, _O.digest, _O.life).where(_O.scope_id == scope_of(connection), _O.queue == queue)
    ).one_or_none()
    return None if found is None else Position(found.last_offset, bytes(found.digest), found.life)


def advance(
    connection: DatabaseConnection, queue: str, before: Position | None, after: Position, now: datetime
) -> None:
    """Note how far it is read; OffsetMoved, which undoes the transaction, if it is no longer read up to `before`."""
    values = {"last_offset": after.offset, "digest": after.digest, "life": after.life, "updated_at": now}
    key = {"scope_id": scope_of(connection), "queue": queue}
    if before is None:
        first = insert_into(connection, STREAM_OFFSETS).values(**key, **values)
        moved = connection.execute(first.on_conflict_do_nothing().returning(_O.last_offset))
    else:
        here = (_O.scope_id == key["scope_id"], _O.queue == queue)
        expected = (_O.last_offset == before.offset, _O.life == before.life)
        further = update(STREAM_OFFSETS).where(*here, *expected).values(values)
        moved = connection.execute(further.returning(_O.last_offset))
    if moved.one_or_none() is None:
        raise OffsetMoved(f"'{queue}' is read further by another run")


@dataclass(slots=True)
class Stream:
    """One stream in one run: how far it was read, and what is there now."""

    queue: str
    position: Position | None
    end: End
    missing: int = 0
    """How many messages at most retention has deleted before they were read."""
    is_replaced: bool = False
    """Another stream has the name now; it is read from its beginning."""

    @property
    def lag(self) -> int:
        """How many messages at most are there and not read."""
        if self.end.last is None or self.end.first is None:
            return 0
        before = self.end.first - 1
        if self.position is not None and not self.is_replaced:
            before = max(before, self.position.offset)
        return self.end.last - before

    def compare(self, delivery: Delivery, offset: int) -> None:
        """The oldest message from the position on is the last that was stored, if all is as it was."""
        if self.position is None:
            return
        if offset > self.position.offset:
            self.missing = offset - self.position.offset - 1
        else:
            self.is_replaced = digest_in_stream(delivery) != self.position.digest

    def warnings(self) -> Iterable[str]:
        if self.missing:
            yield (
                f"'{self.queue}': its retention has deleted up to {self.missing:,} message(s) that no run had read: "
                "they are lost. Let the stream keep more (max-age, max-length-bytes), or run ingest more often"
            )
        if self.is_replaced:
            yield f"'{self.queue}' was deleted and made anew: it is read from its beginning"

    def as_dict(self) -> dict[str, object]:
        read = None if self.position is None else self.position.offset
        return {"read_to": read, "ends_at": self.end.last, "missing": self.missing, "replaced": self.is_replaced}


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a run."""

    queues: Sequence[str] = ()

    def survey(self, session: Session, store: Ingestion) -> tuple[dict[str, Stream], dict[str, str]]:
        """The streams, and why others cannot be read: none of them keeps the rest from being read."""
        found: dict[str, Stream] = {}
        refused: dict[str, str] = {}
        for queue in self.queues:
            try:
                found[queue] = _survey(session, store, queue)
            except BrokerLost as error:
                if session.connection.is_closing:
                    raise
                refused[queue] = error.why
        return found, refused

    def read(
        self,
        stream: Stream,
        limit: int,
        session: Session,
        store: Ingestion,
        examined: Callable[[Delivery], Examined] | None,
        clock: Callable[[], datetime],
        also: Also,
    ) -> Tally:
        """At most so many messages, the last is what stands at the end now; without `examined` nothing is stored."""
        life = 0 if stream.position is None else stream.position.life + stream.is_replaced
        stored = _Stored(stream.queue, stream.position, life, store, clock, also)

        def instruct(delivery: Delivery) -> Instruction:
            if examined is None:
                return Hold(RECORDED)
            offset, digest = offset_of(delivery), digest_in_stream(delivery)
            delivery.properties = without_offset(delivery.properties)
            return Gather(Arrival(examined(delivery), offset, digest))

        is_new = stream.position is None or stream.is_replaced
        start = FIRST if is_new or stream.position is None else stream.position.offset + 1
        transfer = Transfer(session.connection, session.origins, instruct, session.bounds, stored.store_batch)
        fetch = StreamFetch(
            session.connection,
            stream.queue,
            limit,
            transfer.deliver,
            start,
            ends_at=stream.end.last,
            prefetch=stream.end.prefetch,
        )
        transfer.fetches.append(fetch)
        tally = transfer.run()
        if fetch.is_deleted:
            tally.refused[stream.queue] = "it was deleted meanwhile"
        return tally


def _survey(session: Session, store: Ingestion, queue: str) -> Stream:
    with reading(store.engine) as connection:
        position = position_of(connection, queue)
    seconds = session.connection.answer_within
    stream = Stream(queue, position, End(session.connection, queue, seconds))
    if position is not None and stream.end.last is not None:
        if stream.end.last < position.offset:
            stream.is_replaced = True
        else:
            look(session.connection, queue, position.offset, 1, seconds, stream.compare)
    return stream


@dataclass(slots=True)
class _Stored:
    """What this run has stored of a stream."""

    queue: str
    known: Position | None
    """How far the stream is read by the database."""
    life: int
    store: Ingestion
    clock: Callable[[], datetime]
    also: Also = lambda *_: None
    """What else is written in the transaction."""

    def store_batch(self, batch: Sequence[Arrival]) -> Sequence[tuple[str, str | None]]:
        while True:
            known = self.known
            is_read = -1 if known is None or known.life != self.life else known.offset
            fresh = [each for each in batch if each.offset > is_read]
            before = [(DUPLICATE, STORED_BEFORE)] * (len(batch) - len(fresh))
            if not fresh:
                return before
            after, now = Position(fresh[-1].offset, fresh[-1].digest, self.life), self.clock()
            messages = [each.message for each in fresh]
            try:
                results = self.store.store(messages, now, partial(self._advance, known, after, now, messages))
            except OffsetMoved:
                with reading(self.store.engine) as connection:
                    self.known = position_of(connection, self.queue)
                if self.known is None or self.known.life > self.life:
                    raise StreamReplaced(self.queue) from None
                continue
            self.known = after
            return [*before, *results]

    def _advance(
        self,
        before: Position | None,
        after: Position,
        now: datetime,
        messages: Sequence[Examined],
        connection: DatabaseConnection,
        _: object,
    ) -> None:
        advance(connection, self.queue, before, after, now)
        self.also(connection, messages)
