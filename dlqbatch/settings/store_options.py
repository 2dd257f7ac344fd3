"""The options of the dead store: when a message is tried again, for how long it is kept, when somebody is told."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, ValidationInfo, field_validator

from dlqbatch.settings.cold_storage import Bucket, cold_place, kms_key
from dlqbatch.settings.declaring import Options, option
from dlqbatch.settings.urls import SecretAddress, check_webhook_url
from dlqbatch.settings.values import delays, duration, metrics_file, numbers, queue_name, words, zone_name

Name = Annotated[str, AfterValidator(queue_name)]
Duration = Annotated[timedelta, BeforeValidator(duration), Field(gt=timedelta(0), le=timedelta(days=36_500))]
Hour = Annotated[int, Field(ge=0, le=23)]
ColdPlace = Annotated[InstanceOf[Path] | InstanceOf[Bucket], BeforeValidator(cold_place)]

_DURATION = "a time above 0 with its unit, such as 90s, 15m, 12h or 30d, at most 36500d"
_SHARE = "a number above 0, at most 1"
_PER_CENT = "a number above 0, at most 100"
_UNKNOWN = Bucket("", "")


class StoreOptions(Options):
    """Part of `Settings`."""

    ingest_queues: Annotated[tuple[Name, ...], BeforeValidator(words)] = option(
        (),
        "The dead-letter queues that `ingest` takes from; `*` stands for any text and needs the management API. "
        "Without it: the queue of the dead letters.",
        "names or wildcards with commas between them",
    )
    lease: Duration = option(
        timedelta(minutes=5),
        "How long a worker may hold a dead message before another takes over.",
        _DURATION,
        default_text="5m",
    )
    observation_window: Duration = option(
        timedelta(minutes=15),
        "How long a retry has to stay away before it can count as a success.",
        _DURATION,
        default_text="15m",
    )
    max_attempts: int = option(
        5, "So many failed retries from the store end in failed.", "a whole number from 1 to 1000", ge=1, le=1000
    )
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
    recheck: Duration = option(
        timedelta(minutes=5),
        "The conditional strategy: how long until the conditions are looked at again.",
        _DURATION,
        default_text="5m",
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
    breaker_min_attempts: int = option(
        10, "The fewest retries over which the circuit breaker may open.", "a whole number of at least 1", ge=1
    )
    breaker_window: Duration = option(
        timedelta(minutes=30), "How far back the circuit breaker counts.", _DURATION, default_text="30m"
    )
    breaker_cool_down: Duration = option(
        timedelta(minutes=5),
        "How long an open circuit breaker waits before it lets one retry through.",
        _DURATION,
        default_text="5m",
    )
    keep_resolved: Duration = option(
        timedelta(days=30),
        "How long a resolved message is kept before it is deleted.",
        _DURATION,
        default_text="30d",
    )
    keep_failed: Duration = option(
        timedelta(days=90),
        "How long a failed message waits for a person before it goes to cold storage and is archived.",
        _DURATION,
        default_text="90d",
    )
    keep_archived: Duration = option(
        timedelta(days=365),
        "How long an archived message is kept in the database; its cold copy stays.",
        _DURATION,
        default_text="365d",
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
    alert_backlog: int = option(
        10_000, "Alert (critical) above so many dead messages that wait.", "a whole number of at least 1", ge=1
    )
    alert_resolution_rate: float = option(
        0.5,
        "Alert (warning) if a smaller share of what ended in the last hour was resolved.",
        "a number from 0 to 1",
        ge=0,
        le=1,
    )
    alert_new_groups: bool = option(
        True, "Alert (warning) once for each new group of failures that needs a person.", "true or false"
    )
    webhook_url: Annotated[SecretAddress, AfterValidator(check_webhook_url)] | None = option(
        None,
        "Where alerts are sent, as JSON that Slack understands. All of it is a secret.",
        "an http:// or https:// address",
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
