"""A hold: the lifecycle and replays leave a group's messages alone until it is lifted, on both databases."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, begin_attempts, fill, row, store_at
from sqlalchemy import select, text

from dlqbatch.actions.queries import recent
from dlqbatch.actions.undo import NotUndoable, undo
from dlqbatch.groups.decisions import AlreadyHeld, NoSuchGroup, NotHeld, WrittenSince, acknowledge, hold, note, unhold
from dlqbatch.groups.inbox import Decisions, inbox, of_group
from dlqbatch.groups.state import GroupState
from dlqbatch.lifecycle.leases import claim, due, take_over
from dlqbatch.messages.actions import MessageActions
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.replay.items import PlanItems
from dlqbatch.store import holds
from dlqbatch.store.action_tables import GROUPS
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.tables import IS_DUE, MESSAGES

if TYPE_CHECKING:
    from sqlalchemy import Engine

A, B = "a" * 16, "b" * 16
WHO: dict[str, Any] = {"actor": "ann", "reason": "for the developers"}


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def pending(engine: Engine, number: int, **columns: Any) -> list[int]:
    return add(engine, *(row(next_retry_at=NOW, **columns) for _ in range(number)))


def claimed(engine: Engine, limit: int = 100) -> set[int]:
    found: set[int] = set()
    while some := claim(engine, "w", NOW, limit):
        found |= {each.row_id for each in some}
    return found


def test_a_claim_leaves_a_held_group_alone_and_newcomers_too(engine: Engine) -> None:
    pending(engine, 30, fingerprint=A, priority=9)
    free = pending(engine, 3, fingerprint=B)
    hold(engine, A[:4], **WHO)
    pending(engine, 2, fingerprint=A)
    assert {each.row_id for each in due(engine, 100, NOW)} == set(free)
    assert claimed(engine, limit=2) == set(free)
    assert claimed(engine) == set()


def test_what_was_marked_as_due_before_the_hold_is_not_claimed(engine: Engine) -> None:
    (held,) = add(engine, row(fingerprint=A, is_due=True))
    (free,) = add(engine, row(fingerprint=B, is_due=True))
    hold(engine, A, **WHO)
    assert claimed(engine) == {free}
    assert MessageActions(engine).show(held).transitions[-1].reason.startswith("its group is on hold")


def test_a_lifted_hold_makes_due_what_came_due_meanwhile(engine: Engine) -> None:
    held = pending(engine, 5, fingerprint=A)
    (later,) = add(engine, row(fingerprint=A, next_retry_at=NOW + timedelta(hours=1)))
    hold(engine, A, **WHO)
    assert claimed(engine) == set()
    unhold(engine, A, now=NOW, **WHO)
    assert claimed(engine) == set(held)
    assert MessageActions(engine).show(later).record.next_retry_at == NOW + timedelta(hours=1)
    with pytest.raises(NotHeld):
        unhold(engine, A, **WHO)


def test_a_lifting_that_was_cut_is_finished_by_the_lifecycle(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    held = pending(engine, 5, fingerprint=A)
    hold(engine, A, **WHO)
    assert claimed(engine) == set()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dlqbatch.groups.decisions.revive_all", killed)
    with pytest.raises(KeyboardInterrupt):
        unhold(engine, A, now=NOW, **WHO)
    assert claimed(engine) == set(held)
    with reading(engine) as connection:
        assert connection.scalars(select(GROUPS.c.reviving)).all() == [False]


def test_a_hold_of_one_queue_is_none_of_another(engine: Engine) -> None:
    orders = pending(engine, 2, fingerprint=A, origin_queue="orders")
    mails = pending(engine, 2, fingerprint=A, origin_queue="mails")
    tasks = pending(engine, 2, fingerprint=A, origin_exchange="tasks")
    hold(engine, A, queue="orders", **WHO)
    hold(engine, A, queue="tasks", **WHO)
    assert claimed(engine) == set(mails)
    unhold(engine, A, queue="tasks", now=NOW, **WHO)
    assert claimed(engine) == set(tasks)
    with pytest.raises(NotHeld, match="it is held in 'orders'"):
        unhold(engine, A, **WHO)
    hold(engine, A, **WHO)
    unhold(engine, A, queue="orders", now=NOW, **WHO)
    assert claimed(engine) == set(), "the hold of all queues is still there"
    unhold(engine, A, now=NOW, **WHO)
    assert claimed(engine) == set(orders)


def test_an_attempt_that_a_lost_worker_began_is_not_sent_again_while_its_group_is_held(engine: Engine) -> None:
    (row_id,) = pending(engine, 1, fingerprint=A)
    tokens = {each.row_id: each.token for each in claim(engine, "w", NOW)}
    begin_attempts(engine, tokens, None, "w", NOW)
    hold(engine, A, **WHO)
    after = NOW + timedelta(hours=1)
    assert take_over(engine, "x", after) == []
    unhold(engine, A, now=after, **WHO)
    assert [each.row_id for each in take_over(engine, "x", after)] == [row_id]


def test_a_plan_leaves_held_messages_out_and_says_how_many(engine: Engine) -> None:
    held = add(engine, *(row(fingerprint=A, status=Status.MANUAL) for _ in range(3)))
    (free,) = add(engine, row(fingerprint=B, status=Status.MANUAL))
    hold(engine, A, **WHO)
    for selection in (Selection(everything=True), Selection(row_ids=(*held, free))):
        frozen = freeze(engine, selection, now=NOW, dry_run=True, **WHO)
        assert (frozen.size, frozen.left_out) == (1, {"on hold": 3})


def applied(engine: Engine, *row_ids: int) -> PlanItems:
    frozen = freeze(engine, Selection(row_ids=row_ids), now=NOW, **WHO)
    with writing(engine) as connection:
        connection.execute(text("UPDATE dlq_plans SET state = 'applying'"))
    return PlanItems(engine, frozen.plan_id, actor="ann", worker="w", lease=timedelta(minutes=1), reason="replay")


def test_an_apply_skips_what_was_held_after_the_plan(engine: Engine) -> None:
    (held,) = add(engine, row(fingerprint=A, status=Status.MANUAL, origin_queue="orders"))
    (free,) = add(engine, row(fingerprint=B, status=Status.MANUAL, origin_queue="orders"))
    items = applied(engine, held, free)
    hold(engine, A, **WHO)
    taken = items.take(10, None, NOW)
    assert (set(taken.numbers), taken.skipped) == ({free}, {holds.ON_HOLD: 1})


def test_an_apply_publishes_nothing_that_was_held_after_it_was_taken(engine: Engine) -> None:
    (held,) = add(engine, row(fingerprint=A, status=Status.MANUAL, origin_queue="orders"))
    (free,) = add(engine, row(fingerprint=B, status=Status.MANUAL, origin_queue="orders"))
    items = applied(engine, held, free)
    taken = items.take(10, None, NOW)
    hold(engine, A, **WHO)
    items.outgoing(taken.numbers)
    assert items.on_hold == {held}


@pytest.mark.parametrize("word", ["", "c", "zz", "a" * 17, "' OR 1=1 --", "\udcff", "A B"])
def test_a_word_that_names_no_group_changes_nothing(engine: Engine, word: str) -> None:
    pending(engine, 1, fingerprint=A)
    with pytest.raises(NoSuchGroup):
        hold(engine, word, **WHO)
    assert recent(engine) == ()


def test_a_beginning_of_several_groups_names_them(engine: Engine) -> None:
    for last in "0123456":
        pending(engine, 1, fingerprint="a" * 15 + last)
    with pytest.raises(NotUnderstood, match=f"several groups: {'a' * 15}0, {'a' * 15}1, {'a' * 15}2, …"):
        hold(engine, "aa", **WHO)


def test_every_decision_is_an_action_that_can_be_undone(engine: Engine) -> None:
    pending(engine, 2, fingerprint=A, origin_queue="orders")
    held = hold(engine, A, **WHO)
    noted = note(engine, A, text="known", owner="bob", tags=["x"], actor="ann")
    known = acknowledge(engine, A, more=5, **WHO)
    (line,) = of_group(engine, A).lines
    assert (line.decisions.held_why, line.decisions.note, line.decisions.owner, line.decisions.tags) == (
        "for the developers",
        "known",
        "bob",
        ("x",),
    )
    assert line.state is GroupState.ACKNOWLEDGED
    assert claimed(engine) == set()
    for decided in (held, noted, known):
        undone = undo(engine, decided.action, now=NOW, **WHO)
        assert undone.action is not None
    (line,) = of_group(engine, A, now=NOW).lines
    assert (line.decisions.held_at, line.decisions.note, line.decisions.owner, line.decisions.tags) == (
        None,
        None,
        None,
        (),
    )
    assert line.state is GroupState.NEW
    assert len(claimed(engine)) == 2
    undo(engine, str(undone.action), now=NOW, **WHO)
    assert of_group(engine, A, now=NOW).lines[0].state is GroupState.ACKNOWLEDGED
    acknowledge(engine, A, more=9, **WHO)
    with pytest.raises(NotUndoable, match="somebody has decided something else"):
        undo(engine, known.action, **WHO)


def test_what_somebody_else_has_decided_is_not_written_over_unseen(engine: Engine) -> None:
    pending(engine, 1, fingerprint=A)
    hold(engine, A, **WHO)
    with pytest.raises(AlreadyHeld, match=r"by ann since .* UTC: for the developers"):
        hold(engine, A, actor="bob", reason="the limit")
    hold(engine, A, actor="ann", reason="INC-1")
    note(engine, A, text="INC-1", owner="team-a", seen={"note": "", "owner": ""}, actor="ann")
    with pytest.raises(WrittenSince, match="note 'INC-1', owner 'team-a'"):
        note(engine, A, text="whose?", owner="", seen={"note": "", "owner": ""}, actor="bob")
    note(engine, A, text="INC-2", seen={"note": "INC-1", "owner": "team-a"}, actor="bob")
    (line,) = of_group(engine, A).lines
    assert (line.decisions.held_why, line.decisions.note, line.decisions.owner) == ("INC-1", "INC-2", "team-a")
    assert len(recent(engine, 10)) == 4


def test_what_was_parked_and_discarded_is_sent_when_hold_and_discard_are_taken_back(engine: Engine) -> None:
    (row_id,) = pending(engine, 1, fingerprint=A)
    hold(engine, A, now=NOW, **WHO)
    assert claimed(engine) == set()
    discarded = MessageActions(engine).discard([row_id], now=NOW, **WHO)
    unhold(engine, A, now=NOW, **WHO)
    undo(engine, str(discarded.action), now=NOW, **WHO)
    assert claimed(engine) == {row_id}


def test_a_decision_that_is_stored_shortened_can_be_undone(engine: Engine) -> None:
    pending(engine, 1, fingerprint=A)
    for decided in (
        hold(engine, A, actor="n" * 400, reason="r" * 3000),
        note(engine, A, text="n" * 3000, owner="\0", tags=["\0"], actor="ann"),
    ):
        assert undo(engine, decided.action, **WHO).action is not None
    assert of_group(engine, A).lines[0].decisions == Decisions()


# --- The inbox


def test_a_failure_is_a_line_for_each_queue(engine: Engine) -> None:
    add(
        engine, *(row(fingerprint=A, origin_queue="orders") for _ in range(3)), row(fingerprint=A, origin_queue="mails")
    )
    found = inbox(engine, Filters(), now=NOW)
    assert [(line.group, line.queue, line.size) for line in found.lines] == [(A, "orders", 3), (A, "mails", 1)]
    assert (found.total, found.is_complete) == (2, True)
    one = inbox(engine, Filters(), limit=1, now=NOW)
    assert (len(one.lines), one.total) == (1, 2)


def test_the_same_failure_in_two_dialects_is_one_line(engine: Engine) -> None:
    other = "the currency of order 4 is missing"
    same = {"origin_queue": "orders", "error_message": "the currency of order 4711 is missing"}
    add(engine, *(row(fingerprint=A, error_type="payments.KeyError", **same) for _ in range(2)))
    add(
        engine,
        row(fingerprint=B, error_type="KeyError", **same | {"error_message": other}),
    )
    add(engine, row(fingerprint="c" * 16, error_type="KeyError", origin_queue="orders", error_message="no such tenant"))
    first, second = inbox(engine, Filters(), now=NOW).lines
    assert (first.group, first.also, first.size) == (A, (B,), 3)
    assert (second.group, second.size) == ("c" * 16, 1)


def test_a_group_that_came_back_after_it_was_resolved_has_regressed(engine: Engine) -> None:
    (row_id,) = pending(engine, 1, fingerprint=A)
    add(engine, row(fingerprint=A), at=NOW + timedelta(hours=2))
    now = NOW + timedelta(hours=3, minutes=30)
    assert inbox(engine, Filters(), now=now).lines[0].state is GroupState.ONGOING
    with writing(engine) as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == row_id).values(status=Status.RESOLVED))
    assert inbox(engine, Filters(), now=now).lines[0].state is GroupState.REGRESSED
    assert inbox(engine, Filters(), now=now + timedelta(days=2)).lines[0].state is GroupState.QUIET


def test_a_group_of_which_nothing_came_after_one_was_resolved_has_not_regressed(engine: Engine) -> None:
    (row_id,) = pending(engine, 1, fingerprint=A)
    add(engine, row(fingerprint=A), at=NOW + timedelta(hours=2))
    with writing(engine) as connection:
        resolved = {"status": Status.RESOLVED, "status_since": NOW + timedelta(hours=3)}
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == row_id).values(resolved))
    assert inbox(engine, Filters(), now=NOW + timedelta(hours=4)).lines[0].state is GroupState.ONGOING


def test_an_acknowledgement_in_one_queue_counts_what_comes_in_that_queue(engine: Engine) -> None:
    add(engine, *(row(fingerprint=A, origin_queue=queue) for queue in ("orders", "mails")))
    acknowledge(engine, A, queue="orders", more=2, now=NOW, **WHO)
    add(engine, *(row(fingerprint=A, origin_queue="mails") for _ in range(3)), at=NOW + timedelta(minutes=1))
    now = NOW + timedelta(minutes=2)
    states = {line.queue: line.state for line in inbox(engine, Filters(), now=now).lines}
    assert states == {"orders": GroupState.ACKNOWLEDGED, "mails": GroupState.NEW}
    add(engine, *(row(fingerprint=A, origin_queue="orders") for _ in range(2)), at=NOW + timedelta(minutes=1))
    assert {line.state for line in inbox(engine, Filters(), now=now).lines} == {GroupState.NEW}


def test_a_claim_beside_a_large_held_group_reads_little(database_url: str) -> None:
    """What is parked stands in no index that a claim reads."""
    engine = store_at(database_url)
    fill(engine, 20_000, due=4_000)
    with reading(engine) as connection:
        group = str(connection.scalar(select(MESSAGES.c.fingerprint).limit(1)))
    hold(engine, group, **WHO)
    claimed(engine, limit=1_000)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE dlq_messages"))
    query = select(MESSAGES.c.id).where(text(IS_DUE), ~holds.IS_ON_HOLD).limit(100)
    with reading(engine) as connection:
        sql = str(query.compile(connection.engine, compile_kwargs={"literal_binds": True}))
        plan = "\n".join(connection.scalars(text(f"EXPLAIN (ANALYZE, BUFFERS) {sql}")))
        assert "dlq_messages_scope_due" in plan, plan
        assert connection.scalar(text(f"SELECT count(*) FROM dlq_messages WHERE {IS_DUE}")) == 0
