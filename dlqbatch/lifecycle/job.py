"""Builds a lifecycle run from the settings."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import psutil
from sqlalchemy import Engine

from dlqbatch.amqp.patterns import is_wildcard, pattern
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.readings import Readings
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Bounds
from dlqbatch.errors import SettingsError
from dlqbatch.jobs import Report, RunOptions, bounds_of, scope_of
from dlqbatch.lifecycle import breaker
from dlqbatch.lifecycle.backoff_and_off_peak import Options, zone
from dlqbatch.lifecycle.ended_replays import release_ended_plans
from dlqbatch.lifecycle.outbox import DryRun, Sending
from dlqbatch.lifecycle.outcome import Observation, QueueReader
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.lifecycle.resend import Resend
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.lifecycle.run import Lifecycle
from dlqbatch.lifecycle.strategy import Choice, LoadLimits
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock, engine_for, store_for, store_of
from dlqbatch.store.engine import keeping
from dlqbatch.topology.declare import dead_letter_queues, kinds_of, trust_of
from dlqbatch.topology.kinds import Drained

_LOAD_HOLDS = 10.0
"""Seconds for which a measured load of the machine counts."""
_SHARE_FOR_ABORTED_PLANS = 0.2
"""The part of a run's time that may go to rows that aborted plans still hold."""


def lifecycle(settings: Settings, run_options: RunOptions) -> Report:
    if settings.database_url_is_default:
        raise SettingsError(
            "lifecycle sends the dead messages of the database, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was sent"
        )
    bounds = bounds_of(settings, run_options)
    # The broker first: what is claimed while it is down would wait for its lease to end.
    connection = connect(access_to(settings, "dlqbatch lifecycle", bounds))
    try:
        scope = scope_of(settings, connection)
        engine = store_of(settings, scope, dry_run=run_options.dry_run)
        if not run_options.dry_run:
            _release_aborted_plans(settings, engine, run_options, bounds)
        # A connection for each transaction would cost PostgreSQL more than all that is done in it.
        with keeping(engine):
            return replace(_job(settings, run_options, connection, engine, bounds).run(), scope=scope)
    finally:
        connection.close()


def _job(
    settings: Settings, run_options: RunOptions, connection: Connection, engine: Engine, bounds: Bounds
) -> Lifecycle:
    rules, warnings = Rules(engine_for(settings)).load()
    origins = Origins(connection, touch=not run_options.dry_run)
    session = Session(connection, origins, bounds)
    trust = trust_of(settings, connection)
    resend = Resend(origins, trust, session.login, session.properties_limit, settings.return_via == "queue")
    load_limits = LoadLimits(settings.cpu_limit, settings.memory_limit)
    choice = Choice(rules, retry_options(settings), load_limits, _load(), random.random)
    clock = StoreClock(engine)
    limits = breaker_limits(settings)
    sending = partial(
        Sending,
        engine,
        choice,
        resend,
        clock,
        worker=_worker(),
        lease=settings.lease,
        limits=limits,
        max_messages=settings.max_messages,
        max_attempts=settings.max_attempts,
        stopped=run_options.stopped,
    )
    dry_run = partial(DryRun, engine, choice, resend, clock, limits=limits, max_messages=settings.max_messages)
    return Lifecycle(
        session,
        observation(settings, connection, engine, bounds),
        dry_run if run_options.dry_run else sending,
        clock,
        notes=warnings,
        dry_run=run_options.dry_run,
    )


def _release_aborted_plans(settings: Settings, engine: Engine, run_options: RunOptions, bounds: Bounds) -> None:
    """Release the rows that a killed replay holds though its plan was aborted.

    A large plan takes several runs, since most of the time of a run is for messages that are due.
    """
    began = time.monotonic()
    until = began + max(bounds.stop_at - began, 0.0) * _SHARE_FOR_ABORTED_PLANS
    release_ended_plans(
        engine,
        actor="replay",  # the moves of the actor lifecycle are outcomes, and nothing has been decided about these
        worker=_worker(),
        lease=settings.lease,
        now=StoreClock(engine)(),
        is_over=lambda: run_options.stopped() or time.monotonic() >= until,
    )


def _worker() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def retry_options(settings: Settings) -> Options:
    return Options(
        backoff=settings.retry_delays,
        off_peak_hours=settings.off_peak_hours,
        zone=zone(settings.time_zone),
        recheck=settings.recheck,
        most_asked=_most_asked(settings),
    )


def _most_asked(settings: Settings) -> timedelta:
    if not settings.retry_after:
        return timedelta(0)
    by_settings = (timedelta(milliseconds=delay) for delay in settings.retry_after_delays)
    return max(by_settings, default=max(settings.retry_delays))


def breaker_limits(settings: Settings) -> breaker.Limits:
    return breaker.Limits(
        failure_rate=settings.breaker_failure_rate,
        min_attempts=settings.breaker_min_attempts,
        window=settings.breaker_window,
        cool_down=settings.breaker_cool_down,
        # The outcome of a probe is known after the observation window, and a look wherever it would come back.
        probe_timeout=max(breaker.Limits().probe_timeout, 4 * settings.observation_window),
    )


def rule_store(settings: Settings) -> Rules:
    return Rules(store_for(settings))


def observation(settings: Settings, connection: Connection, engine: Engine, bounds: Bounds) -> Observation:
    """The observation of sent retries, for a lifecycle run and for a replay that waits for outcomes."""
    drained = [kind for kind in kinds_of(settings) if isinstance(kind, Drained)]
    sources = [source.queue for kind in drained for source in kind.sources]
    return Observation(
        SentAttempts(engine),
        QueueReader(
            Readings(management_api(settings), connection, is_watched=_watched(settings, sources)),
            access_to(settings, "dlqbatch lifecycle, looking", bounds),
            bounds,
        ),
        sources=sources,
        dead_letter_queues=sorted({queue for kind in drained for queue in kind.dead_letter_queues}),
        window=settings.observation_window,
        is_over=lambda: bounds.stopped() or time.monotonic() >= bounds.stop_at,
        clock=StoreClock(engine),
        lag=settings.statistics_delay,
    )


def _watched(settings: Settings, sources: list[str]) -> Callable[[str], bool]:
    """Whether a drain or an ingest takes from a queue."""
    ingested = settings.ingest_queues or dead_letter_queues(settings)
    names = {*sources, *(name for name in ingested if not is_wildcard(name))}
    wildcards = [pattern(name) for name in ingested if is_wildcard(name)]
    return lambda queue: queue in names or any(wildcard.fullmatch(queue) for wildcard in wildcards)


def _load() -> Callable[[], tuple[float, float]]:
    """CPU and memory in per cent; measuring takes a tenth of a second, and a run asks for every hundred rows."""
    measured_at, measured = 0.0, (0.0, 0.0)

    def load() -> tuple[float, float]:
        nonlocal measured_at, measured
        if not measured_at or time.monotonic() - measured_at >= _LOAD_HOLDS:
            measured = psutil.cpu_percent(interval=0.1), psutil.virtual_memory().percent
            measured_at = time.monotonic()
        return measured

    return load


def system_watched() -> Callable[[], dict[str, float]]:
    """A function that returns the load of CPU and memory since now, as fractions; it does not block."""
    psutil.cpu_percent()
    return lambda: {"cpu": psutil.cpu_percent() / 100, "memory": psutil.virtual_memory().percent / 100}
