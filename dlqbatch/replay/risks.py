"""The risks of a replay plan, for a person to read before it is applied: its possible duplicates, for example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BACKED_UP: Final = 1_000
"""An origin with more waiting messages counts as backed up."""
FAILS_AGAIN: Final = 0.5
"""The share of failed attempts of the last hour from which on messages are expected to come straight back."""
LARGEST_BODY: Final = 16 * 1024 * 1024
LARGEST_BODY_BEFORE_4: Final = 128 * 1024 * 1024
_FIRST_WITH_SMALL_BODIES: Final = (4, 0)
_MOST_QUEUES: Final = 5


class RiskName(StrEnum):
    ORIGIN_MISSING = "origin-missing"
    ORIGIN_NOT_ALLOWED = "origin-not-allowed"
    RESOLVED_BEFORE = "resolved-before"
    REPLACED = "replaced"
    POSSIBLE_DUPLICATE = "possible-duplicate"
    ORIGIN_UNKNOWN = "origin-unknown"
    ORIGIN_UNCLEAR = "origin-unclear"
    ORIGIN_EXCHANGE = "origin-exchange"
    NO_CONSUMERS = "no-consumers"
    BACKED_UP = "backed-up"
    LOOPS_BACK = "loops-back"
    FAILED_BEFORE = "failed-before"
    RULE_SAYS_MANUAL = "rule-says-manual"
    BODY_TOO_LARGE = "body-too-large"
    NOT_EXAMINED = "not-examined"


MENDED: Final = frozenset({RiskName.LOOPS_BACK, RiskName.FAILED_BEFORE, RiskName.RULE_SAYS_MANUAL})
"""The risks that follow from a cause which is still there, so that they are over when somebody has mended it."""
_GRAVITY: Final = {name: place for place, name in enumerate(RiskName)}


@dataclass(frozen=True, slots=True)
class Risk:
    name: RiskName
    messages: int
    """How many messages of the plan it concerns."""
    says: str
    """What it means and what to do, for a person."""


@dataclass(frozen=True, slots=True)
class Place:
    """An origin as the broker shows it."""

    name: str
    is_there: bool | None
    """None: it could not be looked at."""
    messages: int | None = None
    consumers: int | None = None
    """None: an exchange has neither."""
    why: str = ""
    is_exchange: bool = False
    queues: tuple[str, ...] = ()
    """The queues that an exchange leads its messages to, as far as they are known."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a plan's messages before any of them moves."""

    by_place: Mapping[str, int]
    """Messages by where they go, without those whose origin is unknown."""
    without_origin: int = 0
    recent: Mapping[str, tuple[int, int]] | None = None
    """Attempts of the last hour that failed, and all that ended, by where they were sent."""
    failed_before: int = 0
    """Messages of groups in which a retry from the store failed before."""
    said_manual: Mapping[str, int] | None = None
    """The messages of each rule that says manual."""
    replaced: int = 0
    """Messages whose work another message does as well, by an edit: it goes too, or went already."""
    replaced_by: tuple[int, int] | None = None
    """The ids of the first such message and of that other message."""
    large_bodies: int = 0
    largest_body: int = LARGEST_BODY
    possible_duplicates: int = 0
    """Messages that ingest could not tell from another one."""
    not_allowed: int = 0
    """Messages whose origin only a client's headers name, and nobody has allowed; apply leaves them to a person."""
    resolved_before: int = 0
    """Messages that a person has taken back after they were resolved."""


def unanswered(found: Iterable[Risk], mended: str | None) -> tuple[Risk, ...]:
    """The risks without those that a mend answers, if somebody says what was mended."""
    return tuple(risk for risk in found if mended is None or risk.name not in MENDED)


def largest_body(version: tuple[int, ...]) -> int:
    """Bytes of a body that a broker of this version takes unless it is set up otherwise."""
    return LARGEST_BODY if version >= _FIRST_WITH_SMALL_BODIES else LARGEST_BODY_BEFORE_4


