"""What a run tells of itself: counts by decision, and why it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DECISIONS: Final = ("delayed", "returned", "dead_lettered", "recorded", "moved", "left")
"""The counts that add up to `got`."""
LEFT: Final = "left"


@dataclass(frozen=True, slots=True)
class Report:
    job: str
    outcome: str
    """ok, partial (something was left, or the end was forced) or failed."""
    stopped_by: str
    """empty, messages, bytes, time or signal."""
    counts: Mapping[str, int]
    reasons: Mapping[str, int] = field(default_factory=dict)
    elapsed_seconds: float = 0.0
    dry_run: bool = False
    warnings: tuple[str, ...] = ()
    preview: tuple[Mapping[str, str], ...] = ()
    """Of a dry run: the first messages, and what would become of each."""

    @property
    def per_second(self) -> float:
        return round(self.counts["got"] / self.elapsed_seconds, 1) if self.elapsed_seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """Plain values, in the order people read them."""
        return {
            "job": self.job,
            "outcome": self.outcome,
            "stopped_by": self.stopped_by,
            **({"dry_run": True} if self.dry_run else {}),
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "elapsed_seconds": round(self.elapsed_seconds, 3),
            "per_second": self.per_second,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            **({"preview": [dict(line) for line in self.preview]} if self.preview else {}),
        }


def count(results: Mapping[tuple[str, str | None], int], got: int) -> tuple[dict[str, int], dict[str, int]]:
    """Counts and reasons of a run from its single results; AssertionError if a message was counted twice or never."""
    counts = {"got": got, **dict.fromkeys(DECISIONS, 0)}
    reasons: dict[str, int] = {}
    for (decision, reason), number in sorted(results.items(), key=str):
        counts[decision] += number
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + number
    if sum(counts[decision] for decision in DECISIONS) != got:
        raise AssertionError(f"the counts do not add up to what was got: {counts}")
    return counts, reasons
