"""One run of a job: its options, its bounds, and its report.

Each job is the function of its name in `dlqbatch.NAME.job`, and is loaded by the run that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch import __version__, logs
from dlqbatch.aws import secrets
from dlqbatch.broker.traced import TracedMessages
from dlqbatch.broker.transfer import Bounds, Tally
from dlqbatch.errors import BrokerUnreachable, DatabaseRefused, SettingsError
from dlqbatch.settings import Settings
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.store.scope_name import EVERY, scope_name

if TYPE_CHECKING:  # they load pika's connection, and SQLAlchemy
    from sqlalchemy import Engine

    from dlqbatch.broker.connection import Connection

log = logs.get(__name__)

JOBS: Final = ("drain", "ingest", "check", "lifecycle", "replay", "retain", "monitor")
COMMANDS: Final = {job: ("replay", "run") if job == "replay" else (job,) for job in JOBS}
"""The words of the command line that run each job once; `replay` is a group of commands."""
_BOUNDED: Final = ("max_messages", "max_bytes", "max_seconds")
# Settings that an event may change for one run of a job, beside `dry_run`; of the other jobs, those of `_BOUNDED`.
_RUN_OPTIONS: Final = {
    "drain": (*_BOUNDED, "allow_empty_policy"),
    "check": (*_BOUNDED, "check_queues", "check_max_deaths", "check_target", "allow_delivery_cost"),
    "replay": ("max_seconds",),
    "retain": ("max_messages", "max_seconds"),
    "monitor": (),
}
_BOUNDS_OF_RETAIN: Final = {"max_messages": "retain_max_messages", "max_seconds": "retain_max_seconds"}

# The counts that add up to `got`.
DECISIONS: Final = ("delayed", "returned", "dead_lettered", "recorded", "moved", "left")
LEFT: Final = "left"
# What stopped a run that could not take what was there: the broker refused it, or has an alarm.
FAILURE: Final = "failure"
FAILED: Final = "failed"
"""The outcome of a run that ended with an error."""
_BOUNDS: Final = frozenset({"messages", "bytes", "time"})

_LOGGED: Final = frozenset(
    {"job", "outcome", "stopped_by", "hit_bound", "dry_run", "counts", "reasons", "queues", "elapsed_seconds"}
)
_LONGEST_NAME: Final = 60
# Seconds in which a broker says who it is.
_ASKS_FOR: Final = 3.0
# A silent broker may keep a run so long beyond `max_seconds` and `settle_seconds`. A change of a delay waits so long
# for the runs that were under way.
_CLOSING_SECONDS: Final = 5.0


class Depth(NamedTuple):
    """Messages ready in a queue, by the queue's own count."""

    found: int
    """When the run began."""
    left: int | None
    """When it ended; None if nobody could look any more."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one run, for the log, for JSON, for the log of runs and for a person."""

    job: str
    outcome: str
    """ok, partial (something was left, or the end was forced) or failed."""
    stopped_by: str
    """empty, messages, bytes, time, signal or failure."""
    counts: Mapping[str, int]
    reasons: Mapping[str, int] = field(default_factory=dict)
    elapsed_seconds: float = 0.0
    dry_run: bool = False
    warnings: tuple[str, ...] = ()
    preview: tuple[Mapping[str, str], ...] = ()
    """The first messages of a dry run, and what would become of each."""
    emptied: tuple[str, ...] = ()
    """The queues that this run has seen empty."""
    queues: Mapping[str, Depth] = field(default_factory=dict)
    """The depths of the queues that this run serves."""
    was_cut_off: bool = False
    """Whether the broker or the database went away, so that `time` or `messages` is no bound that was reached."""
    scope: str | None = None
    """The deployment whose queues or rows this run has touched, for the log of runs."""
    details: Mapping[str, object] = field(default_factory=dict)
    """What else the job reports, by name; in JSON it stands beside the rest."""

    @property
    def per_second(self) -> float:
        return round(self.counts["got"] / self.elapsed_seconds, 1) if self.elapsed_seconds else 0.0

    @property
    def hit_bound(self) -> bool:
        """Whether the run ended at its bound, so that there may be more to take."""
        return self.stopped_by in _BOUNDS and not self.was_cut_off

    def as_dict(self) -> dict[str, object]:
        """Plain values, in the order in which people read them."""
        return {
            "job": self.job,
            "outcome": self.outcome,
            "stopped_by": self.stopped_by,
            "hit_bound": self.hit_bound,
            **({"dry_run": True} if self.dry_run else {}),
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            **({"queues": {name: depth._asdict() for name, depth in self.queues.items()}} if self.queues else {}),
            "elapsed_seconds": round(self.elapsed_seconds, 3),
            "per_second": self.per_second,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            **({"preview": [dict(line) for line in self.preview]} if self.preview else {}),
            **self.details,
        }


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one run that are not settings."""

    dry_run: bool = False
    seconds_left: float | None = None
    """The seconds, counted from `at`, until the platform ends the process, if it does."""
    stopped: Callable[[], bool] = lambda: False
    """Whether a signal has requested the end."""
    progress: Callable[[int, int], None] = lambda _taken, _of: None
    """Called now and then with how many messages were taken, and of how many."""
    traced: TracedMessages | None = None
    """Notes the messages that belong to a trace."""
    at: float = field(default_factory=time.monotonic)
    """When these options were made, on the monotonic clock."""

    def now(self) -> RunOptions:
        """These options with what is left of the time by now."""
        if self.seconds_left is None:
            return self
        now = time.monotonic()
        return replace(self, seconds_left=max(self.seconds_left - (now - self.at), 0.0), at=now)


def bounds_of(settings: Settings, run_options: RunOptions, max_seconds: float | None = None) -> Bounds:
    """The bounds of one run, which takes messages for `max_seconds` at most, or for as long as the settings say.

    The platform's time has to be enough for taking, settling, closing and the log of runs. Closing ends in the first
    half of the margin; the second half is for what comes after it. Where little time is left, taking gets as much of it
    as settling.
    """
    seconds = settings.max_seconds if max_seconds is None else max_seconds
    settling, closing = settings.settle_seconds, _CLOSING_SECONDS
    left = run_options.now().seconds_left
    if left is not None:
        margin = min(settings.lambda_margin_seconds, left)
        free = left - margin
        settling = min(settling, (free + margin / 4) / 2)
        seconds = min(seconds, max(free - settling, free / 2))
        closing = min(closing, left - margin / 2 - seconds - settling)
    return Bounds(
        time.monotonic() + seconds,
        settling,
        settings.max_bytes,
        run_options.stopped,
        run_options.progress,
        closing,
        run_options.traced,
    )


def scope_of(settings: Settings, connection: Connection) -> str:
    """The scope of a run with a connection: the setting, else as the broker names itself and the virtual host."""
    if settings.scope == EVERY:
        raise SettingsError(f"dlqbatch.scope is '{EVERY}', which commands may look at; a job has one, by its name")
    return settings.scope or scope_name(connection.cluster, connection.virtual_host)


def store_by_asking(
    settings: Settings, name: str, *, dry_run: bool, may_be_any: bool = False
) -> tuple[Engine, str | None]:
    """The dead store and the scope of a run that needs no connection otherwise: the broker is asked who it is.

    Where it does not answer, or none is named, the database may know the only deployment that it can be: with the same
    virtual host, or with `may_be_any` the only one at all, for a run that harms nothing.
    """
    from dlqbatch.broker.access import access_to, connect_once  # noqa: PLC0415  (for those who set no scope)
    from dlqbatch.store.access import store_of, store_of_only_scope  # noqa: PLC0415  (SQLAlchemy)

    if settings.scope is None and "broker_url" not in settings.model_fields_set:
        return store_of_only_scope(settings, None), None
    scope = settings.scope
    if scope is None or scope == EVERY:
        try:
            connection = connect_once(access_to(settings, name), time.monotonic() + _ASKS_FOR)
        except BrokerUnreachable as error:
            log.info("the broker does not say who it is; the database may know the scope", why=error.why)
            return store_of_only_scope(settings, error, may_be_any=may_be_any), None
        try:
            scope = scope_of(settings, connection)
        finally:
            connection.close()
    return store_of(settings, scope, dry_run=dry_run), scope


def options_of(job: str) -> tuple[str, ...]:
    """The options that an event of this job can have."""
    return _RUN_OPTIONS.get(job, _BOUNDED)


def settings_of(job: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of an event as settings. A retain has bounds of its own."""
    renamed = _BOUNDS_OF_RETAIN if job == "retain" else {}
    return {renamed.get(option, option): value for option, value in options.items()}


