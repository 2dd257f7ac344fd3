"""Every option: its type, its default, what it means and what it may be.

The tables in docs/settings.md and the comments in application.properties come from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dlqbatch.settings.cloud_options import CloudOptions
from dlqbatch.settings.console_options import ConsoleOptions
from dlqbatch.settings.content_options import ContentOptions
from dlqbatch.settings.delays import checked_steps
from dlqbatch.settings.schedule_options import ScheduleOptions
from dlqbatch.settings.signal_options import SignalOptions
from dlqbatch.settings.store_options import StoreOptions
from dlqbatch.settings.urls import (
    SecretUrl,
    check_broker_url,
    check_database_url,
    check_management_url,
    split_urls,
)
from dlqbatch.settings.values import (
    LONGEST_TTL_MS,
    Options,
    durations,
    free_name,
    lower,
    name,
    number_option,
    option,
    printable,
    queue_name,
    readable,
    seconds_option,
    size,
    switch_option,
    words,
)

Events = Mapping[str, int | None]
EventDelays = Mapping[str, tuple[int, ...]]
"""Milliseconds before each retry of an event or of a pattern; the last one repeats."""
Topologies = Mapping[str, Mapping[str, object]]
"""What was written of each topology, by name; `dlqbatch.settings.topologies` makes topologies of them."""
Name = Annotated[str, AfterValidator(free_name)]
Origin = Annotated[str, AfterValidator(printable)]
Key = Annotated[str, AfterValidator(name)]
QueueType = Annotated[Literal["classic", "quorum"], BeforeValidator(lower)]
Readable = Annotated[Path, AfterValidator(readable)]
Ttl = Annotated[int, Field(gt=0, le=LONGEST_TTL_MS)]

NAME = "a name of 1 to 200 bytes that does not begin with amq."
KEY = "a routing key of 1 to 200 bytes"
_FILE = "the path of a readable file"
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Entry:
    """A value as somebody wrote it: `key` in their spelling, `where` they wrote it; the value is never in its repr."""

    key: str
    where: str
    value: object = field(repr=False)


QueueName = Annotated[str, AfterValidator(queue_name)]


class CheckOptions(Options):
    """Part of `Settings`."""

    check_queues: Annotated[tuple[QueueName, ...], BeforeValidator(words)] = option(
        (),
        "The queues that `check` looks through; `*` stands for any text and needs the management API.",
        "names or wildcards with commas between them",
    )
    check_max_deaths: int = number_option(
        3, "A message that has failed more often than this is moved by `check`.", least=0
    )
    check_target: Annotated[str, AfterValidator(free_name)] = option(
        "permanent_failure_queue",
        "Where `check` moves to, declared if it is missing. Each `*` in it stands for what the source's `*` stood for: "
        "from `dlq.*` to `dead.*`.",
        "a name of 1 to 200 bytes that does not begin with amq., with or without `*`",
    )
    allow_delivery_cost: bool = switch_option(
        False, "Whether `check` looks through quorum queues where that can cost the messages a delivery of their limit."
    )


class Settings(
    CloudOptions, SignalOptions, ConsoleOptions, ScheduleOptions, ContentOptions, StoreOptions, CheckOptions
):
    """The whole configuration of one run; made by `load`, never changed afterwards."""

    broker_url: Annotated[SecretUrl, AfterValidator(check_broker_url)] = option(
        SecretUrl("amqp://guest:guest@127.0.0.1:5672/%2F"),
        "The broker. Several addresses with commas between them are tried in turn.",
        "an amqp:// or amqps:// address, or several with commas between them",
        default_text="amqp://guest:guest@127.0.0.1:5672/%2F",
    )
    database_url: Annotated[SecretUrl, AfterValidator(check_database_url)] = option(
        ...,
        "Where the policy and the dead store are. Without it: a SQLite file `dlqbatch.sqlite3` beside the "
        "application.properties in use or beside handler.py; if there is none and that folder cannot be written or "
        "belongs to an installed package, in "
        "`$XDG_STATE_HOME/dlqbatch` or `~/.local/state/dlqbatch`.",
        "a postgresql:// or sqlite:/// address",
        default_text="",
    )
    scope: Annotated[str, AfterValidator(name)] | None = option(
        None,
        "Whose rows of the database these are, where several deployments share it: a job touches those of its scope "
        "only. Without it: the name of the broker's cluster and the virtual host, as the broker tells them.",
        "a name of 1 to 200 bytes, the same for all jobs of a deployment, such as rabbit@rabbit-1/shop",
    )
    management_url: Annotated[SecretUrl, AfterValidator(check_management_url)] | None = option(
        None,
        "The broker's management API, for what AMQP cannot tell.",
        "an http:// or https:// address",
    )
    job: str = option(
        "drain",
        "The job of a run for which no command names one: a bare `dlqbatch`, a schedule or an alarm.",
        "the name of a job, such as drain",
        pattern=r"^[a-z][a-z-]{0,30}$",
    )
    queue_type: QueueType = option("classic", "The type of the queues that dlqbatch declares.", "classic or quorum")
    return_via: Annotated[Literal["queue", "exchange"], BeforeValidator(lower)] = option(
        "queue",
        "How a message goes back: to the one queue it failed in, or to its exchange and so to every subscriber.",
        "queue or exchange",
    )
    origins_allowed: Annotated[tuple[Origin, ...], BeforeValidator(words)] = option(
        (),
        "Queues and exchanges that a message may go back to when only headers written by a client name them; "
        "`*` stands for any text.",
        "names or wildcards with commas between them",
    )
    max_messages: int = number_option(
        5000, "The most messages that one run takes; `retain` has `retain_max_messages`.", least=1
    )
    max_bytes: Annotated[int, BeforeValidator(size)] = option(
        256 * 1024**2,
        "The most bytes of bodies that one run takes.",
        "a size of at least 1 byte, such as 256MiB, 10MB or 1048576",
        default_text="256MiB",
        ge=1,
    )
    max_seconds: float = seconds_option(
        50.0,
        "How long a run may take messages (`retain`: see `retain_max_seconds`); inside AWS Lambda the time "
        "that is left ends it sooner.",
        most=_DAY,
    )
    lambda_margin_seconds: float = option(
        5.0,
        "How much of the time AWS Lambda allows is kept back to end the run in order.",
        "a number of seconds from 0 to 900",
        ge=0,
        le=900,
        allow_inf_nan=False,
    )
    settle_seconds: float = seconds_option(
        5.0, "How long a run waits for outstanding confirms after it has stopped taking messages.", most=3600
    )
    default_max_retries: int = number_option(
        3, "Retries of an event that is configured without a number.", least=0, most=2**31 - 1
    )
    max_trips: int = number_option(
        100, "How often a message may pass through here before it is dead-lettered, whatever its event says.", least=1
    )
    tier_ttls: Annotated[tuple[Ttl, ...], BeforeValidator(durations)] = option(
        (10_000, 15_000, 20_000),
        "The delay of each tier, in milliseconds or with a unit (10s, 15m, 1h). As many tiers as delays.",
        "1 to 100 delays with commas between them, each above 0 and at most 4294967295 ms, such as 10s,15m,1h",
        min_length=1,
        max_length=100,
    )
    retry_after: bool = switch_option(
        True,
        "Whether a failed message waits as long as its `Retry-After` asks (docs/policy.md), up to the longest delay.",
    )
    retry_after_delays: Annotated[tuple[Ttl, ...], BeforeValidator(checked_steps)] = option(
        (),
        "Delay queues for what `Retry-After` asks; the longest one is the most that it gets. Without them it waits in "
        "the delay queues that there are, and at most as long as the longest.",
        "delays with a unit, such as 30s,5m,1h, or growing ones, such as 30s*2..1h",
    )
    ladder: bool = switch_option(
        True,
        "Whether the ladder that the options below describe is kept; without it only what "
        "`dlqbatch.topology.NAME.…` describes is (docs/topology.md).",
    )
    retry_exchange: Name = option(
        "retry-exchange", "Where failures arrive; `-N` is added for each tier's exchange.", NAME
    )
    retry_routing_key: Key = option("retry-routing-key", "The routing key that failures arrive with.", KEY)
    retry_queue: Name = option(
        "retry-queue", "The queue that failures arrive in; `-N` is added for each tier's queue.", NAME
    )
    delay_exchange: Name = option("route-delay", "The exchange that leads into the delay queues.", NAME)
    delay_queue: Name = option("queue.delay", "The delay queues, each with its tier: `queue.delay.N`.", NAME)
    dlq_exchange: Name = option("dlq-exchange", "The exchange of the dead letters.", NAME)
    dlq_routing_key: Key = option("dlq-routing-key", "The routing key of the dead letters.", KEY)
    dlq_queue: Name = option("dlq-queue", "The queue of the dead letters.", NAME)
    connect_timeout_seconds: float = seconds_option(
        10.0, "How long connecting to the broker may take, with its retries.", most=3600
    )
    heartbeat_seconds: int = number_option(20, "The heartbeat asked of the broker.", least=1, most=65535)
    blocked_timeout_seconds: float = seconds_option(
        20.0, "How long the broker may block publishing (its memory or disk alarm) before the run ends.", most=3600
    )
    tls_ca_file: Readable | None = option(
        None, "The authority that signed the broker's certificate, if the system does not know it.", _FILE
    )
    tls_cert_file: Readable | None = option(None, "The client's certificate, if the broker asks for one.", _FILE)
    tls_key_file: Readable | None = option(
        None, "The key of the client's certificate, if it is not in the same file.", _FILE
    )
    broker_auth: Annotated[Literal["password", "external"], BeforeValidator(lower)] = option(
        "password",
        "How to log in to the broker: with user and password, or with the client's certificate (SASL EXTERNAL).",
        "password or external",
    )
    broker_token_file: Readable | None = option(
        None,
        "The file with an OAuth 2 token, which is the password for the broker and its management API. It is read anew "
        "for each connection.",
        _FILE,
    )
    tls_verify: bool = switch_option(
        True, "Whether the broker's certificate and host name are checked. Without it anybody can play the broker."
    )
    log_format: Annotated[Literal["auto", "text", "json"], BeforeValidator(lower)] = option(
        "auto", "How a log line looks; `auto` is text on a terminal and JSON elsewhere.", "auto, text or json"
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)] = option(
        "info", "The least important lines that are logged.", "debug, info, warning or error"
    )
    allow_empty_policy: bool = switch_option(
        False, "Whether to run although not a single event is configured, which dead-letters every message."
    )

    # What loading found beside the options.
    database_url_is_default: bool = Field(default=False, exclude=True)
    config_file: Path | None = Field(default=None, exclude=True)
    events: Events = Field(default_factory=dict, exclude=True)
    event_delays: EventDelays = Field(default_factory=dict, exclude=True)
    fields: Mapping[str, str] = Field(default_factory=dict, exclude=True)
    topologies: Topologies = Field(default_factory=dict, exclude=True)
    warnings: tuple[str, ...] = Field(default=(), exclude=True)
    written_in: Mapping[str, str] = Field(default_factory=dict, exclude=True)
    """Where each option was written; one that is not there has its default."""

    def longest_run(self, job: str) -> float:
        """Seconds in which a run of this job may begin something new."""
        return self.retain_max_seconds if job == "retain" else self.max_seconds

    @property
    def every_delay(self) -> tuple[int, ...]:
        """The delays of all events, and those for `Retry-After`, each once: a ladder has a queue for each."""
        by_event = (each for delays in self.event_delays.values() for each in delays)
        return tuple(sorted({*self.retry_after_delays, *by_event}))

    @property
    def broker_urls(self) -> tuple[str, ...]:
        """Every broker address, in the order to try; they hold the password."""
        return split_urls(self.broker_url.get_secret_value())

    @property
    def virtual_host(self) -> str:
        return unquote(urlsplit(self.broker_urls[0]).path[1:]) or "/"

    @model_validator(mode="before")
    @classmethod
    def _take_values(cls, state: dict[str, Any]) -> dict[str, Any]:
        return {option: found.value if isinstance(found, Entry) else found for option, found in state.items()}


FACTS = frozenset(
    {
        *("database_url_is_default", "config_file", "events", "event_delays", "fields", "topologies", "warnings"),
        "written_in",
    }
)
_LAST = {
    field
    for options in (
        CheckOptions,
        StoreOptions,
        ContentOptions,
        ScheduleOptions,
        ConsoleOptions,
        SignalOptions,
        CloudOptions,
    )
    for field in options.model_fields
}
# The options of the broker stand first, then those of the check, the dead store, the schedule, the console and AWS.
OPTIONS = {
    option: Settings.model_fields[option]
    for option in sorted(
        Settings.model_fields.keys() - FACTS, key=lambda each: (each in _LAST, list(Settings.model_fields).index(each))
    )
}


def property_key(option: str) -> str:
    return "dlqbatch." + option.replace("_", "-")


def must_be(option: str) -> str:
    """What an option may be, ready to follow 'it must be'."""
    extra = OPTIONS[option].json_schema_extra
    return str(extra["must_be"]) if isinstance(extra, dict) else ""


def conflicts(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Say which options, each good alone, are wrong together."""
    tiers = range(1, len(settings.tier_ttls) + 1)
    queues = [("retry_queue", settings.retry_queue), ("dlq_queue", settings.dlq_queue)]
    queues += [("retry_queue", f"{settings.retry_queue}-{n}") for n in tiers]
    queues += [("delay_queue", f"{settings.delay_queue}.{n}") for n in tiers]
    queues += [("delay_queue", settings.delay_queue)]
    yield from _twice("queue", queues)
    exchanges = [("retry_exchange", settings.retry_exchange), ("dlq_exchange", settings.dlq_exchange)]
    exchanges += [("delay_exchange", settings.delay_exchange)]
    exchanges += [("retry_exchange", f"{settings.retry_exchange}-{n}") for n in tiers]
    yield from _twice("exchange", exchanges)
    api = "" if settings.management_url is None else settings.management_url.get_secret_value()
    if not any(url.lower().startswith(("amqps://", "https://")) for url in (*settings.broker_urls, api)):
        for option in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if getattr(settings, option) is not None:
                yield (option,), "is set, but the broker's address is not amqps://; use amqps:// or take it away"
    if settings.retry_after_delays and not settings.retry_after:
        yield ("retry_after_delays",), f"is set, but {property_key('retry_after')} is false; take one of them away"
    if settings.tls_key_file is not None and settings.tls_cert_file is None:
        yield ("tls_key_file",), f"is set without a certificate; set {property_key('tls_cert_file')} too"
    if settings.broker_auth == "external":
        if settings.tls_cert_file is None or not all(
            url.lower().startswith("amqps://") for url in settings.broker_urls
        ):
            certificate = property_key("tls_cert_file")
            yield ("broker_auth",), f"is external, which takes amqps:// addresses and {certificate}"
        if settings.broker_token_file is not None:
            yield ("broker_token_file",), f"is a password, and {property_key('broker_auth')} is external; leave one out"


def _twice(kind: str, named: list[tuple[str, str]]) -> Iterator[tuple[tuple[str, ...], str]]:
    owners: dict[str, str] = {}
    clashes: dict[tuple[str, str], str] = {}
    for user, written in named:
        owner = owners.setdefault(written, user)
        if owner != user:
            clashes.setdefault((owner, user), written)
    for (first, second), written in clashes.items():
        both = f"{property_key(first)} and {property_key(second)}"
        yield (second, first), f"makes {kind} '{written}' stand for both {both}; give them different names"
