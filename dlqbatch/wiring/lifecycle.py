"""A lifecycle run, put together."""

from __future__ import annotations

import os
import random
import socket
import time
from typing import TYPE_CHECKING

from dlqbatch import logs
from dlqbatch.broker import declare
from dlqbatch.broker.connection import Connection, NoAnswer, connect
from dlqbatch.broker.origins import Origins
from dlqbatch.broker.session import Session
from dlqbatch.errors import ChannelRefused, DlqbatchError, SettingsError, so_far
from dlqbatch.policy import breaker
from dlqbatch.policy.strategy import Limits, Options, zone
from dlqbatch.runs.choice import Choice
from dlqbatch.runs.lifecycle import Lifecycle
from dlqbatch.runs.observation import Observation, Seen
from dlqbatch.topology.kinds import Drained
from dlqbatch.wiring.access import access_to
from dlqbatch.wiring.ladders import kinds_of, trust_of
from dlqbatch.wiring.occasion import Occasion, bounds_of
from dlqbatch.wiring.stores import clock_of, engine_for, system_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from dlqbatch.broker.connection import Access
    from dlqbatch.broker.transfer import Bounds
    from dlqbatch.deadstore.engine import Kept
    from dlqbatch.message.envelope import Origin
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings

log = logs.get(__name__)

_MEASURED_FOR = 10.0
"""Seconds that one look at CPU and memory holds."""


def lifecycle(settings: Settings, occasion: Occasion) -> Report:
    if settings.database_url_is_default:
        raise SettingsError(
            "lifecycle sends the dead messages of the database, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was sent"
        )
    from dlqbatch.deadstore.engine import keeping  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    bounds = bounds_of(settings, occasion)
    # The broker first: what is claimed while it is down would wait for its lease to end.
    connection = connect(access_to(settings, "dlqbatch lifecycle", bounds))
    try:
        engine = engine_for(settings)
        _release_over(settings, engine, occasion)
        # A connection for each transaction would cost PostgreSQL more than all that is done in it.
        with keeping(engine) as kept:
            return _job(settings, occasion, connection, kept, bounds).run()
    finally:
        connection.close()


def _job(settings: Settings, occasion: Occasion, connection: Connection, engine: Kept, bounds: Bounds) -> Lifecycle:
    from dlqbatch.deadstore.observe import Observations  # noqa: PLC0415  (the same)
    from dlqbatch.deadstore.retries import Preview, Retries  # noqa: PLC0415  (the same)
    from dlqbatch.deadstore.rules import Rules  # noqa: PLC0415  (the same)

    limits = breaker_limits(settings)
    drained = [kind for kind in kinds_of(settings) if isinstance(kind, Drained)]
    rules, warnings = Rules(engine_for(settings)).load()
    origins = Origins(connection, touch=not occasion.dry_run)
    retries = Retries(engine, _worker(), settings.lease, limits)
    return Lifecycle(
        sender=Session(connection, origins, bounds),
        origins=origins,
        trust=trust_of(settings, connection),
        return_to_queue=settings.return_via == "queue",
        retries=retries,
        breakers=retries,
        preview=Preview(engine, limits),
        observation=Observation(
            Observations(engine),
            _looking(connection, access_to(settings, "dlqbatch lifecycle, looking", bounds), bounds),
            sources=[source.queue for kind in drained for source in kind.sources],
            dead_letter_queues=sorted({queue for kind in drained for queue in kind.dead_letter_queues}),
            window=settings.observation_window,
            is_over=lambda: occasion.stopped() or time.monotonic() >= bounds.stop_at,
        ),
        choice=Choice(
            rules, retry_options(settings), Limits(settings.cpu_limit, settings.memory_limit), _load(), random.random
        ),
        max_attempts=settings.max_attempts,
        max_messages=settings.max_messages,
        clock=clock_of(engine),
        notes=warnings,
        dry_run=occasion.dry_run,
    )


def _release_over(settings: Settings, engine: Engine, occasion: Occasion) -> None:
    """What a replay that was killed held when its plan was aborted is nobody else's to give back."""
    from dlqbatch.deadstore.plan_states import release_over  # noqa: PLC0415  (the same)

    if not occasion.dry_run:
        # Not as the lifecycle, whose moves are outcomes: nothing has been decided about these.
        release_over(engine, actor="replay", worker=_worker(), lease=settings.lease, now=clock_of(engine)())


def _worker() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def retry_options(settings: Settings) -> Options:
    return Options(
        backoff=settings.retry_delays,
        off_peak_hours=settings.off_peak_hours,
        zone=zone(settings.time_zone),
        recheck=settings.recheck,
    )


def breaker_limits(settings: Settings) -> breaker.Limits:
    return breaker.Limits(
        failure_rate=settings.breaker_failure_rate,
        min_attempts=settings.breaker_min_attempts,
        window=settings.breaker_window,
        cool_down=settings.breaker_cool_down,
        # A probe is heard of at the latest when the window is over and somebody has looked.
        probe_patience=max(breaker.Limits().probe_patience, 4 * settings.observation_window),
    )


def _looking(connection: Connection, access: Access, bounds: Bounds) -> Callable[[Origin], Seen | None]:
    def look_at(origin: Origin) -> Seen | None:
        queue = origin.queue
        try:
            with connection.asking(origin.name) as scratch:
                if queue is None:
                    scratch.call("exchange_declare", exchange=origin.exchange, passive=True)
                    # Whom it serves nobody can ask: it is taken for one that has consumers.
                    return Seen(1, 0)
                found = scratch.call("queue_declare", queue=queue, passive=True)
        except ChannelRefused as refused:
            return Seen(0, 0, is_gone=True) if refused.is_gone else None
        except (NoAnswer, UnicodeEncodeError):
            return None
        if found.consumer_count or found.message_count:
            return Seen(int(found.consumer_count), int(found.message_count))
        return _look_closer(queue, access, bounds)

    return look_at


def _look_closer(queue: str, access: Access, bounds: Bounds) -> Seen | None:
    """Without a leader a quorum queue is declared as empty, whatever it holds; only a get tells.

    Who may not read from a queue is told neither that nor its type, and has not looked then.
    """
    try:
        # Not on the run's own connection: a broker that finds no leader closes it.
        connection = connect(access)
        try:
            quorum = declare.quorum_queues(connection, [queue], otherwise=True)
            asking = Session(connection, Origins(connection, touch=False), bounds, quorum)
            depths, unknown = asking.depths([queue], ())
        finally:
            connection.close()
    except DlqbatchError as error:
        log.info("an origin cannot be looked at", queue=queue, why=so_far(error))
        return None
    return None if unknown else Seen(0, depths[queue])


def _load() -> Callable[[], tuple[float, float]]:
    """CPU and memory in per cent; measuring takes a tenth of a second, and a run asks for every hundred rows."""
    measured: list[tuple[float, tuple[float, float]]] = []

    def load() -> tuple[float, float]:
        if not measured or time.monotonic() - measured[0][0] >= _MEASURED_FOR:
            state = system_state()
            measured[:] = [(time.monotonic(), (state["cpu"] * 100, state["memory"] * 100))]
        return measured[0][1]

    return load
