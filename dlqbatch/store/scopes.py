"""Whose rows these are: several deployments share a database, and each touches its own rows only.

A deployment is a broker and a virtual host. Its scope goes with its engine, so that every query that looks for rows can
name it: `own(connection)`. An engine without a scope is that of the first deployment, to which also belongs what was
there before there were scopes, and what an older dlqbatch writes until it is replaced.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, func, literal, or_, select, true

from dlqbatch.errors import DlqbatchError
from dlqbatch.store.bulk import insert_into
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.tables import MESSAGES, RUNS, SCOPES
from dlqbatch.store.text import key

FIRST: Final = 1
NOBODY: Final = -1
"""The scope of a deployment that has never worked with the database: it has no rows."""
_EVERY: Final = 0
_OPTION: Final = "dlqbatch_scope"
_MOST_NAMED: Final = 5


class ScopeUnknown(DlqbatchError):
    """Several deployments share the database, and nothing says whose rows are meant."""

    exit_code = 2


def scoped(engine: Engine, scope_id: int) -> Engine:
    """The same engine for one scope."""
    return engine.execution_options(**{_OPTION: scope_id})


def of_every_scope(engine: Engine) -> Engine:
    """The same engine for looking at the rows of all scopes; nothing can be changed with it."""
    return engine.execution_options(**{_OPTION: _EVERY})


def scope_of(connection: Connection) -> int:
    """The id of the connection's scope; ScopeUnknown if it may look at all of them."""
    if is_every(connection):
        names = list(connection.scalars(select(SCOPES.c.name).order_by(SCOPES.c.id).limit(_MOST_NAMED)))
        raise ScopeUnknown(
            f"this database holds the messages of several deployments ({', '.join(names)}), and nothing says whose are "
            "meant: give --scope NAME, or set dlqbatch.scope. Nothing was changed."
        )
    return int(connection.get_execution_options().get(_OPTION, FIRST))


def is_every(connection: Connection) -> bool:
    """Whether the connection may look at all scopes."""
    return bool(connection.get_execution_options().get(_OPTION, FIRST) == _EVERY)


def own(connection: Connection, column: ColumnElement[Any] = MESSAGES.c.scope_id) -> ColumnElement[bool]:
    """The condition that a row belongs to the connection's scope."""
    return true() if is_every(connection) else column == scope_of(connection)


def own_runs(connection: Connection) -> ColumnElement[bool]:
    """The condition that a run in the log of runs was one of this scope. An older dlqbatch names no scope there."""
    if is_every(connection):
        return true()
    found = scope_of(connection)
    name = select(SCOPES.c.name).where(SCOPES.c.id == found).scalar_subquery()
    return or_(RUNS.c.scope == name, RUNS.c.scope.is_(None)) if found == FIRST else RUNS.c.scope == name


def register(engine: Engine, name: str) -> int:
    """The id of this scope, which is known from now on. The first one that is registered has the id 1."""
    wanted = key(name)
    known = select(SCOPES.c.id).where(SCOPES.c.name == wanted)
    with reading(engine) as connection:
        found = connection.scalar(known)
    while found is None:
        with writing(engine) as connection:
            following = select(
                func.coalesce(func.max(SCOPES.c.id), 0) + 1,
                literal(wanted, SCOPES.c.name.type),
                literal(datetime.now(UTC), SCOPES.c.since.type),
            ).where(true())  # or SQLite takes the ON of the conflict for that of a join
            # Of two that come at once, one finds its id taken, and tries again with the next.
            adding = insert_into(connection, SCOPES).from_select(["id", "name", "since"], following)
            connection.execute(adding.on_conflict_do_nothing())
            found = connection.scalar(known)
    return int(found)


def known_scopes(engine: Engine) -> dict[str, int]:
    """The ids of all scopes by their names, the oldest scope first."""
    with reading(engine) as connection:
        return dict(connection.execute(select(SCOPES.c.name, SCOPES.c.id).order_by(SCOPES.c.id)).all())
