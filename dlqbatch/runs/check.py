"""The check: every message of some queues is looked at once; what failed too often moves, the rest stays in place."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from dlqbatch import logs
from dlqbatch.errors import ChannelRefused, TopologyMissing
from dlqbatch.message.delivery import AwaitOrigin, Delivery, Hold, Instruction, Publish
from dlqbatch.message.envelope import Origin, open_envelope
from dlqbatch.message.stamp import stamp
from dlqbatch.policy.check import TOO_MANY_DEATHS, Count, failures, journey_of
from dlqbatch.runs.budget import share
from dlqbatch.runs.report import LEFT, Report, count, unread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dlqbatch.message.envelope import Envelope, Journey
    from dlqbatch.policy.origin import Trust
    from dlqbatch.runs.ports import Origins, Tally

log = logs.get(__name__)

MOVED: Final = "moved"
WITHIN_LIMIT: Final = "within-limit"
UNREADABLE: Final = "headers-unreadable"
HEADERS_TOO_LARGE: Final = "headers-too-large"
NO_TARGET: Final = "target-missing"
_STAYED: Final = (LEFT, WITHIN_LIMIT)
_PREVIEWED: Final = 100
_ASKED_AT_ONCE: Final = 500
"""Queues; each that seems empty may take a channel to be sure."""


class Looker(Protocol):
    """One connection, for one run that leaves most of what it sees."""

    @property
    def login(self) -> bytes: ...
    @property
    def properties_limit(self) -> int: ...
    def depths(self, queues: Iterable[str], exchanges: Iterable[str]) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """What waits in each queue, and why it is not known of some."""

    def look(self, queue: str, limit: int, handle: Callable[[Delivery], Instruction]) -> Tally: ...
    def warnings(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Check:
    broker: Looker
    destinations: Origins
    """What is known of the target queues in this run."""
    targets: Mapping[str, str]
    """Of each queue to look through."""
    named: frozenset[str]
    """Queues that somebody asked for by name, so that one that is not there is an error."""
    max_deaths: int
    trust: Trust
    max_messages: int | None = None
    """None: whatever is there at the start."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        depths, missed = self._depths()
        takes = depths if self.max_messages is None else share(self.max_messages, depths, os.urandom(1)[0])
        handler = _Handler(self)
        results: Counter[tuple[str, str | None]] = Counter()
        told: dict[str, dict[str, object]] = {}
        got, unseen, stopped_by, warnings = 0, 0, "empty", [""] * 0
        # One after the other, so that each is hidden for its own time only; a deep one cannot starve the others.
        for queue in sorted(depths, key=depths.__getitem__):
            if not takes[queue] or stopped_by != "empty":
                unseen += depths[queue]
                continue
            tally = self.broker.look(queue, takes[queue], handler.handle)
            results.update(tally.results)
            got += tally.got
            unseen += max(depths[queue] - tally.got, 0) if tally.stopped_by or takes[queue] < depths[queue] else 0
            missed |= tally.refused
            told[queue] = {"target": self.targets[queue], "got": tally.got} | _counted(tally)
            stopped_by = tally.stopped_by or stopped_by
            if tally.lost is not None:
                warnings.append(f"the connection to the broker was lost: {tally.lost}")
                missed |= {other: "the connection was lost" for other in depths if other not in told}
                # As of a drain: no number was reached, and nobody asked for the end.
                stopped_by, unseen = "time" if stopped_by == "empty" else stopped_by, 0
                break
        if unseen:
            stopped_by = "messages" if stopped_by == "empty" else stopped_by
            warnings.append(
                f"{unseen} message(s) were not looked at. What stays is met first by the next run too: raise the bound "
                f"on {'seconds' if stopped_by == 'time' else stopped_by} (docs/check.md), or check such a queue alone"
            )
        counts, reasons = count(results, got)
        is_complete = counts[LEFT] == results[_STAYED] and not missed and not any("was lost" in one for one in warnings)
        return Report(
            "check",
            outcome="ok" if is_complete else "partial",
            stopped_by=stopped_by,
            counts=counts,
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=(*warnings, *self.broker.warnings(), *unread(missed)),
            preview=tuple(handler.preview),
            details={"queues": told},
        )

    def _depths(self) -> tuple[dict[str, int], dict[str, str]]:
        """What is there at the start; a queue that only a wildcard named may have gone since."""
        depths: dict[str, int] = {}
        missed: dict[str, str] = {}
        queues = sorted(self.targets)
        while queues:
            part = queues[:_ASKED_AT_ONCE]
            try:
                found, unknown = self.broker.depths(part, ())
            except TopologyMissing as missing:
                if missing.name in self.named:
                    raise
                queues.remove(missing.name)
                continue
            except ChannelRefused as refused:
                # It does not say which of them; each is asked alone then.
                if len(part) == 1:
                    missed[part[0]] = refused.text
                    queues = queues[1:]
                    continue
                found, unknown = {}, {}
                for queue in part:
                    alone, why = self._depth_of(queue)
                    found |= alone
                    unknown |= why
            depths |= found
            missed |= unknown
            queues = queues[_ASKED_AT_ONCE:]
        return depths, missed

    def _depth_of(self, queue: str) -> tuple[Mapping[str, int], Mapping[str, str]]:
        try:
            return self.broker.depths([queue], ())
        except (TopologyMissing, ChannelRefused) as error:
            if isinstance(error, ChannelRefused):
                return {}, {queue: error.text}
            if queue in self.named:
                raise
            return {}, {}


