"""The main loop of a drain: decide for each message that failed, and move or leave it, within the bounds of the run."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from dlqbatch import logs
from dlqbatch.amqp.delivery import AwaitOrigin, Delivery, Envelope, Hold, Instruction, Publish, Route, open_envelope
from dlqbatch.amqp.identity import Digest, digest_for
from dlqbatch.amqp.retry_headers import Journey, Origin
from dlqbatch.amqp.stamp import stamp
from dlqbatch.amqp.table import new
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session, share
from dlqbatch.broker.transfer import Tally
from dlqbatch.drain import retry_decision as decisions
from dlqbatch.drain.event_delays import DelayQueues
from dlqbatch.drain.readiness import Obstacles
from dlqbatch.drain.retry_decision import DeadLetter, Decision, Delay, Events, Return, Rules, decide, origin_gone
from dlqbatch.jobs import LEFT, Report, count, cut_off, depths_of, ending, unread
from dlqbatch.topology.kinds import Drained

if TYPE_CHECKING:
    from dlqbatch.drain.event_policy import Policy  # a run that finds no message needs none

log = logs.get(__name__)

DELAYED, RETURNED, DEAD_LETTERED = "delayed", "returned", "dead_lettered"
HEADERS_TOO_LARGE: Final = "headers-too-large"
ORIGIN_UNROUTABLE: Final = "origin-unroutable"
ORIGIN_UNCLEAR: Final = "origin-check-failed"
PUBLISH_REFUSED: Final = "publish-refused"
_ROOM_FOR_A_DEATH: Final = 1024
"""Bytes that the broker adds to the headers when a message leaves a delay queue."""
_ROUTES_KEPT: Final = 4096
_LOGGED_PER_REASON: Final = 20
_PREVIEWED: Final = 100
_ORDINARY: Final = frozenset({decisions.RETRIES_EXHAUSTED, decisions.NOT_CONFIGURED, decisions.ATTEMPT_FAILED})


@dataclass(frozen=True, slots=True)
class Drain:
    """Everything a run of the job needs, decided before it starts."""

    broker: Session
    origins: Origins
    topologies: Sequence[Drained]
    rules: Rules
    """The rules that hold for every topology; each topology adds its tiers and its home queue."""
    load_policy: Callable[[], Policy]
    """Called at most once, and only when there are messages; if it raises, none was touched."""
    max_messages: int
    dry_run: bool = False
    delay_queues: Callable[[Drained], DelayQueues | None] = lambda _: None
    """What decides about the delays of a topology besides its tiers."""
    find_obstacles: Callable[[Collection[str]], Obstacles] = lambda _: Obstacles()
    """Called at most once, with the queues that hold messages."""

    def run(self) -> Report:
        started = time.monotonic()
        sources = [source.queue for topology in self.topologies for source in topology.sources]
        # All exchanges: the broker silently drops what leaves a delay queue towards a missing exchange.
        exchanges = sorted({exchange for topology in self.topologies for exchange in topology.exchange_names})
        depths, unknown = self.broker.depths(sources, exchanges)
        waiting = [queue for queue, depth in depths.items() if depth]
        obstacles = self.find_obstacles(waiting) if waiting else Obstacles()
        depths = {queue: depth for queue, depth in depths.items() if queue not in obstacles.not_read}
        turn = os.urandom(1)[0]  # by a clock, runs that start every minute would have the same turn
        takes = {queue: limit for queue, limit in share(self.max_messages, depths, turn).items() if limit}
        spare = self.max_messages - sum(takes.values())
        policy = self.load_policy() if takes or self.dry_run else None  # a dry run shows whether the policy can be read
        tally, left, preview, warnings = Tally(), depths, [], []
        if takes and policy is not None:
            handler = _Handler(self, policy, obstacles.closed)
            tally = self.broker.transfer(takes, spare, handler.handle)
            left = dict(self.broker.depths_left(depths)) if tally.lost is None else {}
            preview, warnings = handler.preview, [*policy.warnings]
        counts, reasons = count(tally.results, tally.got)
        missed = {**unknown, **tally.refused}
        warnings += [*self.broker.warnings(), *obstacles.not_read.values(), *obstacles.warnings, *unread(missed)]
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
            preview=tuple(preview),
            emptied=emptied,
            queues=depths_of(depths, left, unknown=unknown),
            was_cut_off=cut_off(tally),
        )


class _Lane(NamedTuple):
    """The rules and the ways for the messages of a queue."""

    topology: Drained
    rules: Rules
    first_stage: bool
    closed: Mapping[int, str]
    """The tiers that nothing may be sent to now, with the reason."""
    delay: Callable[[str, int], Route]
    """The topology's own `delay`, which keeps its last results: the same few events come again and again."""
    delayed: str
    """The count of a message that is sent there: without a delay queue it is returned at once."""


