"""The table dlq_event_config: a drain reads it once into its policy, and people edit it."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, delete, func, insert, select, text, update

from dlqbatch.drain.event_policy import EventRow, Policy
from dlqbatch.errors import DatabaseUnreadable, PolicyMissing, SettingsError
from dlqbatch.settings import Settings
from dlqbatch.store import action_log
from dlqbatch.store.access import engine_for
from dlqbatch.store.action_log import By
from dlqbatch.store.engine import EVENT_TABLE, reading, where, writing

KIND: Final = "event"
LONGEST_EVENT = 100
_MOST_RETRIES = 2**31 - 1

# Existing installations have exactly these columns; whatever else we need to know lives elsewhere.
TABLE: Final = sa.Table(
    EVENT_TABLE,
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(LONGEST_EVENT), nullable=True),
    sa.Column("max_retries", sa.Integer, nullable=True),
)


class Changed(NamedTuple):
    row: EventRow
    action: str | None
    """What undoes it."""


class Removed(NamedTuple):
    rows: int
    action: str | None
    """What undoes it."""


class EventConfig:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read(self) -> list[EventRow]:
        """All rows by id, in a single SELECT; no other right is needed."""
        with reading(self._engine, for_policy=True) as connection:
            found = connection.execute(select(TABLE).order_by(TABLE.c.id)).all()
        for row in found:
            # SQLite keeps any text in an integer column; a count that cannot be read must not pass as "not configured".
            if type(row.name) not in {str, NoneType} or type(row.max_retries) not in {int, NoneType}:
                raise DatabaseUnreadable(
                    where(self._engine.url),
                    f"row {row.id} of {EVENT_TABLE} holds name {row.name!r} and max_retries {row.max_retries!r}, "
                    "which are not a text and a whole number",
                )
            # SQLite also lets NULL into an `int primary key`. The highest id counts, so each row needs an id.
            if type(row.id) is not int:
                raise DatabaseUnreadable(
                    where(self._engine.url),
                    f"the row of {EVENT_TABLE} named {row.name!r} has the id {row.id!r}: give it a whole number",
                )
        return [EventRow(*row) for row in found]

    def set(self, name: str, max_retries: int | None, by: By | None = None) -> Changed:
        """Change the row that counts for this name, or add a row; None stands for the default number."""
        _check_name(name)
        if max_retries is not None and not 0 <= max_retries <= _MOST_RETRIES:
            raise SettingsError(f"max_retries of '{name}' is {max_retries}; it is a number from 0 to {_MOST_RETRIES}")
        with writing(self._engine, for_policy=True) as connection:
            if connection.dialect.name == "postgresql":
                # Two writers at once would choose the same id. Readers go on; other writers wait.
                connection.execute(text(f"LOCK TABLE {EVENT_TABLE} IN SHARE ROW EXCLUSIVE MODE"))
            before = _numbers(connection, name)
            row_id = connection.scalar(select(func.max(TABLE.c.id)).where(TABLE.c.name == name))
            if row_id is None:
                row_id = _insert(connection, name, max_retries)
            else:
                connection.execute(update(TABLE).where(TABLE.c.id == row_id).values(max_retries=max_retries))
            action = action_log.decide(connection, by, KIND, name, before, [*before[:-1], max_retries])
        return Changed(EventRow(row_id, name, max_retries), action)

    def remove(self, name: str, by: By | None = None) -> Removed:
        """Delete every row of this name."""
        _check_name(name)
        with writing(self._engine, for_policy=True) as connection:
            before = _numbers(connection, name)
            number = connection.execute(delete(TABLE).where(TABLE.c.name == name)).rowcount
            action = action_log.decide(connection, by, KIND, name, before, [])
        return Removed(number, action)


def put_back(connection: Connection, details: Mapping[str, Any]) -> str:
    """Write the rows of a name as they were; if they have been changed since the action, say so and write nothing."""
    name, before = details[KIND], details["before"]
    ids = connection.scalars(select(TABLE.c.id).where(TABLE.c.name == name).order_by(TABLE.c.id)).all()
    if _numbers(connection, name) != details["after"]:
        return f"somebody has changed the event '{name}' since"
    for row_id, max_retries in zip(ids, before, strict=False):
        connection.execute(update(TABLE).where(TABLE.c.id == row_id).values(max_retries=max_retries))
    for row_id in ids[len(before) :]:
        connection.execute(delete(TABLE).where(TABLE.c.id == row_id))
    for max_retries in before[len(ids) :]:
        _insert(connection, name, max_retries)
    return ""


def _numbers(connection: Connection, name: str) -> list[int | None]:
    """The numbers of retries of all rows with this name; the last one counts."""
    return list(connection.scalars(select(TABLE.c.max_retries).where(TABLE.c.name == name).order_by(TABLE.c.id)))


def _check_name(name: str) -> None:
    if len(name) > LONGEST_EVENT:
        raise SettingsError(
            f"'{name[:40]}…' has {len(name)} characters, but {EVENT_TABLE}.name holds {LONGEST_EVENT}. "
            "Use a topic pattern, or put the event into application.properties (`dlqbatch.events.<key>`)"
        )
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise SettingsError(f"{name!r} holds characters that no database keeps as text")


def _insert(connection: Connection, name: str, max_retries: int | None) -> int:
    if _numbers_itself(connection):
        numbered = sa.table(EVENT_TABLE, sa.column("id", sa.Integer), sa.column("name"), sa.column("max_retries"))
        adding = insert(numbered).values(name=name, max_retries=max_retries).returning(numbered.c.id)
        return int(connection.execute(adding).scalar_one())
    row_id: int = (connection.scalar(select(func.max(TABLE.c.id))) or 0) + 1
    connection.execute(insert(TABLE).values(id=row_id, name=name, max_retries=max_retries))
    return row_id


def _numbers_itself(connection: Connection) -> bool:
    """Whether the id comes from a sequence, which would later collide with an id that we chose."""
    if connection.dialect.name != "postgresql":
        return False
    query = text(
        "SELECT atthasdef OR attidentity <> '' FROM pg_attribute "
        "WHERE attrelid = to_regclass(:the_table) AND attname = 'id'"
    )
    return bool(connection.scalar(query, {"the_table": EVENT_TABLE}))


def load_policy(settings: Settings) -> Policy:
    """The policy of table and properties; PolicyMissing where it would dead-letter everything."""
    rows: list[EventRow] = []
    try:
        rows = event_config(settings).read()
    except PolicyMissing:
        if not settings.allow_empty_policy:
            raise
    events = {
        name: settings.default_max_retries if retries is None else retries for name, retries in settings.events.items()
    }
    policy = Policy(rows, events, settings.default_max_retries, settings.event_delays)
    if not policy and not settings.allow_empty_policy:
        raise PolicyMissing(
            "not a single event is configured, in the table dlq_event_config or in application.properties, so every "
            "message would go to the dead letters. Nothing was moved. Add an event with `dlqbatch events set`, or "
            "pass --allow-empty-policy if that is what you want."
        )
    return policy


def event_config(settings: Settings) -> EventConfig:
    return EventConfig(engine_for(settings))
