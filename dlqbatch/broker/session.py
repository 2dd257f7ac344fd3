"""One run's connection to the broker, and all that the run asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlqbatch.broker import declare
from dlqbatch.broker.frames import properties_limit
from dlqbatch.broker.transfer import Bounds, Take, Tally, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.origins import Origins
    from dlqbatch.message.delivery import Delivery, Instruction


@dataclass(frozen=True, slots=True)
class Session:
    connection: Connection
    origins: Origins
    bounds: Bounds
    quorum: frozenset[str] = field(default_factory=frozenset)
    """Those of our queues that are quorum queues."""
    notes: tuple[str, ...] = ()
    """What a reader of the report has to know beforehand."""

    @property
    def login(self) -> bytes:
        return self.connection.login

    @property
    def properties_limit(self) -> int:
        return properties_limit(self.connection.frame_max)

    def depths(self, queues: Iterable[str], exchanges: Iterable[str]) -> Mapping[str, int]:
        return declare.depths(self.connection, queues, exchanges)

    def transfer(self, takes: Mapping[str, int], handle: Callable[[Delivery], Instruction]) -> Tally:
        wanted = [Take(queue, limit, queue in self.quorum) for queue, limit in takes.items()]
        return Transfer(self.connection, self.origins, handle, self.bounds).run(wanted)

    def warnings(self) -> Sequence[str]:
        blocked = ["the broker takes no publishes: a memory or disk alarm"] if self.connection.blocked else []
        return [*self.notes, *blocked, *self.origins.warnings]
