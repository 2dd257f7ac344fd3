"""What the runs ask of the outside world; the adapters fit these without knowing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from dlqbatch.errors import DlqbatchError
    from dlqbatch.message.delivery import Delivery, Instruction, Offer, Route
    from dlqbatch.message.envelope import Origin
    from dlqbatch.policy.examine import Examined


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
    def taken(self) -> Mapping[str, int]: ...
    @property
    def refused(self) -> Mapping[str, str]: ...
    @property
    def failure(self) -> DlqbatchError | None: ...


class Broker(Protocol):
    """One connection, for one run."""

    @property
    def login(self) -> bytes: ...
    @property
    def properties_limit(self) -> int: ...
    def depths(self, queues: Iterable[str], exchanges: Iterable[str]) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """What waits in each queue, and why it is not known of some."""

    def transfer(
        self,
        takes: Mapping[str, int],
        spare: int,
        handle: Callable[[Delivery], Instruction],
        store: Callable[[Sequence[Any]], Sequence[tuple[str, str | None]]] = ...,
    ) -> Tally: ...
    def warnings(self) -> Sequence[str]: ...


class Source(Protocol):
    """A store's messages on their way to the broker; told at once what the broker took."""

    def more(self, room: int) -> Sequence[Offer] | None:
        """At most so many; none if there are none at the moment, None if there will be no more."""

    def confirmed(self, tag: int) -> None: ...
    def held(self, tag: int, reason: str | None) -> None:
        """It was not published, or nobody knows whether it was."""

    def flush(self) -> None:
        """Called often: the time to write down what was confirmed."""


class Sender(Protocol):
    """One connection that a store's messages leave through."""

    @property
    def login(self) -> bytes: ...
    @property
    def properties_limit(self) -> int: ...
    def send(self, source: Source, handle: Callable[[Delivery], Instruction]) -> Tally: ...
    def warnings(self) -> Sequence[str]: ...


class DeadStore(Protocol):
    """Where dead messages become rows."""

    def store(self, batch: Sequence[Examined], now: datetime) -> Sequence[tuple[str, str | None]]:
        """Committed when it returns: for each message what it counts as, and why.

        An empty batch finds out whether the store is there.
        """

    def acknowledged(self) -> None:
        """Every acknowledgement of this run has reached the broker."""
