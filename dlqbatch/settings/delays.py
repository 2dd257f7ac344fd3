"""How delays of an event are written: `10s,1m,10m` one by one, or `10s*2..1h` where each is so many times the last."""

from __future__ import annotations

import re
from typing import Final

from dlqbatch.logs import plain
from dlqbatch.settings.values import LONGEST_TTL_MS, MILLISECONDS

SUFFIX: Final = ".delays"
"""The end of the key `dlqbatch.events.NAME.delays`."""
FORM: Final = "write delays with a unit, such as 10s,1m,10m, or growing ones, such as 10s*2..1h"
MOST_QUEUES: Final = 32
"""The most delay queues that a ladder has besides those of its tiers: each is a queue for the broker to keep."""
_MOST_STEPS: Final = 100
_LEAST_FACTOR, _GREATEST_FACTOR = 2, 10
_ONE: Final = re.compile(r"([0-9]{1,15})\s*(ms|s|m|h|d)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_GROWING: Final = re.compile(r"([^*]*)\*([^*.]*)\.\.([^*.]*)")
_SHOWN: Final = 20


def steps(text: str) -> tuple[int, ...]:
    """The delays in milliseconds, one for each retry; the last one repeats. A ValueError continues a sentence."""
    if "*" in text or ".." in text:
        return _growing(text)
    parts = text.split(",")
    if len(parts) > _MOST_STEPS:
        raise ValueError(f"has {len(parts)} delays; it may have {_MOST_STEPS}")
    return tuple(_one(part) for part in parts)


def checked_steps(value: object) -> object:
    """The same for an option."""
    return steps(value) if isinstance(value, str) else value


def _growing(text: str) -> tuple[int, ...]:
    found = _GROWING.fullmatch(text)
    if found is None:
        raise ValueError("is no growing delay; write the first one, * and a factor, .. and the longest one: 10s*2..1h")
    first, longest, factor = _one(found[1]), _one(found[3]), found[2].strip()
    if not _NUMBER.fullmatch(factor) or not _LEAST_FACTOR <= int(factor) <= _GREATEST_FACTOR:
        raise ValueError(
            f"grows by the factor '{plain(factor, _SHOWN)}'; it must be a whole number from {_LEAST_FACTOR} to "
            f"{_GREATEST_FACTOR}, as in 10s*2..1h"
        )
    if longest < first:
        raise ValueError(f"begins with {found[1].strip()}, which is longer than {found[3].strip()}, where it ends")
    grown = []
    while first < longest:
        grown.append(first)
        first *= int(factor)
    return (*grown, longest)


def _one(part: str) -> int:
    part = part.strip()
    found = _ONE.fullmatch(part)
    if found is None:
        why = "has no unit" if _NUMBER.fullmatch(part) else "is no delay"
        raise ValueError(f"has the delay '{plain(part, _SHOWN)}', which {why}; {FORM}")
    milliseconds = int(found[1]) * MILLISECONDS[found[2].lower()]
    if not 0 < milliseconds <= LONGEST_TTL_MS:
        raise ValueError(f"has the delay '{plain(part, _SHOWN)}'; each must be above 0 and at most {LONGEST_TTL_MS} ms")
    return milliseconds
