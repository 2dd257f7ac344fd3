"""Messages that come from a store instead of a queue, on their way through the same transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlqbatch.errors import DlqbatchError
from dlqbatch.message.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from dlqbatch.message.delivery import Offer

    class Source(Protocol):
        """Who has messages to publish, and wants to know which the broker took."""

        def more(self, room: int) -> Sequence[Offer] | None:
            """At most so many; none if there are none at the moment, None if there will be no more."""

        def confirmed(self, tag: int) -> None: ...
        def held(self, tag: int, reason: str | None) -> None:
            """It was not published, or nobody knows whether it was."""

        def flush(self) -> None:
            """Called often: the time to write down what was confirmed."""


_END: Final = b"\xce"
_FRAME_OVERHEAD: Final = 8


class Offering:
    """A fetch that asks a source; nothing has to be acknowledged, so that it never waits for the broker."""

    queue = ""

    def __init__(
        self,
        source: Source,
        frame_max: int,
        deliver: Callable[[Delivery], None],
        failed: Callable[[DlqbatchError], None],
    ) -> None:
        self.taken = 0
        self.lost: str | None = None
        self._source = source
        self._chunk = frame_max - _FRAME_OVERHEAD
        self._deliver = deliver
        self._failed = failed
        self._exhausted = False

    @property
    def outstanding(self) -> int:
        return 0

    @property
    def ahead(self) -> int:
        return 0

    @property
    def is_finished(self) -> bool:
        return self._exhausted

    @property
    def is_waiting(self) -> bool:
        return False

    @property
    def is_closed(self) -> bool:
        return True

    def ask(self, room: int) -> None:
        if self._exhausted or room <= 0:
            return
        try:
            offers = self._source.more(room)
        except DlqbatchError as error:
            self._exhausted = True
            self._failed(error)
            return
        if offers is None:
            self._exhausted = True
            return
        for offer in offers:
            self.taken += 1
            self._deliver(self._delivery(offer))

    def stop(self) -> None:
        self._exhausted = True

    def acknowledge_each(self) -> None:
        """Nothing waits for another one's confirm."""

    def flush(self) -> None:
        try:
            self._source.flush()
        except DlqbatchError as error:
            self._failed(error)

    def release(self) -> None:
        self.flush()

    def settle(self, tag: int) -> None:
        self._source.confirmed(tag)

    def hold(self, tag: int, reason: str | None) -> None:
        self._source.held(tag, reason)

    def _delivery(self, offer: Offer) -> Delivery:
        delivery = Delivery(self, offer.tag, offer.exchange, offer.routing_key, redelivered=False)
        delivery.properties, delivery.body_size = offer.properties, len(offer.body)
        cuts = range(0, len(offer.body), self._chunk)
        delivery.chunks = [offer.body[cut : cut + self._chunk] + _END for cut in cuts]
        return delivery
