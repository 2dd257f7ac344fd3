"""One dead message on the screen: what is known of it, what happened to it, what it holds."""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from dlqbatch.logs import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

_MARKS: Final = {"death": "✗", "state": "●", "attempt": "→", "note": "·"}
_TIME: Final = "%Y-%m-%d %H:%M:%S"
_TIME_WIDTH: Final = 19
_LINES_OF_BODY: Final = 40
_LONGEST_LINE: Final = 2_000
_LONGEST_CELL: Final = 2_000


class Step(Protocol):
    """Something that happened."""

    @property
    def at(self) -> datetime | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def actor(self) -> str | None: ...
    @property
    def reason(self) -> str | None: ...


def time(at: datetime | None) -> str:
    """Without a fraction, as UTC."""
    return at.strftime(_TIME) if at is not None else ""


def timeline(steps: Sequence[Step]) -> Iterator[str]:
    before: datetime | None = None
    for step in steps:
        if step.at is not None:
            if before is not None and step.at - before >= timedelta(seconds=1):
                yield f"{'':{_TIME_WIDTH}}  │ {_span(step.at - before)}"
            before = step.at
        who = f" [{plain(step.actor)}]" if step.actor else ""
        why = f": {plain(step.reason)}" if step.reason else ""
        yield f"{time(step.at):{_TIME_WIDTH}}  {_MARKS.get(step.kind, '·')} {plain(step.what)}{who}{why}"


def _span(length: timedelta) -> str:
    minutes, seconds = divmod(int(length.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{number} {unit}" for number, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s"))]
    return " ".join([part for part in parts if not part.startswith("0 ")][:2])


def facts(known: Mapping[str, object], *, full: bool) -> Iterator[str]:
    """A name and a value on each line; what is not known has none."""
    shown = {plain(name): _cell(value, full=full) for name, value in known.items() if value not in (None, "", [], {})}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        yield f"  {name:{min(width, 32)}}  {value}"


def _cell(value: object, *, full: bool) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return plain(text, None if full else _LONGEST_CELL)


def text(lines: Iterable[str], *, full: bool) -> Iterator[str]:
    """Many lines, safe for a terminal; without `full` the first of them."""
    shown = iter(lines)
    for line in islice(shown, None if full else _LINES_OF_BODY):
        yield "  " + plain(line.replace("\t", "    "), None if full else _LONGEST_LINE)
    if not full and next(shown, None) is not None:
        yield "  … and more: --full shows all of it"
