"""The filter in the address of a page: the words of the command line, so that what one shows the other shows too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Final
from urllib.parse import urlencode

from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status

_SPELLED: Final = {"statuses": "status", "ids": "id", "is_edit": "edits", "unwanted": "not"}
"""The filters that have another name in an address, as on the command line."""
_YES_OR_NO: Final = {"yes": True, "no": False}
NAMES: Final = {
    _SPELLED.get(name, name.replace("_", "-")): name
    for name in signature(Filters.parse).parameters
    if name not in {"now", "field_lists"}
}
"""What a filter is called in an address, and in `Filters.parse`."""
_ONCE: Final = ("since", "until")
LONGEST: Final = 4_000
"""The longest filter in an address, which proxies and browsers take; a longer one is carried by forms."""
_A_LIST: Final = 8
"""More values of one filter than these are one chip."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One condition of the filter, as a person sees it, and the address without it."""

    name: str
    value: str
    without: str


def filters_of(pairs: Iterable[tuple[str, str]], *, as_written: bool = False) -> Filters:
    """The filter that an address names; what is no filter is left aside, and an empty value is none.

    Blanks at the ends of values are a slip of who typed them, unless a program has written them.
    """
    options: dict[str, list[str]] = {}
    for name, value in pairs:
        if name in NAMES and (as_written or value.strip()):
            options.setdefault(NAMES[name], []).append(value if as_written else value.strip())
    given: dict[str, object] = {}
    for name, values in options.items():
        match name:
            case "statuses":
                unknown = [value for value in values if value not in set(Status)]
                if unknown:
                    raise NotUnderstood(f"'{unknown[0]}' is no state; the states are {', '.join(Status)}")
                given[name] = [Status(value) for value in values]
            case "is_edit":
                if values[-1] not in _YES_OR_NO:
                    raise NotUnderstood(f"edits={values[-1]}: write yes or no")
                given[name] = _YES_OR_NO[values[-1]]
            case _ if name in _ONCE:
                given[name] = values[-1]
            case _:
                given[name] = values
    return Filters.parse(**given)  # type: ignore[arg-type]  # the names are those of its own parameters


def filter_pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value.strip()) for name, value in pairs if name in NAMES and value.strip()]


def chips(pairs: Sequence[tuple[str, str]]) -> list[Chip]:
    kept = filter_pairs(pairs)
    counts = Counter(_kind(name, value) for name, value in kept)
    lists = {kind: number for kind, number in counts.items() if number > _A_LIST}
    found = [
        Chip(kind, f"{number:,} values", urlencode([each for each in kept if _kind(*each) != kind]))
        for kind, number in lists.items()
    ]
    return found + [
        Chip(name, value, urlencode([*kept[:index], *kept[index + 1 :]]))
        for index, (name, value) in enumerate(kept)
        if _kind(name, value) not in lists
    ]


def _kind(name: str, value: str) -> str:
    """`field order` and `not id` are filters of their own."""
    return f"{name} {value.partition('=')[0]}" if name in {"field", "not"} else name


def command_words(pairs: Sequence[tuple[str, str]]) -> str:
    """The same filter as options of the command line, for a person to copy."""
    from shlex import quote  # noqa: PLC0415  (for this alone)

    words = []
    for name, value in filter_pairs(pairs):
        words.append({"yes": "--edits", "no": "--no-edits"}[value] if name == "edits" else f"--{name} {quote(value)}")
    return " ".join(words)
