"""Engines, connections and transactions of the database; its errors become ours here."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from dlqbatch.errors import (
    CommitUnanswered,
    DatabaseForbids,
    DatabaseRefused,
    DatabaseUnreadable,
    PolicyMissing,
    TablesMissing,
    TablesTaken,
)
from dlqbatch.store import database_url, migrations

if TYPE_CHECKING:
    from dlqbatch.store.timeouts import BoundedConnection

EVENT_TABLE = "dlq_event_config"
STATEMENT_SECONDS = 30.0
_WRITES = "dlqbatch_writes"
_UNDEFINED_TABLE = "42P01"
_UNDEFINED_COLUMN = "42703"
_TABLE_EXISTS = "42P07"
_EXISTS = re.compile(r"table \w+ already exists")
_NO_COLUMN = re.compile("no such column|has no column named")
_NO_PRIVILEGE = "42501"


def create_engine_for(
    url: str,
    *,
    connect_timeout: float,
    statement_timeout: float = STATEMENT_SECONDS,
    create: bool = False,
    is_default: bool = False,
) -> Engine:
    """An engine that holds no connection between uses, except inside `keeping`. Time-outs are in seconds.

    Only with `create` may it make a SQLite file. `is_default` says that nobody has named this database.
    """
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, busy=max(connect_timeout, 1.0), create=create, is_default=is_default)
    return _postgresql(parsed, connect_timeout, statement_timeout, database_url.parse(url).token)


def parse(url: str) -> URL:
    """SQLAlchemy's URL of a database URL; SettingsError for a wrong one, without the password."""
    parsed = database_url.parse(url)
    if parsed.is_sqlite:
        return URL.create("sqlite", database=parsed.database)
    return URL.create(
        "postgresql+psycopg",
        parsed.user or None,
        parsed.password or None,
        parsed.host or None,
        parsed.port,
        parsed.database or None,
        parsed.options,
    )


def where(url: URL) -> str:
    """The database for a person to recognise: no password, and no options, which may hold one too."""
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///{url.database}"
    shown = URL.create(url.get_backend_name(), url.username, None, url.host, url.port, url.database)
    return shown.render_as_string()


class _Pool(QueuePool):
    """A pool that closes each connection after its use, unless `keeping` asks it to keep them for the next use."""

    keepers = 0
    # SQLAlchemy names a pool's logger after its module; as one of ours it would print at our level, not only warn.
    _sqla_logger_namespace = "sqlalchemy.pool"


def _pooled(url: URL, **options: Any) -> Engine:
    engine = create_engine(url, poolclass=_Pool, pool_size=2, max_overflow=-1, hide_parameters=True, **options)

    @event.listens_for(engine, "checkin")
    def _close(_connection: Any, record: ConnectionPoolEntry) -> None:
        pool: Any = engine.pool
        if not pool.keepers:
            record.close()

    return engine


@contextmanager
def keeping(engine: Engine) -> Iterator[Engine]:
    """The engine with up to two connections that stay open between transactions, until the end of the context."""
    pool: Any = engine.pool
    pool.keepers += 1
    try:
        yield engine
    finally:
        pool.keepers -= 1
        if not pool.keepers:
            with translated(engine.url):
                pool.dispose()


@contextmanager
def reading(engine: Engine, *, for_policy: bool = False, is_snapshot: bool = False) -> Iterator[Connection]:
    """A transaction that only reads; with `for_policy`, a SQLite file that is not there is PolicyMissing.

    With `is_snapshot` all its statements see the same rows, as they always do in SQLite.
    """
    options: dict[str, Any] = {_WRITES: False}
    if is_snapshot and engine.dialect.name == "postgresql":
        options["isolation_level"] = "REPEATABLE READ"
    with (
        translated(engine.url, for_policy=for_policy),
        engine.connect().execution_options(**options) as connection,
        connection.begin(),
    ):
        yield connection


