"""Filters: which dead messages a person means, from the words of the command line to the conditions of a query.

They mean the same in every command. Of several values for one filter any may hold; of several filters all must.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from dlqbatch.errors import DlqbatchError
from dlqbatch.store.states import Status
from dlqbatch.store.text import time_text

LARGEST_ID: Final = 2**63 - 1
_DIGITS: Final = len(str(LARGEST_ID))
_DAY: Final = re.compile(r"\d{4}-?\d{2}-?\d{2}|\d{4}-?W\d{2}(-?\d)?")
_AGO: Final = re.compile(r"(\d{1,9})\s*([smhdw])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
NEGATED: Final = ("error type", "group", "event", "origin", "source", "tag", "status", "text")
"""The filters that --not takes."""


class NotUnderstood(DlqbatchError):
    """What was asked for makes no sense; nothing was changed."""

    exit_code = 2


def parse_time(text: str, now: datetime | None = None) -> datetime:
    """A time as a person writes it, without a zone in UTC; a day is its first instant."""
    return _time(text, now)[0]


def parse_end(text: str, now: datetime | None = None) -> datetime:
    """The first instant behind an end: a day counts to its last instant, a time is included itself."""
    start, is_day = _time(text, now)
    try:
        return start + (timedelta(days=1) if is_day else timedelta(microseconds=1))
    except OverflowError:
        raise NotUnderstood(f"'{text}' lies too far ahead") from None


def _time(text: str, now: datetime | None) -> tuple[datetime, bool]:
    """An instant, and whether it stands for the day that begins with it."""
    now = datetime.now(UTC) if now is None else now
    word = text.strip().lower()
    try:
        if ago := _AGO.fullmatch(word.removesuffix("ago").strip()):
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])}), False
        if word in {"today", "yesterday"}:
            today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            return (today if word == "today" else today - timedelta(days=1)), True
        found = datetime.fromisoformat(word.upper())
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        return found, _DAY.fullmatch(word.upper()) is not None
    except (ValueError, OverflowError):
        raise NotUnderstood(
            f"'{text}' is no time; write 2h, 3d, today, yesterday, 2030-06-01 or 2030-06-01T12:00:00Z"
        ) from None


def _as_shown(text: str) -> str:
    r"""A command line's bytes need not be UTF-8; such a one becomes `\xff`, which is how rows show it."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text


Words = str | Iterable[str] | None
"""What a person wrote for one filter: once, several times, or not at all."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The conditions that a message has to meet. An empty field is no condition."""

    error_types: tuple[str, ...] = ()
    """With or without the package: `TimeoutError` is `handlers.TimeoutError` too."""
    groups: tuple[str, ...] = ()
    """Fingerprints, or how they begin."""
    events: tuple[str, ...] = ()
    """Names or topic patterns."""
    origins: tuple[str, ...] = ()
    """Queues that it failed in: names or topic patterns."""
    sources: tuple[str, ...] = ()
    """Programs that published it (app_id)."""
    tags: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """Somewhere in the failure, the reason or an id; upper and lower case are the same, in SQLite for ASCII."""
    statuses: tuple[Status, ...] = ()
    since: datetime | None = None
    """The earliest `created_at`, inclusive."""
    until: datetime | None = None
    """The end of `created_at`, exclusive."""
    is_edit: bool | None = None
    """It was made by an edit; False: it was not."""
    unwanted: tuple[tuple[str, str], ...] = ()
    """Filters and their values that must not hold."""

    @classmethod
    def parse(
        cls,
        *,
        statuses: Sequence[Status] | None = None,
        error_type: Words = None,
        group: Words = None,
        event: Words = None,
        origin: Words = None,
        source: Words = None,
        tag: Words = None,
        text: Words = None,
        since: str | None = None,
        until: str | None = None,
        is_edit: bool | None = None,
        unwanted: Words = None,
        now: datetime | None = None,
    ) -> Filters:
        """Filters from the words of a person; both ends of the time count, and a date is its whole day in UTC.

        An option that is left out is no condition. An empty one is a mistake, and not a filter for everything.
        """
        options = {
            "error type": _listed(error_type),
            "group": _listed(group),
            "event": _listed(event),
            "origin": _listed(origin),
            "source": _listed(source),
            "tag": _listed(tag),
            "text": _listed(text),
        }
        times = {"since": _listed(since), "until": _listed(until)}
        for name, words in {**options, **times}.items():
            if "" in words:
                raise NotUnderstood(f"the {name} to look for is empty; leave it out, or say what it is")
        start = parse_time(since, now) if since is not None else None
        end = parse_end(until, now) if until is not None else None
        if start is not None and end is not None and start >= end:
            raise NotUnderstood(
                f"no message can match: --since {since} ({time_text(start)}) is later than --until {until}"
            )
        return cls(
            error_types=options["error type"],
            groups=options["group"],
            events=options["event"],
            origins=options["origin"],
            sources=options["source"],
            tags=options["tag"],
            texts=options["text"],
            statuses=tuple(dict.fromkeys(statuses or ())),
            since=start,
            until=end,
            is_edit=is_edit,
            unwanted=tuple(_unwanted(words) for words in _listed(unwanted)),
        )

    def shown(self) -> dict[str, object]:
        """As plans keep them, for people and programs to read: one value as it is, several as a list."""
        named: dict[str, tuple[str, ...]] = {
            "error_type": self.error_types,
            "group": self.groups,
            "event": self.events,
            "origin": self.origins,
            "source": self.sources,
            "tag": self.tags,
            "text": self.texts,
        }
        found: dict[str, object] = {
            name: values[0] if len(values) == 1 else list(values) for name, values in named.items() if values
        }
        found |= {"statuses": list(self.statuses)} if self.statuses else {}
        found |= {name: at.isoformat() for name, at in (("since", self.since), ("until", self.until)) if at}
        found |= {} if self.is_edit is None else {"is_edit": self.is_edit}
        return found | ({"not": [f"{name}={value}" for name, value in self.unwanted]} if self.unwanted else {})


def _listed(words: Words) -> tuple[str, ...]:
    listed = () if words is None else (words,) if isinstance(words, str) else words
    return tuple(dict.fromkeys(_as_shown(word) for word in listed))


def _unwanted(words: str) -> tuple[str, str]:
    """`event=orders.#` as the name of a filter and its value."""
    option, equals, value = words.partition("=")
    name = option.strip().lstrip("-").replace("-", " ").replace("_", " ").lower()
    if not equals or not value or name not in NEGATED:
        names = ", ".join(each.replace(" ", "-") for each in NEGATED)
        raise NotUnderstood(f"--not {words}: write it as --not FILTER=VALUE; the filters are {names}")
    if name == "status" and value not in set(Status):
        raise NotUnderstood(f"--not {words}: '{value}' is no state; the states are {', '.join(Status)}")
    return name, value


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
