"""From what a person writes to what the program uses; every ValueError continues a sentence that names the option."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_SIZE: Final = re.compile(r"(\d{1,15})\s*(?:([kmg])(i?)b?|b)?", re.IGNORECASE)
_POWERS: Final = {"k": 1, "m": 2, "g": 3}
_DURATION: Final = re.compile(r"(\d{1,15})\s*(ms|s|m|h|d)?", re.IGNORECASE)
_MILLISECONDS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
LONGEST_TTL_MS: Final = 2**32 - 1
# A queue or exchange name has 255 bytes; the rest is kept for what dlqbatch puts around it.
LONGEST_NAME: Final = 200


def size(value: object) -> object:
    """Read `256MiB` (powers of 1,024) or `10MB` (powers of 1,000) as bytes."""
    if not isinstance(value, str) or (found := _SIZE.fullmatch(value)) is None:
        return value
    number, unit, binary = found.groups()
    return int(number) * (1024 if binary else 1000) ** _POWERS.get((unit or "").lower(), 0)


def words(value: object) -> object:
    """Split at commas, without the space around them; no text is no words."""
    if not isinstance(value, str):
        return value
    return tuple(word for part in value.split(",") if (word := part.strip()))


def durations(value: object) -> object:
    """Read `10s, 15m, 1h` or plain milliseconds as milliseconds."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(_milliseconds(part) for part in parts) if isinstance(parts, (list, tuple)) else value


def _milliseconds(part: object) -> object:
    if not isinstance(part, str) or (found := _DURATION.fullmatch(part.strip())) is None:
        return part
    return int(found[1]) * _MILLISECONDS[(found[2] or "ms").lower()]


def lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("holds a control character or half a character, which no name may")
    return value


def name(value: str) -> str:
    length = len(printable(value).encode())
    if not 1 <= length <= LONGEST_NAME:
        raise ValueError(f"has {length} bytes, but a name has 1 to {LONGEST_NAME}")
    return value


def free_name(value: str) -> str:
    if value.startswith("amq."):
        raise ValueError("begins with amq., which the broker keeps for itself; choose another name")
    return name(value)


def readable(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "no valid path"
        raise ValueError(f"names a file that cannot be read ({why})") from None
    return path
