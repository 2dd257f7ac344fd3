"""A drain, put together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from dlqbatch.broker import declare
from dlqbatch.broker.connection import Connection, connect
from dlqbatch.broker.origins import Origins
from dlqbatch.broker.session import Session
from dlqbatch.errors import ChannelRefused, SettingsError, TopologyMissing
from dlqbatch.policy.decide import Rules
from dlqbatch.runs.drain import Drain
from dlqbatch.topology.kinds import Drained, Kind
from dlqbatch.topology.ladder import Ladder
from dlqbatch.topology.model import Queue, Topology, relay_of
from dlqbatch.topology.per_queue import PerQueue
from dlqbatch.wiring.access import access_to
from dlqbatch.wiring.ladders import kinds_of, matched, trust_of
from dlqbatch.wiring.occasion import Occasion, bounds_of
from dlqbatch.wiring.stores import load_policy

if TYPE_CHECKING:
    from dlqbatch.broker.transfer import Bounds
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings

_Known = tuple[str, tuple[Kind, ...]]

_declared: dict[_Known, frozenset[str]] = {}
"""What this process has declared, with the queues found to be quorum queues; a warm start declares nothing again."""

_NOT_KEPT: Final[_Known] = ("", ())
"""Of a run that declared nothing, because somebody was changing what is there."""

_TIERS_LOOKED_FOR: Final = 20
"""Behind the last one, as long as there is one more."""

LOOKING_COSTS: Final = ("on a quorum queue this look cost each message one delivery of its delivery limit",)


def drain(settings: Settings, occasion: Occasion) -> Report:
    if settings.database_url_is_default and "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
        raise SettingsError(
            "inside AWS Lambda the database has to be named: set DLQBATCH_DATABASE_URL (a SQLite file would be empty, "
            "and gone after the run)"
        )
    bounds = bounds_of(settings, occasion)
    kinds = kinds_of(settings)
    if not any(isinstance(kind, Drained) for kind in kinds):
        raise SettingsError(
            "there is nothing to drain: dlqbatch.ladder is false, and no dlqbatch.topology.NAME.kind is per-queue or "
            "ladder"
        )
    connection = connect(access_to(settings, "dlqbatch drain", bounds))
    try:
        return _drain(settings, occasion, connection, kinds, bounds)
    finally:
        connection.close()


def _drain(
    settings: Settings, occasion: Occasion, connection: Connection, kinds: tuple[Kind, ...], bounds: Bounds
) -> Report:
    known = (settings.broker_url.get_secret_value(), kinds)
    was_warm = known in _declared
    drained = tuple(kind for kind in kinds if isinstance(kind, Drained))
    skipped: tuple[str, ...] = ()
    # A warm run has nothing to declare; but into the delay queue of one queue it publishes without a binding, which
    # whoever changes its delay could not turn aside.
    if (not was_warm or any(isinstance(kind, PerQueue) for kind in kinds)) and declare.changing(connection):
        drained, skipped = _unchanging(connection, drained)
        known, was_warm = _NOT_KEPT, False
    elif not was_warm:
        matched(connection, kinds, declare.compare if occasion.dry_run else declare.declare)
    quorum = _declared.get(known)
    if quorum is None:
        quorum = frozenset[str]()
        for kind in drained:
            sources = [source.queue for source in kind.sources]
            quorum |= declare.quorum_queues(connection, sources, otherwise=kind.queue_type == "quorum")
        if not occasion.dry_run and known != _NOT_KEPT:
            _declared[known] = quorum
    notes: tuple[str, ...] = LOOKING_COSTS if occasion.dry_run and quorum else ()
    notes += skipped
    if not was_warm:
        notes += _left_behind(connection, drained)
    origins = Origins(connection, touch=not occasion.dry_run)
    try:
        drained, unreachable = _with_a_home(connection, drained)
        report = Drain(
            broker=Session(connection, origins, bounds, quorum, notes + unreachable, _published_to(drained)),
            origins=origins,
            topologies=drained,
            rules=Rules(
                tiers=0,
                trust=trust_of(settings, connection),
                max_trips=settings.max_trips,
                return_to_queue=settings.return_via == "queue",
            ),
            load_policy=lambda: load_policy(settings),
            max_messages=settings.max_messages,
            dry_run=occasion.dry_run,
        ).run()
    except TopologyMissing:
        if not was_warm:
            raise
        # Somebody deleted a part of it since this process declared it.
        del _declared[known]
        return _drain(settings, occasion, connection, kinds, bounds)
    if "unroutable" in report.reasons:
        # A queue or a binding of ours may have been deleted: the next run declares everything again.
        _declared.pop(known, None)
    return report


def _unchanging(connection: Connection, drained: tuple[Drained, ...]) -> tuple[tuple[Drained, ...], tuple[str, ...]]:
    """Those to work on while a delay is being changed, and what a reader of the report has to know of it."""
    sets = [kind for kind in drained if isinstance(kind, PerQueue) and kind.has_delay]
    in_change = declare.existing(connection, [relay_of(kind.delay_queue) for kind in sets])
    skipped = [kind for kind in sets if relay_of(kind.delay_queue) in in_change]
    notes = ["a delay is being changed (`dlqbatch topology apply --change-ttl`), so nothing was declared"]
    notes += [
        f"'{kind.retry_queue}' was not read: the delay of '{kind.delay_queue}' is being changed" for kind in skipped
    ]
    return tuple(kind for kind in drained if kind not in skipped), tuple(notes)


def _published_to(drained: tuple[Drained, ...]) -> frozenset[str]:
    """Messages go here whatever they are; the ways back to their origins are looked at one by one."""
    return frozenset(route.exchange for kind in drained for route in (kind.dead(), kind.delay("event", 1)))


def _with_a_home(connection: Connection, drained: tuple[Drained, ...]) -> tuple[tuple[Drained, ...], tuple[str, ...]]:
    """Those whose messages have a queue to come back to: one that is missing would cost what leaves its delay queue."""
    kept: list[Drained] = []
    notes: list[str] = []
    for kind in drained:
        if kind.home is not None:
            try:
                declare.look(connection, Topology((), (Queue(kind.home),), ()))
            except ChannelRefused as refused:
                notes.append(
                    f"'{kind.sources[0].queue}' was not read: '{kind.home}' cannot be looked at: {refused.text}"
                )
                continue
        kept.append(kind)
    return tuple(kept), tuple(notes)


def _left_behind(connection: Connection, drained: tuple[Drained, ...]) -> tuple[str, ...]:
    """A ladder that once had more tiers: nobody takes what is still in them."""
    found: dict[str, int] = {}
    for kind in [each for each in drained if isinstance(each, Ladder)]:
        for beyond in range(1, _TIERS_LOOKED_FOR + 1):
            there = declare.existing(connection, kind.tier_beyond(beyond))
            if not there:
                break
            found |= there
    return tuple(
        f"'{queue}' holds {depth} message(s) and is no part of the ladder now: set tier_ttls back until it is empty"
        for queue, depth in found.items()
        if depth
    )
