"""Every option: its type, its default, what it means and what it may be.

The tables in docs/settings.md and the comments in application.properties come from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dlqbatch.settings.check_options import CheckOptions
from dlqbatch.settings.cloud_options import CloudOptions
from dlqbatch.settings.declaring import option
from dlqbatch.settings.schedule_options import ScheduleOptions
from dlqbatch.settings.store_options import StoreOptions
from dlqbatch.settings.urls import (
    SecretUrl,
    check_broker_url,
    check_database_url,
    check_management_url,
    split_urls,
)
from dlqbatch.settings.values import LONGEST_TTL_MS, durations, free_name, lower, name, printable, readable, size, words

if TYPE_CHECKING:
    from collections.abc import Iterator

Events = Mapping[str, int | None]
Topologies = Mapping[str, Mapping[str, object]]
"""By name, what was written of each; `dlqbatch.settings.topologies` makes topologies of them."""
Name = Annotated[str, AfterValidator(free_name)]
Origin = Annotated[str, AfterValidator(printable)]
Key = Annotated[str, AfterValidator(name)]
Readable = Annotated[Path, AfterValidator(readable)]
Ttl = Annotated[int, Field(gt=0, le=LONGEST_TTL_MS)]

_NAME = "a name of 1 to 200 bytes that does not begin with amq."
_KEY = "a routing key of 1 to 200 bytes"
_FILE = "the path of a readable file"
_SWITCH = "true or false"
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Entry:
    """A value as somebody wrote it: `key` in their spelling, `where` they wrote it; the value is never in its repr."""

    key: str
    where: str
    value: object = field(repr=False)


class Settings(CloudOptions, ScheduleOptions, StoreOptions, CheckOptions):
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
    management_url: Annotated[SecretUrl, AfterValidator(check_management_url)] | None = option(
        None,
        "The broker's management API, for what AMQP cannot tell.",
        "an http:// or https:// address",
    )
    job: str = option(
        "drain",
        "What a run does when nobody says: a bare `python handler.py`, a schedule or an alarm.",
        "the name of a job, such as drain",
        pattern=r"^[a-z][a-z-]{0,30}$",
    )
    queue_type: Annotated[Literal["classic", "quorum"], BeforeValidator(lower)] = option(
        "classic",
        "The type of the queues that dlqbatch declares.",
        "classic or quorum",
    )
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
    max_messages: int = option(5000, "The most messages that one run takes.", "a whole number of at least 1", ge=1)
    max_bytes: Annotated[int, BeforeValidator(size)] = option(
        256 * 1024**2,
        "The most bytes of bodies that one run takes.",
        "a size of at least 1 byte, such as 256MiB, 10MB or 1048576",
        default_text="256MiB",
        ge=1,
    )
    max_seconds: float = option(
        50.0,
        "How long a run may take messages; inside AWS Lambda the time that is left ends it sooner.",
        "a number of seconds above 0, at most 86400",
        gt=0,
        le=_DAY,
        allow_inf_nan=False,
    )
    lambda_margin_seconds: float = option(
        5.0,
        "How much of the time AWS Lambda allows is kept back to end the run in order.",
        "a number of seconds from 0 to 900",
        ge=0,
        le=900,
        allow_inf_nan=False,
    )
    settle_seconds: float = option(
        5.0,
        "How long a run waits for outstanding confirms after it has stopped taking messages.",
        "a number of seconds above 0, at most 3600",
        gt=0,
        le=3600,
        allow_inf_nan=False,
    )
    default_max_retries: int = option(
        3,
        "Retries of an event that is configured without a number.",
        "a whole number from 0 to 2147483647",
        ge=0,
        le=2**31 - 1,
    )
    max_trips: int = option(
        100,
        "How often a message may pass through here before it is dead-lettered, whatever its event says.",
        "a whole number of at least 1",
        ge=1,
    )
    tier_ttls: Annotated[tuple[Ttl, ...], BeforeValidator(durations)] = option(
        (10_000, 15_000, 20_000),
        "The delay of each tier, in milliseconds or with a unit (10s, 15m, 1h). As many tiers as delays.",
        "1 to 100 delays with commas between them, each above 0 and at most 4294967295 ms, such as 10s,15m,1h",
        min_length=1,
        max_length=100,
    )
    ladder: bool = option(
        True,
        "Whether the ladder that the options below describe is kept; without it only what "
        "`dlqbatch.topology.NAME.…` describes is (docs/topology.md).",
        _SWITCH,
    )
    retry_exchange: Name = option(
        "retry-exchange", "Where failures arrive; `-N` is added for each tier's exchange.", _NAME
    )
    retry_routing_key: Key = option("retry-routing-key", "The routing key that failures arrive with.", _KEY)
    retry_queue: Name = option(
        "retry-queue", "The queue that failures arrive in; `-N` is added for each tier's queue.", _NAME
    )
    delay_exchange: Name = option("route-delay", "The exchange that leads into the delay queues.", _NAME)
    delay_queue: Name = option("queue.delay", "The delay queues, each with its tier: `queue.delay.N`.", _NAME)
    dlq_exchange: Name = option("dlq-exchange", "The exchange of the dead letters.", _NAME)
    dlq_routing_key: Key = option("dlq-routing-key", "The routing key of the dead letters.", _KEY)
    dlq_queue: Name = option("dlq-queue", "The queue of the dead letters.", _NAME)
    connect_timeout_seconds: float = option(
        10.0,
        "How long connecting to the broker may take, with its retries.",
        "a number of seconds above 0, at most 3600",
        gt=0,
        le=3600,
        allow_inf_nan=False,
    )
    heartbeat_seconds: int = option(
        20, "The heartbeat asked of the broker.", "a whole number from 1 to 65535", ge=1, le=65535
    )
    blocked_timeout_seconds: float = option(
        20.0,
        "How long the broker may block publishing (its memory or disk alarm) before the run ends.",
        "a number of seconds above 0, at most 3600",
        gt=0,
        le=3600,
        allow_inf_nan=False,
    )
    tls_ca_file: Readable | None = option(
        None, "The authority that signed the broker's certificate, if the system does not know it.", _FILE
    )
    tls_cert_file: Readable | None = option(None, "The client's certificate, if the broker asks for one.", _FILE)
    tls_key_file: Readable | None = option(
        None, "The key of the client's certificate, if it is not in the same file.", _FILE
    )
    tls_verify: bool = option(
        True,
        "Whether the broker's certificate and host name are checked. Without it anybody can play the broker.",
        _SWITCH,
    )
    log_format: Annotated[Literal["auto", "text", "json"], BeforeValidator(lower)] = option(
        "auto", "How a log line looks; `auto` is text on a terminal and JSON elsewhere.", "auto, text or json"
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)] = option(
        "info", "The least important lines that are logged.", "debug, info, warning or error"
    )
    allow_empty_policy: bool = option(
        False,
        "Whether to run although not a single event is configured, which dead-letters every message.",
        _SWITCH,
    )

    # What loading found beside the options.
    database_url_is_default: bool = Field(default=False, exclude=True)
    config_file: Path | None = Field(default=None, exclude=True)
    events: Events = Field(default_factory=dict, exclude=True)
    topologies: Topologies = Field(default_factory=dict, exclude=True)
    warnings: tuple[str, ...] = Field(default=(), exclude=True)

    @property
    def broker_urls(self) -> tuple[str, ...]:
        """Every broker address, in the order to try; they hold the password."""
        return split_urls(self.broker_url.get_secret_value())

    @model_validator(mode="before")
    @classmethod
    def _take_values(cls, state: dict[str, Any]) -> dict[str, Any]:
        return {option: found.value if isinstance(found, Entry) else found for option, found in state.items()}


FACTS = frozenset({"database_url_is_default", "config_file", "events", "topologies", "warnings"})
_LAST = {
    field for options in (CheckOptions, StoreOptions, ScheduleOptions, CloudOptions) for field in options.model_fields
}
OPTIONS = {
    option: Settings.model_fields[option]
    for option in sorted(
        Settings.model_fields.keys() - FACTS, key=lambda each: (each in _LAST, list(Settings.model_fields).index(each))
    )
}
"""Those of the broker first, then those of the check, the dead store, the schedule and AWS."""


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
    if settings.tls_key_file is not None and settings.tls_cert_file is None:
        yield ("tls_key_file",), f"is set without a certificate; set {property_key('tls_cert_file')} too"


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