@contextmanager
def writing(engine: Engine, *, for_policy: bool = False) -> Iterator[Connection]:
    """A transaction that commits at its end; on SQLite it holds the only write lock from its start."""
    with (
        translated(engine.url, for_policy=for_policy),
        engine.connect().execution_options(**{_WRITES: True}) as connection,
    ):
        is_written = False
        try:
            with connection.begin():
                yield connection
                is_written = True
        except DBAPIError as error:
            if is_written and error.connection_invalidated:
                raise CommitUnanswered(where(engine.url), _why(engine.url, error.orig or error)) from error
            raise


@contextmanager
def translated(url: URL, *, for_policy: bool = False) -> Iterator[None]:
    """Whatever the vendors raise inside comes out as one of ours."""
    try:
        yield
    except DBAPIError as error:
        raise _ours(url, error.orig or error, error.statement or "", for_policy=for_policy) from error
    except (SQLAlchemyError, sqlite3.Error, OSError, UnicodeError) as error:
        # OSError: a folder on the way to a SQLite file is closed to us. UnicodeError: a name in another encoding than
        # the database claims.
        raise DatabaseUnreadable(where(url), _why(url, error)) from error


def _ours(url: URL, error: BaseException, statement: str, *, for_policy: bool) -> DatabaseUnreadable | PolicyMissing:
    text = _why(url, error)
    state = getattr(error, "sqlstate", None)
    is_missing = state == _UNDEFINED_TABLE or "no such table" in text
    if (is_missing and EVENT_TABLE in text) or (for_policy and isinstance(error, _NoFile)):
        return PolicyMissing(
            f"there is no table {EVENT_TABLE} in the database at {where(url)}. Nothing was moved. "
            "Run `dlqbatch db upgrade` to make it, or check the database's URL."
        )
    if state == _TABLE_EXISTS or _EXISTS.search(text):
        advice = "dlqbatch did not make it: give dlqbatch a database, or a schema of PostgreSQL, of its own"
        return TablesTaken(where(url), f"{text} ({advice})")
    if is_missing or state == _UNDEFINED_COLUMN or _NO_COLUMN.search(text):
        return TablesMissing(where(url), f"{text} (`dlqbatch db upgrade` makes the tables of this version)")
    if isinstance(error, _NoFile):
        return TablesMissing(where(url), f"{text}{_NAME_IT if error.is_default else _MAKE_IT}")
    if state == _NO_PRIVILEGE:
        return DatabaseForbids(where(url), text + _right(url, text, statement))
    return (DatabaseRefused if database_url.refuses_login(error) else DatabaseUnreadable)(where(url), text)


_CHANGED: Final = re.compile(r"(?:INSERT INTO|UPDATE|DELETE FROM) (?P<name>\S+)")
_DENIED: Final = re.compile(r"permission denied for (?P<kind>table|relation|schema) (?P<name>\S+)")


def _right(url: URL, text: str, statement: str) -> str:
    """The role that a database administrator has to grant; the server names the table, and not the right."""
    denied = _DENIED.search(text)
    if denied is None:
        return ""
    user, name = url.username or "the user", denied["name"]
    if denied["kind"] == "schema":
        return f"; `GRANT USAGE, CREATE ON SCHEMA {name} TO {user}` gives the right"
    said = statement.lstrip().upper()
    # A lock, shared or not, takes the right to update; a table that a change only looks at need not be writable.
    changed = _CHANGED.match(said)
    locks = " FOR UPDATE" in said or " FOR SHARE" in said
    only_reads = changed["name"] != name.upper() if changed else said.startswith("SELECT") and not locks
    if only_reads and name == EVENT_TABLE:
        return f"; for the policy, `GRANT SELECT ON {name} TO {user}` is enough"
    role, does = ("dlqbatch_reader", "look") if only_reads else ("dlqbatch_operator", "do so")
    return (
        f"; `GRANT {role} TO {user}` lets a person {does}, `GRANT dlqbatch_worker TO {user}` a job "
        "(sql/grants.postgresql.sql makes these roles)"
    )


