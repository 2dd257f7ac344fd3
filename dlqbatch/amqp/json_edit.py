"""Changes in a JSON text that leave all else byte for byte: spaces, the order of names, how numbers are written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

DEEPEST_PATCH: Final = 100
"""A merge patch may have so many objects within each other."""
_SPACE: Final = re.compile(r"[ \t\n\r]*")


class CannotChange(ValueError):
    """The text has no such place, or is no JSON; the sentence says what stands in the way."""


class Difference(NamedTuple):
    path: str
    before: str | None
    """The JSON text that was there; None: nothing."""
    after: str | None
    """The JSON text that is there now; None: it is taken away."""


class _Member(NamedTuple):
    name: str
    start: int
    name_end: int
    value: int
    end: int


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number there")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_json, parse_int=str, parse_float=str)


def set_value(text: str, steps: Sequence[str | int], value: str) -> tuple[str, list[Difference]]:
    """Put a JSON value at the path; only its last name may be new."""
    at = _start(text)
    for number, step in enumerate(steps[:-1], 1):
        found = _child(text, at, step, steps[:number])
        if found is None:
            raise CannotChange(f"its body has no {shown(steps[:number])}")
        at = found[0]
    span = _child(text, at, steps[-1], steps)
    path = shown(steps)
    if span is None:
        if isinstance(steps[-1], int):
            raise CannotChange(f"its body has no {path}")
        around = _Object(text, at, steps[:-1])
        around.add(steps[-1], value)
        return around.text(), [Difference(path, None, value)]
    before = text[span[0] : span[1]]
    if _is_same(before, value):
        return text, []
    return text[: span[0]] + value + text[span[1] :], [Difference(path, before, value)]


def merge(text: str, patch: str) -> tuple[str, list[Difference]]:
    """Apply a JSON merge patch (RFC 7386): objects are merged, null takes a member away, all else replaces."""
    differences: list[Difference] = []
    return _merged(text, patch, (), differences), differences


def _merged(text: str, patch: str, steps: tuple[str, ...], differences: list[Difference]) -> str:
    """Go once through the members of both, so that a large patch takes no longer than its size says."""
    members = _members(patch, _start(patch), steps)
    if not members:
        return text
    _check_depth(steps)
    target = _Object(text, _start(text), steps)
    for wanted in members:
        path = (*steps, wanted.name)
        value = patch[wanted.value : wanted.end]
        there = target.member(wanted.name, path)
        if value == "null":
            if there is not None:
                differences.append(Difference(shown(path), there.value, None))
                target.remove(wanted.name, there)
        elif value.startswith("{") and there is not None and there.value.startswith("{"):
            there.value = _merged(there.value, value, path, differences)
        else:
            value = _without_nulls(value, path)
            if there is None:
                differences.append(Difference(shown(path), None, value))
                target.add(wanted.name, value)
            elif not _is_same(there.value, value):
                differences.append(Difference(shown(path), there.value, value))
                there.value = value
    return target.text()


def _without_nulls(value: str, steps: tuple[str, ...]) -> str:
    """An object that a patch adds is added without its nulls; any other value is as it was written."""
    if not value.startswith("{"):
        return value
    _check_depth(steps)
    added = _Object(value, 0, steps)
    for name, piece in added.members():
        if piece.value == "null":
            added.remove(name, piece)
        else:
            piece.value = _without_nulls(piece.value, (*steps, name))
    return added.text()


def _check_depth(steps: Sequence[str]) -> None:
    if len(steps) >= DEEPEST_PATCH:
        raise CannotChange(f"the merge patch is nested deeper than {DEEPEST_PATCH} objects")


@dataclass(slots=True, eq=False)
class _Piece:
    """A member of an object as it is written, between its neighbours."""

    lead: str
    """What stands between the sign before it and its name."""
    name: str
    """Its name in quotes."""
    colon: str
    """The colon, with the space around it."""
    value: str
    tail: str
    """What stands between its value and the sign behind it."""
    before: _Piece | None = None
    behind: _Piece | None = None


class _Object:
    """An object in pieces: members are set, added and taken away, and all else stays as it is written."""

    def __init__(self, text: str, at: int, steps: Sequence[str | int]) -> None:
        self._last: _Piece | None = None
        self._named: dict[str, list[_Piece]] = {}
        begin, end = at + 1, _skip(text, at + 1)
        self._inside = text[begin:end]
        """The space in an object without members."""
        for member in _members(text, at, steps):
            end = _skip(text, member.end)
            piece = _Piece(
                text[begin : member.start],
                text[member.start : member.name_end],
                text[member.name_end : member.value],
                text[member.value : member.end],
                text[member.end : end],
            )
            self._append(piece)
            self._named.setdefault(member.name, []).append(piece)
            begin = end + 1
        self._around = text[:at], text[end + 1 :]

    def _append(self, piece: _Piece) -> None:
        piece.before = self._last
        if self._last is not None:
            self._last.behind = piece
        self._last = piece

    def pieces(self) -> list[_Piece]:
        found, piece = [], self._last
        while piece is not None:
            found.append(piece)
            piece = piece.before
        return found[::-1]

    def members(self) -> list[tuple[str, _Piece]]:
        """All with their names, those of one name together."""
        return [(name, piece) for name, pieces in self._named.items() for piece in pieces]

    def member(self, name: str, path: Sequence[str | int]) -> _Piece | None:
        pieces = self._named.get(name, ())
        if len(pieces) > 1:
            raise CannotChange(f"{shown(path)} is there twice")
        return pieces[0] if pieces else None

    def add(self, name: str, value: str) -> None:
        """The new member stands behind the last one, and is written as that is."""
        last, quoted = self._last, json.dumps(name, ensure_ascii=False)
        if last is None:
            added = _Piece("", quoted, ":", value, self._inside)
        else:
            added = _Piece(last.lead, quoted, last.colon, value, last.tail)
            last.tail = ""
        self._append(added)
        self._named[name] = [added]

    def remove(self, name: str, piece: _Piece) -> None:
        self._named[name].remove(piece)
        before, behind = piece.before, piece.behind
        if before is not None:
            before.tail, before.behind = piece.tail, behind
        elif behind is not None:
            behind.lead = piece.lead
        else:
            self._inside = piece.lead + piece.tail
        if behind is None:
            self._last = before
        else:
            behind.before = before

    def text(self) -> str:
        pieces = self.pieces()
        members = ",".join(f"{each.lead}{each.name}{each.colon}{each.value}{each.tail}" for each in pieces)
        return f"{self._around[0]}{{{members if pieces else self._inside}}}{self._around[1]}"


def shown(steps: Sequence[str | int]) -> str:
    """The path as a person writes it: `body.lines[0].sku`."""
    return "body" + "".join(map(_shown, steps))


def _shown(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if _PLAIN.fullmatch(step) else f"['{step}']"


_PLAIN: Final = re.compile(r"[^\s.\[\]*'\",=$]+")


def text_at(text: str, steps: Sequence[str | int]) -> str:
    """The JSON text at a path; CannotChange if there is none."""
    at, end = _start(text), len(text)
    for number, step in enumerate(steps, 1):
        found = _child(text, at, step, steps[:number])
        if found is None:
            raise CannotChange(f"its body has no {shown(steps[:number])}")
        at, end = found
    return text[at:end]


def json_value(text: str) -> str:
    """A JSON value as somebody wrote it, without the space around it; CannotChange if it is none."""
    stripped = text.strip(" \t\n\r")
    try:
        if _end(stripped, 0) == len(stripped):
            return stripped
    except CannotChange:
        pass
    raise CannotChange(f"{text!r} is no JSON value; a text is written in quotes: '{json.dumps(text)}'")


def _start(text: str) -> int:
    """The place of the document's value, which is the whole text."""
    at = _skip(text, 0)
    if _skip(text, _end(text, at)) != len(text):
        raise CannotChange("its body is no JSON")
    return at


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _end(text: str, at: int) -> int:
    try:
        return int(_DECODER.raw_decode(text, at)[1])
    except (ValueError, RecursionError):
        raise CannotChange("its body is no JSON") from None


