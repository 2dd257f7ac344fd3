"""The JSON that the API takes: each body as a small schema, which is checked and stands in the API's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlqbatch.console.addresses import NAMES
from dlqbatch.store.filters import NotUnderstood

Schema = Mapping[str, Any]

_LARGEST: Final = 2**63 - 1
TEXT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 400, "pattern": "^[ -~]*[!-~][ -~]*$"}
FLAG: Final[Schema] = {"type": "boolean"}
NUMBER: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 1_000_000_000}
IDS: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": _LARGEST},
    "maxItems": 100_000,
}
_VALUES: Final[Schema] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 5_000},
    "maxItems": 100_000,
}
FILTER: Final[Schema] = {
    "type": "object",
    "description": "The filters of the command line, each with its values.",
    "properties": dict.fromkeys(NAMES, _VALUES),
    "additionalProperties": False,
}


def body(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    properties = {**required, **optional}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


SELECTED: Final = {"ids": IDS, "filter": FILTER}
REASON: Final = body({"reason": TEXT})
PLAN: Final = body(
    {"reason": TEXT},
    **SELECTED,
    everything=FLAG,
    to_queue=TEXT,
    in_order=TEXT,
    mended=TEXT,
    limit={**NUMBER, "minimum": 1},
    dry_run=FLAG,
)
SHARE: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 1}
RELEASE: Final = body({}, reason=TEXT, rate=TEXT, canary=FLAG, max_failure_rate=SHARE, guard=FLAG)
PAUSE: Final = body({}, reason=TEXT)
RATE: Final = body({"rate": TEXT})
DISCARD: Final = body({"reason": TEXT}, **SELECTED, everything=FLAG, expect=NUMBER, dry_run=FLAG)
RESTORE: Final = body({"reason": TEXT}, **SELECTED, dry_run=FLAG)
_WORDS: Final[Schema] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 100_000},
    "maxItems": 100,
}
_HEADERS: Final[Mapping[str, Schema]] = {
    "set_headers": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 100_000}},
    "remove_headers": _WORDS,
}
EDIT: Final = body(
    {"reason": TEXT},
    **SELECTED,
    set={**_WORDS, "description": "body.PATH=JSON, as the option --set."},
    merge_patch={
        "type": "string",
        "minLength": 1,
        "maxLength": 1_000_000,
        "description": "A JSON merge patch as a text, so that each number stays as it is written.",
    },
    **_HEADERS,
    expect=NUMBER,
    force=FLAG,
    dry_run=FLAG,
)
ORIGINAL: Final = body({"reason": TEXT}, force=FLAG)
EDIT_ONE: Final = body(
    {"reason": TEXT},
    body_base64={"type": "string", "maxLength": 8_000_000, "description": "The new body; without it that stays."},
    **_HEADERS,
    force=FLAG,
    dry_run=FLAG,
)
_QUEUE: Final[Schema] = {"type": "string", "maxLength": 255, "description": "Only what failed in this queue."}
HOLD: Final = body({"reason": TEXT}, queue=_QUEUE)
ACK: Final = body({"reason": TEXT}, queue=_QUEUE, until=TEXT, more={**NUMBER, "minimum": 1})
_NOTE: Final[Schema] = {"type": "string", "maxLength": 2_000}
NOTE: Final = body({}, queue=_QUEUE, text=_NOTE, owner=_NOTE, tags={"type": "array", "items": _NOTE, "maxItems": 100})
_ASKS: Final[Mapping[str, Schema]] = {
    "filter": FILTER,
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
    "after": TEXT,
    "sought": {"type": "string", "minLength": 1, "maxLength": 5_000},
    "max-seconds": {"type": "number", "minimum": 0, "maximum": 60},
}
SIMULATE: Final = body({"numbers": {"type": "object", "additionalProperties": NUMBER}}, since=TEXT)
UNDO: Final = body({"reason": TEXT}, dry_run=FLAG)
EVENT: Final = body({"event": TEXT}, max_retries=NUMBER)

_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def question(asks: Sequence[str]) -> Schema:
    """What an address may ask for, as a body."""
    return body({}, **{name: _ASKS[name] for name in asks})


def checked(content: Any, schema: Schema | None) -> dict[str, Any]:
    """The content if the schema allows it; else NotUnderstood says which part it is."""
    _check(content, schema or body({}), "the body")
    found: dict[str, Any] = content
    return found


def _check(value: Any, schema: Schema, where: str) -> None:
    kind = _KINDS[schema["type"]]
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise NotUnderstood(f"{where} is to be of the type {schema['type']}. Nothing was done.")
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        raise NotUnderstood(f"{where} is to be from {schema['minimum']} to {schema['maximum']}. Nothing was done.")
    if isinstance(value, str | list):
        least, most = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if not schema.get(least, 0) <= len(value) <= schema.get(most, len(value)):
            raise NotUnderstood(f"{where} is too short or too long. Nothing was done.")
    if isinstance(value, list):
        for each in value:
            _check(each, schema["items"], f"each of {where}")
    if isinstance(value, dict):
        properties: Schema = schema.get("properties", {})
        others = schema["additionalProperties"]
        missing = [name for name in schema.get("required", ()) if name not in value]
        unknown = [name for name in value if name not in properties and not others]
        if missing or unknown:
            word = f"lacks '{missing[0]}'" if missing else f"holds '{unknown[0]}', which nobody knows"
            raise NotUnderstood(f"{where} {word}. Nothing was done.")
        for name, each in value.items():
            _check(each, properties.get(name, others), name)
