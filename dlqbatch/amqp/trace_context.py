"""`traceparent`, the header of W3C Trace Context by which a message belongs to a trace."""

from __future__ import annotations

import re
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Final, NamedTuple

from dlqbatch.amqp.properties import split
from dlqbatch.amqp.table import UnreadableTable, fields

NAME: Final = b"traceparent"
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """The span that a message was published in."""

    trace: int
    span: int
    is_sampled: bool
    """Whether the publisher recorded that span."""


def trace_context(properties: bytes) -> TraceContext | None:
    """The context of a message, by its properties as they came; None if there is none that can be read."""
    if NAME not in properties:
        return None
    try:
        cut = split(properties)
        table = fields(cut.data, cut.table_start, cut.table_end)
        text = next((field.as_text() for name, field in table if name == NAME), None)
    except (UnreadableTable, IndexError, StructError):
        return None
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None:
        return None
    trace, span, flags = (int(part, 16) for part in found.groups())
    return TraceContext(trace, span, bool(flags & _SAMPLED)) if trace and span else None