class _Handler:
    """Reads a message, decides, and says what is to be done. The hot path; it waits for nothing."""

    def __init__(self, drain: Drain, events: Events, closed: Mapping[str, Mapping[int, str]]) -> None:
        self.preview: list[dict[str, str]] = []
        self._events = events
        self._lanes = {
            source.queue: _Lane(
                topology,
                replace(
                    drain.rules, tiers=topology.tiers, home=topology.home, delay_queues=drain.delay_queues(topology)
                ),
                source.first_stage,
                closed.get(source.queue, {}),
                lru_cache(maxsize=_ROUTES_KEPT)(topology.delay),
                DELAYED if topology.waits else RETURNED,
            )
            for topology in drain.topologies
            for source in topology.sources
        }
        self._origins = drain.origins
        self._dry_run = drain.dry_run
        self._stamp = partial(stamp, login=drain.broker.login)
        self._limit = drain.broker.properties_limit
        self._logged: Counter[str] = Counter()
        self._new_id = map(f"{os.urandom(12).hex()}{{:08x}}".format, itertools.count()).__next__

    def handle(self, delivery: Delivery) -> Instruction:
        envelope = open_envelope(
            delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
        )
        queue = delivery.receipt.queue
        lane, now = self._lanes[queue], int(time.time())
        decision = decide(
            envelope,
            self._events,
            lane.rules,
            first_stage=lane.first_stage,
            now=now,
            new_id=self._new_id,
            digest=delivery.digest,
        )
        instruction = self._instruct(envelope, decision, lane, now, delivery.digest)
        if self._dry_run and isinstance(instruction, Publish):
            if self._origins.refuses(instruction.route.exchange):
                return Hold(LEFT, PUBLISH_REFUSED)
            if len(self.preview) < _PREVIEWED:
                self.preview.append(_preview(queue, decision.journey.origin, instruction))
            return Hold(instruction.counts_as, instruction.reason)
        return instruction

    def _instruct(self, envelope: Envelope, decision: Decision, lane: _Lane, now: int, digest: Digest) -> Instruction:
        if isinstance(decision, Delay):
            if lane.closed and decision.tier in lane.closed:
                return Hold(LEFT, lane.closed[decision.tier])
            route = lane.delay(decision.event, decision.tier)
            # From a tier it comes to a drain again; the delay queue of a home queue leads straight back to it.
            known_by = None if lane.rules.home is None else digest()
            limit = self._limit - _ROOM_FOR_A_DEATH
            properties = self._stamp(envelope, decision.journey, limit=limit, digest=known_by)
            if properties is not None:
                return new(Publish, (decision.journey.id, route, properties, lane.delayed, None, None))
        elif isinstance(decision, Return):
            return self._return(envelope, decision, lane, now, digest)
        elif isinstance(decision, DeadLetter):
            self._log_unusual(decision.reason, decision.journey, decision.detail)
            # The digest identifies it also where somebody moves it back by hand.
            properties = self._stamp(
                envelope, decision.journey, limit=self._limit, digest=digest(), reason=decision.text, dead_at=now
            )
            if properties is not None:
                return Publish(decision.journey.id, lane.topology.dead(), properties, DEAD_LETTERED, decision.reason)
        else:
            assert_never(decision)
        return self._too_large(decision.journey)

    def _return(self, envelope: Envelope, decision: Return, lane: _Lane, now: int, digest: Digest) -> Instruction:
        origin = decision.origin
        route = self._origins.route(origin)
        if route is not None:
            known_by = digest_for(route.exchange, envelope.headers, digest)
            properties = self._stamp(envelope, decision.journey, limit=self._limit, digest=known_by)
            if properties is None:
                return self._too_large(decision.journey)
            return new(Publish, (decision.journey.id, route, properties, RETURNED, None, origin))
        if self._origins.is_gone(origin):
            return self._instruct(envelope, origin_gone(decision), lane, now, digest)
        if self._origins.is_unclear(origin):
            return Hold(LEFT, ORIGIN_UNCLEAR)
        if self._origins.leads_nowhere(origin):
            return self._unroutable(envelope, decision, lane, now, digest)
        return AwaitOrigin(origin)

    def _unroutable(self, envelope: Envelope, decision: Return, lane: _Lane, now: int, digest: Digest) -> Instruction:
        """Decide where the exchange is there and leads nowhere: the queue that the message failed in may be gone."""
        home = decision.journey.origin
        if home is None or home.queue is None:
            return Hold(LEFT, ORIGIN_UNROUTABLE)
        if self._origins.is_gone(home):
            return self._instruct(envelope, origin_gone(decision), lane, now, digest)
        if self._origins.is_there(home) or self._origins.is_unclear(home):
            return Hold(LEFT, ORIGIN_UNROUTABLE)
        self._origins.only_look_for(home)
        return AwaitOrigin(home)

    def _too_large(self, journey: Journey) -> Hold:
        self._log_unusual(HEADERS_TOO_LARGE, journey)
        return Hold(LEFT, HEADERS_TOO_LARGE)

    def _log_unusual(self, reason: str, journey: Journey, detail: str = "") -> None:
        """Log what is unusual, up to a number of lines for each reason."""
        if reason in _ORDINARY:
            return
        self._logged[reason] += 1
        if self._logged[reason] <= _LOGGED_PER_REASON:
            queue = journey.origin.queue if journey.origin is not None else None
            log.warning("unusual message", reason=reason, id=journey.id, origin=queue, detail=detail)


def _preview(queue: str, origin: Origin | None, publish: Publish) -> dict[str, str]:
    event, name = ("", "") if origin is None else (origin.event, origin.name)
    shown = {"queue": queue, "id": publish.id, "event": event, "origin": name, "decision": publish.counts_as}
    return shown | {"exchange": publish.route.exchange, "key": publish.route.key, "reason": publish.reason or ""}
