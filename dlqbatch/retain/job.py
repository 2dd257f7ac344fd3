"""The `retain` job deletes old resolved messages, and moves old failed ones to cold storage before it deletes them."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from dlqbatch import logs
from dlqbatch.broker.session import share
from dlqbatch.errors import DlqbatchError, SettingsError, so_far
from dlqbatch.jobs import Report, RunOptions, bounds_of, count, store_by_asking
from dlqbatch.retain.archive import ColdStorage, cold_storage, seals, tidy, write_part
from dlqbatch.retain.format import ArchiveDamaged, ColdStorageFailed, part_name, seal
from dlqbatch.retain.rows import MOST_TOGETHER, Due, Keep, Retention, batches, keep_of
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock
from dlqbatch.store.states import Status

log = logs.get(__name__)

_COUNTS: Final = ("archived", "deleted", "skipped", "left")
_RUNS_KEPT: Final = timedelta(days=30)
_PRUNED_AT_ONCE: Final = 1_000
_CHANGED: Final = "changed"
_NOT_COPIED: Final = "not-copied"
_DAMAGED: Final = "cold-copy-damaged"
_BOUNDS: Final = frozenset({"messages", "time", "signal"})


def retain(settings: Settings, run_options: RunOptions) -> Report:
    if settings.database_url_is_default:
        # ingest never fills the default file: a retain of it would find nothing, say ok, and the real one would grow.
        raise SettingsError(
            "retain deletes from the database that ingest fills, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was deleted"
        )
    bounds = bounds_of(settings, run_options, settings.retain_max_seconds)
    engine, scope = store_by_asking(settings, "dlqbatch retain", dry_run=run_options.dry_run)
    job = Retain(
        rows=Retention(engine),
        cold=cold_storage(settings),
        keep=keep_of(settings),
        bounds=Bounds(settings.retain_max_messages, bounds.stop_at, run_options.stopped, run_options.progress),
        now=StoreClock(engine)(),
        dry_run=run_options.dry_run,
    )
    return replace(job.run(), scope=scope)


@dataclass(frozen=True, slots=True)
class Bounds:
    max_messages: int | None
    """None for all messages that are due."""
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


@dataclass(slots=True)
class _Work:
    """One kind of work, done page by page."""

    do_page: Callable[[], bool]
    """Returns False if it was the last page."""
    seconds: float = 0.0
    """How much of the run's time it has had."""


