"""The commands of a replay, and its job: a plan is made, previewed, applied, released and shown.

The abort is in abort.py, the approval in approve.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Engine, select

from dlqbatch import logs
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.errors import BrokerLost, BrokerUnreachable, DatabaseUnreadable, DlqbatchError, SettingsError, so_far
from dlqbatch.jobs import FAILURE, Report, RunOptions, bounds_of, count, scope_of, store_by_asking
from dlqbatch.lifecycle.ended_replays import release_ended_plans
from dlqbatch.lifecycle.resend import SENT
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.logs import masked
from dlqbatch.replay import plan as plans
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.canary_and_rate import turn_of
from dlqbatch.replay.freeze import Selection, freeze, keep_risks
from dlqbatch.replay.items import LEASE
from dlqbatch.replay.order import place_of
from dlqbatch.replay.plan import Applied, PlanRefused
from dlqbatch.replay.plan_status import PlanStatus
from dlqbatch.replay.risk_facts import Frozen, look_at_origins
from dlqbatch.replay.risks import Place, Risk, largest_body, risks, unanswered
from dlqbatch.replay.run import COUNTS, preview_report
from dlqbatch.replay.send_plan import Unhealthy, check_health, connected, judge, send_plan, worker_name
from dlqbatch.replay.skip_or_send import preview
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock, check_schema, engine_for, store_for, store_of
from dlqbatch.store.action_log import check_person
from dlqbatch.store.engine import reading
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.store.scopes import own_runs
from dlqbatch.store.tables import RUNS
from dlqbatch.store.text import time_text

_log = logs.get(__name__)

_PLANS_FOR: Final = 900.0
"""Seconds for a statement of a plan: it reads every message of the plan, and nobody waits for its locks."""
_RUNS_EVERY: Final = timedelta(minutes=10)  # at least; by default every half minute
_RUNS: Final = 1_000
"""The newest runs that are looked at for one of the job."""
_APPLIED: Final = "applied"
"""In the report of an apply, which is a run of this plan alone."""
AS_PLANNED: Final = "as planned"
"""The reason of a release that was not given another one."""
_RELEASES_FOR: Final = 10.0  # seconds for a plan or an apply to release rows of plans whose abort was cut


@dataclass(frozen=True, slots=True)
class Planned:
    frozen: Frozen
    risks: tuple[Risk, ...]
    places: Mapping[str, Place]
    """The origins as the broker shows them."""
    dry_run: bool
    mended: str | None = None
    answered: tuple[Risk, ...] = ()
    """The risks that were found, and are over by what was mended."""
    actor: str = ""
    approval_above: int | None = None
    """It has more messages than these, so that somebody else than the actor has to approve it."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "dry_run": self.dry_run,
            **self.frozen.as_dict(),
            "hash": None if self.dry_run or not self.frozen.size else self.frozen.hash,
            "actor": self.actor,
            "approval_above": self.approval_above,
            "risks": [asdict(risk) for risk in self.risks],
            "mended": self.mended and masked(self.mended),
            "answered": [asdict(risk) for risk in self.answered],
            "origins": [asdict(place) for place in self.places.values()],
        }


@dataclass(frozen=True, slots=True)
class Replayed:
    report: Report
    status: PlanStatus

    def as_dict(self) -> dict[str, object]:
        return {**self.report.as_dict(), "plan": self.status.as_dict()}


def plan_replay(
    settings: Settings, selection: Selection, *, actor: str, reason: str, dry_run: bool = False, form: str = ""
) -> Planned:
    """Freeze the selected messages, look at their origins on the broker, and list the risks; nothing is sent."""
    _check_named(actor, settings, reason)
    if selection.in_order is not None:
        selection = replace(selection, in_order=place_of(selection.in_order, settings.fields))
    # Connect before anything is frozen: without the broker most risks are unknown.
    with connected(settings) as connection:
        engine = store_of(settings, scope_of(settings, connection), _PLANS_FOR, dry_run=dry_run)
        if not dry_run:
            _release_rows_of_ended_plans(engine, actor)
        frozen = freeze(
            engine,
            selection,
            actor=actor,
            reason=reason,
            now=StoreClock(engine)(),
            dry_run=dry_run,
            form=form,
            refuses=lambda rows: sum(map(judge(settings, connection).refuses, rows)),
        )
        places = {place.name: place for place in look_at_origins(settings, connection, frozen.by_origin)}
        facts = frozen.facts(Rules(engine).all(), largest_body(connection.version))
    every = risks(facts, places)
    found = unanswered(every, selection.mended)
    if frozen.size and not dry_run:
        keep_risks(engine, frozen.plan_id, found)
    answered = tuple(risk for risk in every if risk not in found)
    most = settings.replay_approval
    above = most if not dry_run and most is not None and frozen.size > most else None
    return Planned(frozen, found, places, dry_run, selection.mended, answered, actor, above)


