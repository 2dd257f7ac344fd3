"""What is to become of one message: a closed set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlqbatch.message.envelope import Journey, Origin


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait in a tier of the ladder, then return."""

    journey: Journey
    event: str
    tier: int


@dataclass(frozen=True, slots=True)
class Return:
    """Go back to where it failed."""

    journey: Journey
    origin: Origin


@dataclass(frozen=True, slots=True)
class DeadLetter:
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


@dataclass(frozen=True, slots=True)
class Leave:
    """Stay where it is."""

    reason: str


Decision = Delay | Return | DeadLetter | Leave
