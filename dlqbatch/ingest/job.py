"""The ingest: dead-letter queues into the dead store, committed before they are acknowledged."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from dlqbatch.amqp.delivery import Delivery, Gather, Hold, Instruction
from dlqbatch.amqp.fields import Fields
from dlqbatch.amqp.origin import Trust
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.management import expansion
from dlqbatch.broker.queue_types import quorum_queues_and_streams, types_by_api
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session, depths, share
from dlqbatch.broker.transfer import Bounds, Tally
from dlqbatch.drain.job import looking_costs
from dlqbatch.errors import DlqbatchError, SettingsError, TopologyMissing, so_far
from dlqbatch.ingest.examine import Examined, examine
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.ingest.same_failure import Newcomers
from dlqbatch.ingest.streams import Stream, Streams
from dlqbatch.jobs import (
    DECISIONS,
    LEFT,
    Report,
    RunOptions,
    bounds_of,
    count,
    cut_off,
    depths_of,
    ending,
    scope_of,
    unread,
)
from dlqbatch.lifecycle.job import breaker_limits, retry_options, system_watched
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock, check_schema, engine_for, store_of
from dlqbatch.store.engine import keeping
from dlqbatch.topology.declare import dead_letter_queues, trust_of

if TYPE_CHECKING:
    from sqlalchemy import Engine

_COUNTS: Final = (*DECISIONS, "duplicate")


@dataclass(frozen=True, slots=True)
class Ingest:
    broker: Session
    store: Ingestion
    queues: tuple[str, ...]
    trust: Trust
    max_messages: int
    fields: Fields
    clock: Callable[[], datetime]
    """The dead store's."""
    dry_run: bool = False
    newcomers: Newcomers = field(default_factory=Newcomers)
    streams: Streams = field(default_factory=Streams)

    def run(self) -> Report:
        started = time.monotonic()
        waiting, unknown, missing = self._depths()
        streams, refused = self.streams.survey(self.broker, self.store)
        unknown = {**unknown, **refused}
        depths = {**waiting, **{queue: stream.lag for queue, stream in streams.items()}}
        turn = os.urandom(1)[0]  # as the drain's
        takes = {queue: limit for queue, limit in share(self.max_messages, depths, turn).items() if limit}
        spare = self.max_messages - sum(takes.values())
        if not self.dry_run:
            # A store that is down is found out before anything is taken: being put back is a delivery too.
            self.store.store((), self.clock())
        of_queues = {queue: limit for queue, limit in takes.items() if queue not in streams}
        tally = self.broker.transfer(of_queues, spare, self._instruct, self._store_batch)
        for queue in takes.keys() - of_queues:
            self._read_stream(streams[queue], takes[queue], tally)
        if tally.failure is not None and all(decision == LEFT for decision, _ in tally.results):
            raise tally.failure
        # Where there was nothing to take no time has passed.
        left = waiting if not of_queues else self.broker.depths_left(waiting) if tally.lost is None else {}
        left = {**left, **{queue: stream.lag - tally.taken.get(queue, 0) for queue, stream in streams.items()}}
        counts, reasons = count(tally.results, tally.got, _COUNTS)
        unfinished = {**unknown, **tally.refused}
        missed = {**missing, **unfinished}
        warnings = [*self.broker.warnings(), *unread(missed)]
        warnings += chain.from_iterable(stream.warnings() for stream in streams.values())
        if tally.lost is None and tally.failure is None and not unfinished and not self.dry_run:
            try:
                # Only now nothing of this run can be delivered a second time.
                self.store.acknowledged()
            except DlqbatchError as error:
                warnings.append(f"that the acknowledgements arrived could not be noted: {so_far(error)}")
        if tally.lost is not None:
            warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            warnings.append(so_far(tally.failure))
        is_complete = not counts["left"] and not missed and tally.lost is None and tally.failure is None
        is_complete = is_complete and not any(stream.missing for stream in streams.values())
        stopped_by, emptied = ending(depths, takes, tally, spare, missed)
        return Report(
            "ingest",
            outcome="ok" if is_complete else "partial",
            stopped_by=stopped_by,
            counts=counts,
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=tuple(warnings),
            # Only what was read shows that a stream is at its end.
            emptied=tuple(queue for queue in emptied if queue not in streams or not streams[queue].end.is_empty),
            queues=depths_of(depths, left, unknown=unknown),
            was_cut_off=cut_off(tally),
            details={"streams": {queue: stream.as_dict() for queue, stream in streams.items()}} if streams else {},
        )

    def _read_stream(self, stream: Stream, limit: int, tally: Tally) -> None:
        """Add to the tally what becomes of it; a stream is read after the queues, whose messages others can take."""
        if tally.lost is not None or tally.failure is not None or tally.stopped_by is not None:
            return
        bounds = self.broker.bounds
        session = replace(self.broker, bounds=replace(bounds, max_bytes=max(bounds.max_bytes - tally.bytes, 1)))
        examined = None if self.dry_run else self._examined
        read = self.streams.read(stream, limit, session, self.store, examined, self.clock, self.newcomers.take_over)
        tally.got += read.got
        tally.bytes += read.bytes
        tally.results.update(read.results)
        tally.taken |= read.taken
        tally.refused |= read.refused
        tally.stopped_by, tally.lost, tally.failure = read.stopped_by, read.lost, read.failure

    def _depths(self) -> tuple[Mapping[str, int], Mapping[str, str], Mapping[str, str]]:
        """The depths as the broker tells them, and the queues that do not exist; TopologyMissing if none does."""
        queues, missing = list(self.queues), dict[str, str]()
        while True:
            try:
                return *self.broker.depths(queues, ()), missing
            except TopologyMissing as error:
                if error.name not in queues or len(queues) == 1:
                    raise
                queues.remove(error.name)
                missing[error.name] = "it is not on the broker; make it, or take it out of the queues to ingest"

    def _instruct(self, delivery: Delivery) -> Instruction:
        return Hold("recorded") if self.dry_run else Gather(self._examined(delivery))

    def _examined(self, delivery: Delivery) -> Examined:
        return examine(delivery, self.trust, self.clock(), self.fields)

    def _store_batch(self, batch: Sequence[Examined]) -> Sequence[tuple[str, str | None]]:
        return self.store.store(batch, self.clock(), lambda connection, _: self.newcomers.take_over(connection, batch))


