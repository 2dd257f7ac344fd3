"""What a person asks for, from the words they wrote to values that a query takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement

from dlqbatch.errors import DlqbatchError
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES
from dlqbatch.store.text import time_text

LARGEST_ID: Final = 2**63 - 1
_DIGITS: Final = len(str(LARGEST_ID))
_DAY: Final = re.compile(r"\d{4}-?\d{2}-?\d{2}|\d{4}-?W\d{2}(-?\d)?")


class NotUnderstood(DlqbatchError):
    """What was asked for makes no sense; nothing was changed."""

    exit_code = 2


def parse_time(text: str) -> datetime:
    """A time as a person writes it, without a zone in UTC; a date is its first instant."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise NotUnderstood(f"'{text}' is no time; write 2030-06-01 or 2030-06-01T12:00:00Z") from None


def parse_end(end: str) -> datetime:
    """The first instant that an end leaves out: a date is meant to its last instant, a time is still meant itself."""
    last = parse_time(end)
    try:
        return last + (timedelta(days=1) if _DAY.fullmatch(end.strip()) else timedelta(microseconds=1))
    except OverflowError:
        raise NotUnderstood(f"'{end}' lies too far ahead") from None


def _as_shown(text: str | None) -> str | None:
    r"""A command line's bytes need not be UTF-8; such a one becomes `\xff`, which is how rows show it."""
    if text is None:
        return None
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text


_M: Final = MESSAGES.c


@dataclass(frozen=True, slots=True)
class Filters:
    """What all must hold; an empty field asks for nothing."""

    error_type: str | None = None
    group: str | None = None
    """A fingerprint."""
    event: str | None = None
    origin: str | None = None
    """The queue it failed in."""
    statuses: tuple[Status, ...] = ()
    since: datetime | None = None
    """The earliest `created_at`, inclusive."""
    until: datetime | None = None
    """The end of `created_at`, exclusive."""
    text: str | None = None
    """Somewhere in the failure, the reason or an id; upper and lower case are the same, in SQLite for ASCII."""

    @classmethod
    def parse(
        cls,
        *,
        statuses: Sequence[Status] | None = None,
        error_type: str | None = None,
        group: str | None = None,
        event: str | None = None,
        origin: str | None = None,
        since: str | None = None,
        until: str | None = None,
        text: str | None = None,
    ) -> Filters:
        """Filters from the words of a person; both ends of the time count, and a date is its whole day in UTC.

        An option that was not given asks for nothing. One that is empty is a mistake, not a filter for everything.
        """
        words = {"error type": error_type, "group": group, "event": event, "origin": origin, "text": text}
        empty = [name for name, word in {**words, "since": since, "until": until}.items() if word == ""]
        if empty:
            raise NotUnderstood(f"the {empty[0]} to look for is empty; leave it out, or say what it is")
        return cls(
            error_type=_as_shown(error_type),
            group=_as_shown(group),
            event=_as_shown(event),
            origin=_as_shown(origin),
            statuses=tuple(dict.fromkeys(statuses or ())),
            since=parse_time(since) if since is not None else None,
            until=parse_end(until) if until is not None else None,
            text=_as_shown(text),
        )

    def conditions(self) -> list[ColumnElement[bool]]:
        """All but the text."""
        equal = {
            _M.error_type: self.error_type,
            _M.fingerprint: self.group,
            _M.event: self.event,
            _M.origin_queue: self.origin,
        }
        found: list[ColumnElement[bool]] = [column == value for column, value in equal.items() if value is not None]
        if self.statuses:
            found.append(_M.status.in_(self.statuses))
        if self.since is not None:
            found.append(_M.created_at >= self.since)
        if self.until is not None:
            found.append(_M.created_at < self.until)
        return found


class Place(NamedTuple):
    """The place where a page ended; the next one begins behind it."""

    created_at: datetime
    id: int

    @property
    def token(self) -> str:
        return f"{time_text(self.created_at)}/{self.id}"

    @classmethod
    def parse(cls, token: str) -> Place:
        at, _, number = token.partition("/")
        if not number.isascii() or not number.isdigit() or len(number) > _DIGITS or int(number) > LARGEST_ID:
            raise NotUnderstood(
                f"a page goes on after what the page before it named as the next one, which '{token}' is not"
            )
        return Place(parse_time(at), int(number))


class NoSuchMessage(DlqbatchError):
    exit_code = 1

    def __init__(self, row_id: int) -> None:
        self.row_id = row_id
        super().__init__(
            f"there is no message {row_id} in the dead store. `dlqbatch messages list` shows what there is; "
            "what was resolved is deleted after its retention. What went to cold storage is shown by "
            f"`dlqbatch archive show {row_id}`."
        )
