"""Filters: which dead messages a person means, from the words of the command line to the conditions of a query.

They mean the same in every command. Of several values for one filter any may hold; of several filters all must.
"""

from __future__ import annotations

import re
from collections import Counter
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
_ACTION: Final = re.compile(r"(?:A-)?([1-9][0-9]{0,18})", re.IGNORECASE)
NEGATED: Final = (
    *("id", "error type", "group", "event", "origin", "source", "tag", "field", "status", "text", "action"),
)
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


def action_id_of(word: str) -> int:
    """`A-17`, `a-17` or `17` as a number."""
    found = _ACTION.fullmatch(word.strip())
    if found is None or int(found[1]) > LARGEST_ID:
        raise NotUnderstood(f"'{word}' names no action; write it as `dlqbatch actions list` does, such as A-17")
    return int(found[1])


def action_name(action_id: int) -> str:
    return f"A-{action_id}"


Words = str | Iterable[str] | None
"""What a person wrote for one filter: once, several times, or not at all."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The conditions that a message has to meet. An empty field is no condition."""

    ids: tuple[int, ...] = ()
    """Numbers of messages."""
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
    fields: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names of fields, each once, and the values of which the field has to have one."""
    texts: tuple[str, ...] = ()
    """Somewhere in the failure, the reason or an id; upper and lower case are the same, in SQLite for ASCII."""
    statuses: tuple[Status, ...] = ()
    since: datetime | None = None
    """The earliest `created_at`, inclusive."""
    until: datetime | None = None
    """The end of `created_at`, exclusive."""
    is_edit: bool | None = None
    """It was made by an edit; False: it was not."""
    actions: tuple[str, ...] = ()
    """Changed by one of these actions: A-17."""
    unwanted: tuple[tuple[str, str], ...] = ()
    """Filters and their values that must not hold."""

    @classmethod
    def parse(
        cls,
        *,
        statuses: Sequence[Status] | None = None,
        ids: Words = None,
        error_type: Words = None,
        group: Words = None,
        event: Words = None,
        origin: Words = None,
        source: Words = None,
        tag: Words = None,
        field: Words = None,
        field_lists: Iterable[tuple[str, Sequence[str]]] = (),
        text: Words = None,
        since: str | None = None,
        until: str | None = None,
        is_edit: bool | None = None,
        action: Words = None,
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
        found = cls(
            ids=_ids(_listed(ids)),
            error_types=options["error type"],
            groups=options["group"],
            events=options["event"],
            origins=options["origin"],
            sources=options["source"],
            tags=options["tag"],
            fields=_fields(_listed(field), field_lists),
            texts=options["text"],
            statuses=tuple(dict.fromkeys(statuses or ())),
            since=start,
            until=end,
            is_edit=is_edit,
            actions=tuple(action_name(action_id_of(word)) for word in _listed(action)),
            unwanted=tuple(_unwanted(words) for words in _listed(unwanted)),
        )
        found.check_bounds()
        return found

    def check_bounds(self) -> None:
        """NotUnderstood for more than a database takes in one statement, or looks for in a sensible time."""
        counted = Counter(name for name, value in self.unwanted if name != "group" or len(value) < _FINGERPRINT)
        counted.update({"text": len(self.texts), "tag": len(self.tags), "action": len(self.actions)})
        counted.update({"field": len(self.fields), "group": sum(len(each) < _FINGERPRINT for each in self.groups)})
        for name in ("text", "tag", "action", "field", "group"):
            if counted[name] > MOST_WORDS:
                what = "beginnings of groups" if name == "group" else f"conditions on a {name}"
                raise NotUnderstood(f"{counted[name]:,} {what} are more than {MOST_WORDS} at once")
        longest = max(map(len, (*self.texts, *(value for name, value in self.unwanted if name == "text"))), default=0)
        if longest > LONGEST_SOUGHT:
            raise NotUnderstood(f"a text of {longest:,} characters is longer than the {LONGEST_SOUGHT:,} to look for")

    def shown(self) -> dict[str, object]:
        """As plans keep them, for people and programs to read: one value as it is, several as a list."""
        named: dict[str, tuple[str, ...]] = {
            "id": _shown_values(list(map(str, self.ids))),
            "error_type": self.error_types,
            "group": self.groups,
            "event": self.events,
            "origin": self.origins,
            "source": self.sources,
            "tag": self.tags,
            "text": self.texts,
            "action": self.actions,
        }
        found: dict[str, object] = {
            name: values[0] if len(values) == 1 else list(values) for name, values in named.items() if values
        }
        found |= {"field": [_shown_field(name, values) for name, values in self.fields]} if self.fields else {}
        found |= {"statuses": list(self.statuses)} if self.statuses else {}
        found |= {name: at.isoformat() for name, at in (("since", self.since), ("until", self.until)) if at}
        found |= {} if self.is_edit is None else {"is_edit": self.is_edit}
        return found | ({"not": [f"{name}={value}" for name, value in self.unwanted]} if self.unwanted else {})


def _listed(words: Words) -> tuple[str, ...]:
    listed = () if words is None else (words,) if isinstance(words, str) else words
    return tuple(dict.fromkeys(_as_shown(word) for word in listed))


MOST_WORDS: Final = 100
"""The most values of a filter that is a condition of its own for each of them."""
LONGEST_SOUGHT: Final = 5_000
"""The characters of a text to look for; SQLite takes no pattern of more than 50,000 bytes."""
_FINGERPRINT: Final = 16
MOST_VALUES: Final = 100_000
"""A pasted list has at most so many values."""
_MOST_SHOWN: Final = 20


def _ids(words: Sequence[str]) -> tuple[int, ...]:
    wrong = [word for word in words if not _is_id(word)]
    if wrong:
        raise NotUnderstood(f"'{wrong[0][:40]}' is no number of a message")
    if len(words) > MOST_VALUES:
        raise NotUnderstood(f"{len(words):,} numbers of messages are more than {MOST_VALUES:,} at once")
    return tuple(dict.fromkeys(map(int, words)))


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= _DIGITS and 0 < int(word) <= LARGEST_ID


def _fields(
    words: Iterable[str], lists: Iterable[tuple[str, Sequence[str]]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    wanted: dict[str, dict[str, None]] = {}
    for word in words:
        name, value = _field(word, f"--field {word}")
        wanted.setdefault(name, {})[value] = None
    for name, values in lists:
        wanted.setdefault(name, {}).update(dict.fromkeys(map(_as_shown, values)))
    for name, found in wanted.items():
        if len(found) > MOST_VALUES:
            raise NotUnderstood(f"{len(found):,} values of the field {name} are more than {MOST_VALUES:,} at once")
    return tuple((name, tuple(values)) for name, values in wanted.items())


def _field(word: str, written: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name.strip() or not value:
        raise NotUnderstood(f"{written}: write a field as NAME=VALUE, such as order.id=P-000087")
    return name.strip(), value


def _shown_values(values: Sequence[str]) -> tuple[str, ...]:
    more = len(values) - _MOST_SHOWN
    return (*values[:_MOST_SHOWN], *((f"{more:,} more",) if more > 0 else ()))


def _shown_field(name: str, values: tuple[str, ...]) -> str:
    more = len(values) - _MOST_SHOWN
    return f"{name}={'|'.join(values[:_MOST_SHOWN])}" + (f" and {more:,} more" if more > 0 else "")


def _unwanted(words: str) -> tuple[str, str]:
    """`event=orders.#` as the name of a filter and its value."""
    option, equals, value = words.partition("=")
    name = option.strip().lstrip("-").replace("-", " ").replace("_", " ").lower()
    if not equals or not value or name not in NEGATED:
        names = ", ".join(each.replace(" ", "-") for each in NEGATED)
        raise NotUnderstood(f"--not {words}: write it as --not FILTER=VALUE; the filters are {names}")
    if name == "status" and value not in set(Status):
        raise NotUnderstood(f"--not {words}: '{value}' is no state; the states are {', '.join(Status)}")
    if name == "field":
        _field(value, f"--not {words}")
    if name == "id":
        _ids([value])
    return name, action_name(action_id_of(value)) if name == "action" else value


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
