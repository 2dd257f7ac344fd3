"""One run's connection to the broker, and all that the run asks of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from dlqbatch.broker import declare
from dlqbatch.broker.frames import properties_limit
from dlqbatch.broker.transfer import LEFT, Bounds, Store, Take, Tally, Transfer, stores_nothing
from dlqbatch.errors import BrokerLost
from dlqbatch.message.delivery import Hold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.offering import Source
    from dlqbatch.broker.origins import Origins
    from dlqbatch.message.delivery import Delivery, Instruction


_ANSWER_WITHIN: Final = 5.0
"""Seconds that a queue may take to find its leader."""


def _put_back(_: Delivery) -> Hold:
    return Hold(LEFT)


@dataclass(frozen=True, slots=True)
class Session:
    connection: Connection
    origins: Origins
    bounds: Bounds
    quorum: frozenset[str] = field(default_factory=frozenset)
    """Those of our queues that are quorum queues."""
    notes: tuple[str, ...] = ()
    """What a reader of the report has to know beforehand."""
    published_to: frozenset[str] = frozenset()
    """Exchanges of ours that messages may go to, wherever they come from."""

    @property
    def login(self) -> bytes:
        return self.connection.login

    @property
    def properties_limit(self) -> int:
        return properties_limit(self.connection.frame_max)

    def depths(self, queues: Iterable[str], exchanges: Iterable[str]) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """What waits in each queue, and why it is not known of some.

        A quorum queue that has no leader for the moment is declared with a depth of 0; only a get tells it from an
        empty one. What such a get finds is put back at once.
        """
        found = declare.depths(self.connection, queues, exchanges)
        doubtful = [queue for queue, depth in found.items() if not depth and queue in self.quorum]
        if not doubtful:
            return found, {}
        patience = replace(self.bounds, stop_at=min(self.bounds.stop_at, time.monotonic() + _ANSWER_WITHIN))
        asking = Transfer(self.connection, self.origins, _put_back, patience)
        tally = asking.run([Take(queue, 1, is_quorum=True) for queue in doubtful])
        if tally.lost is not None:
            raise BrokerLost(tally.lost)
        led = [queue for queue, taken in tally.taken.items() if taken]
        counted = declare.depths(self.connection, led, ())
        # The one that was put back may not be counted yet; asking for one too many is answered with "empty".
        return {**found, **{queue: depth + 1 for queue, depth in counted.items()}}, tally.refused

    def transfer(
        self,
        takes: Mapping[str, int],
        spare: int,
        handle: Callable[[Delivery], Instruction],
        store: Store = stores_nothing,
    ) -> Tally:
        wanted = [Take(queue, limit, queue in self.quorum) for queue, limit in takes.items()]
        refused = self.origins.unwritable(self.published_to) if self.published_to else frozenset[str]()
        return Transfer(self.connection, self.origins, handle, self.bounds, store, refused).run(wanted, spare)

    def send(self, source: Source, handle: Callable[[Delivery], Instruction]) -> Tally:
        """Publish what a source has, by the same engine that moves messages from queue to queue."""
        return Transfer(self.connection, self.origins, handle, self.bounds).run((), source=source)

    def warnings(self) -> Sequence[str]:
        blocked = ["the broker takes no publishes: a memory or disk alarm"] if self.connection.blocked else []
        return [*self.notes, *blocked, *self.origins.warnings]
