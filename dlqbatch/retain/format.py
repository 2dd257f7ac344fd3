"""What a cold copy looks like: a dead message is a line, and a part is a compressed file of lines with a manifest.

A line holds every column of the message, its attempts and its transitions, as JSON; bytes are base64, and times are
ISO-8601 in UTC. The files lie by day: `2030/06/01/20300601T120000-ab12cd34.jsonl.gz`, and `.manifest.json` beside it.
Whatever is read here may be damaged or forged.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from binascii import a2b_base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from dlqbatch.errors import DlqbatchError
from dlqbatch.store.text import json_ready

# The version of lines and manifests.
SCHEMA: Final = 1
LARGEST_ID: Final = 2**63 - 1
# Bytes of a part when it is unpacked; no row of a database comes near it.
LARGEST_CONTENT: Final = 1024 * 1024 * 1024
# Bytes to which any file may unpack: more than the largest message of a broker with its defaults.
MOST_UNPACKED: Final = 256 * 1024 * 1024
# A file that unpacks to more than that may only be so many times smaller: a forged one of 1 MB could fill a memory.
MOST_RATIO: Final = 30
LARGEST_MANIFEST: Final = 1024 * 1024
MOST_LINES: Final = 10_000
_DIGEST: Final = 32
_FINGERPRINT: Final = 16
_HIGHEST_PRIORITY: Final = 255
# Bytes of a body that are encoded at once; three of them are four characters.
_BODY_PIECE: Final = 3 * 64 * 1024
_BODY: Final = b'"body":"'
_MARK: Final = 8
_PART: Final = re.compile(r"[0-9]{4}/[0-9]{2}/[0-9]{2}/[0-9A-Za-z-]{1,64}")
_EDITION: Final = re.compile(r"(?P<first>[0-9/]{10}/[0-9]{8}T[0-9]{6}-[0-9a-f]{8})(?:-(?P<number>[1-9][0-9]{0,5}))?")
_UNFINISHED: Final = re.compile(r"([0-9]{4}/[0-9]{2}/[0-9]{2})/\.[0-9A-Za-z.-]{1,128}\.tmp")
_HEX: Final = re.compile("[0-9a-f]{64}")
_DATA, _MANIFEST = ".jsonl.gz", ".manifest.json"


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


# --- A line


class Line(NamedTuple):
    """A dead message with everything that the database knows of it."""

    message: Mapping[str, Any]
    """Every column of its row, and the name of its scope."""
    attempts: tuple[Mapping[str, Any], ...]
    transitions: tuple[Mapping[str, Any], ...]
    """In the order they happened."""


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
        (str, "error_stack strategy lock_owner lock_token source moved_to framework_id scope"),
        (bytes, "returned_digest"),
        (datetime, "locked_at lease_until next_retry_at erased_at"),
    ),
)
ATTEMPT: Final = columns(
    (int, "number"),
    (str, "worker"),
    (datetime, "created_at"),
    nullable=((str, "strategy outcome proof"), (datetime, "sent_at closed_at acknowledged_at")),
)
TRANSITION: Final = columns((str, "to_status actor reason"), (datetime, "at"), nullable=((str, "from_status"),))
# Columns that came later: older copies do not have them.
_ADDED: Final = frozenset(
    {"moved_to", "acknowledged_at", "proof", "framework_id", "returned_digest", "scope", "erased_at"}
)
_PARTS: Final = {"message": MESSAGE, "attempts": ATTEMPT, "transitions": TRANSITION}
# Columns that a move to another state writes.
_STATE: Final = frozenset(
    {"status", "status_since", "updated_at", "is_due", "lock_owner", "lock_token", "locked_at", "lease_until"}
)


def pieces(line: Line) -> Iterator[bytes]:
    """The line in pieces, so that of a large body there is no second copy in memory; equal rows are equal bytes."""
    shown = {
        "attempts": [_plain(each) for each in line.attempts],
        "message": _plain({**line.message, "body": ""}),
        "transitions": [_plain(each) for each in line.transitions],
    }
    # ASCII alone: no character of any message can end a line, or be one that a reader refuses.
    raw = json.dumps(shown, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    # Keys are sorted, and no column before the body holds an object: the first "body" is that of the message.
    before, _, after = raw.partition(_BODY)
    yield before + _BODY
    body = line.message["body"]
    for start in range(0, len(body), _BODY_PIECE):
        yield b64encode(body[start : start + _BODY_PIECE])
    yield after + b"\n"


def decode(raw: bytes | bytearray, part: str) -> Line:
    try:
        shown = _parse(raw)
    except (ValueError, RecursionError) as error:
        raise ArchiveDamaged(part, "a line is not JSON") from error
    if not isinstance(shown, dict) or shown.keys() != _PARTS.keys():
        raise ArchiveDamaged(part, f"a line does not hold {', '.join(_PARTS)} and nothing else")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, kinds in _PARTS.items():
        entries = [shown[name]] if name == "message" else shown[name]
        if not isinstance(entries, list):
            raise ArchiveDamaged(part, f"{name} is not a list")
        found[name] = [_typed(entry, kinds, name, part) for entry in entries]
    (message,) = found["message"]
    sizes = (len(message["digest"]), len(message["full_digest"]), len(message["fingerprint"]))
    if sizes != (_DIGEST, _DIGEST, _FINGERPRINT) or not 0 <= message["priority"] <= _HIGHEST_PRIORITY:
        raise ArchiveDamaged(part, "a digest, a fingerprint or a priority is none")
    return Line(message, tuple(found["attempts"]), tuple(found["transitions"]))


def _parse(raw: bytes | bytearray) -> Any:
    """Parse the JSON without the body, which stays the bytes that it is in `raw`: parsed, it would be there thrice."""
    begin = raw.find(_BODY) + len(_BODY)
    end = raw.find(b'"', begin)
    if begin < len(_BODY) or end < 0:
        return json.loads(raw)
    shown = json.loads(raw[:begin] + raw[end:])
    message = shown.get("message") if isinstance(shown, dict) else None
    if not isinstance(message, dict) or message.get("body") != "":
        return json.loads(raw)  # the first "body" was another one, which only a forged line has
    message["body"] = memoryview(raw)[begin:end]
    return shown


def seal(line: Line) -> bytes:
    """A digest of all that a row and its copy have in common, though the row was archived after it was copied."""
    last = line.transitions[-1] if line.transitions else {}
    is_ours = (last.get("from_status"), last.get("to_status"), last.get("actor")) == ("failed", "archived", "retain")
    # The scope stands in copies of late, and says nothing of the message.
    left_out = _STATE | {"scope"} | {name for name in _ADDED if line.message.get(name) is None}
    kept = {name: value for name, value in line.message.items() if name not in left_out}
    steps = line.transitions[:-1] if is_ours else line.transitions
    digest = hashlib.sha256()
    for piece in pieces(Line(kept, line.attempts, steps)):
        digest.update(piece)
    return digest.digest()


def _plain(value: Any) -> Any:
    return json_ready(value, lambda data: b64encode(data).decode())


def _typed(entry: object, kinds: Mapping[str, Kind], name: str, part: str) -> dict[str, Any]:
    """The values of a JSON object, each with the type of its column."""
    if isinstance(entry, dict):
        entry = {**dict.fromkeys(_ADDED & kinds.keys()), **entry}
    if not isinstance(entry, dict) or entry.keys() != kinds.keys():
        raise ArchiveDamaged(part, f"{name} has other columns than version {SCHEMA} of this format")
    try:
        return {column: _value(entry[column], kind) for column, kind in kinds.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise ArchiveDamaged(part, f"{name} holds a value that its column cannot have") from error


def _value(shown: object, kind: Kind) -> object:
    if shown is None and kind.may_be_null:
        return None
    if isinstance(shown, memoryview):
        return a2b_base64(shown, strict_mode=True)
    if kind.type in (bytes, datetime):
        if not isinstance(shown, str):
            raise TypeError
        if kind.type is bytes:
            return b64decode(shown, validate=True)
        at = datetime.fromisoformat(shown)
        if at.tzinfo is None:
            raise ValueError
        return at.astimezone(UTC)
    # In Python True is an int; in a column it is not.
    if not isinstance(shown, kind.type) or (kind.type is int and isinstance(shown, bool)):
        raise TypeError
    if isinstance(shown, int) and abs(shown) > LARGEST_ID:
        raise ValueError
    return shown


# --- A part


def part_name(now: datetime, mark: str) -> str:
    """The name has the day in UTC; the mark differs between parts of one second."""
    at = now.astimezone(UTC)
    return f"{at:%Y/%m/%d}/{at:%Y%m%dT%H%M%S}-{mark}"


class Edition(NamedTuple):
    """A part under its first name, and how often it has been written: an erase writes a part anew as the next one."""

    first: str
    number: int

    @property
    def part(self) -> str:
        return self.first if self.number == 1 else f"{self.first}-{self.number}"

    @property
    def next(self) -> Edition:
        return self._replace(number=self.number + 1)


def edition_of(part: str) -> Edition:
    found = _EDITION.fullmatch(part)
    return Edition(part, 1) if found is None else Edition(found["first"], int(found["number"] or 1))


def data_name(part: str) -> str:
    return _checked(part) + _DATA


def manifest_name(part: str) -> str:
    return _checked(part) + _MANIFEST


def steps_of(name: str) -> list[str]:
    """The steps of the name of a file; ArchiveDamaged if they would lead out of cold storage."""
    steps = name.split("/")
    if any(step in ("", ".", "..") or "\0" in step for step in steps):
        raise ArchiveDamaged(name, "its name leads out of cold storage")
    return steps


def _checked(part: str) -> str:
    # The name may come from a database or a manifest; it must never lead out of cold storage.
    if not _PART.fullmatch(part):
        raise ArchiveDamaged(part, "that is no name of a part")
    return part


class Named(NamedTuple):
    part: str
    is_manifest: bool


def named(name: str) -> Named | None:
    """The part to which a file in cold storage belongs; None if it is not of this format."""
    for ending in (_DATA, _MANIFEST):
        if name.endswith(ending) and _PART.fullmatch(name.removesuffix(ending)):
            return Named(name.removesuffix(ending), ending == _MANIFEST)
    return None


def is_left_behind(name: str, now: datetime) -> bool:
    """Whether a killed run had only begun to write this file; a file of today may be under way."""
    found = _UNFINISHED.fullmatch(name)
    return found is not None and found[1] < f"{now.astimezone(UTC) - timedelta(days=1):%Y/%m/%d}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a part holds. It is written last, so that a part without it is not finished."""

    part: str
    created: datetime
    count: int
    first_id: int
    last_id: int
    content_bytes: int
    content_sha256: str
    file_bytes: int
    file_sha256: str
    identities: str
    """Eight hexadecimal digits for the identity of each line, which say that a part cannot hold an identity."""

    @property
    def day(self) -> str:
        return self.part.rpartition("/")[0]

    def may_hold(self, key: int | str) -> bool:
        """Whether a message may be in the part, by its number or its identity."""
        if isinstance(key, int):
            return self.first_id <= key <= self.last_id
        return identity_mark(key) in self.marks

    @property
    def marks(self) -> frozenset[str]:
        """The marks of the identities."""
        return frozenset(self.identities[at : at + _MARK] for at in range(0, len(self.identities), _MARK))

    def encode(self) -> bytes:
        shown = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return json.dumps({"schema": SCHEMA, **shown}, indent=1).encode() + b"\n"


