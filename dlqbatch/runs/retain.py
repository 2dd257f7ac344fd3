"""Retain: what was over long enough is deleted or goes to cold storage; nothing goes before its copy was read back."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError, so_far
from dlqbatch.message.cold import ArchiveDamaged, ColdStorageFailed, seal
from dlqbatch.message.cold_part import part_name
from dlqbatch.policy.cold import batches
from dlqbatch.policy.lifecycle import Status
from dlqbatch.runs.archive import seals, tidy, write_part
from dlqbatch.runs.budget import share
from dlqbatch.runs.report import Report, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from dlqbatch.message.cold import Line
    from dlqbatch.policy.cold import Due, Keep
    from dlqbatch.runs.archive import ColdStorage

log = logs.get(__name__)

_COUNTS: Final = ("archived", "deleted", "skipped", "left")
_RUNS_KEPT: Final = timedelta(days=30)
_PRUNED_AT_ONCE: Final = 1_000
_CHANGED: Final = "changed"
_NOT_COPIED: Final = "not-copied"
_DAMAGED: Final = "cold-copy-damaged"


class Rows(Protocol):
    """The dead store, as far as its rows go out of it."""

    def due(self, status: Status, before: datetime, limit: int) -> Sequence[Due]: ...
    def lines(self, due: Sequence[Due]) -> Iterable[Line]: ...
    def copied(self, due: Sequence[Due], part: str, now: datetime) -> set[int]: ...
    def delete(self, due: Sequence[Due]) -> set[int]: ...
    def prune(self, before: datetime, runs_before: datetime, limit: int) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    max_messages: int
    stop_at: float
    """On the monotonic clock."""
    stopped: Callable[[], bool] = lambda: False
    progress: Callable[[int, int], None] = lambda _taken, _of: None


@dataclass(slots=True)
class _Tally:
    of: int
    results: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    is_partial: bool = False
    stopped_by: str | None = None

    def add(self, decision: str, reason: str | None, number: int) -> None:
        if number:
            self.results[decision, reason] += number

    def warn(self, problem: str) -> None:
        self.is_partial = True
        if problem not in self.warnings:
            self.warnings.append(problem)


@dataclass(frozen=True, slots=True)
class Retain:
    rows: Rows
    cold: ColdStorage | None
    keep: Keep
    bounds: Bounds
    now: datetime
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        # One more than may be taken: so it is known whether something stays behind.
        due = {
            status: self.rows.due(status, before, self.bounds.max_messages + 1)
            for status, before in self.keep.before(self.now).items()
        }
        waiting = 0
        if self.cold is None:
            waiting = len(due[Status.FAILED]) + len(due[Status.ARCHIVED])
            due = {Status.RESOLVED: due[Status.RESOLVED]}
        takes = share(self.bounds.max_messages, {status: len(found) for status, found in due.items()})
        is_capped = sum(takes.values()) < sum(map(len, due.values()))
        taken = {status: due[Status(status)][:number] for status, number in takes.items()}
        tally = _Tally(sum(takes.values()))
        if waiting:
            more = " or more" if waiting > self.bounds.max_messages else ""
            tally.warnings.append(
                f"{waiting:,}{more} failed or archived message(s) are due and stay in the database until there is a "
                "cold storage for them: set cold_storage (DLQBATCH_COLD_STORAGE)"
            )
        if self.dry_run:
            for status, found in taken.items():
                archives = status == Status.FAILED
                tally.add("archived" if archives else "deleted", None if archives else status, len(found))
        else:
            try:
                self._act(taken, tally)
            except DlqbatchError as error:
                if not tally.results:
                    raise
                tally.warn(so_far(error))
        counts, reasons = count(tally.results, tally.results.total(), _COUNTS)
        return Report(
            "retain",
            outcome="partial" if tally.is_partial else "ok",
            stopped_by=tally.stopped_by or ("messages" if is_capped else "empty"),
            counts=counts,
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=tuple(tally.warnings),
        )

    def _act(self, taken: Mapping[str, Sequence[Due]], tally: _Tally) -> None:
        for batch in batches(taken[Status.RESOLVED]):
            if self._is_over(tally):
                return
            self._delete(batch, Status.RESOLVED, tally)
        if self.cold is not None:
            try:
                self._tidy(self.cold, tally)
                self._archive(self.cold, taken[Status.FAILED], tally)
                self._remove(self.cold, taken[Status.ARCHIVED], tally)
            except ColdStorageFailed as error:
                tally.warn(str(error))
        self._prune(tally)

    def _archive(self, cold: ColdStorage, failed: Sequence[Due], tally: _Tally) -> None:
        for batch in batches(failed):
            if self._is_over(tally):
                return
            ours = self._copy(cold, batch, tally)
            if ours is not None:
                tally.add("archived", None, len(ours))
                self._told(tally)

    def _remove(self, cold: ColdStorage, archived: Sequence[Due], tally: _Tally) -> None:
        """Only what the copy on record still says word for word; the others are copied first."""
        by_part: dict[str | None, list[Due]] = {}
        for each in archived:
            by_part.setdefault(each.part, []).append(each)
        uncopied = by_part.pop(None, [])
        for part, recorded in by_part.items():
            for batch in batches(recorded):
                if self._is_over(tally):
                    return
                uncopied += self._remove_copied(cold, str(part), batch, tally)
        for batch in batches(uncopied):
            if self._is_over(tally):
                return
            ours = self._copy(cold, batch, tally)
            if ours:
                self._delete([each for each in batch if each.id in ours], Status.ARCHIVED, tally)

    def _remove_copied(self, cold: ColdStorage, part: str, batch: Sequence[Due], tally: _Tally) -> list[Due]:
        """Returns those that have changed since they were copied."""
        try:
            kept = seals(cold, part)
        except ArchiveDamaged as damage:
            # The row is still whole: it makes another copy, and waits for a later run, which reads that one first.
            tally.warn(f"{damage} Its {len(batch)} message(s) that are in the database still are copied anew.")
            again = self._copy(cold, batch, tally)
            if again is not None:
                tally.add("left", _DAMAGED, len(again))
            return []
        same = {line.message["id"] for line in self.rows.lines(batch) if seal(line) == kept.get(line.message["id"])}
        self._delete([each for each in batch if each.id in same], Status.ARCHIVED, tally)
        return [each for each in batch if each.id not in same]

    def _copy(self, cold: ColdStorage, batch: Sequence[Due], tally: _Tally) -> set[int] | None:
        """The ids of the rows that have a verified copy on record now; None, all of them left, if there is none."""
        part = part_name(self.now, secrets.token_hex(4))
        try:
            copied = write_part(cold, part, self.rows.lines(batch), self.now)
        except (ArchiveDamaged, ColdStorageFailed) as error:
            tally.add("left", _NOT_COPIED, len(batch))
            tally.warn(str(error))
            if isinstance(error, ColdStorageFailed):
                raise
            return None
        ours = self.rows.copied([each for each in batch if each.id in copied], part, self.now) if copied else set()
        tally.add("skipped", _CHANGED, len(batch) - len(ours))
        if copied:
            log.info("cold copy", part=part, messages=len(copied))
        return ours

    def _delete(self, batch: Sequence[Due], was: Status, tally: _Tally) -> None:
        gone = self.rows.delete(batch) if batch else set()
        tally.add("deleted", was, len(gone))
        tally.add("skipped", _CHANGED, len(batch) - len(gone))
        self._told(tally)

    def _tidy(self, cold: ColdStorage, tally: _Tally) -> None:
        unfinished = tidy(cold, self.now)
        if unfinished:
            tally.warnings.append(
                f"{len(unfinished)} part(s) of cold storage have no manifest, such as {unfinished[0]}: a run was cut "
                "before it was written, or it is lost. They are not read; docs/retention.md tells what to do"
            )

    def _prune(self, tally: _Tally) -> None:
        before, pruned = self.now - self.keep.archived, Counter[str]()
        while not self._is_over(tally):
            gone = self.rows.prune(before, self.now - _RUNS_KEPT, _PRUNED_AT_ONCE)
            pruned.update(gone)
            if not any(gone.values()):
                break
        if pruned.total():
            log.info("pruned", plans=pruned["plans"], alerts=pruned["alerts"], runs=pruned["runs"])

    def _is_over(self, tally: _Tally) -> bool:
        if self.bounds.stopped():
            tally.stopped_by = "signal"
        elif time.monotonic() >= self.bounds.stop_at:
            tally.stopped_by = "time"
        return tally.stopped_by is not None

    def _told(self, tally: _Tally) -> None:
        self.bounds.progress(tally.results.total(), tally.of)
