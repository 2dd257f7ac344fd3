"""Text that every database keeps: what none of them takes stands there as a visible escape."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Final

LONGEST_TEXT: Final = 65_536
LONGEST_NAME: Final = 255
"""The longest name: names are in indexes, whose entries are bounded."""
LONGEST_NOTE: Final = 2_000
_CUT: Final = "…"
_REFUSED: Final = re.compile("[\0\ud800-\udfff]")


def visible(value: str | bytes, longest: int = LONGEST_TEXT) -> str:
    r"""NUL as `\x00`, a byte that is no UTF-8 as `\xff`, a lone surrogate as `\ud800`; at most `longest` characters."""
    if isinstance(value, str) and len(value) <= longest and value.isascii() and "\0" not in value:
        return value  # as nearly all are
    if isinstance(value, bytes):
        # No character takes more than four bytes: what lies behind cannot be shown, however long it is.
        value = value[: 4 * longest + 4].decode("utf-8", "backslashreplace")
    shown = _REFUSED.sub(_escape, value[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + _CUT


def key(value: str | bytes) -> str:
    """A name to look something up by: a long one is cut, and told from its like by its SHA-256."""
    if isinstance(value, str) and len(value) <= LONGEST_NAME and value.isascii() and "\0" not in value:
        return value  # as nearly all are
    full = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    shown = visible(value, LONGEST_NAME + 1)
    if len(shown) <= LONGEST_NAME:
        return shown
    import hashlib  # noqa: PLC0415  (it loads OpenSSL, for the few names that are too long)

    digest = hashlib.sha256(full).hexdigest()
    return shown[: LONGEST_NAME - len(digest) - 1] + _CUT + digest


def plain(value: object) -> object:
    """The same as JSON can say it: bytes and odd characters become visible text, NaN and infinity their names."""
    match value:
        case str() | bytes():
            return visible(value)
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {visible(str(name)): plain(item) for name, item in value.items()}
        case Sequence() | set() | frozenset():
            return [plain(item) for item in value]
        case _:
            return visible(str(value))


def to_json(value: object) -> str:
    return json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))


def time_text(value: datetime) -> str:
    """UTC in one width, so that the order of texts is the order of times."""
    return value.astimezone(UTC).isoformat(timespec="microseconds")


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"  # noqa: PLR2004  (one byte)


def json_ready(value: object, encode: Callable[[bytes], str] = bytes.hex) -> object:
    """The value as JSON can hold it: times as ISO-8601 in UTC, bytes as text, NaN and infinity by their names."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    match value:
        case datetime():
            return time_text(value)
        case bytes():
            return encode(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(name): json_ready(item, encode) for name, item in value.items()}
        case tuple() | list():
            return [json_ready(item, encode) for item in value]
        case _:
            return value
