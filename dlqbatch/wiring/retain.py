"""A retain, put together; and cold storage for the people who want something back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlqbatch.cloud.cold_folder import ColdFolder
from dlqbatch.cloud.cold_s3 import ColdBucket
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.message.cold import ArchiveDamaged
from dlqbatch.policy.cold import Keep
from dlqbatch.runs.archive import Survey, locate, survey, verify
from dlqbatch.runs.retain import Bounds, Retain
from dlqbatch.settings.cold_storage import Bucket
from dlqbatch.wiring.occasion import Occasion, bounds_of
from dlqbatch.wiring.stores import clock_of, engine_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlqbatch.deadstore.review import Changes, Shown
    from dlqbatch.runs.archive import ColdStorage, Located
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings


class NoSuchCopy(DlqbatchError):
    exit_code = 1

    def __init__(self, sought: int | str) -> None:
        self.sought = sought
        super().__init__(
            f"there is no message {sought!r} in cold storage. `dlqbatch archive list` shows what there is; "
            "what is still in the database is shown by `dlqbatch messages show`."
        )


def retain(settings: Settings, occasion: Occasion) -> Report:
    if settings.database_url_is_default:
        # ingest never fills the default file: a retain of it would find nothing, say ok, and the real one would grow.
        raise SettingsError(
            "retain deletes from the database that ingest fills, so the database has to be named: set "
            "DLQBATCH_DATABASE_URL (dlqbatch.database-url). Nothing was deleted"
        )
    from dlqbatch.deadstore.retention import Retention  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    bounds = bounds_of(settings, occasion)
    engine = engine_for(settings)
    job = Retain(
        rows=Retention(engine),
        cold=_cold_storage(settings),
        keep=Keep(settings.keep_resolved, settings.keep_failed, settings.keep_archived),
        bounds=Bounds(settings.max_messages, bounds.stop_at, occasion.stopped, occasion.progress),
        now=clock_of(engine)(),
        dry_run=occasion.dry_run,
    )
    return job.run()


@dataclass(frozen=True, slots=True)
class Archive:
    """What people can do with cold storage; all but restoring needs no database."""

    settings: Settings
    storage: ColdStorage

    def survey(self) -> Survey:
        return survey(self.storage)

    def verify(self, known: Survey) -> Mapping[str, ArchiveDamaged | None]:
        """By part: what is wrong with it."""
        return {manifest.part: verify(self.storage, manifest) for manifest in known.parts}

    def show(self, sought: str) -> tuple[Shown, str]:
        """The newest copy, and the part it is in."""
        from dlqbatch.deadstore.restoring import shown  # noqa: PLC0415  (the same)

        found = self._find(_number(sought))
        if found is None:
            raise NoSuchCopy(_number(sought))
        return shown(found.line, found.part), found.part

    def restore(self, sought: Sequence[str], *, actor: str, reason: str, dry_run: bool) -> Changes:
        """Each in a transaction of its own: manual, where a person decides about it."""
        from dlqbatch.deadstore.restoring import Restoring  # noqa: PLC0415  (the same)
        from dlqbatch.deadstore.review import Change, Changes  # noqa: PLC0415  (the same)

        store = Restoring(engine_for(self.settings))
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
        return Changes(tuple(done), dry_run)

    def _find(self, sought: int | str) -> Located | None:
        return locate(self.storage, self.survey(), sought)


def archive(settings: Settings) -> Archive:
    storage = _cold_storage(settings)
    if storage is None:
        raise SettingsError(
            "there is no cold storage: set DLQBATCH_COLD_STORAGE (dlqbatch.cold-storage) to the folder or the "
            "s3://bucket/prefix that retain writes to"
        )
    return Archive(settings, storage)


def _cold_storage(settings: Settings) -> ColdStorage | None:
    where = settings.cold_storage
    if isinstance(where, Bucket):
        return ColdBucket(where.name, where.prefix, settings.cold_storage_key)
    return None if where is None else ColdFolder(where)


def _number(sought: str) -> int | str:
    return int(sought) if sought.isascii() and sought.isdigit() and len(sought) < len(str(2**63)) else sought
