"""The ingest: dead-letter queues into the dead store, committed before they are acknowledged."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dlqbatch.amqp.delivery import Delivery, Gather, Hold, Instruction
from dlqbatch.amqp.origin import Trust
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.management import expansion
from dlqbatch.broker.queue_types import quorum_queues, types_by_api
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session, depths, share
from dlqbatch.broker.transfer import Bounds
from dlqbatch.drain.job import LOOKING_COSTS
from dlqbatch.errors import DlqbatchError, SettingsError, TopologyMissing, so_far
from dlqbatch.ingest.examine import Examined, examine
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.jobs import DECISIONS, LEFT, Report, RunOptions, bounds_of, count, cut_off, depths_of, ending, unread
from dlqbatch.lifecycle.job import breaker_limits, retry_options, system_watched
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock, check_schema, engine_for
from dlqbatch.store.engine import keeping
from dlqbatch.topology.declare import dead_letter_queues, trust_of

_COUNTS: Final = (*DECISIONS, "duplicate")


@dataclass(frozen=True, slots=True)
class Ingest:
    broker: Session
    store: Ingestion
    queues: tuple[str, ...]
    trust: Trust
    max_messages: int
    clock: Callable[[], datetime]
    """The dead store's."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        depths, unknown, missing = self._depths()
        turn = os.urandom(1)[0]  # as the drain's
        takes = {queue: limit for queue, limit in share(self.max_messages, depths, turn).items() if limit}
        spare = self.max_messages - sum(takes.values())
        if not self.dry_run:
            # A store that is down is found out before anything is taken: being put back is a delivery too.
            self.store.store((), self.clock())
        tally = self.broker.transfer(takes, spare, self._instruct, self._store_batch)
        if tally.failure is not None and all(decision == LEFT for decision, _ in tally.results):
            raise tally.failure
        # Where there was nothing to take no time has passed.
        left = depths if not takes else self.broker.depths_left(depths) if tally.lost is None else {}
        counts, reasons = count(tally.results, tally.got, _COUNTS)
        unfinished = {**unknown, **tally.refused}
        missed = {**missing, **unfinished}
        warnings = [*self.broker.warnings(), *unread(missed)]
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
            emptied=emptied,
            queues=depths_of(depths, left, unknown=unknown),
            was_cut_off=cut_off(tally),
        )

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
        return Hold("recorded") if self.dry_run else Gather(examine(delivery, self.trust, self.clock()))

    def _store_batch(self, batch: Sequence[Examined]) -> Sequence[tuple[str, str | None]]:
        return self.store.store(batch, self.clock())


def ingest(settings: Settings, run_options: RunOptions) -> Report:
    if settings.database_url_is_default:
        raise SettingsError(
            "ingest takes messages out of RabbitMQ into the database, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was taken"
        )
    bounds = bounds_of(settings, run_options)
    # A connection for each transaction would cost PostgreSQL a good part of all that is done in it.
    with keeping(engine_for(settings)) as engine:
        check_schema(engine)
        store = Ingestion(
            engine,
            retry_options(settings),
            system_watched(),
            settings.max_attempts,
            settings.max_trips,
            breaker_limits(settings),
            random.random,
        )
        connection = connect(access_to(settings, "dlqbatch ingest", bounds))
        try:
            return _job(settings, run_options, connection, store, bounds).run()
        finally:
            connection.close()


def _job(
    settings: Settings, run_options: RunOptions, connection: Connection, store: Ingestion, bounds: Bounds
) -> Ingest:
    names: tuple[str, ...] = settings.ingest_queues or dead_letter_queues(settings)
    found = expansion(names, management_api(settings))
    queues = found.queues
    quorum = _quorum(settings, connection, queues, found.types)
    notes: tuple[str, ...] = LOOKING_COSTS if run_options.dry_run and quorum else ()
    notes += tuple(f"the wildcard '{name}' matches no queue" for name in found.unmatched) + found.left_out
    return Ingest(
        broker=Session(connection, Origins(connection, touch=False), bounds, quorum, notes, asks_empty_queues=True),
        store=store,
        queues=queues,
        trust=trust_of(settings, connection),
        max_messages=settings.max_messages,
        clock=StoreClock(store.engine),
        dry_run=run_options.dry_run,
    )


def _quorum(
    settings: Settings, connection: Connection, queues: Sequence[str], types: Mapping[str, str]
) -> frozenset[str]:
    """Which are quorum queues; SettingsError if one is a stream.

    The management API is asked; where it is silent, a refused consumer tells, which is a line in the broker's log. Of
    our own queues, which are no streams, only for those that hold messages.
    """
    of_quorum = settings.queue_type == "quorum"
    own = [] if settings.ingest_queues else list(queues)
    waiting = depths(connection, own, ())
    asked = [queue for queue in queues if waiting.get(queue, 1)]
    unknown = [queue for queue in asked if queue not in types]
    known = {**types, **types_by_api(management_api(settings, quickly=True), unknown)}
    found = quorum_queues(connection, asked, otherwise=of_quorum, known=known, refuse_streams=True)
    return found | {queue for queue in own if of_quorum and queue not in asked}