def _why(url: URL, error: BaseException) -> str:
    return database_url.describe_error(error, url.password)


class _NoFile(sqlite3.OperationalError):
    """A SQLite file that is not there; for the policy that is a table that is not there."""

    def __init__(self, path: Path, *, is_default: bool) -> None:
        self.is_default = is_default
        super().__init__(f"there is no file {path}")


_MAKE_IT: Final = " (`dlqbatch db upgrade` makes it; if there should be one, check the database's URL)"
_NAME_IT: Final = (
    ", so the database has to be named: set DLQBATCH_DATABASE_URL (dlqbatch.database-url). Only to try dlqbatch out "
    "make this file with `dlqbatch db upgrade`"
)


def _sqlite(url: URL, *, busy: float, create: bool, is_default: bool) -> Engine:
    path = Path(str(url.database)).absolute()
    # Never mode=ro: reading a WAL database may have to make its shared-memory file; rw falls back to reading alone.
    target = f"{path.as_uri()}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        if not create and not path.exists():
            raise _NoFile(path, is_default=is_default)
        if create:
            with suppress(FileExistsError):
                # Bodies and passwords may be in it: it is for its owner alone, whatever the umask.
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        # Transactions begin when we say so: the driver's own way leaves a read outside of any.
        return sqlite3.connect(target, uri=True, timeout=busy, isolation_level=None, check_same_thread=False)

    engine = _pooled(url, creator=connect)

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        # SQLite has `unhex` itself only since 3.41.
        connection.create_function("dlqbatch_unhex", 1, _unhex, deterministic=True)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes later would fail at once if another one wrote in between.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _postgresql(
    url: URL, connect_timeout: float, statement_timeout: float, token: Callable[[], dict[str, str]]
) -> Engine:
    arguments = database_url.connect_options(url.query, connect_timeout)
    engine = _pooled(url, connect_args=arguments)

    @event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, given: Any, options: Any) -> BoundedConnection:
        from dlqbatch.store import timeouts  # noqa: PLC0415  (SQLite's users need no psycopg)

        return timeouts.connect(statement_timeout, *given, **options | token())

    @event.listens_for(engine, "connect")
    def _prepare(connection: BoundedConnection, _record: Any) -> None:
        from dlqbatch.store.bulk import register_arrays  # noqa: PLC0415  (users of SQLite need no dialect of PostgreSQL)

        register_arrays(connection)
        connection.execute(database_url.session_settings(statement_timeout))
        connection.commit()

    return engine


# --- The version of the tables, asked for without loading Alembic

VERSION_TABLE: Final = "dlqbatch_version"


@cache
def newest() -> str:
    """The version of the last migration: what this program works with."""
    files = (Path(migrations.__path__[0]) / "versions").glob("v[0-9]*_*.py")
    return max(file.name[1:].partition("_")[0] for file in files)


def check_version(store: Engine) -> str | None:
    """TablesMissing, and so exit code 2, if the tables are of an older version, or not there.

    A newer version is a warning. Migrations only add, so that the older program goes on until it is replaced: an
    upgrade of the database stops no job.
    """
    with reading(store) as connection:
        try:
            found = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))  # noqa: S608  (its own name)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _NO_PRIVILEGE:
                return None  # a login with few rights: what it may not use says so itself
            raise
    if found is None or str(found) < newest():
        raise TablesMissing(
            where(store.url),
            f"its tables are of version {found or 'none'}, and this dlqbatch works with {newest()} "
            "(`dlqbatch db upgrade` makes the tables of this version)",
        )
    if str(found) > newest():
        return (
            f"the tables of the database at {where(store.url)} are of version {found}, and this dlqbatch was made for "
            f"{newest()}: replace it by the newer one"
        )
    return None
