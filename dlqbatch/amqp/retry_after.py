"""`Retry-After`: how long the client that failed asks to wait, as HTTP writes it, in seconds or as a date."""

from __future__ import annotations

import math
import re
from struct import Struct
from typing import Final

from dlqbatch.amqp.headers import OTHERS_RETRY_AFTER, RETRY_AFTER, Headers
from dlqbatch.amqp.table import Field

LONGEST: Final = 2**32 - 1
"""More seconds than any delay has; whatever asks for more asks for this."""
_LONGEST_TEXT: Final = 64
_SECONDS: Final = re.compile(r"([0-9]{1,60})(?:\.([0-9]{1,60}))?")
_FLOATS: Final = {ord("f"): Struct(">f").unpack, ord("d"): Struct(">d").unpack}


def seconds_asked(headers: Headers, now: int) -> int:
    """Whole seconds, rounded up; 0 if it asks for nothing, or for something that is no wait. Never raises.

    Our own header goes first: it is of this failure alone. Others' stay in a message for ever.
    """
    field = headers.ours.get(RETRY_AFTER)
    if field is None:
        field = next((headers.claims[name] for name in OTHERS_RETRY_AFTER if name in headers.claims), None)
    return 0 if field is None else min(max(_seconds(field, now), 0), LONGEST)


def _seconds(field: Field, now: int) -> int:
    if (number := field.as_integer()) is not None:
        return number
    if (moment := field.as_timestamp()) is not None:
        return moment - now
    if (unpack := _FLOATS.get(field.tag)) is not None:
        (wait,) = unpack(field.value)
        return math.ceil(wait) if math.isfinite(wait) else 0
    text = field.as_text() if len(field.value) <= _LONGEST_TEXT else None
    return 0 if text is None else _seconds_of_text(text.strip(), now)


def _seconds_of_text(text: str, now: int) -> int:
    found = _SECONDS.fullmatch(text)
    if found is not None:
        return int(found[1]) + bool((found[2] or "").strip("0"))
    from email.utils import mktime_tz, parsedate_tz  # noqa: PLC0415  (a cold start; few ask with a date)

    try:
        date = parsedate_tz(text)
        return 0 if date is None else mktime_tz(date) - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0