def _counted(tally: Tally) -> dict[str, object]:
    counts: Counter[str] = Counter()
    for (counts_as, reason), number in tally.results.items():
        counts[WITHIN_LIMIT if (counts_as, reason) == _STAYED else counts_as] += number
    return {"moved": counts[MOVED], "within_limit": counts[WITHIN_LIMIT], "left": counts[LEFT]}


class _Handler:
    """One message after another; it waits for nothing."""

    def __init__(self, check: Check) -> None:
        self.preview: list[dict[str, str]] = []
        self._check = check
        self._login = check.broker.login
        self._size = check.broker.properties_limit
        self._limit = check.max_deaths
        self._destinations = {queue: Origin(target, "", target) for queue, target in check.targets.items()}
        prefix, numbers = os.urandom(12).hex(), itertools.count()
        self._new_id = lambda: f"{prefix}{next(numbers):08x}"

    def handle(self, delivery: Delivery) -> Instruction:
        envelope = open_envelope(
            delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
        )
        headers = envelope.headers
        if headers is None:
            return Hold(LEFT, UNREADABLE)
        counted = failures(headers)
        if counted.failures <= self._limit:
            return Hold(LEFT, WITHIN_LIMIT)
        journey = journey_of(envelope, headers, self._check.trust, self._new_id)
        destination = self._destinations[delivery.receipt.queue]
        if self._check.dry_run:
            self._show(delivery.receipt.queue, destination, journey, counted)
            return Hold(MOVED, counted.by)
        return self._move(envelope, journey, counted, destination)

    def _move(self, envelope: Envelope, journey: Journey, counted: Count, destination: Origin) -> Instruction:
        route = self._check.destinations.route(destination)
        if route is not None:
            properties = self._stamp(envelope, journey, counted)
            if properties is None:
                return Hold(LEFT, HEADERS_TOO_LARGE)
            return Publish(journey.id, route, properties, MOVED, counted.by, destination)
        if self._check.destinations.is_gone(destination) or self._check.destinations.is_unclear(destination):
            return Hold(LEFT, NO_TARGET)
        return AwaitOrigin(destination)

    def _stamp(self, envelope: Envelope, journey: Journey, counted: Count) -> bytes | None:
        reason = f"{TOO_MANY_DEATHS}: {counted.failures} by {counted.by}, at most {self._limit} are allowed"
        now = int(time.time())
        return stamp(envelope, journey, login=self._login, limit=self._size, reason=reason, dead_at=now)

    def _show(self, queue: str, destination: Origin, journey: Journey, counted: Count) -> None:
        if len(self.preview) >= _PREVIEWED:
            return
        origin = journey.origin
        shown = {"queue": queue, "id": journey.id, "event": origin.key if origin is not None else ""}
        shown |= {"origin": origin.name if origin is not None else "", "decision": MOVED}
        shown |= {"exchange": "", "key": destination.key}
        self.preview.append(shown | {"reason": f"{counted.failures} by {counted.by}"})
