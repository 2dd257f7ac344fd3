"""A part of cold storage: a compressed file of lines and a manifest that says what is in it.

The files lie by day: `2030/06/01/20300601T120000-ab12cd34.jsonl.gz`, and `.manifest.json` beside it. Whatever is read
here may be damaged or forged.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zlib
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch.message.cold import LARGEST_ID, SCHEMA, ArchiveDamaged, Line, columns, decode, pieces, plain, read, seal

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST_CONTENT: Final = 1024 * 1024 * 1024
"""Bytes of a part when it is unpacked; no row of a database comes near it."""
LARGEST_MANIFEST: Final = 1024 * 1024
MOST_LINES: Final = 10_000
_GZIP: Final = 31
"""The window bits that make zlib write gzip's own frame: without a name and a time, so the same bytes every time."""
_IN, _OUT = 64 * 1024, 256 * 1024
_MARK: Final = 8
_PART: Final = re.compile(r"[0-9]{4}/[0-9]{2}/[0-9]{2}/[0-9A-Za-z-]{1,64}")
_BEGUN: Final = re.compile(r"([0-9]{4}/[0-9]{2}/[0-9]{2})/\.[0-9A-Za-z.-]{1,128}\.tmp")
_HEX: Final = re.compile("[0-9a-f]{64}")
_DATA, _MANIFEST = ".jsonl.gz", ".manifest.json"


def part_name(now: datetime, mark: str) -> str:
    """By day, in UTC; the mark tells parts of one second apart."""
    at = now.astimezone(UTC)
    return f"{at:%Y/%m/%d}/{at:%Y%m%dT%H%M%S}-{mark}"


def data_name(part: str) -> str:
    return _checked(part) + _DATA


def manifest_name(part: str) -> str:
    return _checked(part) + _MANIFEST


def _checked(part: str) -> str:
    # What a database or a manifest calls a part may be anything; it must never lead out of cold storage.
    if not _PART.fullmatch(part):
        raise ArchiveDamaged(part, "that is no name of a part")
    return part


class Named(NamedTuple):
    part: str
    is_manifest: bool


def named(name: str) -> Named | None:
    """What a file in cold storage is; None: none of ours."""
    for ending in (_DATA, _MANIFEST):
        if name.endswith(ending) and _PART.fullmatch(name.removesuffix(ending)):
            return Named(name.removesuffix(ending), ending == _MANIFEST)
    return None


def is_left_behind(name: str, now: datetime) -> bool:
    """Whether a run that was cut had only begun to write this file; what is younger than a day may be under way."""
    found = _BEGUN.fullmatch(name)
    return found is not None and found[1] < f"{now.astimezone(UTC) - timedelta(days=1):%Y/%m/%d}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Written last: a part without it is not finished."""

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
    """Eight hexadecimal digits for the identity of each line: says which parts cannot hold one."""

    @property
    def day(self) -> str:
        return self.part.rpartition("/")[0]

    def may_hold(self, key: int | str) -> bool:
        """By the number of a message, or by its identity."""
        if isinstance(key, int):
            return self.first_id <= key <= self.last_id
        sought = _mark(key)
        return any(self.identities.startswith(sought, at) for at in range(0, len(self.identities), _MARK))

    def encode(self) -> bytes:
        told: dict[str, object] = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        return json.dumps({"schema": SCHEMA, **told}, indent=1).encode() + b"\n"


_MANIFEST_KINDS: Final = columns(
    (int, "schema count first_id last_id content_bytes file_bytes"),
    (str, "part content_sha256 file_sha256 identities"),
    (datetime, "created"),
)


def decode_manifest(raw: bytes, part: str) -> Manifest:
    """Only as the manifest of this part, with sizes that a part can have."""
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ArchiveDamaged(part, "its manifest is not JSON") from error
    if isinstance(told, dict) and told.get("schema") != SCHEMA:
        raise ArchiveDamaged(part, f"its manifest is not of version {SCHEMA}, the only one known here")
    values = read(told, _MANIFEST_KINDS, "its manifest", part)
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
        and 0 < found.first_id <= found.last_id
    )
    if not are_digests or not is_possible:
        raise ArchiveDamaged(part, "its manifest tells what no part can be")
    return found


