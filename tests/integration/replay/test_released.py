"""Plans that are released to the job `replay`: it goes on with them, bounded run after bounded run."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from program import HANGS_AFTER
from pydantic import SecretStr
from replay_rows import ORIGIN, come_back, fill
from replay_store import AT_ONCE, Store, opened
from sqlalchemy import select

from dlqbatch import jobs
from dlqbatch.actions.queries import recent
from dlqbatch.jobs import Report, RunOptions
from dlqbatch.replay import job as replay_job
from dlqbatch.replay import plan as plans
from dlqbatch.replay.abort import abort_replay
from dlqbatch.replay.approve import approve_replay
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.control import pause_replay, resume_replay, set_rate
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.plan import PlanRefused
from dlqbatch.store.engine import reading
from dlqbatch.store.scopes import known_scopes
from dlqbatch.store.tables import TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlqbatch.replay.plan_status import PlanStatus


@pytest.fixture(params=["postgresql", "sqlite"])
def store(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Store]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    with opened(url, broker_url) as store:
        yield store


def release(store: Store, name: str, options: ApplyOptions = AT_ONCE, *, actor: str = "bob") -> PlanStatus:
    return replay_job.release_replay(store.settings, name, options, actor=actor, reason="the api is back")


def run(store: Store, stopped: Callable[[], bool] = lambda: False, **settings: Any) -> Report:
    return jobs.run("replay", store.settings.model_copy(update=settings), RunOptions(stopped=stopped))


def status(store: Store, name: str) -> PlanStatus:
    return replay_job.replay_status(store.settings, name)


def bodies(store: Store, queue: str = ORIGIN) -> list[int]:
    return sorted(int(message.body) for message in store.team.contents(queue))


def test_each_step_waits_for_its_proof_over_many_runs_and_all_arrives_once(store: Store) -> None:
    fill(store.engine, range(30))
    name = store.plan()
    release(store, name, ApplyOptions())
    out = 0
    for step in (4, 20):
        # A run whose step is out only waits, so that it is ended here.
        done = run(store, stopped=lambda step=step: status(store, name).sent >= step)  # type: ignore[misc]
        assert (done.outcome, done.counts["sent"], done.stopped_by) == ("ok", step - out, "signal"), done
        assert not done.warnings
        found = status(store, name)
        assert (found.state, found.sent, found.waiting) == ("applying", step, 30 - step)
        assert f"the first {step} are out" in found.do_next
        assert "the job `replay` goes on when it is" in found.do_next
        come_back(store.engine, step - out, datetime.now(UTC), failed=False)
        out = step
    last = run(store)
    assert (last.outcome, last.counts["sent"], last.stopped_by) == ("ok", 10, "empty")
    assert status(store, name).state == "done"
    assert bodies(store) == list(range(30))
    assert run(store).details == {}


def test_a_run_ends_at_its_bound_and_the_next_one_goes_on(store: Store) -> None:
    fill(store.engine, range(40))
    name = store.plan()
    release(store, name, ApplyOptions(canary=False, rate="1/min"))
    done = run(store, max_seconds=3.0)
    assert (done.outcome, done.stopped_by, done.hit_bound) == ("ok", "time", True)
    assert status(store, name).waiting >= 39
    set_rate(store.settings, name, "none", actor="bob")
    assert run(store).stopped_by == "empty"
    assert status(store, name).state == "done"
    assert bodies(store) == list(range(40))


def test_a_slow_rate_is_not_begun_anew_by_each_run(store: Store) -> None:
    fill(store.engine, range(9))
    name = store.plan()
    release(store, name, ApplyOptions(canary=False, rate="1/h"))
    run(store, stopped=lambda: status(store, name).sent > 0)
    for _ in range(2):
        assert run(store, max_seconds=3.0).counts["sent"] == 0
    assert len(bodies(store)) == 1


def test_without_a_released_plan_a_run_is_over_at_once_and_needs_no_broker(store: Store) -> None:
    fill(store.engine, range(2))
    name = store.plan()
    (scope,) = known_scopes(store.engine)
    done = run(store, scope=scope, broker_url=SecretStr("amqp://127.0.0.1:1"))
    assert (done.outcome, done.stopped_by, done.counts["got"], done.details) == ("ok", "empty", 0, {})
    assert status(store, name).state == "planned"


def test_plans_go_in_the_order_of_their_release(store: Store) -> None:
    ids = fill(store.engine, range(4))
    names = []
    for half in (ids[:2], ids[2:]):
        chosen = Selection(row_ids=tuple(half))
        names.append(replay_job.plan_replay(store.settings, chosen, actor="ann", reason="why").frozen.hash)
    for name in reversed(names):
        release(store, name)
    done = run(store)
    assert list(done.details["plans"]) == names[::-1]  # type: ignore[call-overload]
    assert (done.counts["got"], done.counts["sent"], done.outcome) == (4, 4, "ok")
    assert [message.body for message in store.team.contents(ORIGIN)] == [b"2", b"3", b"0", b"1"]


@pytest.mark.parametrize("by", ["guard", "person"])
def test_a_plan_that_is_paused_stays_so_until_a_person_resumes_it(store: Store, by: str) -> None:
    fill(store.engine, range(3))
    name = store.plan()
    plan_id = release(store, name).id
    if by == "guard":
        assert plans.stop(store.engine, plan_id, "1 of 1 consumer(s) went away", datetime.now(UTC))
    else:
        pause_replay(store.settings, name, actor="cat")
    for _ in range(2):
        assert (run(store).outcome, bodies(store), status(store, name).state) == ("ok", [], "stopped")
    assert f"`dlqbatch replay resume {name}` lets it go on" in status(store, name).do_next
    resume_replay(store.settings, name, actor="cat")
    assert run(store).counts["sent"] == 3
    assert bodies(store) == [0, 1, 2]


def test_a_plan_that_is_resumed_after_its_apply_had_ended_names_the_next_apply(store: Store) -> None:
    fill(store.engine, range(5))
    name = store.plan()
    store.apply(name, ApplyOptions(wait=0))
    assert plans.stop(store.engine, status(store, name).id, "1 of 1 consumer(s) went away", datetime.now(UTC))
    resumed = resume_replay(store.settings, name, actor="cat")
    assert (resumed.state, resumed.sent, resumed.needs_apply) == ("applying", 4, True)
    assert f"nobody sends it: `dlqbatch replay apply {name}` goes on with the 1 that wait" in resumed.do_next
    store.apply(name)
    assert (status(store, name).state, status(store, name).needs_apply) == ("done", False)
    assert bodies(store) == list(range(5))


def test_an_apply_is_no_run_of_the_job_that_a_release_waits_for(store: Store) -> None:
    fill(store.engine, range(2))
    store.apply(store.plan())
    assert not replay_job.has_run_lately(store.settings)
    run(store)
    assert replay_job.has_run_lately(store.settings)


def test_an_aborted_plan_is_not_gone_on_with(store: Store) -> None:
    fill(store.engine, range(3))
    name = store.plan()
    release(store, name)
    abort_replay(store.settings, name, actor="cat")
    assert (run(store).counts["got"], bodies(store), status(store, name).state) == (0, [], "aborted")


def test_too_much_that_came_back_stops_a_plan_and_the_run_has_failed(store: Store) -> None:
    fill(store.engine, range(9))
    name = store.plan()
    release(store, name, ApplyOptions())
    run(store, stopped=lambda: status(store, name).sent == 4)
    come_back(store.engine, 2, datetime.now(UTC), failed=True)
    done = run(store)
    assert (done.outcome, done.counts["sent"]) == ("failed", 0)
    assert any(name in warning and "2 of 4 came back" in warning for warning in done.warnings)
    assert run(store).outcome == "ok"
    assert len(bodies(store)) == 4


@pytest.mark.parametrize("beside", ["run", "apply"])
def test_two_at_once_send_everything_once(store: Store, beside: str) -> None:
    fill(store.engine, range(400))
    name = store.plan()
    release(store, name)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, store)
        second = pool.submit(run, store) if beside == "run" else pool.submit(store.apply, name)
        for each in (first, second):
            each.result(HANGS_AFTER)
    while status(store, name).state != "done":  # both have ended while the other one held some
        run(store)
    assert Counter(bodies(store)) == Counter(range(400))


def test_an_origin_that_is_gone_holds_up_its_own_plan_alone_until_it_is_back(store: Store) -> None:
    store.team.channel.queue_declare("gone", durable=True)
    gone, well = fill(store.engine, [1], queue="gone"), fill(store.engine, [2])
    names = []
    for ids in (gone, well):
        chosen = Selection(row_ids=tuple(ids))
        names.append(replay_job.plan_replay(store.settings, chosen, actor="ann", reason="why").frozen.hash)
        release(store, names[-1])
    store.team.channel.queue_delete("gone")
    done = run(store)
    assert (done.outcome, done.stopped_by, done.counts["sent"]) == ("partial", "failure", 1)
    assert any(names[0] in warning and "'gone' is not on the broker" in warning for warning in done.warnings)
    assert [status(store, name).state for name in names] == ["applying", "done"]
    assert "'gone' is not on the broker" in status(store, names[0]).do_next
    store.team.channel.queue_declare("gone", durable=True)
    assert run(store).outcome == "ok"
    assert (bodies(store, "gone"), bodies(store)) == ([1], [2])


def test_a_dry_run_says_what_would_go_and_changes_nothing(store: Store) -> None:
    fill(store.engine, range(9))
    name = store.plan()
    release(store, name, ApplyOptions())
    done = jobs.run("replay", store.settings, RunOptions(dry_run=True))
    assert (done.outcome, done.counts["sent"], done.dry_run) == ("ok", 4, True)
    assert (bodies(store), status(store, name).sent) == ([], 0)


def test_a_release_is_an_action_of_whoever_released_it_and_so_is_what_the_job_moves(store: Store) -> None:
    fill(store.engine, range(3))
    name = store.plan()
    found = release(store, name)
    assert found.released is not None
    assert (found.state, found.released["by"], found.released["reason"]) == ("applying", "bob", "the api is back")
    (action,) = recent(store.engine)
    assert (action.kind, action.actor, action.reason, action.details["plan"]) == (
        "replay",
        "bob",
        "the api is back",
        name,
    )
    run(store)
    with reading(store.engine) as connection:
        moved = select(TRANSITIONS.c.actor).where(TRANSITIONS.c.to_status == "processing")
        assert set(connection.scalars(moved)) == {"bob"}
    with pytest.raises(PlanRefused, match="is done"):
        release(store, name)


def test_a_plan_is_released_once_and_what_an_apply_has_begun_can_be_handed_over(store: Store) -> None:
    fill(store.engine, range(9))
    name = store.plan()
    store.apply(name, ApplyOptions())
    release(store, name, actor="bob")
    with pytest.raises(PlanRefused, match="was released by bob"):
        release(store, name, actor="cat")
    come_back(store.engine, 4, datetime.now(UTC), failed=False)
    run(store)
    assert (status(store, name).state, bodies(store)) == ("done", list(range(9)))


def test_a_large_plan_is_not_sent_by_its_maker_alone(store: Store) -> None:
    fill(store.engine, range(3))
    store.settings = store.settings.model_copy(update={"replay_approval": 2})
    name = store.plan(actor="ann")
    for send in (lambda: release(store, name, actor="ann"), lambda: store.apply(name)):
        with pytest.raises(PlanRefused, match=f"dlqbatch replay approve {name}"):
            send()
    for maker in ("ann", " Ann "):
        with pytest.raises(PlanRefused, match="another person has to approve it"):
            approve_replay(store.settings, name, actor=maker, reason="looks good")
    assert (status(store, name).state, recent(store.engine)) == ("planned", ())
    approve_replay(store.settings, name, actor="bob", reason="looked at the sample")
    found = status(store, name)
    assert found.approved is not None
    assert (found.state, found.approved["by"], found.approved["reason"]) == ("planned", "bob", "looked at the sample")
    assert [(action.kind, action.actor) for action in recent(store.engine)] == [("approve", "bob")]
    assert store.apply(name).status.state == "done"
    with pytest.raises(PlanRefused, match="there is nothing to approve"):
        approve_replay(store.settings, name, actor="bob", reason="again")


def test_whoever_did_not_make_a_large_plan_may_send_it_and_a_small_one_needs_nobody(store: Store) -> None:
    ids = fill(store.engine, range(5))
    store.settings = store.settings.model_copy(update={"replay_approval": 2})
    small = replay_job.plan_replay(store.settings, Selection(row_ids=tuple(ids[:2])), actor="ann", reason="why")
    assert store.apply(small.frozen.hash).status.state == "done"
    large = store.plan(actor="ann")
    release(store, large, actor="bob")
    run(store)
    assert status(store, large).state == "done"


def test_an_approval_outlives_a_first_apply_that_failed_at_once(store: Store) -> None:
    fill(store.engine, range(3))
    name = store.plan(actor="ann")
    approve_replay(store.settings, name, actor="bob", reason="looked at the sample")
    now = datetime.now(UTC)
    plan = plans.check(store.engine, name, resume_stopped=False)
    plan = plans.start(store.engine, plan, canary=True, max_failure_rate=0.1, resume_stopped=False, now=now)
    plans.take_back(store.engine, plan, now)
    found = status(store, name)
    assert found.approved is not None
    assert (found.state, found.approved["by"]) == ("planned", "bob")
