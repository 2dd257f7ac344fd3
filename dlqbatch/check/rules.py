"""Which messages have failed too often to be tried again, and where they go instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dlqbatch.amqp.delivery import Envelope
from dlqbatch.amqp.headers import RETRIES, Headers
from dlqbatch.amqp.identity import Identity, own_journey
from dlqbatch.amqp.origin import Found, Trust, find_origin, is_malformed, journey_of_failure, salvaged_journey
from dlqbatch.amqp.patterns import ANY, is_wildcard, pattern
from dlqbatch.amqp.retry_headers import Journey, journey_so_far
from dlqbatch.amqp.table import LONGEST_NAME, to_bytes
from dlqbatch.amqp.x_death import deaths
from dlqbatch.errors import SettingsError

BY_DEATHS: Final = "x-death"
BY_RETRIES: Final = "retries"
TOO_MANY_DEATHS: Final = "too-many-deaths"


class Count(NamedTuple):
    """How often a message has failed, and who says so."""

    failures: int
    by: str


def failures(headers: Headers) -> Count:
    """The highest count of any death that the broker records, or our own retries if they are more."""
    by_deaths = max((death.times for death in deaths(headers)), default=0)
    field = headers.ours.get(RETRIES)
    by_retries = (field.as_integer() or 0) if field is not None else 0
    return Count(by_retries, BY_RETRIES) if by_retries > by_deaths else Count(by_deaths, BY_DEATHS)


def journey_of(
    envelope: Envelope, headers: Headers, trust: Trust, new_id: Callable[[], str], digest: Callable[[], str]
) -> Journey:
    """What a message that moves records of itself: the broker's deaths of it go into the history, and name no origin.

    As for a drain, one that only carries the headers of a message that failed before is another message.
    """
    journey = journey_so_far(headers)
    found = find_origin(envelope, headers, journey, trust, digest)
    if is_malformed(journey, found):
        return salvaged_journey(headers, journey, trust, new_id)
    if not isinstance(found, Found):
        journey = own_journey(journey, Identity.OTHER if found.identity is Identity.COPY else found.identity)
        return journey._replace(id=journey.id or new_id())
    # To move it is no trip of it, and without the broker's word nobody knows when it failed.
    return journey_of_failure(journey, found, None, None, new_id)._replace(trips=journey.trips)


@dataclass(frozen=True, slots=True)
class TargetNames:
    """Where the messages of each source go: one queue, or a name made of what the source's wildcard stood for."""

    sources: tuple[str, ...]
    """Names and wildcards, in the order in which they are tried."""
    target: str

    def problems(self) -> Iterable[str]:
        """What is wrong with them before any queue is known."""
        stars = len(ANY.findall(self.target))
        for source in self.sources:
            if stars and len(ANY.findall(source)) != stars:
                yield (
                    f"the target '{self.target}' takes what {stars} wildcard(s) stand for, and the source '{source}' "
                    f"has {len(ANY.findall(source))}; name one queue as the target, or a source with as many"
                )
        if not stars:
            yield from self._refused("any source", self.target)

    def of(self, queues: Iterable[str]) -> Mapping[str, str]:
        """The target of each queue; SettingsError, with every problem in it, if one must not be used."""
        found = {queue: self._target_of(queue) for queue in queues}
        problems = [problem for queue, target in found.items() for problem in self._refused(f"'{queue}'", target)]
        if problems:
            raise SettingsError(*problems)
        return found

    def _target_of(self, queue: str) -> str:
        if not is_wildcard(self.target):
            return self.target
        stood_for: Sequence[str] = next(
            (match.groups() for source in self.sources if (match := pattern(source).fullmatch(queue))), ()
        )
        parts = ANY.split(self.target)
        return "".join(part + text for part, text in zip(parts, (*stood_for, ""), strict=True))

    def _refused(self, of: str, target: str) -> Iterable[str]:
        for source in self.sources:
            if pattern(source).fullmatch(target):
                yield (
                    f"the target '{target}' of {of} is a source itself, by '{source}': what is moved there would be "
                    "looked at and moved again; choose another name. Nothing was moved"
                )
        size = len(to_bytes(target))
        if not 1 <= size <= LONGEST_NAME or target.startswith("amq."):
            yield f"the target '{target}' of {of} cannot be a queue: 1 to {LONGEST_NAME} bytes, not beginning with amq."
