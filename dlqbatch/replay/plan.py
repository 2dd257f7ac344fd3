"""In which state a replay plan is, what may follow, and how far it is.

`PLAN_MOVES` in `dlqbatch.store.states` draws the states and their moves. An abort is in `dlqbatch.replay.abort`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, exists, or_, select, update

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.errors import DlqbatchError
from dlqbatch.replay.canary_and_rate import MAX_FAILURE_RATE, Go, Step, Stop, Verdict, Wait, how_far
from dlqbatch.replay.plan_status import (
    APPROVED,
    COUNTED_FROM,
    HARMED,
    MENDED,
    NEEDS_APPLY,
    PAUSED,
    RATE,
    RELEASED,
    STEP,
    PlanStatus,
    goes_on_counting,
    outcomes_of,
    status_of,
    step_of,
    without_mended,
)
from dlqbatch.replay.risk_facts import origins_of
from dlqbatch.replay.second_person import why_not_alone
from dlqbatch.store import action_log
from dlqbatch.store.action_log import Request
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.reservation import OVER, release_reservations
from dlqbatch.store.scopes import own
from dlqbatch.store.states import PLAN_MOVES
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.store.text import time_text

# In `progress` of a plan: the place up to which its rows are reserved.
RESERVED_TO: Final = "reserved_to"
# In what `RELEASED` holds: when a run of the job last sent something, and what keeps the plan from going on.
SENT_AT: Final = "sent_at"
PROBLEM: Final = "problem"
_LIST_OR_MAKE: Final = "`dlqbatch replay status` lists the plans, `dlqbatch replay plan` makes a new one"
_SHORTEST_PREFIX: Final = 8  # characters of a hash
_MOST_REASONS: Final = 20
_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c
_P: Final = PLANS.c
_I: Final = PLAN_ITEMS.c


class NoSuchPlan(DlqbatchError):
    """No plan has this hash, or several begin like it."""

    exit_code = 2


class PlanRefused(DlqbatchError):
    """The plan is not in a state in which that can be done to it."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan that may be applied, or is being applied."""

    plan_id: int
    hash: str
    size: int
    to_queue: str | None
    origins: Mapping[Origin, int]
    counted_from: datetime | None = None
    """Attempts from before do not count for its failure rate."""
    is_first: bool = False
    """It was never applied before."""
    step: Step | None = None
    """The canary step that is out, or under way."""
    is_in_order: bool = False
    """Messages with one key go one after the other."""
    canary: bool = True
    max_failure_rate: float = MAX_FAILURE_RATE


def find(connection: Connection, name: str) -> int:
    """The plan with this hash, or with the only one that begins so."""
    wanted = name.strip().lower()
    if len(wanted) < _SHORTEST_PREFIX or not wanted.isalnum():
        raise NoSuchPlan(
            f"'{name}' is no plan's hash; give at least its first {_SHORTEST_PREFIX} characters. {_LIST_OR_MAKE}"
        )
    ours = (own(connection, _P.scope_id), _P.hash.startswith(wanted, autoescape=True))
    found = connection.scalars(select(_P.id).where(*ours).limit(2)).all()
    if len(found) > 1:
        raise NoSuchPlan(f"more than one plan begins with '{name}'; give more of its hash. {_LIST_OR_MAKE}")
    if not found:
        raise NoSuchPlan(f"there is no plan '{name}': nothing was moved. {_LIST_OR_MAKE}")
    return int(found[0])


def status(engine: Engine, name: str) -> PlanStatus:
    with reading(engine) as connection:
        return status_of(connection, find(connection, name))


def recent(engine: Engine, limit: int = 50) -> tuple[PlanStatus, ...]:
    """The newest first."""
    with reading(engine) as connection:
        newest = (
            select(_P.id).where(own(connection, _P.scope_id)).order_by(_P.created_at.desc(), _P.id.desc()).limit(limit)
        )
        return tuple(status_of(connection, plan_id) for plan_id in connection.scalars(newest).all())


def released(engine: Engine) -> list[tuple[str, Mapping[str, Any]]]:
    """The hashes of the plans that the job `replay` goes on with, in the order of their release, with what it knows."""
    with reading(engine) as connection:
        mine = (own(connection, _P.scope_id), _P.state == "applying")
        plans = connection.execute(select(_P.hash, _P.progress).where(*mine).order_by(_P.id))
        found = [(plan.hash, plan.progress[RELEASED]) for plan in plans if RELEASED in plan.progress]
    return sorted(found, key=lambda plan: str(plan[1]["at"]))