def run(
    job: str, settings: Settings, run_options: RunOptions, *, read_again: Callable[[], Settings] | None = None
) -> Report:
    """Run a job once. Its report is returned, and logged unless a person reads it on a terminal anyway.

    Its lines of the log and its row of the log of runs have an id of their own.

    `read_again` reads the settings as they were read before. If the broker or the database refuses the login, and the
    secret has other addresses or passwords now, the run is repeated with them, once; the report is of the second run.
    """
    if job not in JOBS:
        # Anything may have been pasted there, also an address with its password.
        named = "of the name that was given" if "@" in job or "://" in job else f"'{logs.plain(job, _LONGEST_NAME)}'"
        raise SettingsError(f"there is no job {named}; the jobs are: {', '.join(JOBS)}")
    logs.begin_run()
    if settings.otlp_endpoint is None or run_options.dry_run:
        return _run(job, settings, run_options, read_again)
    from dlqbatch.otlp.telemetry import Telemetry  # noqa: PLC0415  (the SDK of OpenTelemetry, for those who use it)

    telemetry = Telemetry(settings, job)
    report: Report | None = None
    try:
        report = _run(job, settings, replace(run_options, traced=telemetry.traced), read_again)
    finally:
        telemetry.push({"outcome": FAILED} if report is None else report.as_dict())
    return report


