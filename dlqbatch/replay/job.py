"""The commands of a replay: a plan is made, previewed, applied and shown. The abort is in abort.py."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

from sqlalchemy import Engine

from dlqbatch import logs
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.access import access_to, connect
from dlqbatch.broker.connection import Connection, NoAnswer, PublishingBlocked
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Bounds
from dlqbatch.errors import ChannelRefused, DlqbatchError, SettingsError
from dlqbatch.jobs import Report, RunOptions
from dlqbatch.lifecycle.ended_replays import release_ended_plans
from dlqbatch.lifecycle.job import breaker_limits, observation
from dlqbatch.lifecycle.resend import Resend
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.messages.actions import check_person
from dlqbatch.replay import plan as plans
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.freeze import Selection, freeze, keep_risks
from dlqbatch.replay.items import LEASE, PlanItems
from dlqbatch.replay.plan import PlanStatus
from dlqbatch.replay.risk_facts import Frozen, look_at_origins
from dlqbatch.replay.risks import Place, Risk, largest_body, risks
from dlqbatch.replay.run import Replay, executor_for, preview_report
from dlqbatch.replay.skip_or_send import preview
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock, store_for
from dlqbatch.store.engine import keeping
from dlqbatch.store.reservation import REPLAYED_AS
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.topology.declare import trust_of

_log = logs.get(__name__)

_NO_BOUND: Final = 1 << 62
_FOR_EVER: Final = 10 * 365 * 86_400.0
_OBSERVES_FOR: Final = 20.0  # seconds that one look at the queues may take
_RELEASES_FOR: Final = 10.0  # seconds for a plan or an apply to release rows of plans whose abort was cut


class Unhealthy(DlqbatchError):
    """An origin or the broker cannot take the messages; nothing was moved, and the plan stays as it was."""

    exit_code = 1

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__(
            "\n".join((*problems, "nothing was moved; the plan stays, apply it again when that is put right"))
        )


@dataclass(frozen=True, slots=True)
class Planned:
    frozen: Frozen
    risks: tuple[Risk, ...]
    places: Mapping[str, Place]
    """The origins as the broker shows them."""
    dry_run: bool

    def as_dict(self) -> dict[str, object]:
        return {
            "dry_run": self.dry_run,
            **self.frozen.as_dict(),
            "hash": None if self.dry_run or not self.frozen.size else self.frozen.hash,
            "risks": [asdict(risk) for risk in self.risks],
            "origins": [asdict(place) for place in self.places.values()],
        }


@dataclass(frozen=True, slots=True)
class Replayed:
    report: Report
    status: PlanStatus

    def as_dict(self) -> dict[str, object]:
        return {**self.report.as_dict(), "plan": self.status.as_dict()}


def plan_replay(settings: Settings, selection: Selection, *, actor: str, reason: str, dry_run: bool = False) -> Planned:
    """Freeze the selected messages, look at their origins on the broker, and list the risks; nothing is sent."""
    engine = store_for_person(actor, settings, reason)
    # Connect before anything is frozen: without the broker most risks are unknown.
    with _connected(settings) as connection:
        if not dry_run:
            _release_rows_of_ended_plans(engine, actor)
        frozen = freeze(
            engine,
            selection,
            actor=actor,
            reason=reason,
            now=StoreClock(engine)(),
            dry_run=dry_run,
            refuses=lambda rows: sum(map(_judge(settings, connection).refuses, rows)),
        )
        places = {place.name: place for place in look_at_origins(settings, connection, frozen.by_origin)}
        facts = frozen.facts(Rules(engine).all(), largest_body(connection.version))
    found = risks(facts, places)
    if frozen.size and not dry_run:
        keep_risks(engine, frozen.plan_id, found)
    return Planned(frozen, found, places, dry_run)


def apply_replay(
    settings: Settings, run_options: RunOptions, name: str, options: ApplyOptions, *, actor: str
) -> Replayed:
    """One run of an apply; apply the plan again for the messages that still wait."""
    options = replace(options, confirm_timeout=settings.settle_seconds + settings.blocked_timeout_seconds)
    engine = store_for_person(actor, settings)
    clock = StoreClock(engine)
    began = clock()
    _release_rows_of_ended_plans(engine, actor, run_options.stopped)
    plan = plans.check(engine, name, resume_stopped=options.resume_stopped)
    with _connected(settings) as connection:
        _check_health(connection, Origins(connection), plan.origins)
    plan = plans.start(
        engine,
        plan,
        canary=options.canary,
        max_failure_rate=options.max_failure_rate,
        resume_stopped=options.resume_stopped,
        now=began,
    )
    items = PlanItems(
        engine,
        plan.plan_id,
        actor=actor,
        worker=worker_name(),
        lease=LEASE,
        reason=f"{REPLAYED_AS}{plan.hash}",
        to_queue=plan.to_queue,
        counted_from=plan.counted_from,
        limits=breaker_limits(settings),
    )
    size = plans.finish(engine, plan.plan_id, began).waiting
    with executor_for(engine) as executor:
        run = Replay(
            items,
            options,
            clock,
            partial(_sending, settings, run_options, items),
            executor,
            run_options.stopped,
            run_options.progress,
            size,
            partial(_observe, settings, run_options, engine),
        )
        try:
            report = run.run()
        except DlqbatchError:
            with suppress(DlqbatchError):
                plans.take_back(engine, plan, clock())
            raise
    kept = record(
        settings.database_url.get_secret_value(),
        RunRecord("replay", began, clock(), report.outcome, report.stopped_by, (), report.as_dict()),
    )
    if kept.warning is not None:
        _log.warning(kept.warning, job="replay")
    for warning in report.warnings:
        _log.warning(warning, job="replay", plan=plan.hash)
    return Replayed(report, replay_status(settings, plan.hash))


def preview_replay(settings: Settings, name: str, options: ApplyOptions, *, actor: str) -> Replayed:
    """What an apply would do now: nothing is reserved, sent or written."""
    started = time.monotonic()
    engine = store_for_person(actor, settings)
    plan = plans.check(engine, name, resume_stopped=options.resume_stopped)
    with _connected(settings) as connection:
        _check_health(connection, Origins(connection, touch=False), plan.origins)
        found = preview(
            engine,
            plan.plan_id,
            plan.to_queue,
            plan.counted_from or StoreClock(engine)(),
            _judge(settings, connection).refuses,
        )
    report = preview_report(found, options, time.monotonic() - started)
    return Replayed(report, replay_status(settings, plan.hash))


def replay_status(settings: Settings, name: str) -> PlanStatus:
    return plans.status(_store(settings), name)


def replay_plans(settings: Settings, limit: int) -> tuple[PlanStatus, ...]:
    """The newest first."""
    return plans.recent(_store(settings), limit)


def _store(settings: Settings) -> Engine:
    if settings.database_url_is_default:
        raise SettingsError(
            "replay sends what the dead store holds, so the database has to be named: set DLQBATCH_DATABASE_URL "
            "(dlqbatch.database-url). Nothing was moved"
        )
    return store_for(settings)


def store_for_person(actor: str, settings: Settings, reason: str = "as planned") -> Engine:
    """Refuses an actor with the name of a job: it may not make the moves of a person, and would fail halfway."""
    check_person(actor, reason)
    return _store(settings)


def _release_rows_of_ended_plans(engine: Engine, actor: str, stopped: Callable[[], bool] = lambda: False) -> None:
    until = time.monotonic() + _RELEASES_FOR
    release_ended_plans(
        engine,
        actor=actor,
        worker=worker_name(),
        lease=LEASE,
        now=StoreClock(engine)(),
        is_over=lambda: stopped() or time.monotonic() >= until,
    )


def worker_name() -> str:
    return f"replay {socket.gethostname()} {os.getpid()}"


def _check_health(connection: Connection, ways: Origins, origins: Iterable[Origin]) -> None:
    """Unhealthy unless the broker takes publishes, and each origin is there and takes ours."""
    problems: list[str] = []
    if not _takes_publishes(connection):
        raise Unhealthy(("the broker takes no publishes: a memory or disk alarm",))
    for origin in origins:
        ways.prepare(origin)
        if ways.is_gone(origin):
            problems.append(
                f"'{origin.name}' is not on the broker: declare it, or plan again with --to-queue, or without it"
            )
        elif ways.is_unclear(origin):
            problems.append(f"'{origin.name}' cannot be checked; the log says why")
    if problems:
        raise Unhealthy(tuple(problems))


def _takes_publishes(connection: Connection) -> bool:
    """Whether a publish is answered: a broker with an alarm blocks it, permitted or not."""
    try:
        with connection.scratch() as scratch:
            scratch.try_publish("")
    except (NoAnswer, PublishingBlocked):
        return False
    except ChannelRefused:
        return True
    return True


def _judge(settings: Settings, connection: Connection) -> Resend:
    """The decisions of an apply by this process, without asking the broker."""
    trust = trust_of(settings, connection)
    return Resend(Origins(connection, touch=False), trust, b"", 0, settings.return_via == "queue")


@contextmanager
def _connected(settings: Settings) -> Iterator[Connection]:
    connection = connect(access_to(settings, "dlqbatch replay"))
    try:
        yield connection
    finally:
        connection.close()


def _observe(settings: Settings, run_options: RunOptions, engine: Engine) -> None:
    """Observe sent messages as a lifecycle run does, on a new connection."""
    bounds = Bounds(time.monotonic() + _OBSERVES_FOR, settings.settle_seconds, _NO_BOUND, run_options.stopped)
    with _connected(settings) as connection:
        observation(settings, connection, engine, bounds).resolve(StoreClock(engine)())


@contextmanager
def _sending(
    settings: Settings,
    run_options: RunOptions,
    items: PlanItems,
    stopped: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> Iterator[tuple[Session, Resend]]:
    """Connect for one step. A plan is finite, so only the platform bounds its run."""
    seconds = _FOR_EVER
    if run_options.seconds_left is not None:
        seconds = max(run_options.seconds_left - settings.lambda_margin_seconds, 0.0)
    bounds = Bounds(time.monotonic() + seconds, settings.settle_seconds, _NO_BOUND, stopped, progress)
    with _connected(settings) as connection, keeping(items.engine):
        origins = Origins(connection)
        session = Session(connection, origins, bounds)
        trust = trust_of(settings, connection)
        yield (
            session,
            Resend(origins, trust, session.login, session.properties_limit, settings.return_via == "queue"),
        )
