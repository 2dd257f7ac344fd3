"""The options of the dead store: when a message is retried, how long it is kept, and when an alert fires."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, ValidationInfo, field_validator

from dlqbatch.settings.console_options import SecretText, secret, signing_secret
from dlqbatch.settings.urls import SecretAddress, check_webhook_url
from dlqbatch.settings.values import (
    Options,
    delays,
    duration,
    duration_option,
    lower,
    metrics_file,
    number_option,
    numbers,
    option,
    place,
    queue_name,
    seconds_option,
    switch_option,
    words,
    zone_name,
)

_BUCKET: Final = re.compile(r"(?!.*\.\.)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# S3 keeps what is longer than 1,024 bytes out, and a part's own name needs some.
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()=+,/-]{0,500}")
_KMS_KEY: Final = re.compile(r"(arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:(key|alias)/|alias/)?[A-Za-z0-9/_-]{1,256}")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A place in S3; the prefix is empty, or it is between slashes and has none at its ends."""

    name: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")


def cold_place(value: object) -> object:
    """A folder, unless it looks like an address: a misspelt bucket must not become a folder of that name."""
    if isinstance(value, str) and ("://" in value or value.lower().startswith("s3:")):
        return bucket(value)
    return place(Path(value)) if isinstance(value, (str, Path)) else value


def bucket(address: str) -> Bucket:
    scheme, separator, rest = address.partition("://")
    if scheme.lower() != "s3" or not separator:
        raise ValueError("is neither the path of a folder nor an address like s3://bucket/prefix")
    name, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(name):
        raise ValueError(
            "names a bucket that cannot be: write s3://bucket/prefix, the bucket with 3 to 63 small letters, digits, "
            "dots and dashes, beginning and ending with a letter or digit; credentials do not go here"
        )
    prefix = prefix.removesuffix("/")
    steps = prefix.split("/") if prefix else []
    if not _PREFIX.fullmatch(prefix) or not {"", ".", ".."}.isdisjoint(steps):
        raise ValueError(
            "has a prefix that is not taken: at most 500 letters, digits or any of ! - _ . * ' ( ) = + , with single "
            "slashes between its steps, and neither . nor .. as a step"
        )
    return Bucket(name, prefix)


def kms_key(value: str) -> str:
    if not _KMS_KEY.fullmatch(value):
        raise ValueError("is neither the id, nor the ARN, nor the alias/NAME of a KMS key")
    return value


QueueName = Annotated[str, AfterValidator(queue_name)]
Duration = Annotated[timedelta, BeforeValidator(duration), Field(gt=timedelta(0), le=timedelta(days=36_500))]
Hour = Annotated[int, Field(ge=0, le=23)]
ColdPlace = Annotated[InstanceOf[Path] | InstanceOf[Bucket], BeforeValidator(cold_place)]

_DURATION = "a time above 0 with its unit, such as 90s, 15m, 12h or 30d, at most 36500d"
_SHARE = "a number above 0, at most 1"
_PER_CENT = "a number above 0, at most 100"
_UNKNOWN = Bucket("", "")


