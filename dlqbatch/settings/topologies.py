"""`dlqbatch.topology.NAME.OPTION`: every ladder, per-queue set, pipeline and native retry of a deployment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError

from dlqbatch.errors import SettingsError
from dlqbatch.settings.delays import MOST_QUEUES
from dlqbatch.settings.options import KEY, NAME, OPTIONS, Entry, Key, Name, QueueType, Settings
from dlqbatch.settings.values import LONGEST_TTL_MS, durations, lower
from dlqbatch.topology.kinds import KINDS, Kind, Ladder, Native, PerQueue, Pipeline

PREFIX: Final = "topology."
_KEY: Final = re.compile(r"topology[.](?P<name>[A-Za-z0-9-]{1,60})[.](?P<option>[a-z-]{1,40})")
_UNNAMED: Final = "unnamed"

Declared = dict[str, dict[str, object]]
"""For the name of each topology its kind and the checked values of its options."""


def _one_duration(value: object) -> object:
    found = durations(value)
    return found[0] if isinstance(found, tuple) and len(found) == 1 else value


def _without_wildcards(queue: str) -> str:
    if {"*", "#"} & set(queue.split(".")):
        raise ValueError("has a word that is only * or #, which as a routing key would stand for others")
    return queue


_Ttl = Annotated[int, Field(strict=True, gt=0, le=LONGEST_TTL_MS)]


_NAME: Final = (Name, NAME)
_TTL: Final = (
    Annotated[_Ttl, BeforeValidator(_one_duration)],
    "a delay above 0 and at most 4294967295 ms, such as 30s, 15m or 90000",
)
_QUEUE_TYPE: Final = (QueueType, "classic or quorum")
_RETRIES: Final = {"delayed-retry-min": _TTL, "delayed-retry-max": _TTL}
_DEAD: Final = {"dlq-exchange": _NAME, "dlq-routing-key": (Key, KEY), "dlq-queue": _NAME}
# By kind and option: the type, as pydantic checks it, and what the option must be, in words.
_OPTIONS: Final[dict[str, dict[str, tuple[Any, str]]]] = {
    "ladder": {
        "tier-ttls": (
            Annotated[tuple[_Ttl, ...], BeforeValidator(durations), Field(min_length=1, max_length=100)],
            "1 to 100 delays with commas between them, such as 10s,15m,1h",
        ),
        "queue-type": _QUEUE_TYPE,
        "retry-exchange": _NAME,
        "retry-routing-key": (Key, KEY),
        "retry-queue": _NAME,
        "delay-exchange": _NAME,
        "delay-queue": _NAME,
        **_DEAD,
    },
    "per-queue": {
        "queue": (Annotated[Name, BeforeValidator(_without_wildcards)], NAME),
        "exchange": _NAME,
        "exchange-type": (
            Annotated[Literal["topic", "direct"], BeforeValidator(lower)],
            "topic or direct (through a fanout exchange a message would leave the delay queue into itself)",
        ),
        "ttl": _TTL,
        "queue-type": _QUEUE_TYPE,
        "delay": (Annotated[Literal["true", "false"], BeforeValidator(lower)], "true or false"),
        **_DEAD,
    },
    "pipeline": {"exchange": _NAME, "queue": _NAME, "ttl": _TTL, "queue-type": _QUEUE_TYPE, **_RETRIES},
    "native": {
        "queue": _NAME,
        **_RETRIES,
        "delivery-limit": (Annotated[int, Field(gt=0, le=1000)], "a whole number from 1 to 1000"),
        **_DEAD,
    },
}
_REQUIRED: Final = {"ladder": (), "per-queue": ("queue", "exchange"), "pipeline": ("exchange",), "native": ("queue",)}


def canonical(key: str) -> str | None:
    """`topology.NAME.OPTION` in one spelling; None if the key is no such thing."""
    if not key.startswith(PREFIX):
        return None
    return key.replace("_", "-")


def understand(entries: Mapping[str, Entry]) -> tuple[Declared, list[str]]:
    """All topologies from their keys, and a sentence for each problem; a topology with a problem is left out."""
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
        values, wrong = _checked(one, options)
        problems += wrong
        if not wrong:
            declared[one] = values
    return declared, problems


def _checked(one: str, options: Mapping[str, Entry]) -> tuple[dict[str, object], list[str]]:
    """The values of one topology, and a sentence for each problem."""
    where = next(iter(options.values())).where
    kind_entry = options.get("kind")
    from pydantic import TypeAdapter  # noqa: PLC0415  (a deployment with one ladder needs none)

    problems = []
    if one in KINDS:
        problems.append(f"dlqbatch.topology.{one} ({where}) has the name of a kind; give it another name.")
    if kind_entry is None:
        set_it = f"set dlqbatch.topology.{one}.kind to {_listed(KINDS)}"
        return {}, [*problems, f"dlqbatch.topology.{one} ({where}) has no kind; {set_it}."]
    kind = str(kind_entry.value).lower()
    if kind not in _OPTIONS:
        guess = get_close_matches(kind, KINDS, n=1)
        meant = f"; perhaps {guess[0]} was meant" if guess else ""
        return {}, [*problems, f"{kind_entry.key} ({kind_entry.where}) must be {_listed(KINDS)}{meant}."]
    known = _OPTIONS[kind]
    values: dict[str, object] = {"kind": kind}
    for option, entry in options.items():
        if option == "kind":
            continue
        if option not in known:
            guess = get_close_matches(option, known, n=1)
            meant = f"; perhaps {guess[0]} was meant" if guess else f"; it has {_listed(known)}"
            problems.append(f"{entry.key} ({entry.where}) is no option of a {kind}{meant}.")
            continue
        kept_as, must_be = known[option]
        try:
            values[option.replace("-", "_")] = TypeAdapter(kept_as).validate_python(str(entry.value))
        except ValidationError as exc:
            [error, *_] = exc.errors(include_url=False, include_input=False)
            why = error["ctx"]["error"] if error["type"] == "value_error" else "has a wrong value"
            problems.append(f"{entry.key} ({entry.where}) {why}; it must be {must_be}.")
    problems += [
        f"dlqbatch.topology.{one} ({where}) has no {option}; set dlqbatch.topology.{one}.{option}."
        for option in _REQUIRED[kind]
        if option not in options
    ]
    return values, problems


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
    built = build(_UNNAMED, declared[_UNNAMED], settings)
    if problems := list(_retries_impossible(built)):
        raise SettingsError(*problems)
    return built


def default_ladder(settings: Settings) -> Ladder:
    """The ladder that the options without a NAME describe, whether or not it is switched off."""
    options = {one.name: getattr(settings, one.name) for one in fields(Ladder) if one.name in OPTIONS}
    return Ladder(**options, more_delays=settings.every_delay)


def topologies(settings: Settings) -> dict[str, Kind]:
    """Every topology of this deployment by its name; the default ladder, unless it is switched off, is `ladder`."""
    found: dict[str, Kind] = {"ladder": default_ladder(settings)} if settings.ladder else {}
    for one, values in settings.topologies.items():
        found[one] = build(one, values, settings)
    return found


def build(one: str, values: Mapping[str, Any], settings: Settings) -> Kind:
    """The topology `one` of checked values; what they leave out comes from the settings."""
    options = {"queue_type": settings.queue_type, **values}
    kind = options.pop("kind")
    if kind == "pipeline":
        return Pipeline(**{"queue": options["exchange"], **options})
    if kind == "native":
        # The type of its own dead-letter queue; the queue of the workers can only be a quorum queue.
        options["queue_type"] = "quorum"
    dead = {option: getattr(settings, option) for option in ("dlq_exchange", "dlq_routing_key", "dlq_queue")}
    options = dead | options
    if options["dlq_queue"] == settings.dlq_queue:
        options["dlq_queue_type"] = settings.queue_type
    if kind == "native":
        return Native(**options)
    if kind == "per-queue":
        options["has_delay"] = options.pop("delay", "true") == "true"
        return PerQueue(**options)
    names = ("retry-exchange", "retry-queue", "delay-exchange", "delay-queue")
    own: dict[str, object] = {option.replace("-", "_"): f"{one}.{option}" for option in names}
    return Ladder(**{**own, "tier_ttls": settings.tier_ttls, "more_delays": settings.every_delay, **options})


def _retries_impossible(kind: Kind) -> Iterator[str]:
    """What is wrong with the delayed retries of a topology."""
    if not isinstance(kind, Native | Pipeline):
        return
    retry = kind.delayed_retry
    if retry is None:
        if kind.delayed_retry_max is not None:
            yield "a delayed-retry-max is nothing without a delayed-retry-min; set both or none."
        return
    if retry.maximum < retry.minimum:
        yield f"delayed-retry-max ({retry.maximum} ms) is below delayed-retry-min ({retry.minimum} ms); raise it."
    if isinstance(kind, Pipeline):
        if kind.queue_type != "quorum":
            yield "delayed-retry-min needs quorum queues, which alone delay retries; set queue-type=quorum."
        if sum(retry.delays) >= kind.ttl:
            yield (
                f"its retries are delayed by {sum(retry.delays)} ms together, and after {kind.ttl} ms its messages "
                "expire; raise ttl, or lower delayed-retry-min."
            )


def _doubled(kind: Kind) -> Iterator[str]:
    """Queues and exchanges with two parts in one topology: dead or delayed messages would be worked on for ever."""
    if isinstance(kind, Pipeline):
        if kind.queue == kind.dead_letter_queue:
            yield f"queue '{kind.queue}'"
        if kind.exchange == kind.dead_letter_exchange:
            yield f"exchange '{kind.exchange}'"
        return
    # A sum of topologies holds once what is the same in both: so the dead letters are compared with all the rest.
    rest = replace(kind, dlq_exchange="", dlq_queue="").topology()
    queues = Counter([kind.dlq_queue, *(one.name for one in rest.queues), *(one.queue for one in rest.policies)])
    exchanges = Counter([kind.dlq_exchange, *(exchange.name for exchange in rest.exchanges)])
    if isinstance(kind, PerQueue) and kind.dlq_routing_key not in {kind.queue, kind.delay_queue}:
        # The workers' own exchange may lead to the dead letters as well, by a key of theirs.
        exchanges -= Counter([kind.exchange])
    yield from (f"queue '{queue}'" for queue, number in queues.items() if number > 1)
    yield from (f"exchange '{exchange}'" for exchange, number in exchanges.items() if number > 1)


def clashes(settings: Settings) -> Iterator[str]:
    """A sentence for each queue or exchange that two topologies, or two parts of one, would declare.

    Also for each delay that no topology can keep.
    """
    yield from _impossible_delays(settings)
    makers: dict[tuple[str, str], tuple[str, object]] = {}
    for one, kind in topologies(settings).items():
        parts = kind.topology()
        if one in settings.topologies:
            for problem in _retries_impossible(kind):
                yield f"the topology '{one}': {problem}"
        for what in _doubled(kind):
            yield f"the topology '{one}' makes {what} stand for two of its parts; give them different names."
        named = [("exchange", each.name, each) for each in parts.exchanges]
        named += [("queue", each.name, each) for each in parts.queues]  # type: ignore[misc]  # either has a name
        named += [("queue", each.queue, each) for each in parts.policies]  # type: ignore[misc]
        is_reported = False
        shared = {("queue", queue) for queue in kind.dead_letter_queues}
        for what, called, part in named:
            other, before = makers.setdefault((what, called), (one, part))
            may_share = what == "exchange" or (what, called) in shared
            if other != one and not is_reported and (before != part or not may_share):
                is_reported = True
                difference = "but differ about it" if before != part else "which each needs for itself"
                yield f"the topologies '{other}' and '{one}' both make {what} '{called}', {difference}; rename one."


def _impossible_delays(settings: Settings) -> Iterator[str]:
    kinds = topologies(settings)
    ladders = {one: kind for one, kind in kinds.items() if isinstance(kind, Ladder)}
    written = [f"dlqbatch.events.{event}.delays" for event in settings.event_delays]
    written += ["dlqbatch.retry-after-delays"] if settings.retry_after_delays else []
    if written and not ladders:
        yield (
            f"{written[0]} takes a ladder, and there is none: the others have one delay for every event. Let "
            "dlqbatch.ladder be true or describe a ladder (dlqbatch.topology.NAME.kind=ladder), or take it away."
        )
    for one, kind in kinds.items():
        if isinstance(kind, PerQueue) and kind.queue in settings.event_delays:
            yield (
                f"dlqbatch.events.{kind.queue}.delays is for a queue of the per-queue topology '{one}', which has one "
                f"delay; set dlqbatch.topology.{one}.ttl in its place, or make it a ladder."
            )
    for one, ladder in ladders.items():
        number = len(ladder.own_delays)
        if number > MOST_QUEUES:
            yield (
                f"the delays of events and of Retry-After take {number} delay queues besides the tiers of '{one}', "
                f"and a ladder has at most {MOST_QUEUES}: give several events the same delays, or growing ones a "
                "greater factor (10s*4..1h in place of 10s*2..1h)."
            )