def _members(text: str, at: int, steps: Sequence[str | int]) -> list[_Member]:
    if text[at] != "{":
        raise CannotChange(f"{shown(steps)} is no object")
    found: list[_Member] = []
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, name_end = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, name_end) + 1)
        end = _end(text, value)
        found.append(_Member(name, at, name_end, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _child(text: str, at: int, step: str | int, steps: Sequence[str | int]) -> tuple[int, int] | None:
    """Where the value of a member, or of an element, begins and ends; None if there is none."""
    if isinstance(step, str):
        alike = [member for member in _members(text, at, steps[:-1]) if member.name == step]
        if len(alike) > 1:
            raise CannotChange(f"{shown(steps)} is there twice")
        return (alike[0].value, alike[0].end) if alike else None
    if text[at] != "[":
        raise CannotChange(f"{shown(steps[:-1])} is no list")
    at = _skip(text, at + 1)
    while text[at] != "]":
        end = _end(text, at)
        if not step:
            return at, end
        step -= 1
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return None


def _is_same(one: str, other: str) -> bool:
    """Whether both are the same value; a number is the same only as it is written, since 1 and 1.0 are not to all."""
    try:
        return bool(_value(one) == _value(other))
    except RecursionError:
        return one == other  # too deep to be compared


def _value(text: str) -> Any:
    # A number is a pair that no other value of JSON is read as: its text counts.
    return json.JSONDecoder(parse_int=_number, parse_float=_number).decode(text)


def _number(text: str) -> tuple[str, str]:
    return "number", text
