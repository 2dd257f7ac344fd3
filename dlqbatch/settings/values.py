"""How options are declared, and how what a person writes is read.

Every ValueError continues a sentence that names the option.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field

_SIZE: Final = re.compile(r"(\d{1,15})\s*(?:([kmg])(i?)b?|b)?", re.IGNORECASE)
_POWERS: Final = {"k": 1, "m": 2, "g": 3}
_DURATION: Final = re.compile(r"(\d{1,15})\s*(ms|s|m|h|d)?", re.IGNORECASE)
MILLISECONDS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
LONGEST_TTL_MS: Final = 2**32 - 1
LONGEST_QUEUE_NAME: Final = 255
# The rest is kept for what dlqbatch puts around it.
LONGEST_NAME: Final = 200


class Options(BaseModel):
    """Some of the options; `Settings` is all of them together."""

    # Of the classes only Settings is ever made, so that nothing else is built; a model costs some milliseconds.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True)


def option(default: Any, meaning: str, must_be: str, *, default_text: str | None = None, **bounds: Any) -> Any:
    """`must_be` is ready to follow 'it must be'; `default_text` is the default as a person would write it."""
    extra: dict[str, Any] = {"must_be": must_be, "default_text": default_text}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


def switch_option(default: bool, meaning: str) -> Any:
    return option(default, meaning, "true or false")


def number_option(default: int | None, meaning: str, *, least: int, most: int | None = None) -> Any:
    must_be = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    return option(default, meaning, must_be, ge=least, le=most)


def seconds_option(default: float, meaning: str, *, most: int) -> Any:
    must_be = f"a number of seconds above 0, at most {most}"
    return option(default, meaning, must_be, gt=0, le=most, allow_inf_nan=False)


def duration_option(default: str, meaning: str) -> Any:
    must_be = "a time above 0 with its unit, such as 90s, 15m, 12h or 30d, at most 36500d"
    return option(duration(default), meaning, must_be, default_text=default)


def size(value: object) -> object:
    """Read `256MiB` (powers of 1,024) or `10MB` (powers of 1,000) as bytes."""
    if not isinstance(value, str) or (found := _SIZE.fullmatch(value)) is None:
        return value
    number, unit, binary = found.groups()
    return int(number) * (1024 if binary else 1000) ** _POWERS.get((unit or "").lower(), 0)


def words(value: object) -> object:
    """Split at commas, without the space around them; text without a word is no list, and so refused."""
    if not isinstance(value, str):
        return value
    return tuple(word for part in value.split(",") if (word := part.strip())) or value


def durations(value: object) -> object:
    """Read `10s, 15m, 1h` or plain milliseconds as milliseconds."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(_milliseconds(part) for part in parts) if isinstance(parts, (list, tuple)) else value


def _milliseconds(part: object) -> object:
    if not isinstance(part, str) or (found := _DURATION.fullmatch(part.strip())) is None:
        return part
    return int(found[1]) * MILLISECONDS[(found[2] or "ms").lower()]


def duration(value: object) -> object:
    """Read `90s`, `15m`, `12h` or `30d`; a number alone is refused, since nobody sees its unit."""
    if isinstance(value, str) and (found := _DURATION.fullmatch(value.strip())) is not None and found[2]:
        try:
            return timedelta(milliseconds=int(found[1]) * MILLISECONDS[found[2].lower()])
        except OverflowError:
            return None
    return value if isinstance(value, timedelta) else None


def delays(value: object) -> object:
    """Read `1m, 5m, 1h` one by one."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def numbers(value: object) -> object:
    """Read `2, 3, 4` as numbers."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def zone_name(value: str) -> str:
    try:
        ZoneInfo(value)
    except (LookupError, ValueError, OSError):
        raise ValueError(
            "names a time zone that this machine does not know; use one like Europe/Berlin, "
            "and install the package tzdata where the system has no zones"
        ) from None
    return value


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


def queue_name(value: str) -> str:
    """A queue that is there, or a wildcard: as long as the broker lets it be."""
    length = len(printable(value).encode())
    if not 1 <= length <= LONGEST_QUEUE_NAME:
        raise ValueError(f"names a queue of {length} bytes, but a name has 1 to {LONGEST_QUEUE_NAME}")
    return value


def free_name(value: str) -> str:
    if value.startswith("amq."):
        raise ValueError("begins with amq., which the broker keeps for itself; choose another name")
    return name(value)


def place(path: Path) -> Path:
    """Where something is to be written; `~` is the user's home."""
    if not str(path).isprintable():
        raise ValueError("holds a control character or half a character, which no path should have")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("begins with the home of a user that this machine does not know") from None


def metrics_file(path: Path) -> Path:
    if path.suffix != ".prom":
        raise ValueError("does not end in .prom, and the textfile collector reads no other file")
    return place(path)


def readable(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "no valid path"
        raise ValueError(f"names a file that cannot be read ({why})") from None
    return path
