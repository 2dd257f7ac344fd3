"""One way to reach the database, and the one place where its errors become ours."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from dlqbatch.deadstore.postgresql import connect_options, session
from dlqbatch.errors import DatabaseUnreadable, PolicyMissing, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

EVENT_TABLE = "dlq_event_config"
STATEMENT_SECONDS = 30.0
_POSTGRESQL = {"postgres", "postgresql", "postgresql+psycopg"}
_WRITES = "dlqbatch_writes"
_UNDEFINED_TABLE = "42P01"
_NO_PRIVILEGE = "42501"


def create_engine_for(
    url: str, *, connect_timeout: float, statement_timeout: float = STATEMENT_SECONDS, create: bool = False
) -> Engine:
    """An engine that holds no connection between uses; only with `create` may it make a SQLite file. Seconds."""
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, busy=max(connect_timeout, 1.0), create=create)
    return _postgresql(parsed, connect_timeout, statement_timeout)


def parse(url: str) -> URL:
    """The URL as SQLAlchemy reads it; a wrong one is never repeated in the error, for it may hold a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise SettingsError(f"the database URL cannot be parsed; {_EXAMPLES}") from None
    if parsed.drivername in _POSTGRESQL:
        if "@" in (parsed.host or ""):
            # What follows would connect to, and print, the rest of the password as a host name.
            raise SettingsError("the database URL has more than one '@': write one in a password as %40")
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername != "sqlite":
        raise SettingsError(f"the database URL starts with '{parsed.drivername}:', which is not supported; {_EXAMPLES}")
    if parsed.query or (parsed.database or ":memory:") == ":memory:" or (parsed.database or "").startswith("file:"):
        raise SettingsError(f"a SQLite URL names a file and takes no options; {_EXAMPLES}")
    return parsed


_EXAMPLES = "it looks like postgresql://user:password@host:5432/database or sqlite:////path/to/file.sqlite3"


def where(url: URL) -> str:
    """The database for a person to recognise: no password, and no options, which may hold one too."""
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///{url.database}"
    shown = URL.create(url.get_backend_name(), url.username, None, url.host, url.port, url.database)
    return shown.render_as_string()


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    with translated(engine.url), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that commits at its end; on SQLite it holds the only write lock from its start."""
    with (
        translated(engine.url),
        engine.connect().execution_options(**{_WRITES: True}) as connection,
        connection.begin(),
    ):
        yield connection


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Whatever the vendors raise inside comes out as one of ours."""
    try:
        yield
    except DBAPIError as error:
        raise _ours(url, error.orig or error) from error
    except (SQLAlchemyError, sqlite3.Error, OSError, UnicodeError) as error:
        # OSError: a folder on the way to a SQLite file is closed to us. UnicodeError: a name in another encoding than
        # the database claims.
        raise DatabaseUnreadable(where(url), _why(url, error)) from error


def _ours(url: URL, error: BaseException) -> DatabaseUnreadable | PolicyMissing:
    text = _why(url, error)
    state = getattr(error, "sqlstate", None)
    if state == _UNDEFINED_TABLE or "no such table" in text or isinstance(error, _NoFile):
        if EVENT_TABLE in text or isinstance(error, _NoFile):
            return PolicyMissing(
                f"there is no table {EVENT_TABLE} in the database at {where(url)}. Nothing was moved. "
                "Run `dlqbatch db upgrade` to make it, or check the database's URL."
            )
        text += " (`dlqbatch db upgrade` makes the tables of this version)"
    if state == _NO_PRIVILEGE:
        text += f"; for the policy, `GRANT SELECT ON {EVENT_TABLE} TO {url.username or 'the user'}` is enough"
    return DatabaseUnreadable(where(url), text)


def _why(url: URL, error: BaseException) -> str:
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
    password = url.password
    return text.replace(str(password), "***") if password else text


class _NoFile(sqlite3.OperationalError):
    """A SQLite file that is not there; for a reader that is a table that is not there."""


def _sqlite(url: URL, *, busy: float, create: bool) -> Engine:
    path = Path(str(url.database)).absolute()
    # Never mode=ro: reading a WAL database may have to make its shared-memory file; rw falls back to reading alone.
    target = f"{path.as_uri()}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        if not create and not path.exists():
            raise _NoFile(f"there is no file {path}")
        # Transactions begin when we say so: the driver's own way leaves a read outside of any.
        return sqlite3.connect(target, uri=True, timeout=busy, isolation_level=None, check_same_thread=False)

    engine = create_engine(url, creator=connect, poolclass=NullPool, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes later would fail at once if another one wrote in between.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: URL, connect_timeout: float, statement_timeout: float) -> Engine:
    arguments = connect_options(url.query, connect_timeout)
    engine = create_engine(url, connect_args=arguments, poolclass=NullPool, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.execute(session(statement_timeout))
        connection.commit()

    return engine