def risks(facts: Facts, places: Mapping[str, Place]) -> tuple[Risk, ...]:
    """The gravest first; none of them stops a plan, but `apply` refuses while an origin is missing."""
    found: list[Risk] = []
    for name, count in facts.by_place.items():
        found.extend(_of_place(places[name], count, (facts.recent or {}).get(name, (0, 0))))
    if facts.without_origin:
        says = "nobody knows where they failed, so they are skipped; `--to-queue` says where to send them"
        found.append(Risk(RiskName.ORIGIN_UNKNOWN, facts.without_origin, says))
    if facts.not_allowed:
        says = (
            "only headers that a client wrote name their origin, and `dlqbatch.origins-allowed` does not list it: "
            "apply leaves them to a person. List it, or plan again with `--to-queue`"
        )
        found.append(Risk(RiskName.ORIGIN_NOT_ALLOWED, facts.not_allowed, says))
    if facts.resolved_before:
        says = (
            "they were resolved before somebody took them back: their work was done, and is done twice. `dlqbatch "
            "messages journal` shows who did it and why; plan again without them if that was a mistake"
        )
        found.append(Risk(RiskName.RESOLVED_BEFORE, facts.resolved_before, says))
    if facts.replaced:
        example = " as message {1} beside message {0}".format(*facts.replaced_by) if facts.replaced_by else ""
        says = (
            f"an edit made another message for the same work{example}. It is done twice if both go; `dlqbatch messages "
            "journal` shows what became of the other. Discard one of them, and plan again"
        )
        found.append(Risk(RiskName.REPLACED, facts.replaced, says))
    if facts.possible_duplicates:
        says = (
            "ingest could not tell them from others that are alike, and flagged both: the work may be done twice. "
            "Compare them with `dlqbatch messages show`, and discard those that are the same"
        )
        found.append(Risk(RiskName.POSSIBLE_DUPLICATE, facts.possible_duplicates, says))
    if facts.large_bodies:
        says = (
            f"their bodies are larger than {facts.largest_body // 2**20} MiB, which this broker refuses by default. "
            "Ask who runs it for `max_message_size`, or plan again without them"
        )
        found.append(Risk(RiskName.BODY_TOO_LARGE, facts.large_bodies, says))
    if facts.failed_before:
        says = (
            "equal failures came back from a retry before. If the cause is mended since, plan again with `--mended "
            "TICKET`: the canary sends a few first, and stops if they come back. If not, mend it first"
        )
        found.append(Risk(RiskName.FAILED_BEFORE, facts.failed_before, says))
    for rule, count in (facts.said_manual or {}).items():
        says = (
            f"the rule '{rule}' says manual: the same message is expected to fail the same way. Edit it (`dlqbatch "
            "messages edit`), or plan again with `--mended TICKET` if the consumer has changed"
        )
        found.append(Risk(RiskName.RULE_SAYS_MANUAL, count, says))
    return tuple(sorted(found, key=lambda risk: (_GRAVITY[risk.name], -risk.messages)))


def _of_place(place: Place, count: int, recent: tuple[int, int]) -> Iterable[Risk]:
    name = place.name
    if place.is_there is None:
        yield Risk(RiskName.ORIGIN_UNCLEAR, count, f"'{name}' could not be looked at: {place.why}")
        return
    if not place.is_there:
        says = f"'{name}' is not on the broker; declare it, or plan again with `--to-queue`. Apply refuses until then"
        yield Risk(RiskName.ORIGIN_MISSING, count, says)
        return
    if place.is_exchange:
        known = f" ({', '.join(place.queues[:_MOST_QUEUES])}{', …' if len(place.queues) > _MOST_QUEUES else ''})"
        says = (
            f"'{name}' is an exchange: every queue that it leads them to gets them{known if place.queues else ''}, "
            "also those whose consumers did their work. `--to-queue` sends them to one queue alone"
        )
        yield Risk(RiskName.ORIGIN_EXCHANGE, count, says)
    if place.consumers == 0:
        says = (
            f"nobody has subscribed to '{name}': they wait there, unless a worker polls (basic.get is not counted). "
            "Start its consumers first"
        )
        yield Risk(RiskName.NO_CONSUMERS, count, says)
    if place.messages is not None and place.messages > BACKED_UP:
        says = (
            f"{place.messages:,} messages wait in '{name}' already; these come behind them. Wait, or go slowly with "
            "`--rate`"
        )
        yield Risk(RiskName.BACKED_UP, count, says)
    failed, ended = recent
    if failed and failed >= ended * FAILS_AGAIN:
        says = (
            f"of the last {ended:,} retries to '{name}', {failed:,} failed: these may come straight back. Mend the "
            "cause first, and plan again with `--mended TICKET`; the canary shows whether it is mended"
        )
        yield Risk(RiskName.LOOPS_BACK, count, says)
