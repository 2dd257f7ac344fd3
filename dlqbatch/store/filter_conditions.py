"""Filters as conditions of a query: what people wrote becomes the names that the store holds, which indexes know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    and_,
    cast,
    false,
    func,
    literal,
    not_,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB

from dlqbatch.amqp.patterns import is_pattern, matches
from dlqbatch.store.bulk import in_list
from dlqbatch.store.filters import Filters
from dlqbatch.store.journal import EDIT_OF
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, TRANSITIONS
from dlqbatch.store.text import key, visible

_FINGERPRINT: Final = 16
_PREFIX: Final = re.compile(f"[0-9a-f]{{1,{_FINGERPRINT - 1}}}")
_PACKAGE_ENDS: Final = ".:\\/$"
"""What stands between a package and a type, in one language or another."""
_COUNTED: Final = 10_000
_NEAR: Final = 3
_ESCAPE: Final = "\\"
_M: Final = MESSAGES.c
_SEARCHED: Final = (_M.error_type, _M.error_message, _M.error_stack, _M.identity, _M.message_id, _M.reason)


def conditions(connection: Connection, filters: Filters) -> list[ColumnElement[bool]]:
    """All but the texts."""
    wanted = {
        "error type": filters.error_types,
        "group": filters.groups,
        "event": filters.events,
        "origin": filters.origins,
        "source": filters.sources,
        "tag": filters.tags,
    }
    found = [_CONDITIONS[name](connection, values) for name, values in wanted.items() if values]
    if filters.statuses:
        found.append(_M.status.in_(filters.statuses))
    if filters.since is not None:
        found.append(_M.created_at >= filters.since)
    if filters.until is not None:
        found.append(_M.created_at < filters.until)
    if filters.is_edit is not None:
        found.append(_IS_EDIT if filters.is_edit else not_(_IS_EDIT))
    for name, value in filters.unwanted:
        if name in _CONDITIONS:
            found.append(_is_not(_CONDITIONS[name](connection, (value,))))
    return found


def text_conditions(filters: Filters) -> list[ColumnElement[bool]]:
    """The conditions on texts. No index helps with them, so the database reads each row that the others leave."""
    found = [or_(*map(_mentions, filters.texts))] if filters.texts else []
    return found + [_is_not(_mentions(value)) for name, value in filters.unwanted if name == "text"]


_IS_EDIT: Final[ColumnElement[bool]] = (
    select(literal(1))
    .where(
        TRANSITIONS.c.message_id == _M.id,
        TRANSITIONS.c.from_status.is_(None),
        TRANSITIONS.c.reason.startswith(EDIT_OF, autoescape=True),
    )
    .exists()
)


def _is_not(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Negate a condition. A row without a value does not have the unwanted one, so that it matches."""
    return not_(func.coalesce(condition, false()))


