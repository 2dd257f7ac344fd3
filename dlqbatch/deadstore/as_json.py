"""Our values as JSON can say them: nothing is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime

from dlqbatch.deadstore.text import time_text


def as_json(value: object) -> object:
    """Times as ISO-8601 in UTC, bytes as hexadecimal."""
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    match value:
        case datetime():
            return time_text(value)
        case bytes():
            return value.hex()
        case Mapping():
            return {str(name): as_json(item) for name, item in value.items()}
        case tuple() | list():
            return [as_json(item) for item in value]
        case _:
            return value
