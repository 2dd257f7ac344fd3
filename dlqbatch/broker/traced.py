"""The messages of a run that belong to a trace: when each was taken, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from dlqbatch.amqp.delivery import Delivery, Instruction
from dlqbatch.amqp.trace_context import NAME, TraceContext, trace_context


class TracedMessage(NamedTuple):
    """One message; times are nanoseconds of the clock."""

    context: TraceContext
    queue: str
    taken_at: int
    settled_at: int
    counts_as: str
    reason: str | None


class TracedMessages:
    """Notes the first `most` messages whose publisher recorded the span that they name; the others cost nothing."""

    def __init__(self, most: int) -> None:
        self.messages: list[TracedMessage] = []
        self._free = most
        self._taken: dict[Delivery, tuple[TraceContext, int]] = {}

    def watching(self, handle: Callable[[Delivery], Instruction]) -> Callable[[Delivery], Instruction]:
        """The same handler, which notes when a message comes for the first time."""

        def watched(delivery: Delivery) -> Instruction:
            if self._free and NAME in delivery.properties and delivery not in self._taken:
                context = trace_context(delivery.properties)
                if context is not None and context.is_sampled:
                    self._free -= 1
                    self._taken[delivery] = context, time.time_ns()
            return handle(delivery)

        return watched

    def settled(self, delivery: Delivery, counts_as: str, reason: str | None) -> None:
        if (taken := self._taken.pop(delivery, None)) is not None:
            context, taken_at = taken
            done = TracedMessage(context, delivery.receipt.queue, taken_at, time.time_ns(), counts_as, reason)
            self.messages.append(done)