def check_named(settings: Settings) -> None:
    """A disposable SQLite file must not swallow messages."""
    if settings.database_url_is_default:
        raise SettingsError(
            "ingest takes messages out of RabbitMQ into the database, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was taken"
        )


def ingestion(settings: Settings, engine: Engine) -> Ingestion:
    return Ingestion(
        engine,
        retry_options(settings),
        system_watched(),
        settings.max_attempts,
        settings.max_trips,
        breaker_limits(settings),
        random.random,
    )


def ingest(settings: Settings, run_options: RunOptions) -> Report:
    check_named(settings)
    bounds = bounds_of(settings, run_options)
    # A connection for each transaction would cost PostgreSQL a good part of all that is done in it.
    check_schema(engine_for(settings))
    connection = connect(access_to(settings, "dlqbatch ingest", bounds))
    try:
        scope = scope_of(settings, connection)
        with keeping(store_of(settings, scope, dry_run=run_options.dry_run)) as engine:
            store = ingestion(settings, engine)
            return replace(_job(settings, run_options, connection, store, bounds).run(), scope=scope)
    finally:
        connection.close()


def _job(
    settings: Settings, run_options: RunOptions, connection: Connection, store: Ingestion, bounds: Bounds
) -> Ingest:
    names: tuple[str, ...] = settings.ingest_queues or dead_letter_queues(settings)
    found = expansion(names, management_api(settings))
    queues = found.queues
    quorum, streams = _quorum_queues_and_streams(settings, connection, queues, found.types)
    notes = looking_costs(connection, quorum, dry_run=run_options.dry_run)
    notes += tuple(f"the wildcard '{name}' matches no queue" for name in found.unmatched) + found.left_out
    api = partial(management_api, settings, quickly=True) if settings.management_url else None
    origins = Origins(connection, touch=False)
    return Ingest(
        broker=Session(connection, origins, bounds, quorum, notes, asks_empty_queues=True, api=api),
        store=store,
        queues=tuple(queue for queue in queues if queue not in streams),
        streams=Streams(sorted(streams)),
        trust=trust_of(settings, connection),
        max_messages=settings.max_messages,
        fields=Fields(settings.fields),
        clock=StoreClock(store.engine),
        dry_run=run_options.dry_run,
    )


def _quorum_queues_and_streams(
    settings: Settings, connection: Connection, queues: Sequence[str], types: Mapping[str, str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Which are quorum queues, and which are streams.

    The management API is asked; where it is silent, a refused consumer tells, which is a line in the broker's log. Of
    our own queues, which are no streams, only for those that hold messages.
    """
    of_quorum = settings.queue_type == "quorum"
    own = [] if settings.ingest_queues else list(queues)
    waiting = depths(connection, own, ())
    asked = [queue for queue in queues if waiting.get(queue, 1)]
    unknown = [queue for queue in asked if queue not in types]
    known = {**types, **types_by_api(management_api(settings, quickly=True), unknown)}
    found, streams = quorum_queues_and_streams(connection, asked, otherwise=of_quorum, known=known)
    return found | {queue for queue in own if of_quorum and queue not in asked}, streams
