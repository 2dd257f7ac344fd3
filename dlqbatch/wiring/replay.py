"""A replay, put together: planned, applied, looked at, aborted."""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from pika import BasicProperties

from dlqbatch import logs
from dlqbatch.broker.connection import Connection, NoAnswer, connect
from dlqbatch.broker.origins import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Bounds
from dlqbatch.deadstore.run_log import RunRecord, record
from dlqbatch.errors import ChannelRefused, SettingsError
from dlqbatch.policy.replay import MAX_FAILURE_RATE, Place, Risk, largest_body, rate_of, risks
from dlqbatch.runs.replay import Manner, Replay, Unhealthy, foresee
from dlqbatch.runs.resend import Resend
from dlqbatch.wiring.access import access_to
from dlqbatch.wiring.ladders import trust_of
from dlqbatch.wiring.stores import aside_of, clock_of, engine_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Engine

    from dlqbatch.deadstore.plan_facts import Frozen
    from dlqbatch.deadstore.plan_items import PlanItems
    from dlqbatch.deadstore.plan_states import Applied
    from dlqbatch.deadstore.plan_status import PlanStatus
    from dlqbatch.message.envelope import Origin
    from dlqbatch.policy.classify import Rule
    from dlqbatch.policy.lifecycle import Status
    from dlqbatch.policy.replay import Outcomes
    from dlqbatch.runs.ports import Sender
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings
    from dlqbatch.wiring.occasion import Occasion

_log = logs.get(__name__)

LEASE: Final = timedelta(seconds=60)
"""Far shorter than the lifecycle's: whoever applies a plan again after a crash sits and waits."""
BATCH_SIZE: Final = 100
_NO_BOUND: Final = 1 << 62
_FOR_EVER: Final = 10 * 365 * 86_400.0
_LOOKED_FOR_ALARM: Final = 0.3
"""Seconds that the broker has to say that it takes no publishes."""


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


@dataclass(frozen=True, slots=True)
class ReplayAsked:
    """How a person wants a plan applied."""

    batch_size: int = BATCH_SIZE
    pause: float = 0.0
    rate: str | None = None
    canary: bool = True
    max_failure_rate: float = MAX_FAILURE_RATE
    wait: float = 0.0
    resume_stopped: bool = False


def plan_replay(
    settings: Settings,
    *,
    row_ids: Sequence[int] = (),
    statuses: Sequence[Status] = (),
    error_type: str | None = None,
    group: str | None = None,
    event: str | None = None,
    origin: str | None = None,
    start: str | None = None,
    end: str | None = None,
    text: str | None = None,
    limit: int | None = None,
    everything: bool = False,
    to_queue: str | None = None,
    actor: str,
    reason: str,
    dry_run: bool = False,
) -> Planned:
    """Freeze what is meant, look at the broker, and say what speaks against it; nothing moves."""
    from dlqbatch.deadstore.plans import Plans, wanted  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    engine = _engine_for(actor, settings, reason)
    what = wanted(
        row_ids=row_ids,
        statuses=statuses,
        error_type=error_type,
        group=group,
        event=event,
        origin=origin,
        start=start,
        end=end,
        text=text,
        limit=limit,
        everything=everything,
        to_queue=to_queue,
    )
    # Before anything is frozen: without a broker nobody can say whether the plan is any good.
    with _connected(settings) as connection:
        if not dry_run:
            _release_over(engine, actor)
        frozen = Plans(engine).freeze(what, actor=actor, reason=reason, now=clock_of(engine)(), dry_run=dry_run)
        places = {place.name: place for place in _look(connection, frozen.by_origin)}
        facts = frozen.facts(_rules(engine), largest_body(connection.version))
    found = risks(facts, places)
    if frozen.size and not dry_run:
        Plans(engine).keep_risks(frozen.plan_id, found)
    return Planned(frozen, found, places, dry_run)


