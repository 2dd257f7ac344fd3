"""The drain: one bounded pass over where failures arrive, each message decided by the policy and moved or left."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, assert_never

from dlqbatch import logs
from dlqbatch.message.delivery import AwaitOrigin, Delivery, Hold, Instruction, Publish
from dlqbatch.message.envelope import Envelope, Journey, open_envelope
from dlqbatch.message.stamp import stamp
from dlqbatch.message.table import new
from dlqbatch.policy.decide import (
    ATTEMPT_FAILED,
    NOT_CONFIGURED,
    RETRIES_EXHAUSTED,
    Events,
    Rules,
    decide,
    origin_gone,
)
from dlqbatch.policy.decision import DeadLetter, Decision, Delay, Leave, Return
from dlqbatch.runs.budget import share
from dlqbatch.runs.ports import Origins
from dlqbatch.runs.report import LEFT, Report, count, ending, unread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.message.delivery import Route
    from dlqbatch.message.envelope import Origin
    from dlqbatch.policy.events import Policy
    from dlqbatch.runs.ports import Broker
    from dlqbatch.topology.kinds import Drained
    from dlqbatch.topology.model import Ways

log = logs.get(__name__)

DELAYED, RETURNED, DEAD_LETTERED = "delayed", "returned", "dead_lettered"
HEADERS_TOO_LARGE: Final = "headers-too-large"
ORIGIN_UNCLEAR: Final = "origin-check-failed"
PUBLISH_REFUSED: Final = "publish-refused"
_ROOM_FOR_A_DEATH: Final = 1024
"""Bytes that the broker adds to the headers when a message leaves a delay queue."""


_ROUTES_KEPT: Final = 4096
_LOGGED_PER_REASON: Final = 20
_PREVIEWED: Final = 100
_ORDINARY: Final = frozenset({RETRIES_EXHAUSTED, NOT_CONFIGURED, ATTEMPT_FAILED})


class Places(Origins, Protocol):
    """What is known of the places a message may go to."""

    def refuses(self, exchange: str) -> bool:
        """It is known to take nothing from us; a dry run would not meet its refusal."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Everything a run of the job needs, decided before it starts."""

    broker: Broker
    origins: Places
    topologies: tuple[Drained, ...]
    rules: Rules
    """Those that hold for every topology; each adds its own tiers and its way home."""
    load_policy: Callable[[], Policy]
    """Called at most once, and only when there are messages; if it raises, none was touched."""
    max_messages: int
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        sources = [source.queue for topology in self.topologies for source in topology.sources]
        # All exchanges: what leaves a delay queue towards a missing one is dropped by the broker without a word.
        exchanges = sorted({exchange for topology in self.topologies for exchange in topology.exchange_names})
        depths, unknown = self.broker.depths(sources, exchanges)
        turn = os.urandom(1)[0]  # a clock would give runs that start every minute the same one
        takes = {queue: limit for queue, limit in share(self.max_messages, depths, turn).items() if limit}
        spare = self.max_messages - sum(takes.values())
        if not takes:
            if self.dry_run:
                self.load_policy()  # whoever tries it out wants to know that it is there
            return Report(
                "drain",
                outcome="partial" if unknown else "ok",
                stopped_by="empty",
                counts=count({}, 0)[0],
                elapsed_seconds=time.monotonic() - started,
                dry_run=self.dry_run,
                warnings=(*self.broker.warnings(), *unread(unknown)),
                emptied=tuple(queue for queue in depths if queue not in unknown),
            )
        policy = self.load_policy()
        handler = _Handler(self, policy)
        tally = self.broker.transfer(takes, spare, handler.handle)
        counts, reasons = count(tally.results, tally.got)
        missed = {**unknown, **tally.refused}
        warnings = [*policy.warnings, *self.broker.warnings(), *unread(missed)]
        if tally.lost is not None:
            warnings.append(f"the connection to the broker was lost: {tally.lost}")
        stopped_by, emptied = ending(depths, takes, tally, spare, missed)
        is_complete = not counts[LEFT] and not missed and tally.lost is None
        return Report(
            "drain",
            outcome="ok" if is_complete else "partial",
            stopped_by=stopped_by,
            counts=counts,
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=tuple(warnings),
            preview=tuple(handler.preview),
            emptied=emptied,
        )


class _Lane(NamedTuple):
    """What a queue's messages are decided by, and where they go."""

    ways: Ways
    rules: Rules
    first_stage: bool
    delay: Callable[[str, int], Route]
    """That of the ways, with its last answers at hand: the same few events come again and again."""


