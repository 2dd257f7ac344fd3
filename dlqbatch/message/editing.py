"""What a person may change of a message, on its exact bytes: all that was not asked for stays as it is."""

from __future__ import annotations

import json
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from dlqbatch.errors import DlqbatchError
from dlqbatch.message import headers as names
from dlqbatch.message.properties import split
from dlqbatch.message.readable import body_form, readable
from dlqbatch.message.table import (
    LONG_STRING,
    LONGEST_NAME,
    TEXT_TAGS,
    Field,
    UnreadableTable,
    encode_field,
    fields,
    to_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LARGEST_BODY: Final = 128 * 1024 * 1024
"""Bytes; no RabbitMQ takes more unless it is told to."""
_FRAME: Final = 131_072
_OVERHEAD: Final = 20
_FOR_OURS: Final = 2_048
"""Bytes that our own headers may take when it is sent; the history stays behind where there is no room for it."""
LARGEST_PROPERTIES: Final = _FRAME - _OVERHEAD - _FOR_OURS
_HEADERS: Final = 0x2000
_RESERVED: Final = b"x-death"


class EditRefused(DlqbatchError):
    """The edit makes no valid message; nothing was changed."""

    exit_code = 2

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why}. Nothing was changed.")


class HeaderEdits(NamedTuple):
    """Encoded texts by header name; None takes the header away."""

    wanted: Mapping[bytes, bytes | None] = {}

    @property
    def told(self) -> tuple[str, ...]:
        return tuple(_shown(name) for name in self.wanted)


def header_edits(given: Iterable[tuple[str, str]], removed: Iterable[str] = ()) -> HeaderEdits:
    """What somebody wrote, checked name by name."""
    wanted: dict[bytes, bytes | None] = {}
    for name, text in (*given, *((name, None) for name in removed)):
        encoded = _checked(name)
        if encoded in wanted:
            raise EditRefused(f"the header '{_shown(encoded)}' is named twice; say once what it is to be")
        wanted[encoded] = None if text is None else _encoded(text)
    return HeaderEdits(wanted)


def edit_headers(properties: bytes, edits: HeaderEdits) -> bytes:
    """Flags and values with these headers changed; of several with one name the first takes the text."""
    if not edits.wanted:
        return properties
    try:
        missing = _removed(edits) - _names(properties)
        edited = _spliced(properties, edits.wanted)
        size = _size_without_ours(edited)
    except (UnreadableTable, IndexError, StructError):
        raise EditRefused("its headers cannot be read, so none can be changed; its body can") from None
    if missing:
        raise EditRefused(f"it has no header '{_shown(min(missing))}' that could be removed")
    if size > LARGEST_PROPERTIES and len(edited) > len(properties):
        raise EditRefused(
            f"its headers would take {size:,} bytes, and what is sent in one piece holds {LARGEST_PROPERTIES:,} of them"
        )
    return edited


def readdress(properties: bytes, identity: str, parent: str) -> bytes:
    """The same as another message: an id of its own, linked to the one it comes from, and no attempt yet.

    Headers that cannot be read stay as they are.
    """
    ours = {names.ID: to_bytes(identity), names.PARENT: to_bytes(parent), names.ATTEMPT: None}
    try:
        return _spliced(properties, ours)
    except (UnreadableTable, IndexError, StructError):
        return properties


def check_body(before: bytes, after: bytes, properties: bytes, *, force: bool = False) -> None:
    """Refuse what no broker takes, and JSON that is JSON no more; `force` allows the second."""
    if len(after) > LARGEST_BODY:
        raise EditRefused(f"the body has {len(after):,} bytes, and a broker takes {LARGEST_BODY:,} at most")
    if force or not _should_be_json(before, properties):
        return
    try:
        json.loads(after.decode(), parse_int=len, parse_float=len, parse_constant=_no_json)
    except RecursionError:
        raise EditRefused(
            "the body should be JSON, and is nested too deeply to tell; --force takes it as it is"
        ) from None
    except ValueError as error:
        raise EditRefused(f"the body should be JSON and is not: {error}; --force takes it as it is") from None


def _no_json(constant: str) -> NoReturn:
    """Python takes NaN and Infinity for numbers of JSON; hardly anything else does."""
    raise ValueError(f"{constant} is no number there")


def as_meant(before: bytes, edited: bytes) -> bytes:
    """What came out of an editor, without the line's end that many of them add to the last line by themselves."""
    if before.endswith(b"\n") or not edited.endswith(b"\n"):
        return edited
    return edited.removesuffix(b"\n").removesuffix(b"\r")


def _checked(name: str) -> bytes:
    encoded = _encoded(name)
    if not encoded or len(encoded) > LONGEST_NAME:
        raise EditRefused(f"a header's name has from 1 to {LONGEST_NAME} bytes, and this one has {len(encoded)}")
    if encoded.startswith(names.PREFIX):
        raise EditRefused(f"the header '{_shown(encoded)}' is dlqbatch's own: it says who the message is and was")
    if encoded in names.BROKERS or encoded.startswith(_RESERVED):
        raise EditRefused(f"the header '{_shown(encoded)}' is the broker's own, and never sent again")
    return encoded


def _encoded(text: str) -> bytes:
    try:
        return to_bytes(text)
    except UnicodeEncodeError:
        raise EditRefused("a header holds half of a character, which cannot be sent") from None


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _removed(edits: HeaderEdits) -> set[bytes]:
    return {name for name, text in edits.wanted.items() if text is None}


def _names(properties: bytes) -> set[bytes]:
    cut = split(properties)
    return {name for name, _ in fields(properties, cut.table_start, cut.table_end)}


def _spliced(properties: bytes, wanted: Mapping[bytes, bytes | None]) -> bytes:
    cut = split(properties)
    left = dict(wanted)
    table = b""
    for name, field in fields(properties, cut.table_start, cut.table_end):
        if name not in wanted:
            table += encode_field(name, field)
            continue
        text = left.pop(name, None)
        if text is not None:
            is_same = field.tag in TEXT_TAGS and field.value == text
            table += encode_field(name, field if is_same else Field(LONG_STRING, text))
    for name, text in left.items():
        if text is not None:
            table += encode_field(name, Field(LONG_STRING, text))
    flags = (cut.flags | _HEADERS).to_bytes(2, "big")
    size = len(table).to_bytes(4, "big")
    return b"".join((flags, properties[2 : cut.head_end], size, table, properties[cut.table_end :]))


def _size_without_ours(properties: bytes) -> int:
    cut = split(properties)
    foreign = names.scan(properties, cut.table_start, cut.table_end).foreign
    return len(properties) - (cut.table_end - cut.table_start) + len(foreign)


def _should_be_json(body: bytes, properties: bytes) -> bool:
    if body_form(body) == "json":
        return True
    said = readable(properties).properties
    # What is compressed is no JSON as it stands.
    kind = str(said.get("content_type", "")).partition(";")[0].strip().lower()
    return "content_encoding" not in said and (kind == "application/json" or kind.endswith("+json"))
