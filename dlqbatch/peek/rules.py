"""Which of the messages that were looked at are shown, and what a look costs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dlqbatch.amqp.patterns import matches
from dlqbatch.broker.versions import DELAYS_RETRIES


@dataclass(frozen=True, slots=True)
class Wanted:
    """The conditions; of several values of one, one has to hold, and an empty one is none."""

    events: tuple[str, ...] = ()
    """Names or topic patterns."""
    error_types: tuple[str, ...] = ()
    """With or without their package."""
    sources: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    """Somewhere in the body or a header, as they are shown."""

    def holds(
        self,
        *,
        event: str,
        error_type: str,
        source: str,
        headers: Mapping[str, object],
        fields: Collection[tuple[str, str]],
        body: str,
    ) -> bool:
        held = {(name, str(value)) for name, value in headers.items()}
        said = " ".join([body, *(f"{name} {value}" for name, value in held)]).lower() if self.texts else ""
        conditions = (
            (self.events, any(matches(each, event) for each in self.events)),
            (self.error_types, bool({error_type, error_type.rpartition(".")[2]} & set(self.error_types))),
            (self.sources, source in self.sources),
            (self.headers, not held.isdisjoint(self.headers)),
            (self.fields, any(each in fields for each in self.fields)),
            (self.texts, any(text.lower() in said for text in self.texts)),
        )
        return all(met for given, met in conditions if given)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a look does to the messages, in sentences; `refused` says why it is not done unless it is allowed."""

    notes: tuple[str, ...] = ()
    refused: str | None = None


def costs(kind: str, version: tuple[int, ...], limit: str | None, *, hides: str | None = None) -> Costs:
    """`limit` says what a delivery limit makes of a look; `hides` why what is put back would not be there."""
    if kind == "stream":
        return Costs(("a stream keeps what is read from it: the look costs nothing",))
    redelivered = "what was looked at is delivered with the flag 'redelivered' from now on"
    if kind != "quorum":
        return Costs((redelivered,))
    if hides is not None:
        return Costs(refused=hides)
    if version >= DELAYS_RETRIES:
        return Costs((redelivered, limit) if limit is not None else (redelivered,))
    if limit is not None:
        return Costs((redelivered, limit), refused=limit)
    return Costs((redelivered, "its delivery count is one higher now; this queue has no delivery limit"))
