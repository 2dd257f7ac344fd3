"""What would have become of what failed, had its events had other numbers of retries: from what is on record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from dlqbatch.drain.event_delays import together

Fate = Literal["as_it_was", "dead_sooner", "handled", "dead_all_the_same", "unknown"]
FATES: Final[tuple[Fate, ...]] = ("as_it_was", "dead_sooner", "handled", "dead_all_the_same", "unknown")


class Died(NamedTuple):
    """So many messages that died alike."""

    event: str | None
    retries: int
    """Delayed retries that each had before it died."""
    failed_after: int
    """Retries from the dead store that failed."""
    succeeded_after: bool
    """The next one succeeded."""
    messages: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """One event with another number of retries."""

    event: str
    max_retries: int
    messages: int
    fates: Mapping[Fate, int]
    retries: int
    """Delayed retries of all these messages, more than there were; fewer where it is negative."""
    waits: float | None = None
    """Seconds that each is delayed until its last retry; None where that differs between the events of a pattern."""

    def as_dict(self) -> dict[str, object]:
        named: dict[str, object] = {"event": self.event, "max_retries": self.max_retries, "messages": self.messages}
        return named | {fate: self.fates[fate] for fate in FATES} | {"retries": self.retries, "waits": self.waits}


def fate(died: Died, max_retries: int) -> Fate:
    """What had become of such a message.

    A retry from the dead store stands for the delayed retry that it would have been. It came later, so that it may have
    found mended what the delayed one would not have: `handled` is at most so many.
    """
    more = max_retries - died.retries
    if more == 0:
        return "as_it_was"
    if more < 0:
        return "dead_sooner"
    if died.failed_after >= more:
        return "dead_all_the_same"
    return "handled" if died.succeeded_after else "unknown"


def retries_more(died: Died, max_retries: int) -> int:
    """The delayed retries that such a message would have had besides; where its fate is unknown all that it may."""
    more = max_retries - died.retries
    return min(more, died.failed_after + 1) if fate(died, max_retries) == "handled" else more


def simulate(
    history: Iterable[Died],
    number_of: Callable[[str], tuple[str, int] | None],
    delays_of: Callable[[str], Sequence[int] | None] = lambda _: None,
) -> list[Simulated]:
    """By the rule that decides about each event, those with most messages first; other events are left out.

    `number_of` names the rule of an event, and its number of retries; `delays_of` has the delays of an event.
    """
    found: dict[tuple[str, int], dict[Fate, int]] = {}
    retries: dict[tuple[str, int], int] = {}
    waits: dict[tuple[str, int], set[float | None]] = {}
    for died in history:
        rule = number_of(died.event) if died.event is not None else None
        if rule is not None:
            fates = found.setdefault(rule, dict.fromkeys(FATES, 0))
            fates[fate(died, rule[1])] += died.messages
            retries[rule] = retries.get(rule, 0) + retries_more(died, rule[1]) * died.messages
            delays = delays_of(died.event or "")
            waits.setdefault(rule, set()).add(None if delays is None else together(delays, rule[1]) / 1000)
    simulated = [
        Simulated(
            *rule, sum(fates.values()), fates, retries[rule], waits[rule].pop() if len(waits[rule]) == 1 else None
        )
        for rule, fates in found.items()
    ]
    return sorted(simulated, key=lambda each: (-each.messages, each.event))
