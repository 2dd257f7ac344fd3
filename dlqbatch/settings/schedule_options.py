"""The options of `dlqbatch schedule`: when each job runs, when more drains are started, where its health is told."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from dlqbatch.settings.cron import FIELDS, cron_trigger
from dlqbatch.settings.values import Options, duration, number_option, option

OFF: Final = "off"
_LEAST: Final = timedelta(seconds=1)
_LONGEST: Final = timedelta(days=366)
_CRON: Final = re.compile(r"[a-z0-9*/, -]{9,200}")


def occasions(value: str) -> str:
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
    if len(text.split()) != FIELDS or not _CRON.fullmatch(text):
        raise ValueError(f"must be {_OCCASIONS}")
    try:
        cron_trigger(text, "UTC")
    except ValueError as error:
        raise ValueError(f"is no cron expression: {error}") from None
    return text


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


Occasions = Annotated[str, AfterValidator(occasions)]
Duration = Annotated[timedelta, BeforeValidator(duration)]

_OCCASIONS = "a time with its unit, such as 60s or 5m, a cron expression of five fields, such as 0 3 * * *, or off"


class ScheduleOptions(Options):
    """Part of `Settings`."""

    schedule_drain: Occasions = option("60s", "When `schedule` runs drain.", _OCCASIONS)
    schedule_ingest: Occasions = option("30s", "When `schedule` runs ingest.", _OCCASIONS)
    schedule_lifecycle: Occasions = option("30s", "When `schedule` runs lifecycle.", _OCCASIONS)
    schedule_monitor: Occasions = option("60s", "When `schedule` runs monitor.", _OCCASIONS)
    schedule_retain: Occasions = option("0 3 * * *", "When `schedule` runs retain.", _OCCASIONS)
    schedule_check: Occasions = option("off", "When `schedule` runs check.", _OCCASIONS)
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
