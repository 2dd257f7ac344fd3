"""A check, put together."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dlqbatch.broker import declare
from dlqbatch.broker.connection import connect
from dlqbatch.broker.delivery_limit import is_classic, why_looking_costs
from dlqbatch.broker.looking import LookingSession
from dlqbatch.broker.management import expansion
from dlqbatch.broker.targets import Targets
from dlqbatch.errors import SettingsError
from dlqbatch.policy.check import Targets as Destinations
from dlqbatch.runs.check import Check
from dlqbatch.topology.arguments import DELIVERY_LIMIT
from dlqbatch.wiring.access import access_to, management_api
from dlqbatch.wiring.ladders import limits_deliveries, trust_of
from dlqbatch.wiring.occasion import Occasion, bounds_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.transfer import Bounds
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings

_LONGEST_HOLD: Final = 25 * 60.0
"""Seconds; the broker closes a channel that has held a message for 30 minutes, unless it is told otherwise."""
_ALL_BACK: Final = 29 * 60.0
"""Seconds after which nothing is held any more, whatever was waited for."""
_PUTTING_BACK: Final = 30.0
"""Seconds; what a look has held goes back channel by channel, each waited for, to keep the queue's order."""
_NO_BOUND: Final = 1 << 62


def check(settings: Settings, occasion: Occasion) -> Report:
    if not settings.check_queues:
        raise SettingsError(
            "no queue to check: name queues or wildcards, as in `dlqbatch check 'dlq.*'`, or set dlqbatch.check-queues"
        )
    destinations = Destinations(settings.check_queues, settings.check_target)
    problems = tuple(destinations.problems())
    if problems:
        raise SettingsError(*problems)
    bounds = _bounds(settings, occasion)
    api = management_api(settings)
    queues, unmatched, left_out = expansion(settings.check_queues, api)
    targets = destinations.of(queues)
    connection = connect(access_to(settings, "dlqbatch check", bounds))
    try:
        # Where AMQP does not tell: to take a quorum queue for classic would cost its messages their deliveries.
        maybe = declare.quorum_sources(connection, queues, otherwise=False, untold=True)
        quorum = frozenset(queue for queue in maybe if not is_classic(queue, api))
        costs = {queue: why for queue in sorted(quorum) if (why := why_looking_costs(connection, queue, api))}
        if costs and not settings.allow_delivery_cost:
            raise SettingsError(
                *(f"the quorum queue '{queue}' is not checked: {why}" for queue, why in costs.items()),
                "nothing was looked at; --allow-delivery-cost (dlqbatch.allow-delivery-cost) does it all the same",
            )
        notes = tuple(f"'{queue}': {why}" for queue, why in costs.items())
        notes += tuple(f"'{wildcard}' matches no queue" for wildcard in unmatched) + left_out
        if settings.max_seconds > _LONGEST_HOLD:
            notes += (f"max_seconds is {settings.max_seconds:g}; a check holds messages for {_LONGEST_HOLD:g} at most",)
        found = Targets(connection, _arguments(connection, targets, quorum))
        job = Check(
            broker=LookingSession(connection, found, bounds, quorum, notes),
            destinations=found,
            targets=targets,
            named=frozenset(name for name in settings.check_queues if "*" not in name),
            max_deaths=settings.check_max_deaths,
            trust=trust_of(settings, connection),
            max_messages=settings.max_messages if "max_messages" in settings.model_fields_set else None,
            dry_run=occasion.dry_run,
        )
        return job.run()
    finally:
        connection.close()


def _bounds(settings: Settings, occasion: Occasion) -> Bounds:
    """The bounds of a drain keep a run short; a check that stops early meets the same messages at its next run.

    So the number of messages and bytes bounds a check only where somebody has set it.
    """
    bounds = bounds_of(settings, occasion)
    if occasion.seconds_left is None:
        bounds = replace(bounds, last_answers=_PUTTING_BACK)
    max_bytes = bounds.max_bytes if "max_bytes" in settings.model_fields_set else _NO_BOUND
    now = time.monotonic()
    stop_at = min(bounds.stop_at, now + _LONGEST_HOLD)
    waits = min(bounds.give_up_after, now + _ALL_BACK - bounds.last_answers - stop_at)
    return replace(bounds, stop_at=stop_at, give_up_after=waits, max_bytes=max_bytes)


def _arguments(
    connection: Connection, targets: Mapping[str, str], quorum: Iterable[str]
) -> dict[str, dict[str, str | int]]:
    """A target is of its source's type; what is dead must not be dropped for being looked at."""
    of_quorum: dict[str, str | int] = {"x-queue-type": "quorum"}
    if limits_deliveries(connection):
        of_quorum[DELIVERY_LIMIT] = -1
    return {target: of_quorum if queue in quorum else {"x-queue-type": "classic"} for queue, target in targets.items()}
