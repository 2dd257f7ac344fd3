"""What a person asks for, from the words they wrote to values that a query takes."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from dlqbatch.deadstore.messages import Filters, Place
from dlqbatch.deadstore.text import time_text
from dlqbatch.errors import DlqbatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlqbatch.policy.lifecycle import Status

LARGEST_ID: Final = 2**63 - 1
_DAY: Final = re.compile(r"\d{4}-?\d{2}-?\d{2}|\d{4}-?W\d{2}(-?\d)?")


class NotUnderstood(DlqbatchError):
    """What was asked for makes no sense; nothing was changed."""

    exit_code = 2


def moment(text: str) -> datetime:
    """A time as a person writes it, without a zone in UTC; a date is its first instant."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise NotUnderstood(f"'{text}' is no time; write 2030-06-01 or 2030-06-01T12:00:00Z") from None


def behind(end: str) -> datetime:
    """The first instant that an end leaves out: a date is meant to its last instant, a time is still meant itself."""
    last = moment(end)
    try:
        return last + (timedelta(days=1) if _DAY.fullmatch(end.strip()) else timedelta(microseconds=1))
    except OverflowError:
        raise NotUnderstood(f"'{end}' lies too far ahead") from None


def asked(
    *,
    statuses: Sequence[Status] = (),
    error_type: str | None = None,
    group: str | None = None,
    event: str | None = None,
    origin: str | None = None,
    since: str | None = None,
    until: str | None = None,
    text: str | None = None,
) -> Filters:
    """An option that was not given asks for nothing; one that is empty is a mistake, not a filter for everything."""
    words = {"error type": error_type, "group": group, "event": event, "origin": origin, "text": text}
    empty = [name for name, word in {**words, "since": since, "until": until}.items() if word == ""]
    if empty:
        raise NotUnderstood(f"the {empty[0]} to look for is empty; leave it out, or say what it is")
    return Filters(
        error_type=_as_shown(error_type),
        group=_as_shown(group),
        event=_as_shown(event),
        origin=_as_shown(origin),
        statuses=tuple(dict.fromkeys(statuses)),
        since=moment(since) if since is not None else None,
        until=behind(until) if until is not None else None,
        text=_as_shown(text),
    )


def _as_shown(text: str | None) -> str | None:
    r"""A command line's bytes need not be UTF-8; such a one becomes `\xff`, which is how rows show it."""
    if text is None:
        return None
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text


def token(place: Place) -> str:
    return f"{time_text(place.created_at)}/{place.id}"


def place(token: str) -> Place:
    at, _, number = token.partition("/")
    if not (number.isascii() and number.isdigit()) or len(number) > len(str(LARGEST_ID)) or int(number) > LARGEST_ID:
        raise NotUnderstood(
            f"a page goes on after what the page before it named as the next one, which '{token}' is not"
        )
    return Place(moment(at), int(number))
