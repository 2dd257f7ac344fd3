"""Messages that are one piece of work: an edit, what it took the place of, and what took its place in turn.

The journal tells it by number, which outlives what is deleted; a parent tells it by identity, which outlives a number:
what comes back from cold storage has another.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import or_, select

from dlqbatch.deadstore.tables import MESSAGES, TRANSITIONS
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import ColumnElement, Connection

EDIT_OF: Final = "an edit of message "
"""The journal of an edit begins with this, and the number of the message whose place it took."""
EDITED: Final = "edited: message "
"""This stands in the journal of that message, and the number of its edit."""
_LINK: Final = re.compile(f"(?:{EDIT_OF}|{EDITED})(\\d{{1,18}}) ")
_MOST: Final = 100
"""Messages of one piece of work that are looked at."""
_M: Final = MESSAGES.c
_T: Final = TRANSITIONS.c
BY_EDIT: Final[ColumnElement[bool]] = or_(
    _T.reason.startswith(EDIT_OF, autoescape=True), _T.reason.startswith(EDITED, autoescape=True)
)
"""Of a step of the journal."""


class Other(NamedTuple):
    row_id: int
    status: Status | None
    """None: it is deleted."""

    @property
    def is_in_the_way(self) -> bool:
        """It may go out too, or it was handled: only what is resolved, or was archived for long, is ever deleted."""
        return self.status is not Status.ARCHIVED


def others(connection: Connection, row_id: int) -> list[Other]:
    """All that stand for the same work as this message; those first that may go out as well, the newest first."""
    found: dict[int, Status | None] = {}
    ahead = [row_id]
    while ahead and len(found) < _MOST:
        this = ahead.pop()
        if this not in found:
            row = connection.execute(select(_M.identity, _M.parent, _M.status).where(_M.id == this)).one_or_none()
            found[this] = None if row is None else row.status
            ahead += [] if row is None else _beside(connection, this, row.identity, row.parent)
    del found[row_id]
    told = [Other(*one) for one in found.items()]
    return sorted(told, key=lambda one: (not one.is_in_the_way, one.status is None, -one.row_id))


def _beside(connection: Connection, row_id: int, identity: str, parent: str | None) -> Iterator[int]:
    """Those that an edit connects with this one directly."""
    told = connection.scalars(select(_T.reason).where(_T.message_id == row_id, BY_EDIT)).all()
    yield from (int(found[1]) for reason in told if (found := _LINK.match(reason)))
    arrived_by_edit = select(_T.id).where(_T.message_id == _M.id, _T.from_status.is_(None), BY_EDIT).exists()
    yield from connection.scalars(select(_M.id).where(_M.parent == identity, arrived_by_edit).limit(_MOST))
    if parent is not None and any(reason.startswith(EDIT_OF) for reason in told):
        yield from connection.scalars(select(_M.id).where(_M.identity == parent))
