"""Erase what cold copies hold: a part is written anew without it and verified, and then the old part is removed.

The new part is the next edition of the old one: its name has a number behind it, and all other messages are as they
were. The database names it before the old one goes. Who is cut leaves both, and readers take the newest; the next erase
of anything goes on from there. The data of an edition is created once and never written over: of two erases at once the
second one fails, or goes on from what the first one wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from sqlalchemy import Engine, select, update

from dlqbatch import logs
from dlqbatch.messages import erase as rows
from dlqbatch.messages.changes import Changes
from dlqbatch.messages.erase import NOTHING_LEFT, Copies, CopiesFound, Sought
from dlqbatch.retain.archive import (
    ColdStorage,
    Survey,
    lines_of,
    manifest_of,
    read_manifest,
    survey,
    unpack,
    verify,
    write_part,
)
from dlqbatch.retain.format import (
    LARGEST_CONTENT,
    ArchiveDamaged,
    ColdStorageFailed,
    Line,
    Manifest,
    data_name,
    edition_of,
    identity_mark,
    manifest_name,
    named,
    seal,
)
from dlqbatch.store.access import StoreClock
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import COLD_COPIES, MESSAGES, SCOPES

log = logs.get(__name__)

_AGAIN: Final = "erase it again when that is mended"


def erase(
    engine: Engine,
    storage: ColdStorage | None,
    row_ids: Sequence[int] = (),
    filters: Filters | None = None,
    *,
    actor: str,
    reason: str,
    now: datetime | None = None,
    expect: int | None = None,
    dry_run: bool = False,
) -> Changes:
    """As `messages.erase.erase`, with the cold copies of the messages, before the messages themselves.

    So a filter still finds them if the run is cut in between. Without a storage copies are named.
    """
    now = StoreClock(engine)() if now is None else now
    cold = None if storage is None else Eraser(engine, storage, actor, f"erased: {reason}", now, dry_run=dry_run)
    done = rows.erase(
        engine,
        row_ids,
        filters,
        actor=actor,
        reason=reason,
        now=now,
        expect=expect,
        dry_run=dry_run,
        copies=None if cold is None else cold.erase,
    )
    return done if cold is None or dry_run else replace(done, left=(*done.left, *cold.written_meanwhile()))


@dataclass(frozen=True, slots=True)
class Eraser:
    engine: Engine
    storage: ColdStorage
    actor: str
    why: str
    """The reason that the journal in the copies is given."""
    now: datetime
    dry_run: bool
    _done: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The files that were written anew, or would be, by identity."""
    _left: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """What holds its content still, by identity."""
    _marks: set[str] = field(default_factory=set)
    """The marks of the identities that were sought."""
    _known: set[str] = field(default_factory=set)
    """The parts that were there, or that this erase wrote."""

    def erase(self, sought: Sought) -> CopiesFound:
        """Erase the copies of these messages, or find them on a dry run."""
        known = survey(self.storage)
        doubts = [
            f"{each.part} of cold storage cannot be read, and nobody knows what it holds: {each.why}"
            for each in known.damaged
        ]
        if not self.dry_run:
            doubts += [why for part in known.replaced if (why := self._finish_replacing(known, part))]
        identities = {row_id: {identity} for row_id, identity in sought.identities.items()}
        identities |= {number: self._numbered(known, number) for number in sought.gone}
        by_mark: dict[str, set[str]] = defaultdict(set)
        for identity in {each for some in identities.values() for each in some}:
            by_mark[identity_mark(identity)].add(identity)
        self._marks.update(by_mark)
        self._known.update(known.replaced, (part.part for part in known.parts), (part.part for part in known.damaged))
        for manifest in known.parts:
            may_hold = {identity for mark in manifest.marks & by_mark.keys() for identity in by_mark[mark]}
            if may_hold:
                self._erase_in(known, manifest, may_hold)
        found: dict[int, Copies] = {}
        for row_id, some in identities.items():
            done = [file for identity in sorted(some) for file in self._done.get(identity, ())]
            left = [why for identity in sorted(some) for why in self._left.get(identity, ())]
            if done or left:
                left += self._rows_of(some) if row_id in sought.gone else ()
                found[row_id] = Copies(tuple(done), tuple(left))
        return CopiesFound(found, tuple(doubts))

    def written_meanwhile(self) -> list[str]:
        """Parts that a retain has written since, of messages that it read before they were erased."""
        try:
            names = {each.part for each in map(named, self.storage.names()) if each is not None and each.is_manifest}
            new = [part for part in sorted(names - self._known) if edition_of(part).number == 1]
            late = [part for part in new if read_manifest(self.storage, part).marks & self._marks]
        except (ArchiveDamaged, ColdStorageFailed) as error:
            return [f"nobody knows whether a retain wrote another copy meanwhile: {error.why}; erase them again"]
        return [
            f"retain wrote {part} of cold storage meanwhile, which may hold them: erase them again" for part in late
        ]

    def _numbered(self, known: Survey, number: int) -> set[str]:
        """The identities of the copies whose message had this number; those of other deployments are none of them."""
        found: set[str] = set()
        with reading(self.engine) as connection:
            ours = connection.scalar(select(SCOPES.c.name).where(SCOPES.c.id == scope_of(connection)))
        for manifest in known.parts:
            if manifest.may_hold(number):
                try:
                    found |= {
                        str(line.message["identity"])
                        for line in lines_of(self.storage, manifest)
                        if line.message["id"] == number and line.message["scope"] in {None, ours}
                    }
                except ArchiveDamaged as damage:
                    log.warning("a part of cold storage cannot be read", part=manifest.part, why=damage.why)
        return found

    def _rows_of(self, identities: Collection[str]) -> list[str]:
        """Messages of the dead store that came back, from cold storage or from the broker."""
        with reading(self.engine) as connection:
            is_same = (in_list(connection, MESSAGES.c.identity, identities), MESSAGES.c.erased_at.is_(None))
            there = connection.scalars(select(MESSAGES.c.id).where(*is_same).order_by(MESSAGES.c.id)).all()
        return [f"message {row_id} of the dead store has its identity: erase that one too" for row_id in there]

    def _erase_in(self, known: Survey, manifest: Manifest, may_hold: Collection[str]) -> None:
        held, old = may_hold, [manifest.part]
        try:
            held = self._holding(manifest, may_hold)
            if self.dry_run or not held:
                self._note(held, data_name(manifest.part))
                return
            new = edition_of(manifest.part).next
            if new.part in known.unfinished:
                # An erase was cut. What it wrote is taken as it is, and this one goes on from there.
                manifest = self._finish_writing(manifest, new.part)
                new = new.next
            if holds := self._holding(manifest, held):
                old = list(dict.fromkeys([*old, manifest.part]))
                self._write(new.part, self._without(manifest, holds), manifest.created)
                manifest = read_manifest(self.storage, new.part)
            self._note(held, data_name(manifest.part))
            log.info("cold copies erased", part=manifest.part, messages=len(held))
            kept = self._replace(old, manifest.part)
        except (ArchiveDamaged, ColdStorageFailed) as error:
            kept = f"a cold copy in {old[0]} may hold it still: {error.why}; {_AGAIN}"
        for identity in held if kept else ():
            self._left[identity].append(kept)

    def _note(self, identities: Collection[str], file: str) -> None:
        for identity in identities:
            self._done[identity].append(file)

    def _holding(self, manifest: Manifest, identities: Collection[str]) -> set[str]:
        """Those of them whose content is in this part."""
        return {
            str(line.message["identity"])
            for line in lines_of(self.storage, manifest)
            if line.message["identity"] in identities and not is_erased(line)
        }

    def _without(self, manifest: Manifest, identities: Collection[str]) -> Iterator[Line]:
        for line in lines_of(self.storage, manifest):
            yield self._erased(line) if line.message["identity"] in identities else line

    def _erased(self, line: Line) -> Line:
        message = {**line.message, **NOTHING_LEFT, "erased_at": self.now}
        step = {
            "from_status": line.message["status"],
            "to_status": str(Status.ARCHIVED),
            "actor": self.actor,
            "reason": self.why,
            "at": self.now,
        }
        return Line(message, line.attempts, (*line.transitions, step))

    def _write(self, part: str, lines: Iterator[Line], created: datetime) -> None:
        try:
            write_part(self.storage, part, lines, created)
        except ArchiveDamaged as damage:
            if damage.part == part:
                self._withdraw(part)
            raise

    def _withdraw(self, part: str) -> None:
        """Remove a new part that is not what was to be written, so that readers take the old one."""
        self.storage.remove(manifest_name(part))
        self.storage.remove(data_name(part))

    def _finish_writing(self, source: Manifest, part: str) -> Manifest:
        """Write the manifest of an edition whose writer was cut, once it is known to hold what its source does."""
        data = self.storage.read(data_name(part), LARGEST_CONTENT)
        manifest = manifest_of(data, part, source.created)
        self._check(source, manifest, data)
        self.storage.write(manifest_name(part), manifest.encode())
        return read_manifest(self.storage, part)

    def _finish_replacing(self, known: Survey, part: str) -> str:
        """Remove what a cut erase has left of a part; return what stays of it."""
        newest = next(each for each in known.parts if edition_of(each.part).first == edition_of(part).first)
        try:
            try:
                source = read_manifest(self.storage, part)
                self.storage.read(data_name(part), source.file_bytes)
            except ArchiveDamaged:
                # One of its two files is gone: whoever began to remove them had checked the new part.
                if (damage := verify(self.storage, newest)) is not None:
                    raise damage from None
            else:
                try:
                    self._check(source, newest)
                except ArchiveDamaged as damage:
                    if damage.part == newest.part and verify(self.storage, source) is None:
                        self._withdraw(newest.part)
                    raise
            return self._replace([part], newest.part)
        except (ArchiveDamaged, ColdStorageFailed) as error:
            return f"{part} of cold storage, in whose place {newest.part} came, is there still: {error.why}; {_AGAIN}"

    def _check(self, source: Manifest, copy: Manifest, data: bytes | None = None) -> None:
        """ArchiveDamaged unless the copy holds each message of the source, as it was or erased."""
        if (source.count, source.identities) != (copy.count, copy.identities):
            raise ArchiveDamaged(copy.part, f"it holds other messages than {source.part}")
        lines = lines_of(self.storage, copy) if data is None else unpack(data, copy)
        for before, after in zip(lines_of(self.storage, source), lines, strict=True):
            is_same = before.message["identity"] == after.message["identity"] and is_erased(after)
            if not is_same and seal(before) != seal(after):
                raise ArchiveDamaged(copy.part, f"it holds another message {before.message['id']} than {source.part}")

    def _replace(self, old: Sequence[str], new: str) -> str:
        """Let the database name the new part, then remove the old ones; return what the storage keeps of them."""
        with writing(self.engine) as connection:
            connection.execute(update(COLD_COPIES).where(COLD_COPIES.c.part.in_(old)).values(part=new))
        kept = []
        for part in old:
            # The data first: it is what must not be found any more, and a manifest alone is known to be a rest.
            kept.append(self.storage.remove(data_name(part)))
            self.storage.remove(manifest_name(part))
        return "; ".join(filter(None, kept))


def is_erased(line: Line) -> bool:
    return line.message["erased_at"] is not None and not line.message["body"]
