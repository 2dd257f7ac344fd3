"""Cold storage as parts: written and read back, listed, searched; whatever it lies in fits one small port."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from dlqbatch.message.cold import ArchiveDamaged, seal
from dlqbatch.message.cold_part import (
    LARGEST_MANIFEST,
    Manifest,
    Packing,
    data_name,
    decode_manifest,
    is_left_behind,
    manifest_name,
    named,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime

    from dlqbatch.message.cold import Line


class ColdStorage(Protocol):
    """Files by name, with `/` between its steps; its errors are ColdStorageFailed and ArchiveDamaged."""

    def names(self) -> Iterable[str]:
        """Of every file."""

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all, durable when it returns; never over a file that is there."""

    def read(self, name: str, most: int) -> bytes:
        """ArchiveDamaged if it is not there or longer than that."""

    def remove(self, name: str) -> None: ...


class Survey(NamedTuple):
    parts: tuple[Manifest, ...]
    """The newest first."""
    damaged: tuple[ArchiveDamaged, ...]
    unfinished: tuple[str, ...]
    """Parts without a manifest: a run was cut before it wrote one, or it was lost."""


class Located(NamedTuple):
    line: Line
    part: str


def write_part(storage: ColdStorage, part: str, lines: Iterable[Line], now: datetime) -> Mapping[int, bytes]:
    """Written and read back: the seal of each line by the number of its message; no line, no part."""
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
    """Of every line, by the number of its message, from a part that is whole."""
    return {line.message["id"]: seal(line) for line in lines_of(storage, _manifest(storage, part))}


def lines_of(storage: ColdStorage, manifest: Manifest) -> Iterator[Line]:
    """Trust none before all were read."""
    return unpack(storage.read(data_name(manifest.part), manifest.file_bytes), manifest)


def verify(storage: ColdStorage, manifest: Manifest) -> ArchiveDamaged | None:
    try:
        for _ in lines_of(storage, manifest):
            pass
    except ArchiveDamaged as damage:
        return damage
    return None


def survey(storage: ColdStorage) -> Survey:
    """Everything that is there, by its manifests; no message is read."""
    found = [each for each in map(named, storage.names()) if each is not None]
    finished = {part for part, is_manifest in found if is_manifest}
    filed = {part for part, is_manifest in found if not is_manifest}
    parts, damaged = [], []
    for part in sorted(finished):
        try:
            parts.append(_manifest(storage, part))
            if part not in filed:
                damaged.append(ArchiveDamaged(part, "its file is not there"))
        except ArchiveDamaged as damage:
            damaged.append(damage)
    parts.sort(key=lambda manifest: (manifest.created, manifest.part), reverse=True)
    return Survey(tuple(parts), tuple(damaged), tuple(sorted(filed - finished)))


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
    """Remove what cut runs had only begun to write; the parts that have no manifest."""
    found: set[str] = set()
    finished: set[str] = set()
    for name in storage.names():
        if is_left_behind(name, now):
            storage.remove(name)
        elif (each := named(name)) is not None:
            (finished if each.is_manifest else found).add(each.part)
    return tuple(sorted(found - finished))


def _manifest(storage: ColdStorage, part: str) -> Manifest:
    return decode_manifest(storage.read(manifest_name(part), LARGEST_MANIFEST), part)
