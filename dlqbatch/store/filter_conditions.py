"""Filters as conditions of a query: what people wrote becomes the names that the store holds, which indexes know."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Text,
    and_,
    any_,
    cast,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import JSONB

from dlqbatch.amqp.fields import MESSAGE_ID
from dlqbatch.amqp.patterns import is_pattern, matches
from dlqbatch.logs import masked
from dlqbatch.store.action_log import selected_by
from dlqbatch.store.bulk import distinct, in_list, values_table
from dlqbatch.store.field_tables import FIELDS
from dlqbatch.store.filters import Filters, action_id_of
from dlqbatch.store.scopes import is_every, own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import HAS_TAGS, MADE_BY_EDIT, MESSAGES, TRANSITIONS
from dlqbatch.store.text import key, visible

_FINGERPRINT: Final = 16
_PREFIX: Final = re.compile(f"[0-9a-f]{{1,{_FINGERPRINT - 1}}}")
_PACKAGE_ENDS: Final = ".:\\/$"
"""What stands between a package and a type, in one language or another."""
_LOOKED_UP_AT_ONCE: Final = 1_000
_MOST_NAMED: Final = 1_000
_COUNTED: Final = 1_000
_TELL_EXCHANGES: Final = 50
"""The newest messages of each queue that tell which exchanges lead to it."""
_FEW: Final = 2_000
"""The largest number of messages that is looked up one by one."""
_NEAR: Final = 3
_MOST_EXPLAINED: Final = 20
"""The words of one filter that are explained; nobody reads more."""
_MOST_COMPARED: Final = 10_000
"""The names that a word is compared with, to say which of them is near."""
_LABELS_LOOKED_AT: Final = 1_000
"""The newest messages of each state that tell which sources and tags there are."""
_ESCAPE: Final = "\\"
_M: Final = MESSAGES.c
_HAS_TAGS: Final = text(f"dlq_messages.{HAS_TAGS}")
_SEARCHED: Final = (_M.error_type, _M.error_message, _M.error_stack, _M.identity, _M.message_id, _M.reason)


def conditions(connection: Connection, filters: Filters) -> list[ColumnElement[bool]]:
    """All but the texts, and that a message belongs to the scope."""
    wanted = {
        "error type": filters.error_types,
        "group": filters.groups,
        "event": filters.events,
        "origin": filters.origins,
        "source": filters.sources,
        "tag": filters.tags,
        "action": filters.actions,
    }
    found = [_CONDITIONS[name](connection, values) for name, values in wanted.items() if values]
    found += [_is_with_field(connection, name, values) for name, values in filters.fields]
    found += [in_list(connection, _M.id, filters.ids)] if filters.ids else []
    found.append(own(connection))
    if filters.statuses:
        found.append(_M.status.in_(filters.statuses))
    if filters.since is not None:
        found.append(_M.created_at >= filters.since)
    if filters.until is not None:
        found.append(_M.created_at < filters.until)
    if filters.is_edit is not None:
        found.append(_is_among(connection, _EDITS) if filters.is_edit else not_(IS_EDIT))
    for name, of_name in _CONDITIONS.items():
        # In one condition: SQLite takes no expression that is made of a thousand.
        if unwanted := tuple(value for each, value in filters.unwanted if each == name):
            found.append(is_not(of_name(connection, unwanted)))
    return found


def text_conditions(filters: Filters) -> list[ColumnElement[bool]]:
    """The conditions on texts. No index helps with them, so the database reads each row that the others leave."""
    # IS true keeps the brackets of each: SQLite bounds the depth, and takes one list of all columns for a deep one.
    found = [or_(*(_mentions(each).is_(true()) for each in filters.texts))] if filters.texts else []
    return found + [is_not(_mentions(value)) for name, value in filters.unwanted if name == "text"]


IS_EDIT: Final[ColumnElement[bool]] = (
    select(literal(1))
    .where(
        TRANSITIONS.c.message_id == _M.id,
        text(MADE_BY_EDIT),
    )
    .exists()
)
"""An edit made the message."""
_EDITS: Final = select(TRANSITIONS.c.message_id).where(text(MADE_BY_EDIT))


def is_not(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Negate a condition. A row without a value does not have the unwanted one, so that it matches."""
    return not_(func.coalesce(condition, false()))


