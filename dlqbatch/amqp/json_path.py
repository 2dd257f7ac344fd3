"""JSON paths: where something stands in a body, such as `$.order.id`, `$.lines[0].sku`, `$.lines[*].sku` or `$..iban`.

This is the plain part of JSONPath (RFC 9535): names, numbers, `*` for every member, and `..` for any depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Final, TypeAlias


class Wild(Enum):
    EVERY = "*"
    """Every member of an object or a list."""
    DEEP = ".."
    """The value itself, and everything that is inside it."""


Step: TypeAlias = str | int | Wild
Path: TypeAlias = tuple[Step, ...]

MUST_BE: Final = "a path such as $.order.id, $.lines[0].sku, $.lines[*].sku, $['order id'] or $..iban"
_MOST_STEPS: Final = 32
_STEP: Final = re.compile(
    r"(?:(?P<deep>\.\.)|\.|(?=\[))"
    r"(?:(?P<name>[^\s.\[\]*'\",=$]{1,200})|(?P<every>\*)|\[(?:(?P<index>\d{1,9})|(?P<all>\*)|"
    r"'(?P<single>[^'\n]{1,200})'|\"(?P<double>[^\"\n]{1,200})\")\])"
)


def parse(text: str) -> Path:
    """The steps of a path; a ValueError continues a sentence that names the option."""
    if not text.startswith("$"):
        raise ValueError(f"has '{text}', which is no JSON path; write {MUST_BE}")
    steps: list[Step] = []
    at = 1
    while at < len(text):
        found = _STEP.match(text, at)
        if found is None or len(steps) >= _MOST_STEPS:
            raise ValueError(f"has '{text}', which is no JSON path; write {MUST_BE}")
        steps += [Wild.DEEP] if found["deep"] else []
        name = found["name"] or found["single"] or found["double"]
        steps.append(name or (int(found["index"]) if found["index"] else Wild.EVERY))
        at = found.end()
    if not steps:
        raise ValueError("has '$', which is the whole body; write " + MUST_BE)
    return tuple(steps)


Places: TypeAlias = frozenset[tuple[int, int]]
"""How far each path has been followed: the number of the path and of its next step."""


def start(paths: tuple[Path, ...]) -> Places:
    """The places at the root of a document."""
    return frozenset((number, 0) for number in range(len(paths)))


def follow(paths: tuple[Path, ...], places: Places, member: str | int) -> tuple[Places, bool]:
    """The places at a member of what stands at `places`, and whether a path ends there."""
    ahead: set[tuple[int, int]] = set()
    ends = False
    for number, step in places:
        path, at = paths[number], step
        if path[at] is Wild.DEEP:
            ahead.add((number, at))
            at += 1
        if path[at] is Wild.EVERY or (path[at] == member and type(path[at]) is type(member)):
            ends = ends or at + 1 == len(path)
            if at + 1 < len(path):
                ahead.add((number, at + 1))
    return frozenset(ahead), ends


_MOST_LOOKED_AT: Final = 100_000


def values(path: Path, document: object) -> Iterator[object]:
    """Whatever stands at the path, in the order of the document; of a huge document only the first part is read."""
    paths = (path,)
    waiting: list[tuple[object, Places]] = [(document, start(paths))]
    for _ in range(_MOST_LOOKED_AT):
        if not waiting:
            return
        value, places = waiting.pop()
        if not places:
            continue
        members: Iterator[tuple[str | int, object]]
        if isinstance(value, dict):
            members = iter(value.items())
        elif isinstance(value, list):
            members = iter(enumerate(value))
        else:
            continue
        inner = []
        for member, held in members:
            behind, ends = follow(paths, places, member)
            if ends:
                yield held
            if behind:
                inner.append((held, behind))
        waiting += reversed(inner)