def apply_replay(settings: Settings, occasion: Occasion, name: str, asked: ReplayAsked, *, actor: str) -> Replayed:
    """One run of a plan; apply it again for what this run left waiting."""
    from dlqbatch.deadstore import plan_states  # noqa: PLC0415  (the same)

    per_second = rate_of(asked.rate) if asked.rate is not None else None
    engine = _engine_for(actor, settings)
    clock = clock_of(engine)
    began = clock()
    _release_over(engine, actor)
    plan = plan_states.check(engine, name, resume_stopped=asked.resume_stopped)
    with _connected(settings) as connection:
        _check_health(connection, Origins(connection), plan.origins)
    plan = plan_states.start(
        engine,
        plan,
        canary=asked.canary,
        max_failure_rate=asked.max_failure_rate,
        resume_stopped=asked.resume_stopped,
        now=began,
    )
    manner = Manner(
        asked.batch_size,
        asked.pause,
        per_second,
        asked.canary,
        asked.max_failure_rate,
        asked.wait,
        LEASE.total_seconds(),
        settings.settle_seconds + settings.blocked_timeout_seconds,
        clock,
    )
    items = _items(engine, plan, actor)
    size = plan_states.finish(engine, plan.plan_id, began).waiting

    with aside_of(engine) as aside:
        run = Replay(
            _Plan(engine, plan, items),
            items,
            manner,
            partial(_sending, settings, occasion, items),
            aside,
            occasion.stopped,
            occasion.progress,
            size,
        )
        report, _ = run.run()
    kept = record(
        settings.database_url.get_secret_value(),
        RunRecord("replay", began, clock(), report.outcome, report.stopped_by, (), report.as_dict()),
    )
    if kept.warning is not None:
        _log.warning(kept.warning, job="replay")
    for warning in report.warnings:
        _log.warning(warning, job="replay", plan=plan.hash)
    return Replayed(report, replay_status(settings, plan.hash))


def preview_replay(settings: Settings, name: str, asked: ReplayAsked, *, actor: str) -> Replayed:
    """What an apply would do now: nothing is reserved, sent or written."""
    from dlqbatch.deadstore import plan_rows, plan_states  # noqa: PLC0415  (the same)

    if asked.rate is not None:
        rate_of(asked.rate)
    started = time.monotonic()
    engine = _engine_for(actor, settings)
    plan = plan_states.check(engine, name, resume_stopped=asked.resume_stopped)
    with _connected(settings) as connection:
        _check_health(connection, Origins(connection, touch=False), plan.origins)
    standing = plan_rows.look(engine, plan.plan_id, plan.to_queue, plan.counted_from or clock_of(engine)())
    report = foresee(standing, canary=asked.canary, max_failure_rate=asked.max_failure_rate)
    seen = replace(report, elapsed_seconds=time.monotonic() - started)
    return Replayed(seen, replay_status(settings, plan.hash))


def replay_status(settings: Settings, name: str) -> PlanStatus:
    from dlqbatch.deadstore.plans import Plans  # noqa: PLC0415  (the same)

    return Plans(_engine(settings)).status(name)


def replay_plans(settings: Settings, limit: int) -> tuple[PlanStatus, ...]:
    """The newest first."""
    from dlqbatch.deadstore.plans import Plans  # noqa: PLC0415  (the same)

    return Plans(_engine(settings)).recent(limit)


def abort_replay(settings: Settings, name: str, *, actor: str) -> PlanStatus:
    from dlqbatch.deadstore import plan_states  # noqa: PLC0415  (the same)

    engine = _engine_for(actor, settings)
    return plan_states.abort(engine, name, actor=actor, worker=_worker(), lease=LEASE, now=clock_of(engine)())


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan that is applied, as the run asks for it."""

    engine: Engine
    plan: Applied
    items: PlanItems

    def reserve(self) -> Mapping[str, int]:
        return self.items.reserve()

    def outcomes(self) -> Outcomes:
        return self.items.outcomes()

    def stop(self, why: str, now: datetime) -> None:
        from dlqbatch.deadstore import plan_states  # noqa: PLC0415  (the same)

        plan_states.stop(self.engine, self.plan.plan_id, why, now)

    def finish(self, now: datetime) -> PlanStatus:
        from dlqbatch.deadstore import plan_states  # noqa: PLC0415  (the same)

        return plan_states.finish(self.engine, self.plan.plan_id, now)


def _engine(settings: Settings) -> Engine:
    if settings.database_url_is_default:
        raise SettingsError(
            "replay sends what the dead store holds, so the database has to be named: set DLQBATCH_DATABASE_URL "
            "(dlqbatch.database-url). Nothing was moved"
        )
    return engine_for(settings)


def _engine_for(actor: str, settings: Settings, reason: str = "as planned") -> Engine:
    """Refused to the name of a job: such a one may not make a person's moves, and would find out in the middle."""
    from dlqbatch.deadstore.review import check_person  # noqa: PLC0415  (the same)

    check_person(actor, reason)
    return _engine(settings)