def note_run(engine: Engine, plan: Applied, problem: str, sent_at: datetime | None) -> None:
    """What a run of the job leaves to the next one: what kept the plan from going on, and when it sent something."""
    with writing(engine) as connection:
        found = locked(connection, plan.plan_id)
        before = found.progress[RELEASED]
        after = {**before, PROBLEM: problem} | ({} if sent_at is None else {SENT_AT: time_text(sent_at)})
        if after != before:
            enter(connection, found, found.state, found.state_since, {**found.progress, RELEASED: after})


def check(
    engine: Engine, name: str, *, resume_stopped: bool, person: str = "", most_alone: int | None = None
) -> Applied:
    """NoSuchPlan or PlanRefused unless it may be applied, by this person; nothing is changed."""
    with reading(engine) as connection:
        plan_id = find(connection, name)
        plan = connection.execute(select(PLANS).where(_P.id == plan_id)).one()
        _may_apply(plan, person, resume_stopped=resume_stopped, most_alone=most_alone)
        origins, _ = origins_of(connection, plan_id, plan.to_queue)
    return Applied(
        plan_id,
        plan.hash,
        plan.size,
        plan.to_queue,
        origins,
        _counted_from(plan),
        step=step_of(plan),
        is_in_order="in_order" in (plan.filters or {}),
        canary=plan.progress.get("canary", True),
        max_failure_rate=plan.progress.get("max_failure_rate", MAX_FAILURE_RATE),
    )


def start(
    engine: Engine,
    plan: Applied,
    *,
    canary: bool,
    max_failure_rate: float,
    resume_stopped: bool,
    now: datetime,
    per_second: float | None = None,
    actor: str | None = None,
    most_alone: int | None = None,
    released: Mapping[str, object] | None = None,
) -> Applied:
    """The plan is being applied from this commit on, until it is done, stopped or aborted.

    The first apply is an action of this person, or without a name of who made the plan; so is a release, which hands
    the plan to the job `replay`.
    """
    with writing(engine) as connection:
        found = locked(connection, plan.plan_id)
        _may_apply(found, actor or found.actor, resume_stopped=resume_stopped, most_alone=most_alone)
        if released and (before := found.progress.get(RELEASED)):
            raise PlanRefused(
                f"plan {found.hash} was released by {before['by']} at {before['at'][:19]}: the job `replay` goes on "
                "with it. Nothing was changed"
            )
        counted_from = _counted_from(found) or now
        over = {"stopped_why", HARMED, PAUSED, NEEDS_APPLY} | (set() if goes_on_counting(found) else {STEP})
        progress = {
            **{name: value for name, value in (found.progress or {}).items() if name not in over},
            **({} if per_second is None else {RATE: per_second}),
            "canary": canary,
            "max_failure_rate": max_failure_rate,
            COUNTED_FROM: time_text(counted_from),
            **({RELEASED: dict(released)} if released else {}),
        }
        enter(connection, found, "applying", now, progress)
        if found.state == "planned" or released:
            filters, mended = without_mended(found.filters)
            details = {"plan": found.hash, "plan_id": found.id, **({"released": True} if released else {})}
            details |= {} if mended is None else {MENDED: mended}
            reason = str(released["reason"]) if released else found.reason
            verified = bool(released and released.get("verified"))
            request = Request("replay", actor or found.actor, reason, verified, filters, details)
            action_log.begin(connection, request, now, ended=True)
    return replace(plan, counted_from=counted_from, is_first=found.state == "planned")


def take_back(engine: Engine, plan: Applied, now: datetime) -> None:
    """After a first apply that failed before it did anything, the plan is `planned` again."""
    with writing(engine) as connection:
        found = locked(connection, plan.plan_id)
        touched = or_(_I.state != "waiting", _I.attempt.is_not(None))
        has_begun = connection.scalar(select(exists().where(_I.plan_id == plan.plan_id, touched)))
        has_rows = connection.scalar(select(exists().where(_M.plan_id == plan.plan_id)))
        if plan.is_first and found.state == "applying" and not has_begun and not has_rows:
            enter(connection, found, "planned", now, {k: v for k, v in found.progress.items() if k == APPROVED})


def stop(engine: Engine, plan_id: int, why: str, now: datetime, queue: str | None = None) -> bool:
    """Nothing more of the plan goes; its rows stay reserved until a person decides. False: it is not being applied.

    `queue` is where harm was seen.
    """
    with writing(engine) as connection:
        found = locked(connection, plan_id)
        if found.state == "applying":
            stopped = {"stopped_why": why} | ({} if queue is None else {HARMED: queue})
            enter(connection, found, "stopped", now, {**(found.progress or {}), **stopped})
        return bool(found.state == "applying")


