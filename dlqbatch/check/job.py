"""One run of `check`, built from the settings: which queues, what a look at them costs, and where messages go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from dlqbatch.amqp.patterns import is_wildcard
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection, Scratch
from dlqbatch.broker.management import expansion
from dlqbatch.broker.queue_types import quorum_queues, types_by_api, why_looking_costs
from dlqbatch.broker.return_exchanges import Origins, _Way
from dlqbatch.broker.transfer import Bounds
from dlqbatch.check.rules import TargetNames
from dlqbatch.check.run import Check, LookingSession
from dlqbatch.errors import ChannelRefused, SettingsError
from dlqbatch.jobs import Report, RunOptions, bounds_of, scope_of
from dlqbatch.settings import Settings
from dlqbatch.topology.declare import limits_deliveries, trust_of
from dlqbatch.topology.model import queue_read

_LONGEST_HOLD: Final = 25 * 60.0
"""Seconds that a message may be held: by default the broker closes a channel that has held one for 30 minutes."""
_ALL_BACK: Final = 29 * 60.0
"""Seconds after which nothing is held any more, whatever was waited for."""
_PUTTING_BACK: Final = 30.0
"""Seconds in which what was held goes back, channel by channel, each waited for, to keep the queue's order."""
_NO_BOUND: Final = 1 << 62


def check(settings: Settings, run_options: RunOptions) -> Report:
    if not settings.check_queues:
        raise SettingsError(
            "no queue to check: name queues or wildcards, as in `dlqbatch check 'dlq.*'`, or set dlqbatch.check-queues"
        )
    names = TargetNames(settings.check_queues, settings.check_target)
    if problems := tuple(names.problems()):
        raise SettingsError(*problems)
    bounds = _bounds(settings, run_options)
    api = management_api(settings)
    queues, unmatched, left_out, types = expansion(settings.check_queues, api)
    targets = names.of(queues)
    connection = connect(access_to(settings, "dlqbatch check", bounds))
    try:
        # AMQP may not show the type: taking a quorum queue for a classic one would cost its messages deliveries.
        named = [queue for queue in queues if queue not in types]
        known = {**types, **types_by_api(management_api(settings, quickly=True), named)}
        maybe = quorum_queues(connection, queues, otherwise=False, cut_off=True, known=known, refuse_streams=True)
        quorum = frozenset(
            queue for queue in maybe if queue in known or types_by_api(api, [queue]).get(queue) != "classic"
        )
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
        # A target is of its source's type, and what is dead must not be dropped for being looked at.
        unlimited = limits_deliveries(connection)
        arguments = {
            target: queue_read("quorum" if queue in quorum else "classic", unlimited_deliveries=unlimited)
            for queue, target in targets.items()
        }
        declared = TargetQueues(connection, arguments)
        job = Check(
            broker=LookingSession(connection, declared, bounds, quorum, notes),
            targets=targets,
            named=frozenset(name for name in settings.check_queues if not is_wildcard(name)),
            max_deaths=settings.check_max_deaths,
            trust=trust_of(settings, connection),
            max_messages=settings.max_messages if "max_messages" in settings.model_fields_set else None,
            dry_run=run_options.dry_run,
        )
        return replace(job.run(), scope=scope_of(settings, connection))
    finally:
        connection.close()


def _bounds(settings: Settings, run_options: RunOptions) -> Bounds:
    """The bounds of a drain keep a run short; a check that stops early meets the same messages at its next run.

    So the number of messages and bytes bounds a check only where somebody has set it.
    """
    bounds = bounds_of(settings, run_options)
    if run_options.seconds_left is None:
        bounds = replace(bounds, last_answers=_PUTTING_BACK)
    max_bytes = bounds.max_bytes if "max_bytes" in settings.model_fields_set else _NO_BOUND
    now = time.monotonic()
    stop_at = min(bounds.stop_at, now + _LONGEST_HOLD)
    waits = min(bounds.give_up_after, now + _ALL_BACK - bounds.last_answers - stop_at)
    return replace(bounds, stop_at=stop_at, give_up_after=waits, max_bytes=max_bytes)


class TargetQueues(Origins):
    """Queues that messages are moved to: looked for when a first message wants to go there, declared if missing.

    They are reached through the default exchange; one that was deleted during the run is declared once more.
    """

    def __init__(self, connection: Connection, arguments: Mapping[str, Mapping[str, str | int]]) -> None:
        super().__init__(connection)
        self._arguments = arguments
        """What each is declared with if it is missing."""

    def _find(self, origin: Origin, scratch: Scratch) -> _Way:
        queue = origin.name
        try:
            return self._directly(queue, scratch)
        except ChannelRefused as refused:
            if not refused.is_gone:
                raise
        scratch.call("queue_declare", queue=queue, durable=True, arguments=dict(self._arguments.get(queue, {})))
        self.warnings[f"'{queue}' was not there and has been declared"] = None
        return self._directly(queue, scratch)
