"""The parts of cold storage, in a folder or in S3: written and read back, listed, searched and verified."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from dlqbatch.amqp.fields import Fields
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.retain.folder import ColdFolder
from dlqbatch.retain.format import (
    LARGEST_ID,
    LARGEST_MANIFEST,
    MOST_RATIO,
    MOST_UNPACKED,
    ArchiveDamaged,
    Line,
    Manifest,
    data_name,
    decode,
    decode_manifest,
    edition_of,
    identity_mark,
    is_left_behind,
    manifest_name,
    named,
    pieces,
    seal,
)
from dlqbatch.retain.s3 import ColdBucket
from dlqbatch.settings import Settings
from dlqbatch.settings.store_options import Bucket
from dlqbatch.store.access import store_for

if TYPE_CHECKING:
    from dlqbatch.messages.changes import Changes  # SQLAlchemy, which a list of parts does not need
    from dlqbatch.messages.shown import Reveal, Shown

# These window bits make zlib write gzip's frame without a name and a time, so that equal rows are equal bytes.
_GZIP: Final = 31
_IN, _OUT = 64 * 1024, 256 * 1024


class NoSuchCopy(DlqbatchError):
    exit_code = 1

    def __init__(self, sought: int | str) -> None:
        self.sought = sought
        super().__init__(
            f"there is no message {sought!r} in cold storage. `dlqbatch archive list` shows what there is; "
            "what is still in the database is shown by `dlqbatch messages show`."
        )


class ColdStorage(Protocol):
    """Files by name, with `/` between the steps of a name; its errors are ColdStorageFailed and ArchiveDamaged."""

    def names(self) -> Iterable[str]:
        """The names of all files."""

    def write(self, name: str, data: bytes) -> None:
        """Write the file whole or not at all, durable on return; never over a file that is there."""

    def read(self, name: str, most: int) -> bytes:
        """ArchiveDamaged if it is not there, or longer than `most`."""

    def remove(self, name: str) -> str:
        """Delete the file, if it is there; return what the storage keeps of it, and what to do about that."""


def cold_storage(settings: Settings) -> ColdStorage | None:
    where = settings.cold_storage
    if isinstance(where, Bucket):
        return ColdBucket(where.name, where.prefix, settings.cold_storage_key)
    return None if where is None else ColdFolder(where)


class Survey(NamedTuple):
    parts: tuple[Manifest, ...]
    """The newest part first."""
    damaged: tuple[ArchiveDamaged, ...]
    unfinished: tuple[str, ...]
    """Parts without a manifest: a run was killed before it wrote one, or it was lost."""
    replaced: tuple[str, ...] = ()
    """Parts that an erase wrote anew, and that it was cut before it could remove; nothing reads them."""


class Located(NamedTuple):
    line: Line
    part: str


def write_part(storage: ColdStorage, part: str, lines: Iterable[Line], now: datetime) -> Mapping[int, bytes]:
    """Write a part and read it back; return the seal of each line by the number of its message.

    Without a line there is no part.
    """
    packing = Packing()
    for line in lines:
        packing.add(line)
        del line  # it may be large, and would be kept until all is written and read back
    if not packing.seals:
        return {}
    data, manifest = packing.finish(part, now)
    storage.write(data_name(part), data)
    storage.write(manifest_name(part), manifest.encode())
    del data
    if seals(storage, part) != packing.seals:
        raise ArchiveDamaged(part, "what was read back is not what was written")
    return packing.seals


def seals(storage: ColdStorage, part: str) -> dict[int, bytes]:
    """The seal of each line of a whole part, by the number of its message."""
    return {line.message["id"]: seal(line) for line in lines_of(storage, read_manifest(storage, part))}


def lines_of(storage: ColdStorage, manifest: Manifest) -> Iterator[Line]:
    """The lines of a part, none of which is to be trusted before all were read."""
    return unpack(storage.read(data_name(manifest.part), manifest.file_bytes), manifest)


def verify(storage: ColdStorage, manifest: Manifest) -> ArchiveDamaged | None:
    try:
        for _ in lines_of(storage, manifest):
            pass
    except ArchiveDamaged as damage:
        return damage
    return None


class _Files(NamedTuple):
    """The parts whose manifest is there, those whose data is there, and those that a newer edition has replaced."""

    finished: set[str]
    filed: set[str]
    replaced: set[str]

    @property
    def unfinished(self) -> tuple[str, ...]:
        return tuple(sorted(self.filed - self.finished - self.replaced))


def _files(names: Iterable[str]) -> _Files:
    found = [each for each in map(named, names) if each is not None]
    finished = {part for part, is_manifest in found if is_manifest}
    filed = {part for part, is_manifest in found if not is_manifest}
    newest: dict[str, int] = {}
    for first, number in map(edition_of, finished & filed):
        newest[first] = max(number, newest.get(first, 0))
    editions = {part: edition_of(part) for part in finished | filed}
    replaced = {part for part, (first, number) in editions.items() if number < newest.get(first, 0)}
    return _Files(finished, filed, replaced)


def survey(storage: ColdStorage) -> Survey:
    """All parts by their manifests, without reading a message."""
    files = _files(storage.names())
    parts, damaged = [], []
    for part in sorted(files.finished - files.replaced):
        try:
            parts.append(read_manifest(storage, part))
            if part not in files.filed:
                damaged.append(ArchiveDamaged(part, "its file is not there"))
        except ArchiveDamaged as damage:
            damaged.append(damage)
    parts.sort(key=lambda manifest: (manifest.created, manifest.part), reverse=True)
    return Survey(tuple(parts), tuple(damaged), files.unfinished, tuple(sorted(files.replaced)))


def locate(storage: ColdStorage, known: Survey, sought: int | str) -> Located | None:
    """The newest copy of a message, by the number it had or by its identity.

    None if there is none; ArchiveDamaged if it may be in a part that cannot be read.
    """
    damage = known.damaged[0] if known.damaged else None
    column = "id" if isinstance(sought, int) else "identity"
    for manifest in known.parts:
        if not manifest.may_hold(sought):
            continue
        found = None
        try:
            for line in lines_of(storage, manifest):
                if line.message[column] == sought:
                    found = Located(line, manifest.part)
        except ArchiveDamaged as error:
            damage = damage or error
        else:
            if found is not None:
                return found
    if damage is not None:
        raise damage
    return None


def tidy(storage: ColdStorage, now: datetime) -> tuple[str, ...]:
    """Remove the files that killed runs had only begun to write; return the parts that have no manifest."""
    names = list(storage.names())
    for name in names:
        if is_left_behind(name, now):
            storage.remove(name)
    return _files(names).unfinished


def read_manifest(storage: ColdStorage, part: str) -> Manifest:
    return decode_manifest(storage.read(manifest_name(part), LARGEST_MANIFEST), part)


class Packing:
    """A part that is being written; it holds the lines only compressed."""

    def __init__(self) -> None:
        self._compress = zlib.compressobj(wbits=_GZIP)
        self._data = io.BytesIO()
        self._content = hashlib.sha256()
        self._bytes = 0
        self._identities: list[str] = []
        self.seals: dict[int, bytes] = {}
        """The seal of each line, by the number of its message."""

    def add(self, line: Line) -> None:
        for raw in pieces(line):
            self._content.update(raw)
            self._bytes += len(raw)
            self._data.write(self._compress.compress(raw))
        self._identities.append(identity_mark(line.message["identity"]))
        self.seals[line.message["id"]] = seal(line)

    def finish(self, part: str, created: datetime) -> tuple[bytes, Manifest]:
        """Return the file and its manifest; to be called once."""
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
    """The lines; ArchiveDamaged as soon as something is wrong, so that none is trusted before all were read."""
    part = manifest.part
    if len(data) != manifest.file_bytes or hashlib.sha256(data).hexdigest() != manifest.file_sha256:
        raise ArchiveDamaged(part, "its file is not the one that was written")
    content = hashlib.sha256()
    count, size, first, last = 0, 0, LARGEST_ID, 0
    for raw in _lines(data, part, manifest.content_bytes):
        content.update(raw)
        line = decode(raw, part)
        count, first, last = count + 1, min(first, line.message["id"]), max(last, line.message["id"])
        size += len(raw)
        yield line
    if size != manifest.content_bytes:
        raise ArchiveDamaged(part, "its file is not as long as its manifest says")
    if (count, first, last) != (manifest.count, manifest.first_id, manifest.last_id):
        raise ArchiveDamaged(part, f"it holds {count} messages, not the {manifest.count} of its manifest")
    if content.hexdigest() != manifest.content_sha256:
        raise ArchiveDamaged(part, "its content is not what was written")


def manifest_of(data: bytes, part: str, created: datetime) -> Manifest:
    """The manifest that whoever wrote this file was cut before writing; the same bytes whoever makes it."""
    content = hashlib.sha256()
    ids, identities, size = [], [], 0
    for raw in _lines(data, part, max(MOST_UNPACKED, MOST_RATIO * len(data))):
        content.update(raw)
        message = decode(raw, part).message
        ids.append(message["id"])
        identities.append(identity_mark(message["identity"]))
        size += len(raw)
    if not ids:
        raise ArchiveDamaged(part, "it holds no message")
    whole = hashlib.sha256(data).hexdigest()
    digest = content.hexdigest()
    return Manifest(part, created, len(ids), min(ids), max(ids), size, digest, len(data), whole, "".join(identities))


def _lines(data: bytes, part: str, most: int) -> Iterator[bytearray]:
    begun = bytearray()  # joined pieces would be there twice
    for piece in _inflated(data, part, most):
        *whole, rest = piece.split(b"\n")
        for end in whole:
            begun += end
            begun += b"\n"
            yield begun
            begun = bytearray()
        begun += rest
    if begun:
        raise ArchiveDamaged(part, "its last line has no end")


def _inflated(data: bytes, part: str, most: int) -> Iterator[bytes]:
    """Unpack no more bytes than `most`, because a small file can unpack to more than any memory holds."""
    inflate = zlib.decompressobj(wbits=_GZIP)
    rest, position = b"", 0
    while not inflate.eof:
        if not rest:
            rest, position = data[position : position + _IN], position + _IN
        is_last = not rest
        try:
            piece = inflate.decompress(rest, _OUT)
        except zlib.error as error:
            raise ArchiveDamaged(part, "its file cannot be unpacked") from error
        rest = inflate.unconsumed_tail
        most -= len(piece)
        if most < 0:
            raise ArchiveDamaged(part, "it unpacks to more than its manifest says")
        if is_last and not piece and not inflate.eof:
            raise ArchiveDamaged(part, "its file ends too soon")
        yield piece
    if inflate.unused_data or position < len(data):
        raise ArchiveDamaged(part, "its file is not as long as its manifest says")


@dataclass(frozen=True, slots=True)
class Archive:
    """What people can do with cold storage; only restoring needs a database."""

    settings: Settings
    storage: ColdStorage

    def survey(self) -> Survey:
        return survey(self.storage)

    def verify(self, known: Survey) -> Mapping[str, ArchiveDamaged | None]:
        """What is wrong with each part."""
        return {manifest.part: verify(self.storage, manifest) for manifest in known.parts}

    def show(self, sought: str, by: Reveal | None = None) -> tuple[Shown, str]:
        """The newest copy, and the part that has it; masked, unless `by` says who sees it unmasked and why."""
        from dlqbatch.retain.restore import Restoring, shown_copy  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

        found = locate(self.storage, self.survey(), _number(sought))
        if found is None:
            raise NoSuchCopy(_number(sought))
        if by is not None:
            Restoring(store_for(self.settings), Fields(self.settings.fields)).journal_reveal(found.line, by)
        return shown_copy(found.line, found.part, is_revealed=by is not None), found.part

    def restore(self, sought: Sequence[str], *, actor: str, reason: str, dry_run: bool) -> Changes:
        """Put each into the database as manual, where a person decides about it; each in its own transaction."""
        from dlqbatch.messages.changes import Change, Changes  # noqa: PLC0415  (SQLAlchemy)
        from dlqbatch.retain.restore import Restoring  # noqa: PLC0415  (SQLAlchemy)

        store = Restoring(store_for(self.settings), Fields(self.settings.fields))
        known: list[Survey] = []
        done = []
        for each in dict.fromkeys(map(_number, sought)):

            def find(key: int | str = each) -> Located | None:
                if not known:
                    known.append(self.survey())
                return locate(self.storage, known[0], key)

            try:
                change = store.bring_back(each, find, actor=actor, reason=reason, dry_run=dry_run)
            except ArchiveDamaged as damage:
                change = Change(each if isinstance(each, int) else 0, None, None, is_done=False, why=str(damage))
            done.append(change)
        return Changes(tuple(done), dry_run, store.end())


def archive(settings: Settings) -> Archive:
    storage = cold_storage(settings)
    if storage is None:
        raise SettingsError(
            "there is no cold storage: set DLQBATCH_COLD_STORAGE (dlqbatch.cold-storage) to the folder or the "
            "s3://bucket/prefix that retain writes to"
        )
    return Archive(settings, storage)


def _number(sought: str) -> int | str:
    return int(sought) if sought.isascii() and sought.isdigit() and len(sought) < len(str(2**63)) else sought
