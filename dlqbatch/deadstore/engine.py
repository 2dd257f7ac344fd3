"""One way to reach the database, and the one place where its errors become ours."""

from __future__ import annotations

import re
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from dlqbatch.deadstore.postgresql import connect_options, refuses_login, session, without_option
from dlqbatch.errors import (
    CommitUnanswered,
    DatabaseRefused,
    DatabaseUnreadable,
    PolicyMissing,
    SettingsError,
    TablesMissing,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Connection, Engine

    from dlqbatch.deadstore.patience import Beside, PatientConnection

EVENT_TABLE = "dlq_event_config"
STATEMENT_SECONDS = 30.0
_POSTGRESQL = {"postgres", "postgresql", "postgresql+psycopg"}
_WRITES = "dlqbatch_writes"
_UNDEFINED_TABLE = "42P01"
_UNDEFINED_COLUMN = "42703"
_NO_COLUMN = re.compile("no such column|has no column named")
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


class Kept:
    """One connection for many transactions, one after the other; never for two at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self.beside: Beside | None = None
        """What goes on while a server works. SQLite has none: there we do the work ourselves."""

    @property
    def url(self) -> URL:
        return self._engine.url

    def connect(self, options: Mapping[str, Any]) -> Connection:
        """Opened when it is first needed, and anew after it was lost."""
        if self._connection is None:
            self._connection = self._engine.connect()
        if self.beside is not None and self.url.get_backend_name() != "sqlite":
            driver: Any = self._connection.connection.driver_connection
            driver.beside = self.beside
        return self._connection.execution_options(**options)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
def keeping(engine: Engine) -> Iterator[Kept]:
    """What `reading` and `writing` take in place of an engine, where a connection for each would cost the most."""
    kept = Kept(engine)
    try:
        yield kept
    finally:
        with translated(engine.url):
            kept.close()


@contextmanager
def reading(engine: Engine | Kept, *, for_policy: bool = False) -> Iterator[Connection]:
    """With `for_policy`, a SQLite file that is not there is PolicyMissing."""
    with (
        translated(engine.url, for_policy=for_policy),
        _connected(engine, {_WRITES: False}) as connection,
        connection.begin(),
    ):
        yield connection


@contextmanager
def writing(engine: Engine | Kept, *, for_policy: bool = False) -> Iterator[Connection]:
    """A transaction that commits at its end; on SQLite it holds the only write lock from its start."""
    with (
        translated(engine.url, for_policy=for_policy),
        _connected(engine, {_WRITES: True}) as connection,
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
def _connected(engine: Engine | Kept, options: Mapping[str, Any]) -> Iterator[Connection]:
    if isinstance(engine, Kept):
        yield engine.connect(options)
    else:
        with engine.connect().execution_options(**options) as connection:
            yield connection


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
    if is_missing or state == _UNDEFINED_COLUMN or _NO_COLUMN.search(text):
        return TablesMissing(where(url), f"{text} (`dlqbatch db upgrade` makes the tables of this version)")
    if isinstance(error, _NoFile):
        advice = "(`dlqbatch db upgrade` makes it; if there should be one, check the database's URL)"
        return TablesMissing(where(url), f"{text} {advice}")
    if state == _NO_PRIVILEGE:
        text += _right(url, text, statement)
    return (DatabaseRefused if refuses_login(error) else DatabaseUnreadable)(where(url), text)


_CHANGED: Final = re.compile(r"(?:INSERT INTO|UPDATE|DELETE FROM) (?P<name>\S+)")
_DENIED: Final = re.compile(r"permission denied for (?P<kind>table|relation|schema) (?P<name>\S+)")


def _right(url: URL, text: str, statement: str) -> str:
    """The GRANT that a database administrator has to give; the server names the table, and not the right."""
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
    rights = "SELECT" if only_reads else "SELECT, INSERT, UPDATE, DELETE"
    return f"; `GRANT {rights} ON {name} TO {user}` gives the right"


def _why(url: URL, error: BaseException) -> str:
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
    password = url.password
    return without_option(text.replace(str(password), "***") if password else text)


class _NoFile(sqlite3.OperationalError):
    """A SQLite file that is not there; for the policy that is a table that is not there."""


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

    @event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, given: Any, options: Any) -> PatientConnection:
        from dlqbatch.deadstore import patience  # noqa: PLC0415  (SQLite's users need no psycopg)

        return patience.connect(statement_timeout, *given, **options)

    @event.listens_for(engine, "connect")
    def _prepare(connection: PatientConnection, _record: Any) -> None:
        from dlqbatch.deadstore import arrays  # noqa: PLC0415  (the same)

        arrays.teach(connection)
        connection.execute(session(statement_timeout))
        connection.commit()

    return engine