def apply_replay(
    settings: Settings,
    run_options: RunOptions,
    name: str,
    options: ApplyOptions,
    *,
    actor: str,
    live: Callable[[str], None] = lambda _: None,
) -> Replayed:
    """One run of an apply; apply the plan again for the messages that still wait.

    `live` is called about every second with a line that says what the run waits for, and since when.
    """
    _check_named(actor, settings)
    with connected(settings) as connection:
        scope = scope_of(settings, connection)
        engine = store_of(settings, scope)
        clock = StoreClock(engine)
        began = clock()
        _release_rows_of_ended_plans(engine, actor, run_options.stopped)
        plan = plans.check(
            engine, name, resume_stopped=options.resume_stopped, person=actor, most_alone=settings.replay_approval
        )
        check_health(connection, Origins(connection), plan.origins)
    plan = plans.start(
        engine,
        plan,
        canary=options.canary,
        max_failure_rate=options.max_failure_rate,
        resume_stopped=options.resume_stopped,
        now=began,
        per_second=options.per_second,
        actor=actor,
        most_alone=settings.replay_approval,
    )
    try:
        report = send_plan(settings, run_options, engine, plan, options, actor=actor, live=live)
    except DlqbatchError:
        with suppress(DlqbatchError):
            plans.take_back(engine, plan, clock())
        raise
    shown = report.as_dict() | {_APPLIED: plan.hash}
    kept = record(
        settings.database_url.get_secret_value(),
        RunRecord("replay", began, clock(), report.outcome, report.stopped_by, (), shown, scope),
    )
    if kept.warning is not None:
        _log.warning(kept.warning, job="replay")
    for warning in report.warnings:
        _log.warning(warning, job="replay", plan=plan.hash)
    return Replayed(report, replay_status(settings, plan.hash))


def release_replay(
    settings: Settings,
    name: str,
    options: ApplyOptions,
    *,
    actor: str,
    reason: str = AS_PLANNED,
    verified: bool = False,
) -> PlanStatus:
    """Hand the plan to the job `replay`, which sends it run after run; nothing is sent here."""
    _check_named(actor, settings, reason)
    with connected(settings) as connection:
        engine = store_of(settings, scope_of(settings, connection))
        plan = plans.check(engine, name, resume_stopped=False, person=actor, most_alone=settings.replay_approval)
        check_health(connection, Origins(connection), plan.origins)
    now = StoreClock(engine)()
    plans.start(
        engine,
        plan,
        canary=options.canary,
        max_failure_rate=options.max_failure_rate,
        resume_stopped=False,
        now=now,
        per_second=options.per_second,
        actor=actor,
        most_alone=settings.replay_approval,
        released={
            "by": actor,
            "at": time_text(now),
            "reason": reason,
            "verified": verified,
            "guard": options.guard,
        },
    )
    return plans.status(engine, plan.hash)


def has_run_lately(settings: Settings) -> bool:
    """Whether a run of the job has begun in the last minutes: without one, a release sends nothing.

    An apply, which is a run of one plan, stands in the log of runs under the same name.
    """
    engine = _store(settings)
    since = StoreClock(engine)() - _RUNS_EVERY
    with reading(engine) as connection:
        lately = (own_runs(connection), RUNS.c.job == "replay", RUNS.c.started_at > since)
        runs = connection.scalars(select(RUNS.c.report).where(*lately).order_by(RUNS.c.started_at.desc()).limit(_RUNS))
        return any(_APPLIED not in report for report in runs)


def replay(settings: Settings, run_options: RunOptions) -> Report:
    """One run of the job: the released plans, in the order of their release, each for its share of the time."""
    _refuse_default_database(settings)
    began = time.monotonic()
    bounds = bounds_of(settings, run_options)
    engine, scope = store_by_asking(settings, "dlqbatch replay", dry_run=run_options.dry_run)
    waiting = plans.released(engine)
    done: list[Report] = []
    shown: dict[str, object] = {}
    while waiting and not run_options.stopped() and (now := time.monotonic()) < bounds.stop_at:
        seconds, wait = turn_of(bounds.stop_at - now, len(waiting))
        name, released = waiting.pop(0)
        try:
            report = _go_on(settings, run_options, engine, name, released, now + seconds, wait)
        except PlanRefused:
            continue  # somebody has paused, stopped or aborted it a moment ago
        status = plans.status(engine, name)
        shown[name] = {"state": status.state, "sent": status.sent, "waiting": status.waiting, "next": status.do_next}
        done.append(replace(report, warnings=tuple(f"plan {name}: {each}" for each in report.warnings)))
    ends = [each.stopped_by for each in done if each.stopped_by != "empty"]
    ends += ["signal" if run_options.stopped() else "time"] * bool(waiting)
    whole = _sum(done, next(iter(ends), "empty"), time.monotonic() - began, dry_run=run_options.dry_run)
    return replace(whole, scope=scope, details={"plans": shown} if shown else {})


