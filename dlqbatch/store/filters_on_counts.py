"""Filters as conditions on the counts, where these say all that a filter does: no message has to be read then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, select

from dlqbatch.store.counts import LONGEST_FACET, Columns, Where, has_facets, sizes
from dlqbatch.store.filter_conditions import (
    behind_exchanges,
    by_pattern,
    group_condition,
    is_not,
    is_type,
    one_of_names,
    stored_names,
)
from dlqbatch.store.filters import Filters
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES

_M: Final = MESSAGES.c
_COLUMNS: Final = {
    "group": "fingerprint",
    "origin": "origin_queue",
    "error type": "error_type",
    "event": "event",
    "source": "source",
}
_TOGETHER: Final = 2
_OF_FACETS: Final = frozenset({"error type", "event", "source"})


def states_of(filters: Filters, otherwise: Sequence[Status]) -> tuple[Status, ...]:
    """The states that the filters leave."""
    unwanted = {value for name, value in filters.unwanted if name == "status"}
    return tuple(status for status in filters.statuses or otherwise if status not in unwanted)


def conditions_on_counts(connection: Connection, filters: Filters) -> Where | None:
    """The conditions of all filters but those on states; None where only the messages can say it."""
    others = tuple(each for each in filters.unwanted if each[0] not in {*_COLUMNS, "status"})
    rest = replace(filters, statuses=(), groups=(), origins=(), error_types=(), events=(), sources=(), unwanted=others)
    if rest != Filters():
        return None
    wanted = {
        "group": filters.groups,
        "origin": filters.origins,
        "error type": filters.error_types,
        "event": filters.events,
        "source": filters.sources,
    }
    unwanted = {name: tuple(value for each, value in filters.unwanted if each == name) for name in _COLUMNS}
    used = {name for name in _COLUMNS if wanted[name] or unwanted[name]}
    needs_facets = not used.isdisjoint(_OF_FACETS)
    if needs_facets and not has_facets(connection):
        return None
    meant: list[tuple[str, Sequence[str], bool]] = []
    for name in used:
        for values, is_wanted in ((wanted[name], True), (unwanted[name], False)):
            names = _names(connection, name, values) if values else ()
            if names is None:
                return None
            meant += [(name, names, is_wanted)] if values else []

    def conditions(columns: Columns) -> list[ColumnElement[bool]]:
        found = []
        for name, values, is_wanted in meant:
            condition = (
                group_condition(connection, tuple(values), columns[_COLUMNS[name]])
                if name == "group"
                else one_of_names(connection, columns[_COLUMNS[name]], values)
            )
            found.append(condition if is_wanted else is_not(condition))
        return found

    return Where(conditions, needs_facets)


_FEW_GROUPS: Final = 100
_FEW: Final = 2_000


def seldom_together(connection: Connection, filters: Filters) -> set[str] | None:
    """The groups of the messages that meet all these filters, where they are few; none if there is no such message.

    An index finds the messages of one filter, however few of them meet the other one. None: it need not be known.
    """
    named = Filters(
        groups=filters.groups,
        events=filters.events,
        origins=filters.origins,
        error_types=filters.error_types,
        sources=filters.sources,
    )
    used = (named.groups, named.events, named.origins, named.error_types, named.sources)
    if sum(map(bool, used)) < _TOGETHER or (where := conditions_on_counts(connection, named)) is None:
        return None
    found = sizes(connection, filters.statuses or tuple(Status), where)
    rows = connection.execute(found.order_by(found.selected_columns.size.desc()).limit(_FEW_GROUPS + 1)).all()
    is_few = len(rows) <= _FEW_GROUPS and sum(size for _, size in rows) <= _FEW
    return {fingerprint for fingerprint, _ in rows} if is_few else None


def _names(connection: Connection, name: str, values: tuple[str, ...]) -> Sequence[str] | None:
    """The names in the store that the words mean; None where the counts cannot tell a name from others."""
    column: ColumnElement[Any] = _M[_COLUMNS[name]]
    match name:
        case "origin":
            behind = behind_exchanges(connection, values)
            if (
                behind
                and connection.scalar(select(_M.id).where(own(connection), column.is_(None)).limit(1)) is not None
            ):
                return None
            found = [*by_pattern(connection, column, values), *(queue for each in behind.values() for queue in each)]
        case "error type":
            found = list(stored_names(connection, column, values, is_type))
        case "event":
            found = list(by_pattern(connection, column, values))
        case _:
            found = list(values)
    return None if any(not each or len(each) >= LONGEST_FACET for each in found) and name != "group" else found
