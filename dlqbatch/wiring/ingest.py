"""An ingest, put together."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dlqbatch.broker import declare
from dlqbatch.broker.connection import connect
from dlqbatch.broker.management import expansion
from dlqbatch.broker.origins import Origins
from dlqbatch.broker.session import Session
from dlqbatch.errors import SettingsError
from dlqbatch.runs.ingest import Ingest
from dlqbatch.wiring.access import access_to, management_api
from dlqbatch.wiring.drain import LOOKING_COSTS
from dlqbatch.wiring.ladders import dead_letter_queues, trust_of
from dlqbatch.wiring.lifecycle import breaker_limits, retry_options
from dlqbatch.wiring.occasion import Occasion, bounds_of
from dlqbatch.wiring.stores import clock_of, engine_for, system_watched

if TYPE_CHECKING:
    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.transfer import Bounds
    from dlqbatch.deadstore.engine import Kept
    from dlqbatch.deadstore.ingest import Ingestion
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings


def ingest(settings: Settings, occasion: Occasion) -> Report:
    if settings.database_url_is_default:
        raise SettingsError(
            "ingest takes messages out of RabbitMQ into the database, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was taken"
        )
    from dlqbatch.deadstore.engine import keeping  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    bounds = bounds_of(settings, occasion)
    # A connection for each transaction would cost PostgreSQL a good part of all that is done in it.
    with keeping(engine_for(settings)) as kept:
        store = _ingestion(settings, kept)
        kept.beside = connection = connect(access_to(settings, "dlqbatch ingest", bounds))
        try:
            return _job(settings, occasion, connection, store, bounds).run()
        finally:
            connection.close()


def _job(settings: Settings, occasion: Occasion, connection: Connection, store: Ingestion, bounds: Bounds) -> Ingest:
    names: tuple[str, ...] = settings.ingest_queues or dead_letter_queues(settings)
    found = expansion(names, management_api(settings))
    queues = found.queues
    quorum = declare.quorum_sources(connection, queues, otherwise=settings.queue_type == "quorum")
    notes: tuple[str, ...] = LOOKING_COSTS if occasion.dry_run and quorum else ()
    notes += tuple(f"the wildcard '{name}' matches no queue" for name in found.unmatched) + found.left_out
    return Ingest(
        broker=Session(connection, Origins(connection, touch=False), bounds, quorum, notes),
        store=store,
        queues=queues,
        trust=trust_of(settings, connection),
        max_messages=settings.max_messages,
        clock=clock_of(store.engine),
        dry_run=occasion.dry_run,
    )


def _ingestion(settings: Settings, engine: Kept) -> Ingestion:
    from dlqbatch.deadstore.ingest import Ingestion  # noqa: PLC0415  (the same)

    return Ingestion(
        engine,
        retry_options(settings),
        system_watched(),
        settings.max_attempts,
        breaker_limits(settings),
        random.random,
    )
