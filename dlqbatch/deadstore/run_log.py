"""Every run's report as a row of dlq_runs, written without loading more than the database's own driver.

It comes last in every run, even one that found nothing to do: it has to be cheap, and it may not spoil what is done.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from dlqbatch.deadstore.address import Address, read
from dlqbatch.deadstore.postgresql import connect_options, session
from dlqbatch.deadstore.text import LONGEST_NAME, time_text, to_json, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

KEPT_FOR: Final = timedelta(days=30)
_SECONDS: Final = 2.0
_TABLE_MISSING: Final = "42P01"
_MAY_NOT_WRITE: Final = frozenset({"42501", "25006"})  # no privilege; a read-only session or a standby
_ADDING: Final = (
    "INSERT INTO dlq_runs (job, started_at, ended_at, outcome, stopped_by, emptied, report) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)
# A few old rows go with every new one: the log stays bounded without a job of its own.
_PRUNING: Final = (
    "DELETE FROM dlq_runs WHERE id IN (SELECT id FROM dlq_runs WHERE started_at < ? ORDER BY started_at LIMIT 10"
)
_PRUNING_ALONE: Final = f"{_PRUNING})"
_PRUNING_SHARED: Final = f"{_PRUNING} FOR UPDATE SKIP LOCKED)"


@dataclass(frozen=True, slots=True)
class RunRecord:
    job: str
    started_at: datetime
    ended_at: datetime
    outcome: str
    stopped_by: str
    emptied: Sequence[str]
    """Queues that this run saw empty."""
    report: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Recorded:
    is_kept: bool
    warning: str | None = None
    """What a person should know of; a database that is not meant to keep runs is nothing of the kind."""


def record(url: str, run: RunRecord, seconds: float = _SECONDS) -> Recorded:
    """Never raises. Waits about `seconds` at most for each of: the connection, a lock, the statement."""
    try:
        address = read(url)
        if url.startswith("sqlite:"):
            return _in_sqlite(address.file, run, seconds)
        return _in_postgresql(address, run, seconds)
    except Exception as error:  # noqa: BLE001  (the run is done; nothing that happens here may undo its outcome)
        return Recorded(is_kept=False, warning=_told(url, error))


def _in_sqlite(path: Path, run: RunRecord, seconds: float) -> Recorded:
    import sqlite3  # noqa: PLC0415  (only for those who use it)

    if not path.exists():
        return Recorded(is_kept=False)
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=seconds)) as connection:
            # A lost line of the log delays what waits for it and harms nothing: not worth a wait for the disk.
            connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                connection.execute(_ADDING, _values(run))
                connection.execute(_PRUNING_ALONE, (time_text(run.ended_at - KEPT_FOR),))
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_READONLY") or "no such table" in str(error):
            return Recorded(is_kept=False)
        raise
    return Recorded(is_kept=True)


def _in_postgresql(address: Address, run: RunRecord, seconds: float) -> Recorded:
    import psycopg  # noqa: PLC0415  (a tenth of a second that SQLite's users need not spend)
    from psycopg.conninfo import make_conninfo  # noqa: PLC0415  (the same)

    given = address.for_libpq()
    where = make_conninfo("", **given, **connect_options(given, seconds))
    try:
        with psycopg.connect(where, autocommit=True) as connection:
            connection.execute(f"{session(seconds)}; SET synchronous_commit = off".encode())
            connection.execute(_ADDING.replace("?", "%s").encode(), _values(run))
            with suppress(psycopg.errors.InsufficientPrivilege):  # who may only add leaves it to the others
                connection.execute(_PRUNING_SHARED.replace("?", "%s").encode(), (time_text(run.ended_at - KEPT_FOR),))
    except psycopg.Error as error:
        if error.sqlstate == _TABLE_MISSING or error.sqlstate in _MAY_NOT_WRITE:
            return Recorded(is_kept=False)
        raise
    return Recorded(is_kept=True)


def _values(run: RunRecord) -> tuple[str, ...]:
    return (
        visible(run.job, LONGEST_NAME),
        time_text(run.started_at),
        time_text(run.ended_at),
        visible(run.outcome, LONGEST_NAME),
        visible(run.stopped_by, LONGEST_NAME),
        to_json(list(run.emptied)),
        to_json(run.report),
    )


def _told(url: str, error: Exception) -> str:
    why = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
    try:
        password = read(url).password
    except ValueError:
        password = ""
    shown = why.replace(password, "***") if password else why
    return f"this run is not in the log of runs: {shown}"