class StoreOptions(Options):
    """Part of `Settings`."""

    ingest_queues: Annotated[tuple[QueueName, ...], BeforeValidator(words)] = option(
        (),
        "The dead-letter queues that `ingest` takes from; `*` stands for any text and needs the management API. "
        "Without it: the queue of the dead letters.",
        "names or wildcards with commas between them",
    )
    lease: Duration = duration_option("5m", "How long a worker may hold a dead message before another takes over.")
    statistics_delay: Duration = duration_option(
        "12s",
        "How old the figures of the management API may be: a little more than twice the broker's "
        "collect_statistics_interval. What was sent later is not proven by them.",
    )
    observation_window: Duration = duration_option(
        "15m",
        "How long a retry has to stay away before it can count as a success where the broker's figures cannot be had.",
    )
    max_attempts: int = number_option(5, "So many failed retries from the store end in failed.", least=1, most=1000)
    retry_delays: Annotated[tuple[Duration, ...], BeforeValidator(delays), Field(min_length=1, max_length=100)] = (
        option(
            tuple(timedelta(minutes=minutes) for minutes in (1, 5, 15, 30, 60)),
            "The immediate strategy: how long before the first retry, the second and so on; the last one stays.",
            "1 to 100 times with their units and commas between them, such as 1m,5m,1h",
            default_text="1m,5m,15m,30m,60m",
        )
    )
    off_peak_hours: Annotated[tuple[Hour, ...], BeforeValidator(numbers), Field(min_length=1, max_length=24)] = option(
        (2, 3, 4),
        "The scheduled strategy: the hours in which to retry.",
        "whole numbers from 0 to 23 with commas between them",
    )
    time_zone: Annotated[str, AfterValidator(zone_name)] = option(
        "UTC",
        "The time zone of the off-peak hours and of cron expressions.",
        "the name of a time zone, such as Europe/Berlin",
    )
    recheck: Duration = duration_option(
        "5m", "The conditional strategy: how long until the conditions are looked at again."
    )
    cpu_limit: float = option(
        80.0, "The conditional strategy waits while the CPU is at so many per cent or above.", _PER_CENT, gt=0, le=100
    )
    memory_limit: float = option(
        85.0,
        "The conditional strategy waits while so many per cent of memory or more are used.",
        _PER_CENT,
        gt=0,
        le=100,
    )
    breaker_failure_rate: float = option(
        0.5, "The circuit breaker of an origin opens at this share of failed retries.", _SHARE, gt=0, le=1
    )
    breaker_min_attempts: int = number_option(
        10, "The fewest retries over which the circuit breaker may open.", least=1
    )
    breaker_window: Duration = duration_option("30m", "How far back the circuit breaker counts.")
    breaker_cool_down: Duration = duration_option(
        "5m", "How long an open circuit breaker waits before it lets one retry through."
    )
    replay_approval: int | None = number_option(
        None,
        "Above so many messages the person who made a replay plan cannot send it alone: another one has to approve or "
        "send it. Without it: no plan needs that.",
        least=0,
    )
    keep_resolved: Duration = duration_option("30d", "How long a resolved message is kept before it is deleted.")
    keep_failed: Duration = duration_option(
        "90d", "How long a failed message waits for a person before it goes to cold storage and is archived."
    )
    keep_archived: Duration = duration_option(
        "365d", "How long an archived message is kept in the database; its cold copy stays."
    )
    retain_max_seconds: float = seconds_option(
        900.0, "How long a `retain` may take; inside AWS Lambda the time that is left ends it sooner.", most=86_400
    )
    retain_max_messages: int | None = number_option(
        None, "The most messages that one `retain` archives or deletes. Without it: all that are due.", least=1
    )
    cold_storage: ColdPlace | None = option(
        None,
        "The folder or the S3 bucket for cold copies. Without it `retain` deletes what is resolved and touches "
        "nothing else.",
        "the path of a folder, or s3://bucket/prefix",
    )
    cold_storage_key: Annotated[str, AfterValidator(kms_key)] | None = option(
        None,
        "The AWS KMS key that S3 encrypts cold copies with. Without it: S3's own key (AES256), also where the bucket's "
        "default is another one.",
        "the id, the ARN or the alias/NAME of a KMS key",
    )
    alert_ingestion_per_minute: float = option(
        100.0,
        "Alert (warning) above so many new dead messages a minute.",
        "a number above 0",
        gt=0,
        allow_inf_nan=False,
    )
    alert_backlog: int = number_option(10_000, "Alert (critical) above so many dead messages that wait.", least=1)
    alert_resolution_rate: float = option(
        0.5,
        "Alert (warning) if a smaller share of what ended in the last hour was resolved.",
        "a number from 0 to 1",
        ge=0,
        le=1,
    )
    alert_resolution_minimum: int = number_option(5, "The fewest outcomes over which that alert may fire.", least=1)
    alert_overdue: Duration = duration_option(
        "36h",
        "Alert (warning) if messages are kept for so much longer than `keep_…` says; until then `retain` may come.",
    )
    alert_queue_depth: int = number_option(
        5000,
        "Alert (critical) if a queue that drain or ingest serves stays above so many messages; 0 is never.",
        least=0,
    )
    alert_queue_deep_for: Duration = duration_option("15m", "For how long it must have been so deep.")
    alert_bounded_runs: int = number_option(
        3,
        "Alert (warning) if so many runs of drain or of ingest in a row ended at their bound; 0 is never.",
        least=0,
        most=20,
    )
    alert_unproven_after: Duration = duration_option(
        "30m", "Alert (warning) if a retry was sent so long ago and is neither known to have succeeded nor back."
    )
    alert_new_groups: bool = switch_option(
        True, "Alert (warning) once for each new group of failures that needs a person."
    )
    webhook_url: Annotated[SecretAddress, AfterValidator(check_webhook_url)] | None = option(
        None,
        "Where alerts are sent, as JSON that Slack understands. All of it is a secret.",
        "an http:// or https:// address",
    )
    webhook_format: Annotated[Literal["slack", "teams", "pagerduty"], BeforeValidator(lower)] = option(
        "slack",
        "What the webhook understands: slack (also JSON for programs), teams (a workflow's adaptive card), or "
        "pagerduty (Events API v2, at https://events.pagerduty.com/v2/enqueue).",
        "slack, teams or pagerduty",
    )
    webhook_secret: Annotated[SecretText, AfterValidator(signing_secret)] | None = option(
        None,
        "Signs what the webhook is sent, as Standard Webhooks says: headers webhook-id, -timestamp and -signature.",
        "whsec_ and at least 24 bytes as base64",
    )
    pagerduty_key: Annotated[SecretText, AfterValidator(secret)] | None = option(
        None, "PagerDuty's integration key (Events API v2), for the webhook format pagerduty.", "an integration key"
    )
    prometheus_file: Annotated[Path, AfterValidator(metrics_file)] | None = option(
        None,
        "The file that `monitor` writes its metrics to, for the textfile collector of Prometheus' node exporter.",
        "the path of a file that ends in .prom",
    )

    @field_validator("cold_storage_key")
    @classmethod
    def _needs_a_bucket(cls, key: str | None, others: ValidationInfo) -> str | None:
        # What is wrong with the cold storage itself is said there.
        if key is not None and not isinstance(others.data.get("cold_storage", _UNKNOWN), Bucket):
            raise ValueError("is set, but cold_storage is no s3://bucket; a folder is not encrypted here")
        return key
