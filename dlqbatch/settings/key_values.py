"""Java's format of properties: a key and a value on each line, comments, continued lines, escapes.

There is a library for it, which the tests hold this to. It brings XML and HTTP along, which every cold start paid for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLANK: Final = " \t\f"
_CONTINUED: Final = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_SEPARATOR: Final = re.compile(r"(?<!\\)(?:\\\\)*([ \t\f]*[=:]|[ \t\f])[ \t\f]*")
_ESCAPE: Final = re.compile(r"\\(u.{0,4}|.)")
_CODE: Final = re.compile(r"u[0-9A-Fa-f]{4}")
_CONTROLS: Final = {"t": "\t", "n": "\n", "f": "\f", "r": "\r"}


class BrokenEscape(ValueError):
    """A backslash and a u without the four hexadecimal digits."""


def pairs(text: str) -> Iterator[tuple[int, str, str]]:
    """The first line's number, key and value, each still with its escapes; lines end with a line feed alone."""
    lines = enumerate(text.split("\n"), 1)
    for number, line in lines:
        pieces = [line.lstrip(_BLANK)]
        if pieces[0].startswith(("#", "!")):
            continue
        while _CONTINUED.search(pieces[-1]):
            _, following = next(lines, (0, ""))
            pieces[-1] = pieces[-1][:-1]
            pieces.append(following.lstrip(_BLANK))
        whole = "".join(pieces)
        if whole:
            found = _SEPARATOR.search(whole)
            yield (number, whole[: found.start(1)], whole[found.end() :]) if found else (number, whole, "")


def unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    # Two \u escapes may be the halves of one character.
    return _ESCAPE.sub(_meant, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _meant(found: re.Match[str]) -> str:
    escape = found[1]
    if escape[0] != "u":
        return _CONTROLS.get(escape, escape)
    if not _CODE.fullmatch(escape):
        raise BrokenEscape
    return chr(int(escape[1:], 16))
