"""application.properties: its syntax, and its options with the line in which each stands."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dlqbatch.amqp.fields import BUILT_IN, NAME, check_place
from dlqbatch.logs import plain
from dlqbatch.settings import delays
from dlqbatch.settings.options import Entry
from dlqbatch.settings.sources import Source, option_named, shown_key, unknown_property
from dlqbatch.settings.topologies import canonical

PREFIX = "dlqbatch."
EVENTS_PREFIX = "dlqbatch.events."
FIELDS_PREFIX = "dlqbatch.fields."
_LARGEST_FILE = 1024 * 1024
_MOST_RETRIES = 2**31 - 1


class _NotReadable(Exception):
    """The file as a whole cannot be used; the text says why and what to do."""


class PropertiesFile(Source):
    """One application.properties; keys without our prefix belong to somebody else and are left alone."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._first_line: dict[str, int] = {}
        self._events: dict[str, int | None] = {}
        self._event_delays: dict[str, tuple[int, ...]] = {}
        self._fields: dict[str, str] = {}
        self.facts = {"events": self._events, "event_delays": self._event_delays, "fields": self._fields}
        self.facts["config_file"] = path
        try:
            text = _text(path)
        except _NotReadable as exc:
            self.problems.append(f"{path} {exc}.")
            return
        for line, key, value in self._pairs(text):
            if key.startswith(PREFIX):
                self._take(line, key, value)

    def _pairs(self, text: str) -> Iterator[tuple[int, str, str]]:
        for line, key, value in pairs(text.replace("\r\n", "\n").replace("\r", "\n")):
            try:
                yield line, unescaped(key), unescaped(value)
            except BrokenEscape:  # it may be part of a password
                self.problems.append(
                    f"{self._path}:{line} has a broken \\u escape; it takes four hexadecimal digits, "
                    "and a backslash alone is written \\\\."
                )

    def _take(self, line: int, key: str, value: str) -> None:
        where = f"{self._path}:{line}"
        is_event = key.startswith((EVENTS_PREFIX, FIELDS_PREFIX))
        option = None if is_event else option_named(key.removeprefix(PREFIX))
        of_topology = canonical(key.removeprefix(PREFIX))
        if not is_event and option is None and of_topology is None:
            self.problems.append(unknown_property(key, where))
            return
        first = self._first_line.setdefault(option or of_topology or key, line)
        if first != line:
            self.problems.append(
                f"{shown_key(key)} ({where}) is already set in line {first}; which one counts must not be a guess, "
                "so take one away."
            )
        elif option is not None:
            self.add(option, Entry(shown_key(key), where, value))
        elif of_topology is not None:
            self.add_to_topology(of_topology, Entry(shown_key(key), where, value))
        elif key.startswith(FIELDS_PREFIX):
            self._take_field(where, key, value.strip())
        else:
            self._take_event(where, key, value.strip())

    def _take_field(self, where: str, key: str, value: str) -> None:
        name = key.removeprefix(FIELDS_PREFIX)
        problem = ""
        if not NAME.fullmatch(name) or name in BUILT_IN:
            problem = (
                "has a name that no field can have: 1 to 64 letters, digits, dots, dashes or _, and none of "
                f"{', '.join(BUILT_IN)}, which are there without a setting"
            )
        try:
            self._fields[name] = check_place(value)
        except ValueError as error:
            problem = plain(str(error))
        if problem:
            self.problems.append(f"{shown_key(key)} ({where}) {problem}.")

    def _take_event(self, where: str, key: str, value: str) -> None:
        event = key.removeprefix(EVENTS_PREFIX)
        if not _is_text(event):
            self.problems.append(f"{shown_key(key)} ({where}) holds half a character; write both \\u escapes of it.")
        elif event.endswith(delays.SUFFIX):
            try:
                self._event_delays[event.removesuffix(delays.SUFFIX)] = delays.steps(value)
            except ValueError as error:
                self.problems.append(f"{shown_key(key)} ({where}) {error}.")
        elif value and not (value.isascii() and value.isdecimal() and int(value[:20]) <= _MOST_RETRIES):
            self.problems.append(
                f"{shown_key(key)} ({where}) has a value that is no number of retries; it must be a whole number "
                f"from 0 to {_MOST_RETRIES}, or empty for the default. A space, : or = inside a key takes a "
                "backslash before it."
            )
        else:
            self._events[event] = int(value) if value else None


def _text(path: Path) -> str:
    data = _bytes(path)
    if b"\x00" in data:
        raise _NotReadable("is not a text file in UTF-8 or Latin-1; save it as UTF-8 (a UTF-16 file looks like this)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")  # what Java wrote for twenty years; it has no wrong bytes


def _bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise _NotReadable("is a folder; it must be an application.properties file")
        # Reading a pipe could wait for ever; an empty device is a common way to say "no file".
        if not stat.S_ISREG(status.st_mode) and str(path) != os.devnull:
            raise _NotReadable("is not a regular file; it must be an application.properties file")
        if status.st_size > _LARGEST_FILE:
            raise _NotReadable(f"has {status.st_size} bytes, more than settings can have; name the right file")
        return path.read_bytes()
    except FileNotFoundError:
        raise _NotReadable("does not exist; make it, or correct its name (--config or DLQBATCH_CONFIG)") from None
    except (OSError, ValueError) as exc:
        raise _NotReadable(f"cannot be read ({getattr(exc, 'strerror', None) or 'no valid path'})") from None


def _is_text(event: str) -> bool:
    try:
        event.encode()
    except UnicodeEncodeError:
        return False
    return True


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