_MANIFEST_KINDS: Final = columns(
    (int, "schema count first_id last_id content_bytes file_bytes"),
    (str, "part content_sha256 file_sha256 identities"),
    (datetime, "created"),
)


def decode_manifest(raw: bytes, part: str) -> Manifest:
    """ArchiveDamaged unless it is the manifest of this part, with sizes that a part can have."""
    try:
        shown = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ArchiveDamaged(part, "its manifest is not JSON") from error
    if isinstance(shown, dict) and shown.get("schema") != SCHEMA:
        raise ArchiveDamaged(part, f"its manifest is not of version {SCHEMA}, the only one known here")
    values = _typed(shown, _MANIFEST_KINDS, "its manifest", part)
    del values["schema"]
    found = Manifest(**values)
    if found.part != part:
        raise ArchiveDamaged(part, "its manifest names another part")
    are_digests = _HEX.fullmatch(found.content_sha256) and _HEX.fullmatch(found.file_sha256)
    is_possible = (
        0 < found.count <= MOST_LINES
        and len(found.identities) == found.count * _MARK
        and 0 < found.content_bytes <= LARGEST_CONTENT
        and 0 < found.file_bytes <= LARGEST_CONTENT
        and found.content_bytes <= max(MOST_UNPACKED, MOST_RATIO * found.file_bytes)
        and 0 < found.first_id <= found.last_id
    )
    if not are_digests or not is_possible:
        raise ArchiveDamaged(part, "its manifest tells what no part can be")
    return found


def identity_mark(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:_MARK]