def _items(engine: Engine, plan: Applied, actor: str) -> PlanItems:
    from dlqbatch.deadstore.plan_items import PlanItems  # noqa: PLC0415  (the same)
    from dlqbatch.deadstore.plan_status import REPLAYED_AS  # noqa: PLC0415  (the same)

    return PlanItems(
        engine,
        plan.plan_id,
        actor=actor,
        worker=_worker(),
        lease=LEASE,
        reason=f"{REPLAYED_AS}{plan.hash}",
        to_queue=plan.to_queue,
        counted_from=plan.counted_from,
    )


def _release_over(engine: Engine, actor: str) -> None:
    from dlqbatch.deadstore import plan_states  # noqa: PLC0415  (the same)

    plan_states.release_over(engine, actor=actor, worker=_worker(), lease=LEASE, now=clock_of(engine)())


def _rules(engine: Engine) -> tuple[Rule, ...]:
    from dlqbatch.deadstore.rules import Rules  # noqa: PLC0415  (the same)

    return Rules(engine).all()


def _worker() -> str:
    return f"replay {socket.gethostname()} {os.getpid()}"


@contextmanager
def _connected(settings: Settings) -> Iterator[Connection]:
    connection = connect(access_to(settings, "dlqbatch replay"))
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _sending(
    settings: Settings,
    occasion: Occasion,
    items: PlanItems,
    stopped: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> Iterator[tuple[Sender, Resend]]:
    """A plan is finite, so that a run of it needs no bound but the platform's."""
    seconds = _FOR_EVER
    if occasion.seconds_left is not None:
        seconds = max(occasion.seconds_left - settings.lambda_margin_seconds, 0.0)
    bounds = Bounds(time.monotonic() + seconds, settings.settle_seconds, _NO_BOUND, stopped, progress)
    with _connected(settings) as connection, items.connected():
        origins = Origins(connection)
        session = Session(connection, origins, bounds)
        trust = trust_of(settings, connection)
        yield (
            session,
            Resend(origins, trust, session.login, session.properties_limit, settings.return_via == "queue"),
        )


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
    """A broker with an alarm says so to whoever publishes, so a publish is made that it must refuse."""
    properties = BasicProperties(expiration="not a number")
    try:
        with connection.scratch() as scratch:
            scratch.provoke("basic_publish", exchange="", routing_key="", body=b"", properties=properties)
    except NoAnswer:
        return False
    until = time.monotonic() + _LOOKED_FOR_ALARM
    while not connection.blocked and time.monotonic() < until:
        connection.step()
    return not connection.blocked


def _look(connection: Connection, origins: Iterable[Origin]) -> Iterator[Place]:
    for origin in origins:
        yield _place(connection, origin)


def _place(connection: Connection, origin: Origin) -> Place:
    name = origin.name
    try:
        with connection.asking(name) as scratch:
            if origin.queue is None:
                scratch.call("exchange_declare", exchange=name, passive=True)
                return Place(name, is_there=True)
            found = scratch.call("queue_declare", queue=name, passive=True)
            return Place(name, is_there=True, messages=int(found.message_count), consumers=int(found.consumer_count))
    except ChannelRefused as refused:
        return Place(name, is_there=False if refused.is_gone else None, why=refused.text)
    except (NoAnswer, UnicodeEncodeError) as error:
        return Place(name, is_there=None, why=str(error))