def _id(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return in_list(connection, _M.id, map(int, values))


def _error_type(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return one_of_names(connection, _M.error_type, stored_names(connection, _M.error_type, values, is_type))


def is_type(wanted: str, stored: str) -> bool:
    return stored == wanted or (stored.endswith(wanted) and stored[-len(wanted) - 1] in _PACKAGE_ENDS)


def _event(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return one_of_names(connection, _M.event, by_pattern(connection, _M.event, values))


def _origin(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    behind = behind_exchanges(connection, values)
    queues = (*by_pattern(connection, _M.origin_queue, values), *(queue for each in behind.values() for queue in each))
    found = one_of_names(connection, _M.origin_queue, tuple(dict.fromkeys(queues)))
    if not behind:
        return found
    # Where only the exchange is known, it is the origin.
    return or_(found, and_(_M.origin_queue.is_(None), one_of_names(connection, _M.origin_exchange, tuple(behind))))


def behind_exchanges(connection: Connection, values: Sequence[str]) -> dict[str, list[str]]:
    """The queues in which messages of an exchange failed, by the exchanges among these names; a queue goes first.

    Of each queue the newest messages tell which exchanges lead to it, so that no table is read from end to end.
    """
    names = {key(value) for value in values if not is_pattern(value)}
    queues = distinct(connection, _M.origin_queue) if names else []
    names -= set(queues)
    found: dict[str, list[str]] = {}
    if not names:
        return found
    given = values_table(connection, {_M.origin_queue: queues})
    # No index finds at once what may be NULL or not, and one that is read backwards is ordered by the queue too.
    of_queue = select(_M.origin_exchange).where(own(connection), _M.origin_queue == given.c.origin_queue)
    newest = of_queue.order_by(_M.origin_queue.desc(), _M.created_at.desc(), _M.id.desc()).limit(_TELL_EXCHANGES)
    each = newest.correlate(given).subquery().c.origin_exchange
    for name in sorted(names):
        leads = select(literal(1)).where(each == literal(name, each.type)).exists()
        if behind := list(connection.scalars(select(given.c.origin_queue).where(leads))):
            found[name] = behind
    nowhere = select(_M.origin_exchange).where(own(connection), _M.origin_queue.is_(None))
    nowhere = nowhere.order_by(_M.origin_queue.desc(), _M.created_at.desc(), _M.id.desc()).limit(_TELL_EXCHANGES)
    for exchange in names & {each for each in connection.scalars(nowhere) if each}:
        found.setdefault(exchange, [])
    return found


def exchanges_named(connection: Connection, filters: Filters) -> list[str]:
    """A sentence for each exchange that was given as an origin: which queues it was taken for."""
    unwanted = [value for name, value in filters.unwanted if name == "origin"]
    found = behind_exchanges(connection, (*filters.origins, *unwanted)) if filters.origins or unwanted else {}
    return [
        f"'{exchange}' is an exchange, by which messages came that failed in {', '.join(sorted(queues))}"
        if queues
        else f"'{exchange}' is an exchange, and the queues behind it are not known"
        for exchange, queues in sorted(found.items())
    ]


def group_condition(
    connection: Connection, values: tuple[str, ...], column: ColumnElement[Any] = _M.fingerprint
) -> ColumnElement[bool]:
    prefixes = [value.lower() for value in values if _PREFIX.fullmatch(value.lower())]
    whole = [value.lower() for value in values if not _PREFIX.fullmatch(value.lower())]
    # Between the first and the last fingerprint that begin so: a range of the index, whatever the collation.
    ranges = [
        and_(column >= prefix.ljust(_FINGERPRINT, "0"), column <= prefix.ljust(_FINGERPRINT, "f"))
        for prefix in prefixes
    ]
    return or_(*ranges, *([one_of_names(connection, column, whole)] if whole else []))


def _source(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return one_of_names(connection, _M.source, values)


def _tag(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    values = tuple(map(visible, values))
    if connection.dialect.name == "postgresql":
        return and_(_HAS_TAGS, or_(*(cast(_M.tags, JSONB).has_key(value) for value in values)))
    each = func.json_each(cast(_M.tags, Text)).table_valued("value")
    return and_(_HAS_TAGS, select(literal(1)).select_from(each).where(each.c.value.in_(values)).exists())


def _action(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return or_(*(selected_by(connection, action_id_of(value), _M.id) for value in values))


def _status(_: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    return _M.status.in_([Status(value) for value in values])


def _has_field(connection: Connection, name: str, values: Sequence[str]) -> ColumnElement[bool]:
    if name == MESSAGE_ID:
        return one_of_names(connection, _M.message_id, values)
    return _M.id.in_(_with_field(connection, name, values))


def _with_field(connection: Connection, name: str, values: Sequence[str]) -> Select[Any]:
    return select(FIELDS.c.message_id).where(FIELDS.c.name == name, one_of_names(connection, FIELDS.c.value, values))


def _is_with_field(connection: Connection, name: str, values: Sequence[str]) -> ColumnElement[bool]:
    if name == MESSAGE_ID:
        return _has_field(connection, name, values)
    return _is_among(connection, _with_field(connection, name, values))


def _is_among(connection: Connection, ids: Select[Any]) -> ColumnElement[bool]:
    """The condition that a message is one of these.

    A guess that they are many would make PostgreSQL walk from the newest message back to the first one of them.
    """
    if connection.dialect.name == "postgresql" and connection.scalar(ids.limit(1).offset(_FEW)) is None:
        return _M.id == any_(func.array(ids.scalar_subquery()))
    return _M.id.in_(ids)


def _field(connection: Connection, values: tuple[str, ...]) -> ColumnElement[bool]:
    pairs = (value.split("=", 1) for value in values)
    return or_(*(_has_field(connection, name, [value]) for name, value in pairs))


_CONDITIONS: Final[dict[str, Callable[[Connection, tuple[str, ...]], ColumnElement[bool]]]] = {
    "id": _id,
    "error type": _error_type,
    "group": group_condition,
    "event": _event,
    "origin": _origin,
    "source": _source,
    "tag": _tag,
    "field": _field,
    "status": _status,
    "action": _action,
}


def one_of_names(connection: Connection, column: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
    return column == values[0] if len(values) == 1 else in_list(connection, column, values)


def by_pattern(connection: Connection, column: ColumnElement[Any], values: tuple[str, ...]) -> Sequence[str]:
    patterns = tuple(value for value in values if is_pattern(value))
    if not patterns:
        return values
    names = tuple(value for value in values if not is_pattern(value))
    return (*names, *stored_names(connection, column, patterns, matches))


def stored_names(
    connection: Connection, column: ColumnElement[Any], values: tuple[str, ...], is_meant: Callable[[str, str], bool]
) -> Sequence[str]:
    """The values of this column that the words mean. If there are none, the words themselves, which match nothing."""
    words = [key(value) for value in values]
    return [each for each in distinct(connection, column) if any(is_meant(word, each) for word in words)] or values


def _mentions(text: str) -> ColumnElement[bool]:
    sought = visible(text).replace(_ESCAPE, _ESCAPE * 2).replace("%", _ESCAPE + "%").replace("_", _ESCAPE + "_")
    return or_(*(column.ilike(f"%{sought}%", escape=_ESCAPE) for column in _SEARCHED))


def near(connection: Connection, filters: Filters) -> list[str]:
    """For each name that no message has, a sentence with the names most like it, and how many messages have those.

    Each look is at an index, or at a bounded number of messages.
    """
    named = (
        ("error type", _M.error_type, filters.error_types),
        ("event", _M.event, filters.events),
        ("origin", _M.origin_queue, filters.origins),
        ("group", _M.fingerprint, filters.groups),
    )
    found = []
    for name, column, values in named:
        for value in values[:_MOST_EXPLAINED]:
            some = select(_M.id).where(own(connection), _CONDITIONS[name](connection, (value,))).limit(1)
            if connection.scalar(some) is None:
                alike = [] if name == "group" else _alike(value, distinct(connection, column, _MOST_COMPARED))
                counted = {masked(each): _count(connection, column == each) for each in alike}
                known = ", ".join(f"{each} ({number})" for each, number in counted.items() if number != "0")
                found.append(f"no message has the {name} '{value}'" + (f"; there is {known}" if known else ""))
    return found + _near_labels(connection, filters) + _near_fields(connection, filters)


def _near_labels(connection: Connection, filters: Filters) -> list[str]:
    """For each source or tag that is on none of the newest messages of each state, a sentence with those like it."""
    if not (filters.sources or filters.tags):
        return []
    counted: dict[str, Counter[str]] = {"source": Counter(), "tag": Counter()}
    is_all, looked_at = True, 0
    age = _M.created_at if is_every(connection) else _M.status_since  # as the index of all, or of one scope, is
    for status in Status:
        newest = select(_M.source, _M.tags).where(own(connection), _M.status == status)
        rows = connection.execute(newest.order_by(age.desc()).limit(_LABELS_LOOKED_AT)).all()
        is_all, looked_at = is_all and len(rows) < _LABELS_LOOKED_AT, looked_at + len(rows)
        for row in rows:
            counted["source"].update([row.source] if row.source is not None else [])
            counted["tag"].update({each for each in row.tags if isinstance(each, str)})
    whose = "no message" if is_all else f"none of the newest {looked_at:,} messages"
    found = []
    for name, values in (("source", filters.sources), ("tag", filters.tags)):
        for value in values[:_MOST_EXPLAINED]:
            if (key(value) if name == "source" else visible(value)) not in counted[name]:
                alike = _alike(value, list(counted[name]))
                known = ", ".join(f"{masked(each)} ({counted[name][each]:,})" for each in alike)
                found.append(f"{whose} has the {name} '{value}'" + (f"; there is {known}" if known else ""))
    return found


def _near_fields(connection: Connection, filters: Filters) -> list[str]:
    """For each field that no message has, a sentence with the fields that there are."""
    if not filters.fields:
        return []
    known = [MESSAGE_ID, *distinct(connection, FIELDS.c.name)]
    there = f"there are {', '.join(known)}; dlqbatch.fields.NAME describes one"
    return [f"no message has the field {name}; {there}" for name, _ in filters.fields if name not in known]


def values_not_found(connection: Connection, filters: Filters) -> list[str]:
    """A sentence for each list of ids or of a field's values that no message has all of, with these values."""
    missing = {name: _missing(connection, name, values) for name, values in filters.fields}
    if filters.ids:
        there = set(connection.scalars(select(_M.id).where(own(connection), in_list(connection, _M.id, filters.ids))))
        missing["id"] = [str(row_id) for row_id in filters.ids if row_id not in there]
    return [
        f"{len(values):,} of the values of {name} are not found: {', '.join(values[:_MOST_NAMED])}"
        + (f" and {len(values) - _MOST_NAMED:,} more" if len(values) > _MOST_NAMED else "")
        for name, values in missing.items()
        if values
    ]


def _missing(connection: Connection, name: str, values: Sequence[str]) -> list[str]:
    found: set[str] = set()
    is_id = name == MESSAGE_ID
    column = _M.message_id if is_id else FIELDS.c.value
    query = select(column).distinct().where(own(connection))
    if not is_id:
        query = query.join_from(FIELDS, MESSAGES, _M.id == FIELDS.c.message_id).where(FIELDS.c.name == name)
    for start in range(0, len(values), _LOOKED_UP_AT_ONCE):
        some = in_list(connection, column, values[start : start + _LOOKED_UP_AT_ONCE])
        found.update(connection.scalars(query.where(some)))
    return [value for value in values if key(value) not in found]


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
    some = select(_M.id).where(own(connection), condition).limit(_COUNTED + 1).subquery()
    number = int(connection.scalar(select(func.count()).select_from(some)) or 0)
    return f"{_COUNTED:,} and more" if number > _COUNTED else f"{number:,}"
