"""The options of `dlqbatch schedule`: when each job runs, when more runs are started, and where its health is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from dlqbatch.settings.values import Options, duration, number_option, option

OFF: Final = "off"
_LEAST: Final = timedelta(seconds=1)
_LONGEST: Final = timedelta(days=366)
_CRON: Final = re.compile(r"[a-z0-9*/, -]{9,200}")
_CRON_FIELDS: Final = 5
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART: Final = re.compile(r"(?:\*|(?P<first>[a-z]{3}|\d)(?:-(?P<last>[a-z]{3}|\d))?)(?:/(?P<step>\d))?")


def when(value: str) -> str:
    """Refuse what is neither a time, a cron expression nor `off`; the text stays as it is."""
    text = " ".join(value.split()).lower()
    if text == OFF:
        return text
    interval = duration(text)
    if isinstance(interval, timedelta):
        if interval < _LEAST:
            raise ValueError("is less than a second, in which no run could begin and end")
        if interval > _LONGEST:
            raise ValueError("is more than a year")
        return text
    if len(text.split()) != _CRON_FIELDS or not _CRON.fullmatch(text):
        raise ValueError(f"must be {_WHEN}")
    try:
        cron_trigger(text, "UTC")
    except ValueError as error:
        raise ValueError(f"is no cron expression: {error}") from None
    return text


def cron_trigger(expression: str, time_zone: str) -> Any:
    """A trigger of APScheduler for an expression as cron understands it; ValueError says what is wrong with it.

    APScheduler's own reading (`CronTrigger.from_crontab`) differs from cron's: there 0 is a Monday, and a day of the
    month and a day of the week have to come together. For cron 0 and 7 are Sundays, and one of the two days is enough.
    """
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
    yield from (_WEEKDAYS[number % 7] for number in range(first, last + 1, step))


def _number(day: str) -> int:
    if day in _WEEKDAYS:
        return _WEEKDAYS.index(day)
    if not day.isdigit() or int(day) > len(_WEEKDAYS):
        raise ValueError(f"'{day}' is no day of the week; 0 and 7 are Sunday, or write sun, mon, tue")
    return int(day)


def address(value: str) -> str:
    if value.lower() == OFF:
        return OFF
    parts = urlsplit(f"//{value}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None or parts.path or parts.query or parts.fragment or "@" in value:
        raise ValueError("is not a host and a port, such as 127.0.0.1:8421 or [::1]:8421")
    return value


When = Annotated[str, AfterValidator(when)]
Duration = Annotated[timedelta, BeforeValidator(duration)]

_WHEN = "a time with its unit, such as 60s or 5m, a cron expression of five fields, such as 0 3 * * *, or off"


class ScheduleOptions(Options):
    """Part of `Settings`."""

    schedule_drain: When = option("60s", "When `schedule` runs drain.", _WHEN)
    schedule_ingest: When = option("30s", "When `schedule` runs ingest.", _WHEN)
    schedule_lifecycle: When = option("30s", "When `schedule` runs lifecycle.", _WHEN)
    schedule_replay: When = option("30s", "When `schedule` runs replay, which goes on with released plans.", _WHEN)
    schedule_monitor: When = option("60s", "When `schedule` runs monitor.", _WHEN)
    schedule_retain: When = option("0 3 * * *", "When `schedule` runs retain.", _WHEN)
    schedule_check: When = option("off", "When `schedule` runs check.", _WHEN)
    schedule_jitter: Annotated[Duration, Field(ge=timedelta(0), le=timedelta(hours=1))] = option(
        timedelta(seconds=2),
        "By how much at most `schedule` delays a start at random, so that not all come at once.",
        "a time with its unit from 0s to 1h",
        default_text="2s",
    )
    trigger_depth: int = number_option(
        5000,
        "At so many messages in the queues that drain serves, `schedule` starts more drains at once; 0 is never.",
        least=0,
    )
    trigger_ingest_depth: int = number_option(
        5000,
        "At so many messages in the queues that ingest serves, `schedule` starts more ingests at once, unless "
        "ingest is off; 0 is never.",
        least=0,
    )
    trigger_interval: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(minutes=5))] = option(
        timedelta(seconds=5),
        "How often `schedule` looks at the depth of those queues.",
        "a time with its unit from 1s to 5m",
        default_text="5s",
    )
    max_workers: int = number_option(2, "The most drains that `schedule` has at work at once.", least=1, most=64)
    max_ingest_workers: int = number_option(
        1, "The most ingests that `schedule` has at work at once.", least=1, most=64
    )
    health_address: Annotated[str, AfterValidator(address)] = option(
        "127.0.0.1:8421",
        "Where `schedule` answers /livez, /healthz and /metrics over HTTP.",
        "a host and a port, such as 127.0.0.1:8421 or [::1]:8421, or off",
    )