@dataclass(frozen=True, slots=True)
class Retain:
    rows: Retention
    cold: ColdStorage | None
    keep: Keep
    bounds: Bounds
    now: datetime
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        before = self.keep.before(self.now)
        due = self.rows.count_due(before)
        waiting = 0
        if self.cold is None:
            waiting = due[Status.FAILED] + due[Status.ARCHIVED]
            before = {Status.RESOLVED: before[Status.RESOLVED]}
            due = {Status.RESOLVED: due[Status.RESOLVED]}
        takes = share(self.bounds.max_messages or sum(due.values()), {status.value: n for status, n in due.items()})
        tally = _Tally(sum(takes.values()))
        if waiting:
            tally.warnings.append(
                f"{waiting:,} failed or archived message(s) are due and stay in the database until there is a "
                "cold storage for them: set cold_storage (DLQBATCH_COLD_STORAGE)"
            )
        still_due: Mapping[Status, int] = {}
        if self.dry_run:
            for status, number in takes.items():
                archives = status == Status.FAILED
                tally.add("archived" if archives else "deleted", None if archives else status, number)
        else:
            try:
                self._work(before, {Status(status): number for status, number in takes.items()}, tally)
                still_due = self.rows.count_due(before)
            except DlqbatchError as error:
                if not tally.results:
                    raise
                tally.warn(so_far(error))
        if tally.stopped_by is None and sum(takes.values()) < sum(due.values()):
            tally.stopped_by = "messages"
        if tally.stopped_by in _BOUNDS and any(still_due.values()):
            each = ", ".join(f"{number:,} {status.value}" for status, number in still_due.items() if number)
            tally.warnings.append(
                f"{sum(still_due.values()):,} message(s) are still due ({each}): the next run goes on. If every run "
                "ends so, run retain more often, or raise retain_max_seconds"
            )
        counts, reasons = count(tally.results, tally.results.total(), _COUNTS)
        return Report(
            "retain",
            outcome="partial" if tally.is_partial else "ok",
            stopped_by=tally.stopped_by or "empty",
            counts=counts,
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=tuple(tally.warnings),
            details={"still_due": {status.value: n for status, n in still_due.items()}} if still_due else {},
        )

    def _work(self, before: Mapping[Status, datetime], takes: Mapping[Status, int], tally: _Tally) -> None:
        """Do page after page, each of the kind of work that has had the least time."""
        works = [self._pages(Status.RESOLVED, before, takes, tally, partial(self._delete, Status.RESOLVED, tally))]
        cold: list[_Work] = []
        if self.cold is not None:
            archive, remove = partial(self._archive, self.cold, tally), partial(self._remove, self.cold, tally)
            cold.append(self._pages(Status.FAILED, before, takes, tally, archive))
            cold.append(self._pages(Status.ARCHIVED, before, takes, tally, remove))
            try:
                self._tidy(self.cold, tally)
            except ColdStorageFailed as error:
                tally.warn(str(error))
                cold.clear()
        pruned: Counter[str] = Counter()
        works += [*cold, _Work(partial(self._prune, pruned))]
        while works and not self._is_over(tally):
            work = min(works, key=lambda one: one.seconds)
            began = time.monotonic()
            try:
                goes_on = work.do_page()
            except ColdStorageFailed as error:
                tally.warn(str(error))
                works = [one for one in works if one not in cold]
                continue
            work.seconds += time.monotonic() - began
            if not goes_on:
                works.remove(work)
        if pruned.total():
            log.info("pruned", plans=pruned["plans"], alerts=pruned["alerts"], runs=pruned["runs"])

    def _pages(
        self,
        status: Status,
        before: Mapping[Status, datetime],
        takes: Mapping[Status, int],
        tally: _Tally,
        act: Callable[[Sequence[Due]], None],
    ) -> _Work:
        left = takes[status] if self.bounds.max_messages else None
        last: Due | None = None

        def do_page() -> bool:
            nonlocal left, last
            limit = MOST_TOGETHER if left is None else min(left, MOST_TOGETHER)
            page = self.rows.due(status, before[status], limit, last) if limit else ()
            for batch in batches(page):
                if self._is_over(tally):
                    return False
                act(batch)
            if left is not None:
                left -= len(page)
            last = page[-1] if page else last
            return len(page) == limit > 0

        return _Work(do_page)

    def _archive(self, cold: ColdStorage, tally: _Tally, failed: Sequence[Due]) -> None:
        copied = self._copy(cold, failed, tally)
        if copied is not None:
            tally.add("archived", None, len(copied))
            self._report_progress(tally)

    def _remove(self, cold: ColdStorage, tally: _Tally, archived: Sequence[Due]) -> None:
        """Delete rows that their copy has word for word; the other rows are copied first."""
        by_part: dict[str | None, list[Due]] = {}
        for each in archived:
            by_part.setdefault(each.part, []).append(each)
        uncopied = by_part.pop(None, [])
        for part, recorded in by_part.items():
            uncopied += self._remove_copied(cold, str(part), recorded, tally)
        if uncopied:
            copied = self._copy(cold, uncopied, tally)
            if copied:
                self._delete(Status.ARCHIVED, tally, [each for each in uncopied if each.id in copied])

    def _remove_copied(self, cold: ColdStorage, part: str, batch: Sequence[Due], tally: _Tally) -> list[Due]:
        """Delete the rows that the part has word for word; return those that have changed since they were copied."""
        try:
            kept = seals(cold, part)
        except ArchiveDamaged as damage:
            # The rows are still whole: they are copied again, and wait for a later run, which reads that copy first.
            tally.warn(f"{damage} Its {len(batch)} message(s) that are in the database still are copied anew.")
            again = self._copy(cold, batch, tally)
            if again is not None:
                tally.add("left", _DAMAGED, len(again))
            return []
        same = {line.message["id"] for line in self.rows.lines(batch) if seal(line) == kept.get(line.message["id"])}
        self._delete(Status.ARCHIVED, tally, [each for each in batch if each.id in same])
        return [each for each in batch if each.id not in same]

    def _copy(self, cold: ColdStorage, batch: Sequence[Due], tally: _Tally) -> set[int] | None:
        """Copy the rows, and return the ids of those whose copy is verified and on record; None if no part is whole."""
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
        if erased := self.rows.erased(copied.keys() - ours) if copied.keys() - ours else []:
            # Their content was read before.
            named = " ".join(map(str, erased))
            tally.warn(
                f"{part} of cold storage may hold message(s) that were erased while it was written: "
                f"`dlqbatch messages erase {named}` takes them out of it"
            )
        if copied:
            log.info("cold copy", part=part, messages=len(copied))
        return ours

    def _delete(self, was: Status, tally: _Tally, batch: Sequence[Due]) -> None:
        gone = self.rows.delete(batch) if batch else set()
        tally.add("deleted", was, len(gone))
        tally.add("skipped", _CHANGED, len(batch) - len(gone))
        self._report_progress(tally)

    def _tidy(self, cold: ColdStorage, tally: _Tally) -> None:
        unfinished = tidy(cold, self.now)
        if unfinished:
            tally.warnings.append(
                f"{len(unfinished)} part(s) of cold storage have no manifest, such as {unfinished[0]}: a run was cut "
                "before it was written, or it is lost. They are not read; docs/retention.md tells what to do"
            )

    def _prune(self, pruned: Counter[str]) -> bool:
        gone = self.rows.prune(self.now - self.keep.archived, self.now - _RUNS_KEPT, _PRUNED_AT_ONCE, self.now)
        pruned.update(gone)
        return any(gone.values())

    def _is_over(self, tally: _Tally) -> bool:
        if self.bounds.stopped():
            tally.stopped_by = "signal"
        elif time.monotonic() >= self.bounds.stop_at:
            tally.stopped_by = "time"
        return tally.stopped_by is not None

    def _report_progress(self, tally: _Tally) -> None:
        self.bounds.progress(tally.results.total(), tally.of)