def _run(job: str, settings: Settings, run_options: RunOptions, read_again: Callable[[], Settings] | None) -> Report:
    # Only the job that runs is loaded: a cold start pays for every import.
    run_once: Callable[[Settings, RunOptions], Report] = getattr(import_module(f"dlqbatch.{job}.job"), job)
    for warning in settings.warnings:
        log.warning("settings", problem=warning)
    began = time.monotonic()
    try:
        report = run_once(settings, run_options)
    except (BrokerUnreachable, DatabaseRefused) as refused:
        # Every run is safe to repeat: if it was refused at its beginning, it has taken nothing; if later, it has put
        # back what it took, or left it where the next run finds it.
        settings = secrets.renewed(settings, read_again, refused)
        report = run_once(settings, run_options.now())
    if not run_options.dry_run:
        report = replace(report, warnings=(*report.warnings, *_add_to_run_log(settings, report, began)))
    for warning in report.warnings:
        log.warning(warning, job=job)
    if not logs.is_on_terminal():
        fields = {key: value for key, value in report.as_dict().items() if key in _LOGGED}
        log.info("run", failure=None, version=__version__, **fields)
    return report


def _add_to_run_log(settings: Settings, report: Report, began: float) -> tuple[str, ...]:
    """Put the run into the log of runs, if the database has one; return a warning if that was not possible."""
    # Without the figures of a monitor, which would add up: it runs once a minute.
    fields = replace(report, details={}).as_dict() | logs.origin()
    # Both times are by the clock as it is now, which the log compares with the database's: it may have been set since
    # the run began.
    ended = datetime.now(UTC)
    started = ended - timedelta(seconds=time.monotonic() - began)
    run = RunRecord(report.job, started, ended, report.outcome, report.stopped_by, report.emptied, fields, report.scope)
    kept = record(settings.database_url.get_secret_value(), run)
    if kept.is_refused:
        secrets.stale(*secrets.named(settings))
    return () if kept.warning is None else (kept.warning,)


def count(
    results: Mapping[tuple[str, str | None], int], got: int, decisions: tuple[str, ...] = DECISIONS
) -> tuple[dict[str, int], dict[str, int]]:
    """Counts and reasons of a run from its single results; AssertionError if a message was counted twice or never."""
    counts = {"got": got, **dict.fromkeys(decisions, 0)}
    reasons: dict[str, int] = {}
    for (decision, reason), number in sorted(results.items(), key=str):
        counts[decision] += number
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + number
    if sum(counts[decision] for decision in decisions) != got:
        raise AssertionError(f"the counts do not add up to what was got: {counts}")
    return counts, reasons


def depths_of(found: Mapping[str, int], left: Mapping[str, int], *, unknown: Container[str] = ()) -> dict[str, Depth]:
    """The queues of a run; without those whose depth was not known when it began."""
    return {queue: Depth(depth, left.get(queue)) for queue, depth in found.items() if queue not in unknown}


def cut_off(tally: Tally) -> bool:
    """Whether something went away before any bound was reached."""
    return tally.stopped_by is None and (tally.lost is not None or tally.failure is not None)


def ending(
    depths: Mapping[str, int], takes: Mapping[str, int], tally: Tally, spare: int, missed: Container[str]
) -> tuple[str, tuple[str, ...]]:
    """Why the run stopped, and which queues it has seen empty.

    A queue is seen empty when it gave less than was asked for, or when all that it held could be asked for and was
    taken. Where a message had to stay, only those count that held none at all.
    """
    is_cut = tally.stopped_by is not None or tally.lost is not None or tally.failure is not None
    has_left = any(decision == LEFT and number for (decision, _), number in tally.results.items())
    at_the_bound = sum(tally.taken.values()) >= sum(takes.values()) + spare
    is_capped = spare > 0 and at_the_bound
    through = []
    for queue, depth in depths.items():
        asked, gave = takes.get(queue, 0), tally.taken.get(queue, 0)
        if queue not in missed and not is_cut and (gave < asked or (asked >= depth and not is_capped)):
            through.append(queue)
    is_empty = len(through) == len([queue for queue in depths if queue not in missed])
    emptied = [queue for queue in through if not has_left or not depths[queue]]
    if tally.lost is not None:
        # No bound was reached and there is more to take: the run ended before its time.
        return tally.stopped_by or "time", tuple(emptied)
    if is_empty and any(queue in missed for queue in depths):
        return tally.stopped_by or FAILURE, tuple(emptied)
    return tally.stopped_by or ("empty" if is_empty else "messages"), tuple(emptied)


def unread(queues: Mapping[str, str]) -> tuple[str, ...]:
    """A warning for each queue that could not be read, by why."""
    return tuple(f"'{queue}' was not read to its end: {why}{_advice(queue, why)}" for queue, why in queues.items())


def _advice(queue: str, why: str) -> str:
    """Whoever may not read a queue needs a right that only an administrator can give."""
    if "ACCESS_REFUSED" not in why:
        return ""
    return f". The user needs the right to read '{queue}': `dlqbatch doctor` prints the command that gives it"
