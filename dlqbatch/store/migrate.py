"""The schema's version: bring it up to date, ask for it, or write it down for a database administrator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, text
from tenacity import Retrying, retry_if_exception, retry_if_exception_type, stop_after_delay, wait_random

from dlqbatch.errors import DatabaseUnreadable, PolicyMissing
from dlqbatch.store import migrations
from dlqbatch.store.count_changes import count_stored
from dlqbatch.store.engine import VERSION_TABLE, create_engine_for, parse, reading, translated, where, writing
from dlqbatch.store.indexes import build_missing

_UPGRADES_ONE_AT_A_TIME = 0x646C716261746368  # 'dlqbatch', the key of an advisory lock
_SECONDS_FOR_A_STATEMENT = 600.0  # a change of a large table, or the wait for another process's upgrade
_SECONDS_FOR_AN_INDEX = 6 * 3_600.0
_SECONDS_FOR_WAL = 5.0
_MILLISECONDS_FOR_A_LOCK = 2_000
_SECONDS_BETWEEN_TRIES = (1.0, 3.0)  # in which those who waited behind the upgrade go on
_STATES_OF_IN_USE = frozenset({"55P03", "40P01"})  # lock_not_available, deadlock_detected
_IN_USE = (
    "for {after:.0f} s a transaction has been open on a table that has to change: a long query, a backup, an editor. "
    "Nothing has changed yet, and it is tried again. To end the wait, end that transaction"
)


@dataclass(frozen=True, slots=True)
class Pending:
    """A migration that has not been made yet."""

    revision: str
    what: str


@dataclass(frozen=True, slots=True)
class Upgraded:
    before: str | None
    after: str | None


def upgrade(url: str, *, connect_timeout: float = 10, waits: Callable[[str], None] = lambda _: None) -> Upgraded:
    """Bring the schema up to date in one transaction, then do what takes long; makes the SQLite file.

    That is to build the indexes that it lacks, and to count the messages. `waits` hears of it, and that somebody else
    uses a table that has to change, each time before it is tried again.
    """
    parsed = parse(url)
    is_new_file = parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists()
    engine = create_engine_for(
        url, connect_timeout=connect_timeout, statement_timeout=_SECONDS_FOR_A_STATEMENT, create=True
    )
    with _said_plainly(parsed):
        upgraded: Upgraded = Retrying(
            retry=retry_if_exception(_is_in_use),
            wait=wait_random(*_SECONDS_BETWEEN_TRIES),
            stop=stop_after_delay(_SECONDS_FOR_A_STATEMENT),
            before_sleep=lambda state: waits(_IN_USE.format(after=state.seconds_since_start or 0.0)),
            reraise=True,
        )(_upgrade, engine)
    if is_new_file:
        _use_wal(engine)
    patient = create_engine_for(url, connect_timeout=connect_timeout, statement_timeout=_SECONDS_FOR_AN_INDEX)
    build_missing(patient, waits)
    count_stored(patient, waits)
    return upgraded


def _upgrade(engine: Engine) -> Upgraded:
    with writing(engine) as connection:
        if connection.dialect.name == "postgresql":
            # The version is read only behind this lock; SQLite's write lock is there since the transaction began.
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADES_ONE_AT_A_TIME})
            # Who waits for a table makes all others wait behind it, also those who only read.
            connection.execute(text(f"SET LOCAL lock_timeout = {_MILLISECONDS_FOR_A_LOCK}"))
        before = _version(connection)
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        return Upgraded(before, _version(connection))


def _is_in_use(error: BaseException) -> bool:
    return getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) in _STATES_OF_IN_USE


def current(url: str, *, connect_timeout: float = 10) -> str | None:
    """The schema's version; None if this database has not been upgraded yet, or is a SQLite file still to be made."""
    try:
        with reading(create_engine_for(url, connect_timeout=connect_timeout), for_policy=True) as connection:
            return _version(connection)
    except PolicyMissing:
        return None


def latest() -> str:
    """The version that this program makes and works with."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def planned(url: str, *, connect_timeout: float = 10) -> Upgraded:
    """What `upgrade` would do; it changes nothing, and refuses what `upgrade` refuses."""
    before = current(url, connect_timeout=connect_timeout)
    with _said_plainly(parse(url)):
        if before is not None:
            ScriptDirectory.from_config(_config()).get_revision(before)
    return Upgraded(before, latest())


def pending(version: str) -> tuple[Pending, ...]:
    """What `upgrade` would do to a schema of this version, which this program knows, in its order."""
    scripts = ScriptDirectory.from_config(_config()).iterate_revisions("head", version)
    return tuple(Pending(one.revision, one.doc.splitlines()[0].rstrip(".")) for one in reversed(list(scripts)))


def sql(dialect: Literal["postgresql", "sqlite"]) -> str:
    """Everything that `upgrade` does to an empty database, for someone who runs it by hand."""
    written = StringIO()
    config = _config(written)
    config.attributes["dialect"] = dialect
    command.upgrade(config, "head", sql=True)
    lines = [line.rstrip() for line in written.getvalue().strip().splitlines()]
    return "\n".join([_HEAD.format(dialect=dialect), *lines]) + "\n"


def grants() -> str:
    """The rights of each role on PostgreSQL, for someone who may give them."""
    return Path(__file__).with_name("grants.postgresql.sql").read_text(encoding="utf-8")


_HEAD = """\
-- The schema of dlqbatch for {dialect}, as `dlqbatch db upgrade` makes it. Safe beside an existing dlq_event_config.
-- Generated by `dlqbatch db sql`: do not edit; a test compares this file with the migrations.
"""


def _config(output: StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    # A `%` in the path would be read as the start of an interpolation.
    config.set_main_option("script_location", str(Path(migrations.__path__[0])).replace("%", "%%"))
    return config


def _version(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _use_wal(engine: Engine) -> None:
    # Only for a file of our own: the mode stays with the file, and someone else's may lie on a network share, where WAL
    # does not work. SQLite does not wait for other users of the file here, so we do; if they never let go, the file is
    # as safe without it.
    for attempt in Retrying(
        retry=retry_if_exception_type(DatabaseUnreadable),
        wait=wait_random(0.01, 0.05),
        stop=stop_after_delay(_SECONDS_FOR_WAL),
        retry_error_callback=lambda _: None,
    ):
        with attempt, translated(engine.url), closing(engine.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA journal_mode = WAL")


@contextmanager
def _said_plainly(url: URL) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise DatabaseUnreadable(
            where(url), f"this version of dlqbatch does not know its schema ({error}); install the newer dlqbatch"
        ) from error
