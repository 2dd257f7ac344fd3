"""Every run's report as a row of dlq_runs, written without loading more than the database's own driver.

It comes last in every run, even one that found nothing to do: it has to be cheap, and it may not spoil what is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlqbatch.store.database_url import (
    DatabaseUrl,
    connect_options,
    describe_error,
    parse,
    refuses_login,
    session_settings,
)
from dlqbatch.store.text import LONGEST_NAME, key, time_text, to_json, visible

if TYPE_CHECKING:
    import psycopg

KEPT_FOR: Final = timedelta(days=30)
_SECONDS: Final = 2.0
# A smaller difference between the clocks may as well be the time that the question took.
_NO_SKEW: Final = timedelta(seconds=1)
_TABLE_MISSING: Final = "42P01"
_NO_PRIVILEGE: Final = "42501"
_READ_ONLY: Final = "25006"  # a session that may only read, or a standby
_ADDING: Final = (
    "INSERT INTO dlq_runs (job, started_at, ended_at, outcome, stopped_by, emptied, report, scope) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
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
    scope: str | None = None
    """The deployment that it was a run of."""


@dataclass(frozen=True, slots=True)
class Recorded:
    is_kept: bool
    warning: str | None = None
    """What a person should know of; a database that is not meant to keep runs is nothing of the kind."""
    is_refused: bool = False
    """The database let nobody in with this user and password."""


def record(url: str, run: RunRecord, seconds: float = _SECONDS) -> Recorded:
    """Keep a run; never raises. Waits about `seconds` at most for each of connection, lock, statement, answer."""
    password = None
    try:
        parsed = parse(url)
        password = parsed.password
        return _in_sqlite(parsed.file, run, seconds) if parsed.is_sqlite else _in_postgresql(parsed, run, seconds)
    except Exception as error:  # noqa: BLE001  (the run is done; nothing that happens here may undo its outcome)
        why = f"this run is not in the log of runs: {describe_error(error, password)}"
        return Recorded(is_kept=False, warning=why, is_refused=refuses_login(error))


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


def _in_postgresql(url: DatabaseUrl, run: RunRecord, seconds: float) -> Recorded:
    import psycopg  # noqa: PLC0415  (a tenth of a second that SQLite's users need not spend)
    from psycopg.conninfo import make_conninfo  # noqa: PLC0415  (as above)

    from dlqbatch.store import timeouts  # noqa: PLC0415  (as above)

    given = url.for_libpq()
    where = make_conninfo("", **given, **connect_options(given, seconds))
    try:
        with timeouts.connect(seconds, where, autocommit=True) as connection:
            first = f"{session_settings(seconds)}; SET synchronous_commit = off; SELECT clock_timestamp()"
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


def _values(run: RunRecord) -> tuple[str | None, ...]:
    return (
        visible(run.job, LONGEST_NAME),
        time_text(run.started_at),
        time_text(run.ended_at),
        visible(run.outcome, LONGEST_NAME),
        visible(run.stopped_by, LONGEST_NAME),
        to_json(list(run.emptied)),
        to_json(run.report),
        run.scope and key(run.scope),
    )
