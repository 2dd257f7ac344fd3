"""What a run holds of the broker: its connection, what is known of origins, and the bounds of the run.

A run reads the depths of its queues, then makes a transfer (transfer.py), whose tally says what became of each message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from pika.exceptions import AMQPError

from dlqbatch.amqp.delivery import Delivery, Hold, Instruction
from dlqbatch.broker.connection import BLOCKED, Connection, PublishingBlocked, Scratch
from dlqbatch.broker.fetch import MessageSource
from dlqbatch.broker.frames import properties_limit
from dlqbatch.broker.queue_types import held_back
from dlqbatch.broker.refusals import NO_PERMISSION
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.transfer import FAILURE, LEFT, Bounds, Store, Take, Tally, Transfer, stores_nothing
from dlqbatch.broker.versions import DELAYS_RETRIES
from dlqbatch.errors import BrokerLost, ChannelRefused, TopologyMissing

if TYPE_CHECKING:  # it loads HTTP, which most runs never need
    from dlqbatch.broker.management import Api

_ANSWER_WITHIN: Final = 5.0
"""Seconds that a queue may take to find its leader."""
_LAST_QUESTIONS: Final = 1.0
"""Seconds after the end of a run in which depths may still be read."""


@dataclass(frozen=True, slots=True)
class Session:
    connection: Connection
    origins: Origins
    bounds: Bounds
    quorum: frozenset[str] = field(default_factory=frozenset)
    """The queues of this run that are quorum queues."""
    notes: tuple[str, ...] = ()
    """What a reader of the report has to know beforehand."""
    published_to: frozenset[str] = frozenset()
    """Exchanges of ours that messages may go to, wherever they come from."""
    asks_empty_queues: bool = False
    """Whether a queue that looks empty gets a get: only a get shows whether we may read it."""
    api: Callable[[], Api] | None = None
    """The management API if it is set, for what AMQP does not show."""

    @property
    def login(self) -> bytes | None:
        return self.connection.login

    @property
    def properties_limit(self) -> int:
        return properties_limit(self.connection.frame_max)

    def depths(self, queues: Iterable[str], exchanges: Iterable[str]) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """What waits in each queue, and for some queues why that is not known, or not all.

        A quorum queue that has no leader for the moment is declared with a depth of 0; only a get distinguishes it from
        an empty queue. A message that the get brings is put back at once.
        """
        found = depths(self.connection, queues, exchanges)
        hiding: dict[str, str] = {}
        if self.api is not None and self.quorum and self.connection.version >= DELAYS_RETRIES:
            hiding = held_back(self.connection, self.api(), sorted(self.quorum & found.keys()))
        doubtful = [queue for queue, depth in found.items() if not depth]
        if not self.asks_empty_queues:
            doubtful = [queue for queue in doubtful if queue in self.quorum]
        if not doubtful:
            return found, hiding
        stop_at = min(self.bounds.stop_at, time.monotonic() + _ANSWER_WITHIN)
        bounds = replace(self.bounds, stop_at=stop_at, traced=None)
        gets = Transfer(self.connection, self.origins, lambda _: Hold(LEFT), bounds)
        tally = gets.run([Take(queue, 1, queue in self.quorum) for queue in doubtful])
        if tally.lost is not None:
            raise BrokerLost(tally.lost)
        led = [queue for queue, taken in tally.taken.items() if taken]
        counted = depths(self.connection, led, ())
        # The message that was put back may not be counted yet; a get too many is answered with "empty".
        return {**found, **{queue: depth + 1 for queue, depth in counted.items()}}, hiding | tally.refused

    def depths_left(self, queues: Iterable[str]) -> Mapping[str, int]:
        """The depths when all is done: without the queues that are refused to us, and within a second."""
        if self.connection.blocked:
            return {}
        found: dict[str, int] = {}
        until = time.monotonic() + _LAST_QUESTIONS
        with suppress(BrokerLost, AMQPError), self.connection.scratch() as scratch:
            for queue in queues:
                if time.monotonic() > until:
                    break
                with suppress(ChannelRefused):
                    found[queue] = scratch.ready(queue)
        return found

    def transfer(
        self,
        takes: Mapping[str, int],
        spare: int,
        handle: Callable[[Delivery], Instruction],
        store: Store = stores_nothing,
    ) -> Tally:
        wanted = [Take(queue, limit, queue in self.quorum) for queue, limit in takes.items()]
        try:
            refused = self.origins.unwritable(self.published_to) if self.published_to else frozenset[str]()
        except PublishingBlocked:
            return self.blocked(takes)
        tally = Transfer(self.connection, self.origins, handle, self.bounds, store, refused).run(wanted, spare)
        self._tidy(tally)
        return tally

    def _tidy(self, tally: Tally) -> None:
        if tally.lost is None and not self.connection.is_closing:
            with suppress(BrokerLost, AMQPError):
                self.origins.tidy(time.monotonic() + _LAST_QUESTIONS)

    def blocked(self, queues: Iterable[str]) -> Tally:
        """Nothing was taken from these, because nothing could be published."""
        self.connection.is_done = True
        return Tally(stopped_by=FAILURE, refused=dict.fromkeys(queues, BLOCKED))

    def send(self, source: MessageSource, handle: Callable[[Delivery], Instruction]) -> Tally:
        """Publish what a store has, by the transfer that moves messages from queue to queue."""
        self.origins.finds_alarms = True
        tally = Transfer(self.connection, self.origins, handle, self.bounds, source=source).run(())
        self._tidy(tally)
        # Nothing of the broker's was taken: there is no settlement to wait for.
        self.connection.is_done = tally.stopped_by == FAILURE
        return tally

    def warnings(self) -> Sequence[str]:
        blocked = [BLOCKED] if self.connection.blocked else []
        return [*self.notes, *blocked, *self.origins.warnings]


def depths(connection: Connection, queues: Iterable[str], exchanges: Iterable[str]) -> dict[str, int]:
    """Messages ready in each queue; TopologyMissing if a queue or an exchange is not there.

    A publish to a missing exchange would cost the channel and all that is under way.
    """
    counts = {}
    with connection.scratch() as scratch:
        for exchange in exchanges:
            look_for(scratch, "exchange", exchange)
        for queue in queues:
            try:
                counts[queue] = scratch.ready(queue)
            except ChannelRefused as refused:
                raise (TopologyMissing("queue", queue) if refused.is_gone else refused) from refused
    return counts


def look_for(scratch: Scratch, kind: str, name: str) -> None:
    try:
        scratch.look(kind, name)
    except ChannelRefused as refused:
        if refused.is_gone:
            raise TopologyMissing(kind, name) from refused
        # From 4.3 on even looking needs a permission; for what we neither read nor write we need none.
        if refused.code != NO_PERMISSION:
            raise


def share(max_messages: int, depths: Mapping[str, int], turn: int = 0) -> dict[str, int]:
    """How many to take from each queue: as evenly as their depths allow, and never more than there was at the start.

    So a deep queue cannot starve the others, and what comes back during a run does not keep it alive. `turn` says which
    queue is the first to get of what does not divide evenly: where each run gives it another, none goes empty for ever.
    """
    shares = dict.fromkeys(depths, 0)
    left, open_queues = max_messages, [queue for queue, depth in depths.items() if depth > 0]
    first = turn % len(open_queues) if open_queues else 0
    open_queues = open_queues[first:] + open_queues[:first]
    while left > 0 and open_queues:
        part = max(left // len(open_queues), 1)
        for queue in open_queues:
            more = min(part, depths[queue] - shares[queue], left)
            shares[queue] += more
            left -= more
        open_queues = [queue for queue in open_queues if shares[queue] < depths[queue]]
    return shares
