"""Every run's report as a row of dlq_runs, written without loading more than the database's own driver.

It comes last in every run, even one that found nothing to do: it has to be cheap, and it may not spoil what is done.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from dlqbatch.deadstore.address import Address, read
from dlqbatch.deadstore.postgresql import connect_options, refuses_login, session, without_option
from dlqbatch.deadstore.text import LONGEST_NAME, time_text, to_json, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import psycopg

KEPT_FOR: Final = timedelta(days=30)
_SECONDS: Final = 2.0
_NO_SKEW: Final = timedelta(seconds=1)
"""Less may as well be the way there."""
_TABLE_MISSING: Final = "42P01"
_NO_PRIVILEGE: Final = "42501"
_READ_ONLY: Final = "25006"  # a session that may only read, or a standby
_ADDING: Final = (
    "INSERT INTO dlq_runs (job, started_at, ended_at, outcome, stopped_by, emptied, report) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_NOT_GRANTED: Final = (
    "this run is not in the log of runs, and a retry from the dead store counts as a success only after a drain and an "
    "ingest that are: `GRANT INSERT ON dlq_runs TO {user}` gives the right"
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
    is_refused: bool = False
    """The database let nobody in with this user and password."""


def record(url: str, run: RunRecord, seconds: float = _SECONDS) -> Recorded:
    """Never raises. Waits about `seconds` at most for each of: the connection, a lock, the statement, an answer."""
    try:
        address = read(url)
        if url.startswith("sqlite:"):
            return _in_sqlite(address.file, run, seconds)
        return _in_postgresql(address, run, seconds)
    except Exception as error:  # noqa: BLE001  (the run is done; nothing that happens here may undo its outcome)
        return Recorded(is_kept=False, warning=_told(url, error), is_refused=refuses_login(error))


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

    from dlqbatch.deadstore import patience  # noqa: PLC0415  (the same)

    given = address.for_libpq()
    where = make_conninfo("", **given, **connect_options(given, seconds))
    try:
        with patience.connect(seconds, where, autocommit=True) as connection:
            first = f"{session(seconds)}; SET synchronous_commit = off; SELECT clock_timestamp()"
            run = _by_clock_of(connection.execute(first.encode()), run)
            connection.execute(_ADDING.replace("?", "%s").encode(), _values(run))
            with suppress(psycopg.errors.InsufficientPrivilege):  # who may only add leaves it to the others
                connection.execute(_PRUNING_SHARED.replace("?", "%s").encode(), (time_text(run.ended_at - KEPT_FOR),))
    except psycopg.Error as error:
        if error.sqlstate in {_TABLE_MISSING, _READ_ONLY}:
            return Recorded(is_kept=False)
        if error.sqlstate == _NO_PRIVILEGE:
            # There is a dead store, and its lifecycle waits for what this run could have told.
            return Recorded(is_kept=False, warning=_NOT_GRANTED.format(user=given.get("user", "the user of this job")))
        raise
    return Recorded(is_kept=True)


def _by_clock_of(asked: psycopg.Cursor[Any], run: RunRecord) -> RunRecord:
    """The run with its times by the database's clock: what was sent is timed by that, and one is held to the other."""
    while asked.nextset():
        pass
    found = asked.fetchone()
    skew = found[0] - datetime.now(UTC) if found is not None else timedelta()
    if abs(skew) < _NO_SKEW:
        return run
    return replace(run, started_at=run.started_at + skew, ended_at=run.ended_at + skew)


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
    return f"this run is not in the log of runs: {without_option(shown)}"