def go_on(engine: Engine, plan_id: int, *, canary: bool, max_failure_rate: float, now: datetime) -> Verdict:
    """What the plan may send now: a next canary step begins, or too much has come back and the plan is stopped."""

    def judged(connection: Connection, plan: Row[*tuple[Any, ...]]) -> Verdict:
        outcomes = outcomes_of(connection, plan_id, _counted_from(plan))
        return how_far(outcomes, step_of(plan), canary=canary, max_failure_rate=max_failure_rate)

    with reading(engine) as connection:
        plan = connection.execute(select(PLANS).where(_P.id == plan_id)).one()
        verdict = judged(connection, plan)
    if isinstance(verdict, Wait) or (isinstance(verdict, Go) and verdict.step in {None, step_of(plan)}):
        return verdict
    if isinstance(verdict, Stop):
        stop(engine, plan_id, verdict.why, now)
        return verdict
    with writing(engine) as connection:
        plan = locked(connection, plan_id)
        verdict = judged(connection, plan)
        if plan.state == "applying" and isinstance(verdict, Go) and (step := verdict.step) is not None:
            begun = {STEP: [step.to, step.after, step.failed_before]}
            enter(connection, plan, "applying", now, {**plan.progress, **begun})
    return verdict


def finish(engine: Engine, plan_id: int, now: datetime) -> PlanStatus:
    """The plan is done if no message waits any more; then its rows are released."""
    with reading(engine) as connection:
        state = connection.scalar(select(_P.state).where(_P.id == plan_id))
        waits = connection.scalar(select(exists().where(_I.plan_id == plan_id, _I.state == "waiting")))
    if state == "applying" and not waits:
        with writing(engine) as connection:
            found = locked(connection, plan_id)
            if found.state == "applying":
                enter(connection, found, "done", now, found.progress or {})
    if not waits:
        # Only now: rows that leave processing after this keep no reservation. An abort releases its rows itself.
        release_reservations(engine, plan_id)
    with reading(engine) as connection:
        return status_of(connection, plan_id)


def locked(connection: Connection, plan_id: int) -> Row[*tuple[Any, ...]]:
    return connection.execute(select(PLANS).where(_P.id == plan_id).with_for_update()).one()


def enter(
    connection: Connection, plan: Row[*tuple[Any, ...]], state: str, now: datetime, progress: Mapping[str, object]
) -> None:
    if state != plan.state and state not in PLAN_MOVES[plan.state]:
        raise PlanRefused(f"plan {plan.hash} is {plan.state}, and cannot become {state}")
    since = plan.state_since if plan.state == state else now
    changing = update(PLANS).where(_P.id == plan.id)
    connection.execute(changing.values(state=state, state_since=since, progress=dict(progress)))


def _counted_from(plan: Row[*tuple[Any, ...]]) -> datetime | None:
    """A further apply goes on counting; after a stop it counts anew."""
    since = plan.progress.get(COUNTED_FROM) if goes_on_counting(plan) else None
    return datetime.fromisoformat(since) if since else None


def _may_apply(plan: Row[*tuple[Any, ...]], person: str, *, resume_stopped: bool, most_alone: int | None) -> None:
    if plan.state in OVER:
        raise PlanRefused(
            f"plan {plan.hash} is {plan.state}, and was so since {plan.state_since:%Y-%m-%d %H:%M:%S} UTC: nothing was "
            "moved. Make a new one with `dlqbatch replay plan`, which holds what there is now."
        )
    if PAUSED in (plan.progress or {}) and not resume_stopped:
        raise PlanRefused(
            f"plan {plan.hash} was {plan.progress.get('stopped_why')}. Nothing was moved; "
            f"`dlqbatch replay resume {plan.hash}` lets it go on."
        )
    if plan.state == "stopped" and not resume_stopped:
        raise PlanRefused(
            f"plan {plan.hash} was stopped: {(plan.progress or {}).get('stopped_why')}. Nothing was moved. When the "
            f"cause is gone, `dlqbatch replay apply {plan.hash} --resume-stopped` goes on; "
            f"`dlqbatch replay abort {plan.hash}` lets its messages go."
        )
    is_approved = APPROVED in (plan.progress or {})
    alone = why_not_alone(plan.hash, plan.size, plan.actor, person, is_approved=is_approved, most_alone=most_alone)
    if plan.state == "planned" and alone is not None:
        raise PlanRefused(alone)
