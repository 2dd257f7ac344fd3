"""What a run tells of itself: counts by decision, and why it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from dlqbatch.runs.ports import Tally

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
    emptied: tuple[str, ...] = ()
    """Queues that this run has seen empty; for the log of runs."""
    details: Mapping[str, object] = field(default_factory=dict)
    """What else this job has to say, by name; it stands in the JSON beside the rest."""

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
            **self.details,
        }


def unread(queues: Mapping[str, str]) -> tuple[str, ...]:
    """A warning for each queue that could not be read, by why."""
    return tuple(f"'{queue}' was not read to its end: {why}" for queue, why in queues.items())


def ending(
    depths: Mapping[str, int], takes: Mapping[str, int], tally: Tally, spare: int, missed: Container[str]
) -> tuple[str, tuple[str, ...]]:
    """Why the run stopped, and which queues it has seen empty.

    A queue is seen empty when it gave less than was asked for, or when all that it held could be asked for and was
    taken. Where a message had to stay, only those count that held none at all.
    """
    is_cut = tally.stopped_by is not None or tally.lost is not None or tally.failure is not None
    has_left = any(decision == LEFT and number for (decision, _), number in tally.results.items())
    at_the_bound = sum(tally.taken.values()) >= sum(takes.values()) + spare
    is_capped = spare > 0 and at_the_bound
    through = []
    for queue, depth in depths.items():
        asked, gave = takes.get(queue, 0), tally.taken.get(queue, 0)
        if queue not in missed and not is_cut and (gave < asked or (asked >= depth and not is_capped)):
            through.append(queue)
    is_empty = len(through) == len([queue for queue in depths if queue not in missed])
    emptied = [queue for queue in through if not has_left or not depths[queue]]
    if tally.lost is not None:
        # No number was reached, nobody asked for the end, and there is more to take: only its time was over, too soon.
        return tally.stopped_by or "time", tuple(emptied)
    return tally.stopped_by or ("empty" if is_empty else "messages"), tuple(emptied)


def count(
    results: Mapping[tuple[str, str | None], int], got: int, decisions: tuple[str, ...] = DECISIONS
) -> tuple[dict[str, int], dict[str, int]]:
    """Counts and reasons of a run from its single results; AssertionError if a message was counted twice or never."""
    counts = {"got": got, **dict.fromkeys(decisions, 0)}
    reasons: dict[str, int] = {}
    for (decision, reason), number in sorted(results.items(), key=str):
        counts[decision] += number
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + number
    if sum(counts[decision] for decision in decisions) != got:
        raise AssertionError(f"the counts do not add up to what was got: {counts}")
    return counts, reasons