class _Handler:
    """One message after another: read, decide, say what is to be done. The hot path; it waits for nothing."""

    def __init__(self, drain: Drain, events: Events) -> None:
        self.preview: list[dict[str, str]] = []
        self._events = events
        self._lanes = {
            source.queue: _Lane(
                topology,
                replace(drain.rules, tiers=topology.tiers, home=topology.home),
                source.first_stage,
                lru_cache(maxsize=_ROUTES_KEPT)(topology.delay),
            )
            for topology in drain.topologies
            for source in topology.sources
        }
        self._origins = drain.origins
        self._dry_run = drain.dry_run
        self._stamp = partial(stamp, login=drain.broker.login)
        self._limit = drain.broker.properties_limit
        self._logged: Counter[str] = Counter()
        prefix, numbers = os.urandom(12).hex(), itertools.count()
        self._new_id = lambda: f"{prefix}{next(numbers):08x}"

    def handle(self, delivery: Delivery) -> Instruction:
        envelope = open_envelope(
            delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
        )
        queue = delivery.receipt.queue
        lane, now = self._lanes[queue], int(time.time())
        decision = decide(
            envelope, self._events, lane.rules, first_stage=lane.first_stage, now=now, new_id=self._new_id
        )
        instruction = self._instruct(envelope, decision, lane, now)
        if self._dry_run and isinstance(instruction, Publish):
            if self._origins.refuses(instruction.route.exchange):
                return Hold(LEFT, PUBLISH_REFUSED)
            self._show(queue, decision, instruction)
            return Hold(instruction.counts_as, instruction.reason)
        return instruction

    def _instruct(self, envelope: Envelope, decision: Decision, lane: _Lane, now: int) -> Instruction:
        if isinstance(decision, Delay):
            route = lane.delay(decision.event, decision.tier)
            properties = self._stamp(envelope, decision.journey, limit=self._limit - _ROOM_FOR_A_DEATH)
            return self._publish(decision.journey, route, properties, DELAYED if lane.ways.waits else RETURNED)
        if isinstance(decision, Return):
            return self._return(envelope, decision, lane, now)
        if isinstance(decision, DeadLetter):
            self._notice(decision.reason, decision.journey, decision.detail)
            properties = self._stamp(envelope, decision.journey, limit=self._limit, reason=decision.text, dead_at=now)
            return self._publish(decision.journey, lane.ways.dead(), properties, DEAD_LETTERED, decision.reason)
        if isinstance(decision, Leave):
            return Hold(LEFT, decision.reason)
        assert_never(decision)

    def _return(self, envelope: Envelope, decision: Return, lane: _Lane, now: int) -> Instruction:
        origin = decision.origin
        route = self._origins.route(origin)
        if route is not None:
            properties = self._stamp(envelope, decision.journey, limit=self._limit)
            return self._publish(decision.journey, route, properties, RETURNED, origin=origin)
        if self._origins.is_gone(origin):
            return self._instruct(envelope, origin_gone(decision), lane, now)
        if self._origins.is_unclear(origin):
            return Hold(LEFT, ORIGIN_UNCLEAR)
        return AwaitOrigin(origin)

    def _publish(
        self,
        journey: Journey,
        route: Route,
        properties: bytes | None,
        counts_as: str,
        reason: str | None = None,
        origin: Origin | None = None,
    ) -> Instruction:
        if properties is None:
            self._notice(HEADERS_TOO_LARGE, journey)
            return Hold(LEFT, HEADERS_TOO_LARGE)
        return new(Publish, (journey.id, route, properties, counts_as, reason, origin))

    def _notice(self, reason: str, journey: Journey, detail: str = "") -> None:
        """A log line for what is out of the ordinary, until there are too many of a kind to be read."""
        if reason in _ORDINARY:
            return
        self._logged[reason] += 1
        if self._logged[reason] <= _LOGGED_PER_REASON:
            queue = journey.origin.queue if journey.origin is not None else None
            log.warning("unusual message", reason=reason, id=journey.id, origin=queue, detail=detail)

    def _show(self, queue: str, decision: Decision, publish: Publish) -> None:
        if len(self.preview) < _PREVIEWED and not isinstance(decision, Leave):
            origin = decision.journey.origin
            shown = {"queue": queue, "id": publish.id, "event": origin.key if origin is not None else ""}
            shown |= {"origin": (origin.name if origin is not None else ""), "decision": publish.counts_as}
            shown |= {"exchange": publish.route.exchange, "key": publish.route.key, "reason": publish.reason or ""}
            self.preview.append(shown)
