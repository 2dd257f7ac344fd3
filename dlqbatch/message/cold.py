"""A dead message as one line of a cold copy: every column, its attempts and its transitions.

Bytes are base64, times ISO-8601 in UTC. Whatever is read here may be damaged or forged.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from base64 import b64decode, b64encode
from binascii import a2b_base64
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlqbatch.errors import DlqbatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA: Final = 1
"""What lines and manifests look like."""
LARGEST_ID: Final = 2**63 - 1
_DIGEST: Final = 32
_FINGERPRINT: Final = 16
_HIGHEST_PRIORITY: Final = 255
_LARGE: Final = 3 * 64 * 1024
"""Bytes of a body that are encoded at once; three of them are four characters."""
_MESSAGE_BEGINS: Final = b'"message":{"ack_proven":'
_LARGE_BODY: Final = re.compile(_MESSAGE_BEGINS + rb'(?:true|false),"body":"([A-Za-z0-9+/=]{%d,})"' % _LARGE)


class ArchiveDamaged(DlqbatchError):
    """What cold storage holds is not what was written there."""

    def __init__(self, part: str, why: str) -> None:
        self.part, self.why = part, why
        super().__init__(
            f"the cold copy {part} is damaged: {why}. Nothing is deleted on its word; bring it back from a backup, "
            "and let `dlqbatch archive list --verify` read it again."
        )


class ColdStorageFailed(DlqbatchError):
    """Cold storage cannot be read or written."""

    def __init__(self, where: str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"cold storage at {where} cannot be used: {why}. What has no copy yet stays in the database.")


class Line(NamedTuple):
    """A dead message with everything that the database knows of it."""

    message: Mapping[str, Any]
    """Every column of its row."""
    attempts: tuple[Mapping[str, Any], ...]
    transitions: tuple[Mapping[str, Any], ...]
    """In the order they happened."""


# --- What a line is made of: the type of each column, and whether it may be null


class Kind(NamedTuple):
    type: type
    may_be_null: bool = False


def columns(*groups: tuple[type, str], nullable: tuple[tuple[type, str], ...] = ()) -> dict[str, Kind]:
    named = {name: Kind(each) for each, names in groups for name in names.split()}
    return named | {name: Kind(each, may_be_null=True) for each, names in nullable for name in names.split()}


MESSAGE: Final = columns(
    (int, "id retry_count dlq_retry_count priority"),
    (str, "identity source_queue exchange routing_key fingerprint status"),
    (bytes, "digest full_digest body properties"),
    (bool, "had_id is_due possible_duplicate ack_proven"),
    (datetime, "first_failed_at last_failed_at status_since created_at updated_at"),
    (list, "tags"),
    (dict, "system_state"),
    nullable=(
        (int, "plan_id"),
        (str, "parent message_id origin_queue origin_exchange origin_key event reason error_type error_message"),
        (str, "error_stack strategy lock_owner lock_token source"),
        (datetime, "locked_at lease_until next_retry_at"),
    ),
)
ATTEMPT: Final = columns(
    (int, "number"),
    (str, "worker"),
    (datetime, "created_at"),
    nullable=((str, "strategy outcome"), (datetime, "sent_at closed_at")),
)
TRANSITION: Final = columns((str, "to_status actor reason"), (datetime, "at"), nullable=((str, "from_status"),))
_PARTS: Final = {"message": MESSAGE, "attempts": ATTEMPT, "transitions": TRANSITION}
_STATE: Final = frozenset(
    {"status", "status_since", "updated_at", "is_due", "lock_owner", "lock_token", "locked_at", "lease_until"}
)
"""What a move writes."""


def encode(line: Line) -> bytes:
    """The same row is the same bytes."""
    return b"".join(pieces(line))


def pieces(line: Line) -> Iterator[bytes]:
    """What `encode` returns, a little at a time: of a large body, no second copy is made in memory."""
    attempts, transitions = list(map(_told, line.attempts)), list(map(_told, line.transitions))
    body = line.message.get("body", b"")
    if len(body) <= _LARGE:
        told = {"message": _told(line.message), "attempts": attempts, "transitions": transitions}
        yield _json(told) + b"\n"
        return
    before = {name: value for name, value in line.message.items() if name < "body"}
    after = {name: value for name, value in line.message.items() if name > "body"}
    yield b'{"attempts":' + _json(attempts) + b',"message":' + _json(_told(before))[:-1]
    yield (b"," if before else b"") + b'"body":"'
    for start in range(0, len(body), _LARGE):
        yield b64encode(body[start : start + _LARGE])
    yield b'"' + (b"," if after else b"") + _json(_told(after))[1:]
    yield b',"transitions":' + _json(transitions) + b"}\n"


def _json(told: object) -> bytes:
    # ASCII alone: no character of any message can end a line, or be one that a reader refuses.
    return json.dumps(told, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def decode(raw: bytes | bytearray, part: str) -> Line:
    try:
        told = _parsed(raw)
    except (ValueError, RecursionError) as error:
        raise ArchiveDamaged(part, "a line is not JSON") from error
    if not isinstance(told, dict) or told.keys() != _PARTS.keys():
        raise ArchiveDamaged(part, f"a line does not hold {', '.join(_PARTS)} and nothing else")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, kinds in _PARTS.items():
        entries = [told[name]] if name == "message" else told[name]
        if not isinstance(entries, list):
            raise ArchiveDamaged(part, f"{name} is not a list")
        found[name] = [read(entry, kinds, name, part) for entry in entries]
    (message,) = found["message"]
    sizes = (len(message["digest"]), len(message["full_digest"]), len(message["fingerprint"]))
    if sizes != (_DIGEST, _DIGEST, _FINGERPRINT) or not 0 <= message["priority"] <= _HIGHEST_PRIORITY:
        raise ArchiveDamaged(part, "a digest, a fingerprint or a priority is none")
    return Line(message, tuple(found["attempts"]), tuple(found["transitions"]))


def seal(line: Line) -> bytes:
    """A digest of all that is the same in a row and in its copy, though the row was archived after it was copied."""
    last = line.transitions[-1] if line.transitions else {}
    is_ours = (last.get("from_status"), last.get("to_status"), last.get("actor")) == ("failed", "archived", "retain")
    kept = {name: value for name, value in line.message.items() if name not in _STATE}
    steps = line.transitions[:-1] if is_ours else line.transitions
    digest = hashlib.sha256()
    for piece in pieces(Line(kept, line.attempts, steps)):
        digest.update(piece)
    return digest.digest()


def _parsed(raw: bytes | bytearray) -> Any:
    """As json.loads; a large body stays the bytes that it is in `raw`, which parsed would be there three times over."""
    # Only `attempts` comes before it, and no column of those holds an object: the first is the message's, or damage.
    body = _LARGE_BODY.match(raw, max(raw.find(_MESSAGE_BEGINS), 0))
    if body is None:
        return json.loads(raw)
    told = json.loads(raw[: body.start(1)] + raw[body.end(1) :])
    if isinstance(told, dict) and isinstance(told.get("message"), dict):
        told["message"]["body"] = memoryview(raw)[body.start(1) : body.end(1)]
    return told


def _told(entry: Mapping[str, Any]) -> dict[str, object]:
    return {name: plain(value) for name, value in entry.items()}


def plain(value: object) -> object:
    match value:
        case bytes():
            return b64encode(value).decode()
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="microseconds")
        case float():
            return value if math.isfinite(value) else str(value)  # JSON has no others, nor has the database
        case Mapping():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _:
            return value


def read(entry: object, kinds: Mapping[str, Kind], name: str, part: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or entry.keys() != kinds.keys():
        raise ArchiveDamaged(part, f"{name} has other columns than version {SCHEMA} of this format")
    try:
        return {column: _value(entry[column], kind) for column, kind in kinds.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise ArchiveDamaged(part, f"{name} holds a value that its column cannot have") from error


def _value(told: object, kind: Kind) -> object:
    if told is None and kind.may_be_null:
        return None
    if isinstance(told, memoryview):
        return a2b_base64(told, strict_mode=True)
    if kind.type in (bytes, datetime):
        if not isinstance(told, str):
            raise TypeError
        if kind.type is bytes:
            return b64decode(told, validate=True)
        at = datetime.fromisoformat(told)
        if at.tzinfo is None:
            raise ValueError
        return at.astimezone(UTC)
    # True is an int for Python, and for nobody else.
    if not isinstance(told, kind.type) or (kind.type is int and isinstance(told, bool)):
        raise TypeError
    if isinstance(told, int) and abs(told) > LARGEST_ID:
        raise ValueError
    return told
