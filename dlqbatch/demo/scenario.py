"""Three messages: what their consumers do, what is to become of each, and what was seen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf
from typing import Final

MAX_RETRIES: Final = 3
ACKNOWLEDGED: Final = "acknowledged"
SCALED_TTLS: Final = (1_000, 1_500, 2_000)
REAL_TTLS: Final = (10_000, 15_000, 20_000)
_NUMBERS: Final = ("no", "one", "two", "three")


class Kind(StrEnum):
    """What can be seen to happen to a message."""

    PUBLISHED = "published"
    REJECTED = "rejected"
    FAILED = "failed"
    DELAYED = "delayed"
    EXPIRED = "expired"
    PASSED = "passed"
    DEAD = "dead"


_ENDS: Final = frozenset((Kind.PASSED, Kind.DEAD))


@dataclass(frozen=True, slots=True)
class Outcome:
    deliveries: int = 0
    """How often its consumer received it."""
    retries: int = 0
    tiers: tuple[int, ...] = ()
    where: str = ""
    """The queue it was last seen in, without the demo's prefix."""
    reason: str | None = None
    changed: bool = False

    def __str__(self) -> str:
        if self.deliveries == 1 and self.where == ACKNOWLEDGED and not self.changed:
            return "passed at once"
        words = ["failed"] if self.deliveries else ["never delivered"]
        if self.tiers:
            number = len(self.tiers)
            words.append(f"{_NUMBERS[number] if number < len(_NUMBERS) else number} tier{'s' if number > 1 else ''}")
        if self.where == ACKNOWLEDGED:
            words.append("passed")
        else:
            words.append("dead-letter queue" if self.reason else f"last seen in {self.where}")
        return ", ".join([*words, "changed on the way"] if self.changed else words)


@dataclass(frozen=True, slots=True)
class Part:
    """A message and its consumer, which rejects the first `failures` deliveries."""

    event: str
    failures: float
    expected: Outcome


PARTS: Final = (
    Part("rk.test.pass", 0, Outcome(1, 0, (), ACKNOWLEDGED)),
    Part("rk.test.fail", inf, Outcome(4, 3, (1, 2, 3), "dlq-queue", "retries-exhausted")),
    Part("rk.test.fail.pass", 1, Outcome(2, 1, (1,), ACKNOWLEDGED)),
)


@dataclass(frozen=True, slots=True)
class Step:
    at: float
    """Seconds since the messages were published."""
    where: str
    kind: Kind
    retries: int = 0
    tier: int = 0
    ttl: float = 0.0
    """Seconds that it now waits in the tier."""
    reason: str | None = None

    def __str__(self) -> str:
        back = "drain: return; " if self.retries else ""
        return {
            Kind.PUBLISHED: "published",
            Kind.REJECTED: f"{back}rejected by its consumer",
            Kind.FAILED: "dead-lettered by the broker; waits for a drain",
            Kind.DELAYED: f"drain: delay, retry {self.retries} of {MAX_RETRIES}, for {self.ttl:g} s",
            Kind.EXPIRED: "its delay is over; waits for a drain",
            Kind.PASSED: f"{back}acknowledged by its consumer",
            Kind.DEAD: f"drain: dead-letter, {self.reason}",
        }[self.kind]


@dataclass(slots=True)
class Trail:
    """What was seen of a message so far."""

    part: Part
    steps: list[Step] = field(default_factory=list)
    changed: bool = False

    @property
    def deliveries(self) -> int:
        return sum(step.kind in {Kind.REJECTED, Kind.PASSED} for step in self.steps)

    @property
    def is_over(self) -> bool:
        return any(step.kind in _ENDS for step in self.steps)

    @property
    def is_as_expected(self) -> bool:
        return self.outcome == self.part.expected

    @property
    def outcome(self) -> Outcome:
        # The end counts, although a busy broker may have shown an earlier step later.
        ends = [step for step in self.steps if step.kind in _ENDS]
        last = (ends or self.steps or [Step(0, "", Kind.PUBLISHED)])[-1]
        return Outcome(
            deliveries=self.deliveries,
            retries=last.retries,
            tiers=tuple(step.tier for step in self.steps if step.kind is Kind.DELAYED),
            where=ACKNOWLEDGED if last.kind is Kind.PASSED else last.where,
            reason=last.reason,
            changed=self.changed,
        )


@dataclass(frozen=True, slots=True)
class Result:
    trails: Sequence[Trail]
    counts: Mapping[str, int]
    """The reports of all drains added up."""
    drains: int
    seconds: float

    @property
    def differences(self) -> list[str]:
        """A sentence for everything that did not go as expected."""
        found: list[str] = []
        for trail in self.trails:
            wanted, seen = asdict(trail.part.expected), asdict(trail.outcome)
            found += [
                f"{trail.part.event}: {name} is {seen[name]}, expected {wanted[name]}"
                for name in wanted
                if seen[name] != wanted[name]
            ]
        outcomes = [trail.part.expected for trail in self.trails]
        totals = {
            "delayed": sum(len(one.tiers) for one in outcomes),
            "returned": sum(one.deliveries - 1 for one in outcomes),
            "dead_lettered": sum(one.reason is not None for one in outcomes),
        }
        for name, number in (totals | {"got": sum(totals.values())}).items():
            if self.counts.get(name, 0) != number:
                found.append(f"all drains together: {name} is {self.counts.get(name, 0)}, expected {number}")
        return found

    def as_dict(self) -> dict[str, object]:
        messages = [
            {
                "message": trail.part.event,
                "as_expected": trail.is_as_expected,
                "expected": str(trail.part.expected),
                "happened": str(trail.outcome),
                **asdict(trail.outcome),
                "journey": [{"at": round(step.at, 3), "where": step.where, "what": str(step)} for step in trail.steps],
            }
            for trail in self.trails
        ]
        return {
            "outcome": "failed" if self.differences else "ok",
            "differences": self.differences,
            "seconds": round(self.seconds, 3),
            "drains": self.drains,
            "counts": dict(self.counts),
            "messages": messages,
        }