def _mark(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:_MARK]


class Packing:
    """A part in the making; it holds what is compressed, not what came in."""

    def __init__(self) -> None:
        self._compress = zlib.compressobj(wbits=_GZIP)
        self._data = io.BytesIO()
        self._content = hashlib.sha256()
        self._bytes = 0
        self._identities: list[str] = []
        self.seals: dict[int, bytes] = {}
        """Of each line, by the number of its message."""

    def add(self, line: Line) -> None:
        for raw in pieces(line):
            self._content.update(raw)
            self._bytes += len(raw)
            self._data.write(self._compress.compress(raw))
        self._identities.append(_mark(line.message["identity"]))
        self.seals[line.message["id"]] = seal(line)

    def finish(self, part: str, created: datetime) -> tuple[bytes, Manifest]:
        """To be called once."""
        self._data.write(self._compress.flush())
        data = self._data.getvalue()  # hands its buffer over, where join would make a second one
        self._data = io.BytesIO()
        manifest = Manifest(
            part,
            created.astimezone(UTC),
            len(self._identities),
            min(self.seals),
            max(self.seals),
            self._bytes,
            self._content.hexdigest(),
            len(data),
            hashlib.sha256(data).hexdigest(),
            "".join(self._identities),
        )
        return data, manifest


def unpack(data: bytes, manifest: Manifest) -> Iterator[Line]:
    """Line by line; ArchiveDamaged as soon as something is wrong, so trust none before all were read."""
    part = manifest.part
    if len(data) != manifest.file_bytes or hashlib.sha256(data).hexdigest() != manifest.file_sha256:
        raise ArchiveDamaged(part, "its file is not the one that was written")
    content = hashlib.sha256()
    count, first, last = 0, LARGEST_ID, 0
    for raw in _lines(data, manifest):
        content.update(raw)
        line = decode(raw, part)
        count, first, last = count + 1, min(first, line.message["id"]), max(last, line.message["id"])
        yield line
    if (count, first, last) != (manifest.count, manifest.first_id, manifest.last_id):
        raise ArchiveDamaged(part, f"it holds {count} messages, not the {manifest.count} of its manifest")
    if content.hexdigest() != manifest.content_sha256:
        raise ArchiveDamaged(part, "its content is not what was written")


def _lines(data: bytes, manifest: Manifest) -> Iterator[bytearray]:
    begun = bytearray()  # grows where it is; pieces that are joined would be there twice
    for piece in _inflated(data, manifest):
        *whole, rest = piece.split(b"\n")
        for end in whole:
            begun += end
            begun += b"\n"
            yield begun
            begun = bytearray()
        begun += rest
    if begun:
        raise ArchiveDamaged(manifest.part, "its last line has no end")


def _inflated(data: bytes, manifest: Manifest) -> Iterator[bytes]:
    """Never more than the manifest allows: a small file can unpack to more than any memory holds."""
    inflate = zlib.decompressobj(wbits=_GZIP)
    left = manifest.content_bytes
    rest, position = b"", 0
    while not inflate.eof:
        if not rest:
            rest, position = data[position : position + _IN], position + _IN
        is_last = not rest
        try:
            piece = inflate.decompress(rest, _OUT)
        except zlib.error as error:
            raise ArchiveDamaged(manifest.part, "its file cannot be unpacked") from error
        rest = inflate.unconsumed_tail
        left -= len(piece)
        if left < 0:
            raise ArchiveDamaged(manifest.part, "it unpacks to more than its manifest says")
        if is_last and not piece and not inflate.eof:
            raise ArchiveDamaged(manifest.part, "its file ends too soon")
        yield piece
    if left or inflate.unused_data or position < len(data):
        raise ArchiveDamaged(manifest.part, "its file is not as long as its manifest says")