def _go_on(
    settings: Settings,
    run_options: RunOptions,
    engine: Engine,
    name: str,
    released: Mapping[str, Any],
    stop_at: float,
    wait: float,
) -> Report:
    """One run of a released plan, until `stop_at`; what keeps it from going on is kept with it."""
    plan = plans.check(engine, name, resume_stopped=False)
    options = ApplyOptions(
        canary=plan.canary, max_failure_rate=plan.max_failure_rate, wait=wait, guard=released["guard"]
    )
    clock = StoreClock(engine)
    sent_at = released.get(plans.SENT_AT)
    try:
        with connected(settings) as connection:
            check_health(connection, Origins(connection, touch=not run_options.dry_run), plan.origins)
            if run_options.dry_run:
                report = _preview(settings, connection, engine, plan, options)
                return report if report.outcome == "failed" else replace(report, outcome="ok")
        report = send_plan(
            settings,
            run_options,
            engine,
            plan,
            options,
            actor=released["by"],
            stop_at=stop_at,
            idle=(clock() - datetime.fromisoformat(sent_at)).total_seconds() if sent_at else None,
        )
    except (BrokerUnreachable, BrokerLost, DatabaseUnreadable):
        raise
    except DlqbatchError as error:
        # The plans behind it may be well.
        why = error.problems if isinstance(error, Unhealthy) else (so_far(error),)
        report = Report("replay", "partial", FAILURE, count({}, 0, COUNTS)[0], warnings=why)
    if not run_options.dry_run:
        problem = "" if report.outcome == "failed" else "; ".join(report.warnings)  # why it stopped is kept anyway
        plans.note_run(engine, plan, problem, clock() if report.counts[SENT] else None)
    return report


def _sum(reports: Sequence[Report], stopped_by: str, seconds: float, *, dry_run: bool) -> Report:
    counts, reasons = Counter(count({}, 0, COUNTS)[0]), Counter[str]()
    for each in reports:
        counts.update(each.counts)
        reasons.update(each.reasons)
    outcomes = {each.outcome for each in reports}
    outcome = next((one for one in ("failed", "partial") if one in outcomes), "ok")
    warnings = tuple(warning for each in reports for warning in each.warnings)
    return Report("replay", outcome, stopped_by, counts, reasons, seconds, dry_run, warnings)


def preview_replay(settings: Settings, name: str, options: ApplyOptions, *, actor: str) -> Replayed:
    """What an apply would do now: nothing is reserved, sent or written."""
    _check_named(actor, settings)
    with connected(settings) as connection:
        engine = store_of(settings, scope_of(settings, connection), dry_run=True)
        plan = plans.check(engine, name, resume_stopped=options.resume_stopped)
        check_health(connection, Origins(connection, touch=False), plan.origins)
        report = _preview(settings, connection, engine, plan, options)
    return Replayed(report, replay_status(settings, plan.hash))


def _preview(
    settings: Settings, connection: Connection, engine: Engine, plan: Applied, options: ApplyOptions
) -> Report:
    started = time.monotonic()
    counted_from = plan.counted_from or StoreClock(engine)()
    found = preview(engine, plan.plan_id, plan.to_queue, counted_from, judge(settings, connection).refuses)
    return preview_report(found, plan.step, options, time.monotonic() - started)


def replay_status(settings: Settings, name: str) -> PlanStatus:
    return plans.status(_store(settings), name)


def replay_plans(settings: Settings, limit: int) -> tuple[PlanStatus, ...]:
    """The newest first."""
    return plans.recent(_store(settings), limit)


def _store(settings: Settings) -> Engine:
    _refuse_default_database(settings)
    return store_for(settings)


def _refuse_default_database(settings: Settings) -> None:
    if settings.database_url_is_default:
        raise SettingsError(
            "replay sends what the dead store holds, so the database has to be named: set DLQBATCH_DATABASE_URL "
            "(dlqbatch.database-url). Nothing was moved"
        )


def _check_named(actor: str, settings: Settings, reason: str = "as planned") -> None:
    check_person(actor, reason)
    _refuse_default_database(settings)
    check_schema(engine_for(settings))


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
