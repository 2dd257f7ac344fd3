"""Build a drain from the settings; the loop over its messages is in run.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dlqbatch import logs
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Bounds
from dlqbatch.broker.versions import DELAYS_RETRIES
from dlqbatch.drain import readiness
from dlqbatch.drain.event_delays import DelayQueues, EventDelays
from dlqbatch.drain.retry_decision import Rules
from dlqbatch.drain.run import Drain
from dlqbatch.errors import DlqbatchError, SettingsError, TopologyMissing
from dlqbatch.jobs import Report, RunOptions, bounds_of, scope_of
from dlqbatch.settings import Settings
from dlqbatch.topology import declare
from dlqbatch.topology.declare import kinds_of, matched, trust_of
from dlqbatch.topology.kinds import Drained, Kind, Ladder

if TYPE_CHECKING:
    from dlqbatch.drain.event_policy import Policy  # a run that finds no message needs none

log = logs.get(__name__)

# What this process has declared or compared, by broker and topologies; a warm start declares nothing again.
_declared: dict[tuple[str, tuple[Kind, ...]], readiness.Declared] = {}


def looking_costs(connection: Connection, quorum: Collection[str], *, dry_run: bool) -> tuple[str, ...]:
    """What a dry run has cost the messages of quorum queues; from RabbitMQ 4.3 on, to put them back costs nothing."""
    if not dry_run or not quorum or connection.version >= DELAYS_RETRIES:
        return ()
    return ("on a quorum queue with a delivery limit this look cost each message one delivery",)


def drain(settings: Settings, run_options: RunOptions) -> Report:
    if settings.database_url_is_default and "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
        raise SettingsError(
            "inside AWS Lambda the database has to be named: set DLQBATCH_DATABASE_URL (a SQLite file would be empty, "
            "and gone after the run)"
        )
    bounds = bounds_of(settings, run_options)
    kinds = kinds_of(settings)
    if not any(isinstance(kind, Drained) for kind in kinds):
        raise SettingsError(
            "there is nothing to drain: dlqbatch.ladder is false, and no dlqbatch.topology.NAME.kind is per-queue or "
            "ladder"
        )
    connection = connect(access_to(settings, "dlqbatch drain", bounds))
    try:
        report = _drain(settings, run_options, connection, kinds, bounds)
        return replace(report, scope=scope_of(settings, connection))
    finally:
        connection.close()


def _drain(
    settings: Settings, run_options: RunOptions, connection: Connection, kinds: tuple[Kind, ...], bounds: Bounds
) -> Report:
    known = (settings.broker_url.get_secret_value(), kinds)
    drained = [kind for kind in kinds if isinstance(kind, Drained)]
    notes: list[str] = []
    declared = _declared.get(known)
    was_warm = declared is not None
    if declared is None:
        declared = readiness.declare_or_compare(connection, kinds, dry_run=run_options.dry_run)
        if declared is None:
            drained, not_read = readiness.without_changing_delays(connection, drained)
            notes = [readiness.DELAY_CHANGES, *not_read.values()]
        elif not run_options.dry_run:
            _declared[known] = declared
    api = partial(management_api, settings, quickly=True)
    origins = Origins(connection, touch=not run_options.dry_run)
    origins.knows_homes = True
    try:
        quorum = readiness.quorum_queues_of(connection, drained, declared, api)
        notes[:0] = looking_costs(connection, quorum, dry_run=run_options.dry_run)
        drained, without_home = readiness.with_home_queues(connection, drained)
        # Messages of any origin go to these exchanges; the way back to each origin is checked when it is needed.
        published_to = frozenset(route.exchange for kind in drained for route in (kind.dead(), kind.delay("event", 1)))
        report = Drain(
            broker=Session(
                connection,
                origins,
                bounds,
                quorum,
                (*notes, *without_home),
                published_to,
                api=api if settings.management_url else None,
            ),
            origins=origins,
            topologies=drained,
            rules=Rules(
                tiers=0,
                trust=trust_of(settings, connection),
                max_trips=settings.max_trips,
                return_to_queue=settings.return_via == "queue",
            ),
            load_policy=partial(load_policy, settings),
            max_messages=settings.max_messages,
            dry_run=run_options.dry_run,
            delay_queues=delay_queues_of(settings),
            # While a delay is being changed nothing is bound; the command that changes it binds again what it moved.
            find_obstacles=partial(
                readiness.obstacles,
                connection,
                drained,
                declared,
                api,
                is_bound=run_options.dry_run or declared is None or (declared.may_declare and not was_warm),
            ),
        ).run()
    except TopologyMissing:
        if not was_warm:
            raise
        # Somebody deleted a part of it since this process declared it.
        _declared.pop(known, None)
        return _drain(settings, run_options, connection, kinds, bounds)
    if "unroutable" in report.reasons:
        # A binding into a delay queue may be gone; it is not declared while a delay is being changed.
        _declared.pop(known, None)
        if declared is not None and declared.may_declare and not run_options.dry_run and not connection.is_closing:
            _bind_everything(connection, kinds)
    return report


def delay_queues_of(settings: Settings) -> Callable[[Drained], DelayQueues | None]:
    events = EventDelays(settings.event_delays)

    def of(kind: Drained) -> DelayQueues | None:
        if not isinstance(kind, Ladder):  # a per-queue set has a single delay
            return None
        follows, asked = settings.retry_after, settings.retry_after_delays
        return DelayQueues(tuple(kind.delays.values()), kind.tiers, events, follows=follows, asked=asked)

    return of


def load_policy(settings: Settings) -> Policy:
    from dlqbatch.drain import event_config  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    return event_config.load_policy(settings)


def _bind_everything(connection: Connection, kinds: tuple[Kind, ...]) -> None:
    """Declare and bind again for the next run; an error is only logged, because this run is over."""
    try:
        if not declare.changing(connection):
            matched(connection, kinds, declare.declare)
    except DlqbatchError as error:
        log.warning("the topology could not be declared again", why=str(error))
