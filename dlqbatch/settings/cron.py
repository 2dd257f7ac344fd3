"""A cron expression as cron understands it, made into a trigger of APScheduler, which understands two things otherwise.

There 0 is a Monday, and a day of the month goes together with a day of the week; for cron 0 and 7 are Sundays, and one
of the two days is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

FIELDS: Final = 5
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART: Final = re.compile(r"(?:\*|(?P<first>[a-z]{3}|\d)(?:-(?P<last>[a-z]{3}|\d))?)(?:/(?P<step>\d))?")


def cron_trigger(expression: str, time_zone: str) -> Any:
    """ValueError says what is wrong with it."""
    from apscheduler.triggers.combining import OrTrigger  # noqa: PLC0415  (only for those who write an expression)
    from apscheduler.triggers.cron import CronTrigger  # noqa: PLC0415  (for the scheduler only)

    minute, hour, day, month, weekday = expression.split()
    time = {"minute": minute, "hour": hour, "month": month, "timezone": time_zone}
    named = _weekdays(weekday)
    # As in cron, a field that begins with * sets no day of its own.
    if day.startswith("*") or weekday.startswith("*"):
        trigger = CronTrigger(**time, day=day, day_of_week=named)
    else:
        trigger = OrTrigger([CronTrigger(**time, day=day), CronTrigger(**time, day_of_week=named)])
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise ValueError("such a day never comes")
    return trigger


def _weekdays(field: str) -> str:
    if field == "*":
        return field
    return ",".join(dict.fromkeys(name for part in field.split(",") for name in _named(part)))


def _named(part: str) -> Iterator[str]:
    found = _PART.fullmatch(part)
    if found is None:
        raise ValueError(f"'{part}' is no day of the week; 0 and 7 are Sunday, or write sun, mon, tue")
    step = int(found["step"] or 1)
    first, last = 0, 6
    if found["first"] is not None:
        first = _number(found["first"])
        last = _number(found["last"]) if found["last"] else 6 if found["step"] else first
    if last < first:
        last += 7  # from Friday to Monday, or to a Sunday written as sun or 0
    if not step:
        raise ValueError(f"'{part}' makes steps of 0")
    yield from (_DAYS[number % 7] for number in range(first, last + 1, step))


def _number(day: str) -> int:
    if day in _DAYS:
        return _DAYS.index(day)
    if not day.isdigit() or int(day) > len(_DAYS):
        raise ValueError(f"'{day}' is no day of the week; 0 and 7 are Sunday, or write sun, mon, tue")
    return int(day)
