"""What the runs ask of the outside world; the adapters fit these without knowing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dlqbatch.message.delivery import Delivery, Instruction, Route
    from dlqbatch.message.envelope import Origin


class Origins(Protocol):
    """What is known in this run of the places messages failed in."""

    def route(self, origin: Origin) -> Route | None: ...
    def is_gone(self, origin: Origin) -> bool: ...
    def is_unclear(self, origin: Origin) -> bool: ...


class Tally(Protocol):
    """What became of each message that a transfer took."""

    @property
    def got(self) -> int: ...
    @property
    def results(self) -> Counter[tuple[str, str | None]]: ...
    @property
    def stopped_by(self) -> str | None: ...
    @property
    def lost(self) -> str | None: ...
    @property
    def refused(self) -> Mapping[str, str]: ...


class Broker(Protocol):
    """One connection, for one run."""

    @property
    def login(self) -> bytes: ...
    @property
    def properties_limit(self) -> int: ...
    def depths(self, queues: Iterable[str], exchanges: Iterable[str]) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """What waits in each queue, and why it is not known of some."""

    def transfer(self, takes: Mapping[str, int], handle: Callable[[Delivery], Instruction]) -> Tally: ...
    def warnings(self) -> Sequence[str]: ...