def _error_type(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return _in(connection, _M.error_type, _stored(connection, _M.error_type, values, _is_type))


def _is_type(wanted: str, stored: str) -> bool:
    return stored == wanted or (stored.endswith(wanted) and stored[-len(wanted) - 1] in _PACKAGE_ENDS)


def _event(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return _in(connection, _M.event, _by_pattern(connection, _M.event, values))


def _origin(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return _in(connection, _M.origin_queue, _by_pattern(connection, _M.origin_queue, values))


def _group(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    prefixes = [value.lower() for value in values if _PREFIX.fullmatch(value.lower())]
    whole = [value.lower() for value in values if not _PREFIX.fullmatch(value.lower())]
    # Between the first and the last fingerprint that begin so: a range of the index, whatever the collation.
    ranges = [
        and_(_M.fingerprint >= prefix.ljust(_FINGERPRINT, "0"), _M.fingerprint <= prefix.ljust(_FINGERPRINT, "f"))
        for prefix in prefixes
    ]
    return or_(*ranges, *([_in(connection, _M.fingerprint, whole)] if whole else []))


def _source(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return _in(connection, _M.source, values)


def _tag(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    if connection.dialect.name == "postgresql":
        return or_(*(cast(_M.tags, JSONB).has_key(value) for value in values))
    each = func.json_each(cast(_M.tags, Text)).table_valued("value")
    return select(literal(1)).select_from(each).where(each.c.value.in_(values)).exists()


def _status(_: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return _M.status.in_([Status(value) for value in values])


_CONDITIONS: Final[dict[str, Callable[[Connection, tuple[str, ...]], ColumnElement[bool]]]] = {
    "error type": _error_type,
    "group": _group,
    "event": _event,
    "origin": _origin,
    "source": _source,
    "tag": _tag,
    "status": _status,
}


def _in(connection: Connection, column: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
    return column == values[0] if len(values) == 1 else in_list(connection, column, values)


def _by_pattern(connection: Connection, column: ColumnElement[Any], values: tuple[str, ...]) -> Sequence[str]:
    patterns = tuple(value for value in values if is_pattern(value))
    if not patterns:
        return values
    names = tuple(value for value in values if not is_pattern(value))
    return (*names, *_stored(connection, column, patterns, matches))


def _stored(
    connection: Connection, column: ColumnElement[Any], values: tuple[str, ...], is_meant: Callable[[str, str], bool]
) -> Sequence[str]:
    """The values of this column that the words mean. If there are none, the words themselves, which match nothing."""
    words = [key(value) for value in values]
    return [each for each in distinct(connection, column) if any(is_meant(word, each) for word in words)] or values


def distinct(connection: Connection, column: ColumnElement[Any]) -> list[str]:
    """All values of a column, which an index has to begin with: one look at the index for each value."""
    steps = select(func.min(column).label("value")).where(column.is_not(None)).cte("steps", recursive=True)
    following = select(func.min(column)).where(column > steps.c.value).scalar_subquery()
    steps = steps.union_all(select(following).where(steps.c.value.is_not(None)))
    return list(connection.scalars(select(steps.c.value).where(steps.c.value.is_not(None))))


def _mentions(text: str) -> ColumnElement[bool]:
    sought = visible(text).replace(_ESCAPE, _ESCAPE * 2).replace("%", _ESCAPE + "%").replace("_", _ESCAPE + "_")
    return or_(*(column.ilike(f"%{sought}%", escape=_ESCAPE) for column in _SEARCHED))


def near(connection: Connection, filters: Filters) -> list[str]:
    """For each name that no message has, a sentence with the names most like it, and how many messages have those."""
    named = (
        ("error type", _M.error_type, filters.error_types),
        ("event", _M.event, filters.events),
        ("origin", _M.origin_queue, filters.origins),
        ("group", _M.fingerprint, filters.groups),
    )
    found = []
    for name, column, values in named:
        for value in values:
            if connection.scalar(select(_M.id).where(_CONDITIONS[name](connection, (value,))).limit(1)) is None:
                alike = [] if name == "group" else _alike(value, distinct(connection, column))
                known = ", ".join(f"{each} ({_count(connection, column == each)})" for each in alike)
                found.append(f"no message has the {name} '{value}'" + (f"; there is {known}" if known else ""))
    return found


def _alike(value: str, known: Sequence[str]) -> list[str]:
    """Names that contain the word, then names that are spelled nearly the same. Case does not matter."""
    wanted = value.lower()
    folded = {each: each.lower() for each in known}
    inside = [each for each, text in folded.items() if wanted in text]
    ends = {each: re.split(f"[{re.escape(_PACKAGE_ENDS)}]", text)[-1] for each, text in folded.items()}
    close = set(difflib.get_close_matches(wanted, [*folded.values(), *ends.values()], n=_NEAR))
    spelled = [each for each in known if folded[each] in close or ends[each] in close]
    return list(dict.fromkeys([*inside, *spelled]))[:_NEAR]


def _count(connection: Connection, condition: ColumnElement[bool]) -> str:
    some = select(_M.id).where(condition).limit(_COUNTED + 1).subquery()
    number = int(connection.scalar(select(func.count()).select_from(some)) or 0)
    return f"{_COUNTED:,} and more" if number > _COUNTED else f"{number:,}"
