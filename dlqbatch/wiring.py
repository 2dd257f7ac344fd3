"""From settings to a finished run: the one place that knows every adapter."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.broker import declare
from dlqbatch.broker.connection import Access, Connection, connect, parameters
from dlqbatch.broker.management import expand
from dlqbatch.broker.origins import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Bounds
from dlqbatch.cloud.events import Ignored, Request, understand
from dlqbatch.deadstore.run_log import RunRecord, record
from dlqbatch.errors import PolicyMissing, SettingsError, TopologyMismatch, TopologyMissing
from dlqbatch.policy.decide import Rules
from dlqbatch.policy.events import EventRow, Policy
from dlqbatch.policy.origin import Trust
from dlqbatch.runs.drain import Drain
from dlqbatch.runs.ingest import Ingest
from dlqbatch.topology.ladder import DELIVERY_LIMIT, Ladder, demonstration

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from pika import ConnectionParameters
    from sqlalchemy import Engine

    from dlqbatch.deadstore.event_config import EventConfig
    from dlqbatch.deadstore.ingest import Ingestion
    from dlqbatch.deadstore.review import Review
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings
    from dlqbatch.topology.model import Topology

log = logs.get(__name__)

__all__ = ["JOBS", "RUN_OPTIONS", "Ignored", "Occasion", "Request", "run", "understand"]

_FIRST_WITH_DELIVERY_LIMIT: Final = (4, 0)
"""From here on the broker limits deliveries of quorum queues by itself, and names the newest death itself."""

_declared: dict[tuple[str, Ladder], frozenset[str]] = {}
"""What this process has declared, with the queues found to be quorum queues; a warm start declares nothing again."""

_LOOKING_COSTS: Final = ("on a quorum queue this look cost each message one delivery of its delivery limit",)
_LOGGED: Final = frozenset({"job", "outcome", "stopped_by", "dry_run", "counts", "reasons", "elapsed_seconds"})


@dataclass(frozen=True, slots=True)
class Occasion:
    """What is asked of this one run, apart from the settings."""

    dry_run: bool = False
    seconds_left: float | None = None
    """Until the platform ends the process, if it does."""
    stopped: Callable[[], bool] = lambda: False
    """Whether a signal has asked for the end."""
    progress: Callable[[int, int], None] = lambda _taken, _of: None
    """Told now and then how many messages were taken, and of how many."""


def run(job: str, settings: Settings, occasion: Occasion) -> Report:
    """One run of a job; its report is logged and returned."""
    found = JOBS.get(job)
    if found is None:
        raise SettingsError(f"there is no job '{job}'; the jobs are: {', '.join(JOBS)}")
    for warning in settings.warnings:
        log.warning("settings", problem=warning)
    began = datetime.now(UTC)
    report = found(settings, occasion)
    if not occasion.dry_run:
        report = replace(report, warnings=(*report.warnings, *_keep(settings, report, began)))
    for warning in report.warnings:
        log.warning(warning, job=job)
    log.info("run", failure=None, **{key: value for key, value in report.as_dict().items() if key in _LOGGED})
    return report


def _keep(settings: Settings, report: Report, began: datetime) -> tuple[str, ...]:
    """Put the run into the log of runs, if the database keeps one; a warning if it should have and could not."""
    run = RunRecord(
        report.job, began, datetime.now(UTC), report.outcome, report.stopped_by, report.emptied, report.as_dict()
    )
    kept = record(settings.database_url.get_secret_value(), run)
    return () if kept.warning is None else (kept.warning,)


def drain(settings: Settings, occasion: Occasion) -> Report:
    if settings.database_url_is_default and "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
        raise SettingsError(
            "inside AWS Lambda the database has to be named: set DLQBATCH_DATABASE_URL (a SQLite file would be empty, "
            "and gone after the run)"
        )
    bounds = _bounds(settings, occasion)
    ladder = ladder_of(settings)
    connection = connect(access_to(settings, "dlqbatch drain", bounds.stop_at - time.monotonic()))
    try:
        return _drain(settings, occasion, connection, ladder, bounds)
    finally:
        connection.close()


def _drain(settings: Settings, occasion: Occasion, connection: Connection, ladder: Ladder, bounds: Bounds) -> Report:
    known = (settings.broker_url.get_secret_value(), ladder)
    was_warm = known in _declared
    quorum = _declared.get(known)
    if quorum is None:
        if occasion.dry_run:
            _matched(connection, ladder, declare.compare)
        else:
            declare_ladder(connection, ladder)
        sources = [source.queue for source in ladder.sources]
        quorum = declare.quorum_queues(connection, sources, otherwise=ladder.queue_type == "quorum")
        if not occasion.dry_run:
            _declared[known] = quorum
    notes: tuple[str, ...] = _LOOKING_COSTS if occasion.dry_run and quorum else ()
    if not was_warm:
        notes += _left_behind(connection, ladder)
    origins = Origins(connection, touch=not occasion.dry_run)
    trust = _trust(settings, connection, ladder)
    job = Drain(
        broker=Session(connection, origins, bounds, quorum, notes),
        origins=origins,
        ladder=ladder,
        rules=Rules(ladder.tiers, trust, settings.max_trips, settings.return_via == "queue"),
        load_policy=lambda: load_policy(settings),
        max_messages=settings.max_messages,
        dry_run=occasion.dry_run,
    )
    try:
        report = job.run()
    except TopologyMissing:
        if not was_warm:
            raise
        # Somebody deleted a part of it since this process declared it.
        del _declared[known]
        return _drain(settings, occasion, connection, ladder, bounds)
    if "unroutable" in report.reasons:
        # A queue or a binding of ours may have been deleted: the next run declares everything again.
        _declared.pop(known, None)
    return report


def _left_behind(connection: Connection, ladder: Ladder) -> tuple[str, ...]:
    """A ladder that once had more tiers: nobody takes what is still in them."""
    return tuple(
        f"'{queue}' holds {depth} message(s) and is no part of the ladder now: set tier_ttls back until it is empty"
        for queue, depth in declare.existing(connection, ladder.next_tier).items()
        if depth
    )


def ingest(settings: Settings, occasion: Occasion) -> Report:
    if settings.database_url_is_default:
        raise SettingsError(
            "ingest takes messages out of RabbitMQ into the database, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was taken"
        )
    bounds = _bounds(settings, occasion)
    store = _ingestion(settings)
    connection = connect(access_to(settings, "dlqbatch ingest", bounds.stop_at - time.monotonic()))
    try:
        names = settings.ingest_queues or (settings.dlq_queue,)
        management_url = settings.management_url.get_secret_value() if settings.management_url else None
        queues = expand(names, settings.broker_urls[0], management_url)
        quorum = declare.quorum_queues(connection, queues, otherwise=settings.queue_type == "quorum")
        notes = _LOOKING_COSTS if occasion.dry_run and quorum else ()
        job = Ingest(
            broker=Session(connection, Origins(connection, touch=False), bounds, quorum, notes),
            store=store,
            queues=queues,
            trust=_trust(settings, connection, ladder_of(settings)),
            max_messages=settings.max_messages,
            dry_run=occasion.dry_run,
        )
        return job.run()
    finally:
        connection.close()


JOBS: Final[dict[str, Callable[[Settings, Occasion], Report]]] = {"drain": drain, "ingest": ingest}

RUN_OPTIONS: Final = ("max_messages", "max_bytes", "max_seconds", "allow_empty_policy")
"""Settings that an event may change for one run; `dry_run` is understood beside them."""


def _trust(settings: Settings, connection: Connection, ladder: Ladder) -> Trust:
    return Trust(
        own_queues=ladder.queue_names,
        own_exchanges=ladder.exchange_names,
        origins_allowed=settings.origins_allowed,
        last_death=_limits_deliveries(connection),
    )


def _bounds(settings: Settings, occasion: Occasion) -> Bounds:
    seconds = settings.max_seconds
    if occasion.seconds_left is not None:
        seconds = max(min(seconds, occasion.seconds_left - settings.lambda_margin_seconds), 0.0)
    return Bounds(
        time.monotonic() + seconds, settings.settle_seconds, settings.max_bytes, occasion.stopped, occasion.progress
    )


def ladder_of(settings: Settings) -> Ladder:
    return Ladder(
        tier_ttls=settings.tier_ttls,
        queue_type=settings.queue_type,
        retry_exchange=settings.retry_exchange,
        retry_routing_key=settings.retry_routing_key,
        retry_queue=settings.retry_queue,
        delay_exchange=settings.delay_exchange,
        delay_queue=settings.delay_queue,
        dlq_exchange=settings.dlq_exchange,
        dlq_routing_key=settings.dlq_routing_key,
        dlq_queue=settings.dlq_queue,
    )


def access_to(settings: Settings, name: str, seconds: float | None = None) -> Access:
    timeout = settings.connect_timeout_seconds
    return Access(
        urls=settings.broker_urls,
        connect_timeout=timeout if seconds is None else max(min(timeout, seconds), 0.1),
        heartbeat=settings.heartbeat_seconds,
        blocked_timeout=settings.blocked_timeout_seconds,
        tls_ca_file=_path(settings.tls_ca_file),
        tls_cert_file=_path(settings.tls_cert_file),
        tls_key_file=_path(settings.tls_key_file),
        tls_verify=settings.tls_verify,
        name=name,
    )


def broker_parameters(settings: Settings, name: str) -> list[ConnectionParameters]:
    """For a client of pika's own, such as the demo's consumers."""
    access = access_to(settings, name)
    return [parameters(url, access, access.connect_timeout) for url in access.urls]


def _path(value: object) -> str | None:
    return None if value is None else str(value)


def declare_ladder(connection: Connection, ladder: Ladder, *, with_demonstration: bool = False) -> None:
    """Idempotent."""
    _matched(connection, ladder, declare.declare)
    if with_demonstration:
        declare.declare(connection, demonstration(ladder))


def _matched(connection: Connection, ladder: Ladder, act: Callable[[Connection, Topology], None]) -> None:
    """Declare or compare; on a broker that limits deliveries by itself, our queues have to say that they do not."""
    try:
        act(connection, ladder.topology(unlimited_deliveries=_limits_deliveries(connection)))
    except TopologyMismatch as error:
        if error.argument != DELIVERY_LIMIT or error.found != "none":
            raise
        # Declared by an older broker, which knew no such argument: a policy can still set it.
        log.warning(
            "a queue from before RabbitMQ 4.0 drops messages after 20 deliveries",
            queue=error.name,
            do="rabbitmqctl set_policy with delivery-limit -1 on it",
        )
        act(connection, ladder.topology())


def _limits_deliveries(connection: Connection) -> bool:
    return connection.version >= _FIRST_WITH_DELIVERY_LIMIT


def apply_topology(settings: Settings, *, with_demonstration: bool = False) -> Ladder:
    connection = connect(access_to(settings, "dlqbatch topology"))
    try:
        ladder = ladder_of(settings)
        declare_ladder(connection, ladder, with_demonstration=with_demonstration)
        return ladder
    finally:
        connection.close()


def load_policy(settings: Settings) -> Policy:
    """The table and the properties as one policy; PolicyMissing rather than a policy that dead-letters everything."""
    rows: list[EventRow] = []
    try:
        rows = event_config(settings).read()
    except PolicyMissing:
        if not settings.allow_empty_policy:
            raise
    events = {
        name: settings.default_max_retries if retries is None else retries for name, retries in settings.events.items()
    }
    policy = Policy.build(rows, events, settings.default_max_retries)
    if not policy and not settings.allow_empty_policy:
        raise PolicyMissing(
            "not a single event is configured, in the table dlq_event_config or in application.properties, so every "
            "message would go to the dead letters. Nothing was moved. Add an event with `dlqbatch events set`, or "
            "pass --allow-empty-policy if that is what you want."
        )
    return policy


def event_config(settings: Settings) -> EventConfig:
    from dlqbatch.deadstore.event_config import EventConfig  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    return EventConfig(_engine(settings))


def _engine(settings: Settings) -> Engine:
    from dlqbatch.deadstore.engine import create_engine_for  # noqa: PLC0415  (the same)

    return create_engine_for(settings.database_url.get_secret_value(), connect_timeout=settings.connect_timeout_seconds)


def _ingestion(settings: Settings) -> Ingestion:
    from dlqbatch.deadstore.ingest import Ingestion  # noqa: PLC0415  (the same)

    return Ingestion(_engine(settings), system_state=system_state())


def system_state() -> dict[str, float]:
    """How busy this machine is, as fractions."""
    import psutil  # noqa: PLC0415  (only the jobs of the dead store ask)

    return {"cpu": psutil.cpu_percent(interval=0.1) / 100, "memory": psutil.virtual_memory().percent / 100}


def dead_store(settings: Settings) -> Review:
    """What people can do to dead messages."""
    from dlqbatch.deadstore.review import Review  # noqa: PLC0415  (the same)

    return Review(_engine(settings))


def migrations() -> ModuleType:
    """What changes the schema; it loads Alembic, which nothing else needs."""
    from dlqbatch.deadstore import migrate  # noqa: PLC0415

    return migrate
