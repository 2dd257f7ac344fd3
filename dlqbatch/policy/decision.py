"""What is to become of one message: a closed set."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dlqbatch.message.envelope import Journey, Origin


class Delay(NamedTuple):
    """Wait in a tier of the ladder, then return."""

    journey: Journey
    event: str
    tier: int


class Return(NamedTuple):
    """Go back to where it failed."""

    journey: Journey
    origin: Origin


class DeadLetter(NamedTuple):
    """Go to the dead-letter queue."""

    journey: Journey
    reason: str
    detail: str = ""
    """For the log."""
    told: bool = False
    """The detail goes into the message's reason as well, for whoever finds it in the dead-letter queue."""

    @property
    def text(self) -> str:
        return f"{self.reason}: {self.detail}" if self.told else self.reason


class Leave(NamedTuple):
    """Stay where it is."""

    reason: str


Decision = Delay | Return | DeadLetter | Leave
