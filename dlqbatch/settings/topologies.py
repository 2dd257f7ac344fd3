"""`dlqbatch.topology.NAME.OPTION`: every ladder, per-queue set and pipeline that a deployment keeps."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch.errors import SettingsError
from dlqbatch.settings.options import Entry
from dlqbatch.settings.values import LONGEST_TTL_MS, durations, free_name, name
from dlqbatch.topology.kinds import KINDS, Kind
from dlqbatch.topology.ladder import Ladder
from dlqbatch.topology.per_queue import PerQueue
from dlqbatch.topology.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dlqbatch.settings.options import Settings

PREFIX: Final = "topology."
_KEY: Final = re.compile(r"topology[.](?P<name>[A-Za-z0-9-]{1,60})[.](?P<option>[a-z-]{1,40})")
_UNNAMED: Final = "unnamed"
_MOST_TIERS: Final = 100

Declared = dict[str, dict[str, object]]
"""Checked values by the name of a topology and the name of an option."""


class _Option(NamedTuple):
    read: Callable[[str], object]
    must_be: str


class _Wrong(ValueError):
    """The text continues 'it'."""


def _name(text: str) -> str:
    try:
        return free_name(text)
    except ValueError as error:
        raise _Wrong(str(error)) from None


def _key(text: str) -> str:
    try:
        return name(text)
    except ValueError as error:
        raise _Wrong(str(error)) from None


def _queue(text: str) -> str:
    if {"*", "#"} & set(text.split(".")):
        raise _Wrong("has a word that is only * or #, which as a routing key would stand for others")
    return _name(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise _Wrong
        return text.lower()

    return read


def _switch(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


def _ttls(text: str) -> tuple[int, ...]:
    found = durations(text)
    if not isinstance(found, tuple) or not 1 <= len(found) <= _MOST_TIERS:
        raise _Wrong
    for ttl in found:
        if not isinstance(ttl, int) or not 0 < ttl <= LONGEST_TTL_MS:
            raise _Wrong
    return found


def _ttl(text: str) -> int:
    found = _ttls(text)
    if len(found) > 1:
        raise _Wrong
    return found[0]


_NAME: Final = _Option(_name, "a name of 1 to 200 bytes that does not begin with amq.")
_ROUTING_KEY: Final = _Option(_key, "a routing key of 1 to 200 bytes")
_QUEUE_TYPE: Final = _Option(_one_of("classic", "quorum"), "classic or quorum")
_TTL: Final = _Option(_ttl, "a delay above 0 and at most 4294967295 ms, such as 30s, 15m or 90000")
_DEAD: Final = {"dlq-exchange": _NAME, "dlq-routing-key": _ROUTING_KEY, "dlq-queue": _NAME}
_OPTIONS: Final[dict[str, dict[str, _Option]]] = {
    "ladder": {
        "tier-ttls": _Option(_ttls, "1 to 100 delays with commas between them, such as 10s,15m,1h"),
        "queue-type": _QUEUE_TYPE,
        "retry-exchange": _NAME,
        "retry-routing-key": _ROUTING_KEY,
        "retry-queue": _NAME,
        "delay-exchange": _NAME,
        "delay-queue": _NAME,
        **_DEAD,
    },
    "per-queue": {
        "queue": _Option(_queue, _NAME.must_be),
        "exchange": _NAME,
        "exchange-type": _Option(
            _one_of("topic", "direct"),
            "topic or direct (through a fanout exchange a message would leave the delay queue into itself)",
        ),
        "ttl": _TTL,
        "queue-type": _QUEUE_TYPE,
        "delay": _Option(_switch, "true or false"),
        **_DEAD,
    },
    "pipeline": {"exchange": _NAME, "queue": _NAME, "ttl": _TTL, "queue-type": _QUEUE_TYPE},
}
_REQUIRED: Final = {"ladder": (), "per-queue": ("queue", "exchange"), "pipeline": ("exchange",)}


def canonical(key: str) -> str | None:
    """`topology.NAME.OPTION` in one spelling; None if the key is no such thing."""
    if not key.startswith(PREFIX):
        return None
    return key.replace("_", "-")


def understand(entries: Mapping[str, Entry]) -> tuple[Declared, list[str]]:
    """All of them from their keys, and a sentence for each problem; a topology with a problem is left out."""
    problems: list[str] = []
    written: dict[str, dict[str, Entry]] = {}
    for key, entry in entries.items():
        found = _KEY.fullmatch(key)
        if found is None:
            problems.append(
                f"{entry.key} ({entry.where}) is no option; a topology is written dlqbatch.topology.NAME.OPTION, with "
                "letters, digits and dashes in its NAME, and an OPTION such as kind."
            )
        else:
            written.setdefault(found["name"], {})[found["option"]] = entry
    declared: Declared = {}
    for one, options in written.items():
        wrong = list(_problems(one, options))
        problems += wrong
        if not wrong:
            declared[one] = _values(options)
    return declared, problems


def _problems(one: str, options: Mapping[str, Entry]) -> Iterator[str]:
    kind_entry = options.get("kind")
    where = next(iter(options.values())).where
    if one in KINDS:
        yield f"dlqbatch.topology.{one} ({where}) has the name of a kind; give it another name."
    if kind_entry is None:
        yield f"dlqbatch.topology.{one} ({where}) has no kind; set dlqbatch.topology.{one}.kind to {_listed(KINDS)}."
        return
    kind = str(kind_entry.value).lower()
    if kind not in _OPTIONS:
        guess = get_close_matches(kind, KINDS, n=1)
        meant = f"; perhaps {guess[0]} was meant" if guess else ""
        yield f"{kind_entry.key} ({kind_entry.where}) must be {_listed(KINDS)}{meant}."
        return
    known = _OPTIONS[kind]
    for option, entry in options.items():
        if option == "kind":
            continue
        if option not in known:
            guess = get_close_matches(option, known, n=1)
            meant = f"; perhaps {guess[0]} was meant" if guess else f"; it has {_listed(known)}"
            yield f"{entry.key} ({entry.where}) is no option of a {kind}{meant}."
            continue
        try:
            known[option].read(str(entry.value))
        except _Wrong as error:
            why = str(error) or "has a wrong value"
            yield f"{entry.key} ({entry.where}) {why}; it must be {known[option].must_be}."
    for option in _REQUIRED[kind]:
        if option not in options:
            yield f"dlqbatch.topology.{one} ({where}) has no {option}; set dlqbatch.topology.{one}.{option}."


def _values(options: Mapping[str, Entry]) -> dict[str, object]:
    kind = str(options["kind"].value).lower()
    read = _OPTIONS[kind]
    values = {option: read[option].read(str(entry.value)) for option, entry in options.items() if option != "kind"}
    return {"kind": kind, **values}


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else str(last)


def from_options(kind: str, options: Mapping[str, Entry], settings: Settings) -> Kind:
    """A topology that was described with the call and nowhere else; SettingsError names what is wrong."""
    entries = {f"{PREFIX}{_UNNAMED}.{option}": entry for option, entry in options.items()}
    entries[f"{PREFIX}{_UNNAMED}.kind"] = Entry("kind", "command line", kind)
    declared, problems = understand(entries)
    if problems:
        raise SettingsError(*problems)
    return build(_UNNAMED, declared[_UNNAMED], settings)


def default_ladder(settings: Settings) -> Ladder:
    """The one that the plain options describe, whether or not it is switched off."""
    return Ladder(
        tier_ttls=settings.tier_ttls,
        queue_type=settings.queue_type,
        retry_exchange=settings.retry_exchange,
        retry_routing_key=settings.retry_routing_key,
        retry_queue=settings.retry_queue,
        delay_exchange=settings.delay_exchange,
        delay_queue=settings.delay_queue,
        dlq_exchange=settings.dlq_exchange,
        dlq_routing_key=settings.dlq_routing_key,
        dlq_queue=settings.dlq_queue,
    )


def topologies(settings: Settings) -> dict[str, Kind]:
    """Every topology of this deployment by its name; the default ladder, unless it is switched off, is `ladder`."""
    found: dict[str, Kind] = {"ladder": default_ladder(settings)} if settings.ladder else {}
    for one, values in settings.topologies.items():
        found[one] = build(one, values, settings)
    return found


def build(one: str, values: Mapping[str, object], settings: Settings) -> Kind:
    given = {option.replace("-", "_"): value for option, value in values.items() if option != "kind"}
    given.setdefault("queue_type", settings.queue_type)
    if values["kind"] == "pipeline":
        return Pipeline(**{"queue": given["exchange"], **given})  # type: ignore[arg-type]  # checked by `understand`
    dead = {option: getattr(settings, option) for option in ("dlq_exchange", "dlq_routing_key", "dlq_queue")}
    given = dead | given
    if given["dlq_queue"] == settings.dlq_queue:
        given["dlq_queue_type"] = settings.queue_type
    if values["kind"] == "per-queue":
        given["has_delay"] = given.pop("delay", True)
        return PerQueue(**given)  # type: ignore[arg-type]  # the same
    names = ("retry-exchange", "retry-queue", "delay-exchange", "delay-queue")
    own = {option.replace("-", "_"): f"{one}.{option}" for option in names}
    return Ladder(**{**own, "tier_ttls": settings.tier_ttls, **given})  # type: ignore[arg-type]  # the same


def _doubled(kind: Kind) -> Iterator[str]:
    """What has two parts to play in one topology: what is dead, or waits, would be worked on again, for ever."""
    if isinstance(kind, Pipeline):
        if kind.queue == kind.dead_letter_queue:
            yield f"queue '{kind.queue}'"
        if kind.exchange == kind.dead_letter_exchange:
            yield f"exchange '{kind.exchange}'"
        return
    # A sum of topologies holds once what is the same in both: so the dead letters are compared with all the rest.
    rest = replace(kind, dlq_exchange="", dlq_queue="").topology()
    queues = Counter([kind.dlq_queue, *(queue.name for queue in rest.queues)])
    exchanges = Counter([kind.dlq_exchange, *(exchange.name for exchange in rest.exchanges)])
    if isinstance(kind, PerQueue) and kind.dlq_routing_key not in {kind.queue, kind.delay_queue}:
        # The workers' own exchange may lead to the dead letters as well, by a key of theirs.
        exchanges -= Counter([kind.exchange])
    yield from (f"queue '{queue}'" for queue, number in queues.items() if number > 1)
    yield from (f"exchange '{exchange}'" for exchange, number in exchanges.items() if number > 1)


def clashes(settings: Settings) -> Iterator[str]:
    """A topology that is in its own way; or two that would make one queue or exchange, and differ about it."""
    makers: dict[tuple[str, str], tuple[str, object]] = {}
    for one, kind in topologies(settings).items():
        parts = kind.topology()
        if one in settings.topologies:
            for what in _doubled(kind):
                yield f"the topology '{one}' makes {what} stand for two of its parts; give them different names."
        named = [("exchange", each.name, each) for each in parts.exchanges]
        named += [("queue", each.name, each) for each in parts.queues]  # type: ignore[misc]  # either has a name
        told = False
        shared = {("queue", queue) for queue in kind.dead_letter_queues}
        for what, called, part in named:
            other, before = makers.setdefault((what, called), (one, part))
            may_share = what == "exchange" or (what, called) in shared
            if other != one and not told and (before != part or not may_share):
                told = True
                difference = "but differ about it" if before != part else "which each needs for itself"
                yield f"the topologies '{other}' and '{one}' both make {what} '{called}', {difference}; rename one."
