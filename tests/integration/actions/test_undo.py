"""Actions of people and their undo, on both databases."""

from __future__ import annotations

import random
import sqlite3
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, begin_attempts, row, store_at
from plan_rows import reserve
from sqlalchemy import select

from dlqbatch.actions import undo as undoing
from dlqbatch.actions.queries import recent, show
from dlqbatch.actions.undo import NotUndoable, undo
from dlqbatch.drain.event_config import EventConfig
from dlqbatch.lifecycle import attempts
from dlqbatch.lifecycle.leases import claim, give_back
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.lifecycle.strategy import Back
from dlqbatch.messages import changes as bulk
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.changes import Changes
from dlqbatch.messages.edit import Editing, header_edits
from dlqbatch.messages.shown import Reveal
from dlqbatch.store import action_log
from dlqbatch.store.action_log import By, NoSuchAction
from dlqbatch.store.engine import create_engine_for, keeping, reading, writing
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.journal import move
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

PENDING, MANUAL, FAILED, ARCHIVED = Status.PENDING, Status.MANUAL, Status.FAILED, Status.ARCHIVED
WHO: dict[str, Any] = {"actor": "ann", "reason": "a test"}


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@pytest.fixture
def store(engine: Engine) -> MessageActions:
    return MessageActions(engine)


def failed(engine: Engine) -> int:
    """A message whose last attempt failed."""
    (row_id,) = add(engine, row(next_retry_at=NOW, priority=200))
    (taken,) = claim(engine, "w", NOW, limit=1)
    assert taken.row_id == row_id
    give_back(engine, {row_id: Back(taken.token, Status.FAILED, "five attempts failed")}, NOW)
    return row_id


def states(engine: Engine) -> dict[int, Status]:
    with reading(engine) as connection:
        return dict(connection.execute(select(MESSAGES.c.id, MESSAGES.c.status)).all())


def done(changes: Changes) -> str:
    assert changes.action is not None
    return changes.action


def test_an_undone_discard_gives_each_message_its_state_back(engine: Engine, store: MessageActions) -> None:
    waiting, due = add(engine, row(next_retry_at=NOW + timedelta(hours=3)), row())
    (person,) = add(engine, row(status=MANUAL))
    last = failed(engine)
    before = states(engine)
    action = done(store.discard([waiting, due, person, last], **WHO))
    assert set(states(engine).values()) == {ARCHIVED}
    undone = undo(engine, action, **WHO)
    assert (undone.done, undone.not_done) == (4, 0)
    assert states(engine) == before
    assert store.show(waiting).record.next_retry_at == NOW + timedelta(hours=3)
    journal = store.show(last).transitions[-1]
    assert (journal.from_status, journal.to_status, journal.reason) == (ARCHIVED, FAILED, f"undo of {action}: a test")


def test_an_action_says_who_did_what_and_why_and_what_became_of_each(engine: Engine, store: MessageActions) -> None:
    free, held = add(engine, row(fingerprint="a" * 16), row(fingerprint="a" * 16))
    reserve(engine, held)
    name = done(store.discard(filters=Filters.parse(group="a" * 16), actor="ann", reason="of no use", now=NOW))
    shown = show(engine, name)
    action = shown.action
    assert (action.kind, action.actor, action.verified, action.reason) == ("discard", "ann", False, "of no use")
    assert (action.filters, action.at, action.ended_at) == ({"group": "a" * 16}, NOW, NOW)
    assert action.counts == {"done": 1, "refused": 1}
    by_id = {each.id: each for each in shown.messages}
    assert (by_id[free].state, by_id[free].before, by_id[free].after) == ("done", PENDING, ARCHIVED)
    assert by_id[held].state == "refused"
    assert "has reserved it" in str(by_id[held].why)
    undone = done(undo(engine, name, **WHO))
    assert [each.name for each in recent(engine)] == [undone, name]
    assert show(engine, name).action.undone_by == undone
    assert (show(engine, undone).action.undoes, show(engine, name).action.counts) == (name, {"undone": 1, "refused": 1})


def test_a_secret_in_a_reason_or_a_filter_is_masked(engine: Engine, store: MessageActions) -> None:
    add(engine, row(error_message="login with password=hunter2 failed"))
    filters = Filters.parse(text="password=hunter2")
    name = done(store.discard(filters=filters, actor="ann", reason="password=hunter2 is old", now=NOW))
    assert (recent(engine)[0].reason, show(engine, name).action.filters) == (
        "password=*** is old",
        {"text": "password=***"},
    )


def test_pages_of_an_action_hold_all_its_messages(engine: Engine, store: MessageActions) -> None:
    ids = add(engine, *(row() for _ in range(7)))
    name = done(store.discard(ids, **WHO))
    seen: list[int] = []
    after: int | None = 0
    while after is not None:
        page = show(engine, name, 3, after)
        seen += [each.id for each in page.messages]
        after = page.next
    assert seen == sorted(ids)
    assert show(engine, name, state="refused").messages == ()


def test_what_has_changed_since_is_left_alone_and_listed(engine: Engine, store: MessageActions) -> None:
    restored, twice, reserved, left = add(engine, *(row() for _ in range(4)))
    action = done(store.discard([restored, twice, reserved, left], **WHO))
    store.restore([restored, twice], **WHO)
    store.discard([twice], **WHO)
    reserve(engine, reserved)
    undone = undo(engine, action, **WHO)
    assert [each.id for each in undone.changes if each.is_done] == [left]
    why = {each.id: each.why for each in undone.changes}
    assert "it has changed since: it is manual" in why[restored]
    assert "it has changed since: it is archived" in why[twice]
    assert "is reserved by replay plan" in why[reserved]
    assert {each.id for each in show(engine, done(undone), state="skipped").messages} == {restored, twice, reserved}


def test_a_dry_run_of_an_undo_says_the_same_and_changes_nothing(engine: Engine, store: MessageActions) -> None:
    ids = add(engine, *(row() for _ in range(3)))
    action = done(store.discard(ids, **WHO))
    store.restore(ids[:1], **WHO)
    before = states(engine)
    planned = undo(engine, action, dry_run=True, **WHO)
    assert (planned.action, states(engine)) == (None, before)
    assert undo(engine, action, **WHO).changes == planned.changes


def test_an_action_that_changes_nothing_is_not_written(engine: Engine, store: MessageActions) -> None:
    (row_id,) = add(engine, row())
    assert store.restore([row_id, 10**9], **WHO).action is None
    assert store.discard([row_id], dry_run=True, **WHO).action is None
    assert recent(engine) == ()


def test_what_was_under_way_comes_back_to_a_person(engine: Engine, store: MessageActions) -> None:
    (row_id,) = add(engine, row(next_retry_at=NOW))
    tokens = {each.row_id: each.token for each in claim(engine, "w", NOW)}
    attempts.mark_sent(engine, begin_attempts(engine, tokens, Strategy.IMMEDIATE, "w", NOW), NOW)
    action = done(store.discard([row_id], **WHO))
    (change,) = undo(engine, action, **WHO).changes
    assert (change.before, change.after) == (ARCHIVED, MANUAL)
    assert "its retry had been sent" in change.why
    assert claim(engine, "w", NOW + timedelta(days=1)) == []


def test_an_undone_edit_has_its_original_back_and_a_second_undo_makes_it_again(engine: Engine) -> None:
    (row_id,) = add(engine, row(body=b'{"a":1}'))
    edited = Editing(engine).edit(row_id, body=b'{"a":2}', **WHO)
    assert edited.action is not None
    first = undo(engine, edited.action, **WHO)
    assert states(engine) == {row_id: PENDING, edited.id: ARCHIVED}
    second = undo(engine, done(first), **WHO)
    assert states(engine) == {row_id: ARCHIVED, edited.id: MANUAL}
    assert (first.done, second.done) == (2, 2)
    assert show(engine, edited.action).action.counts == {"done": 2}
    undo(engine, done(second), **WHO)
    assert states(engine) == {row_id: PENDING, edited.id: ARCHIVED}
    assert show(engine, edited.action).action.counts == {"undone": 2}


def test_an_edit_that_was_sent_is_not_undone(engine: Engine, store: MessageActions) -> None:
    (row_id,) = add(engine, row(body=b'{"a":1}'))
    edited = Editing(engine).edit(row_id, body=b'{"a":2}', **WHO)
    assert edited.id is not None
    assert edited.action is not None
    with writing(engine) as connection:
        lock = {"lock_owner": "w", "lock_token": "t"}
        assert move(connection, edited.id, MANUAL, Status.PROCESSING, None, NOW, "ann", "sent", **lock)
    undone = undo(engine, edited.action, **WHO)
    assert (undone.done, undone.action) == (0, None)
    assert f"message {edited.id}, which took its place, has changed since: it is processing" in undone.changes[0].why
    assert states(engine) == {row_id: ARCHIVED, edited.id: Status.PROCESSING}


def test_no_undo_brings_an_original_back_beside_its_edit(engine: Engine, store: MessageActions) -> None:
    """It was restored by hand after the edit, and discarded again: its edit may have been sent meanwhile."""
    (row_id,) = add(engine, row(body=b'{"a":1}'))
    edited = Editing(engine).edit(row_id, body=b'{"a":2}', **WHO)
    store.restore([row_id], **WHO)
    action = done(store.discard([row_id], **WHO))
    (change,) = undo(engine, action, **WHO).changes
    assert not change.is_done
    assert f"message {edited.id} (manual) is the same work by an edit" in change.why
    assert states(engine)[row_id] is ARCHIVED


def test_a_restore_by_filter_brings_one_of_the_same_work_back(engine: Engine, store: MessageActions) -> None:
    (row_id,) = add(engine, row(body=b'{"a":1}'))
    editing, everything = Editing(engine), Filters(statuses=(ARCHIVED,))
    undone = editing.edit(row_id, body=b'{"a":2}', **WHO)
    undo(engine, str(undone.action), **WHO)
    assert undone.id is not None
    (change,) = store.restore(filters=everything, **WHO).changes
    assert change.why.startswith(f"message {row_id} (pending) is the same work by an edit")
    assert states(engine) == {row_id: PENDING, undone.id: ARCHIVED}
    newer = editing.edit(row_id, body=b'{"a":3}', **WHO)
    assert newer.id is not None
    store.discard([newer.id], **WHO)
    store.restore(filters=everything, **WHO)
    assert states(engine) == {row_id: ARCHIVED, undone.id: ARCHIVED, newer.id: MANUAL}
    store.restore([undone.id], **WHO)
    assert states(engine)[undone.id] is MANUAL


def test_an_action_is_a_filter_everywhere(engine: Engine, store: MessageActions) -> None:
    first, second, other = add(engine, *(row(body=b'{"a":1}') for _ in range(3)))
    discarded = done(store.discard([first, second], **WHO))
    edited = Editing(engine).edit(other, headers=header_edits([("tenant", "blue")]), **WHO)

    def found(**words: Any) -> set[int]:
        return {each.id for each in store.page(Filters.parse(**words)).messages}

    assert found(action=discarded) == found(action=discarded.lower()) == found(action=discarded[2:]) == {first, second}
    assert found(action=edited.action) == {edited.id}
    assert found(action=[discarded, str(edited.action)]) == {first, second, edited.id}
    assert found(unwanted=f"action={discarded}") == {other, edited.id}
    undo(engine, discarded, **WHO)
    assert done(store.discard(filters=Filters.parse(action=discarded), **WHO)) is not None
    assert states(engine)[first] is ARCHIVED
    with pytest.raises(NoSuchAction, match="A-999"):
        found(action="A-999")
    for wrong in ("", "A-", "A-0", "B-1", "A-1x", "A-" + "9" * 40, "\udcff"):
        with pytest.raises(NotUnderstood):
            found(action=wrong)


def test_a_discard_that_is_killed_shows_what_it_did_and_can_be_undone(
    engine: Engine, store: MessageActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "AT_ONCE", 4)
    ids = add(engine, *(row(fingerprint="a" * 16) for _ in range(10)))
    count = 0
    real = action_log.add_rows

    def killed(*given: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        real(*given)

    monkeypatch.setattr(action_log, "add_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        store.discard(filters=Filters.parse(group="a" * 16), **WHO)
    monkeypatch.setattr(action_log, "add_rows", real)
    (action,) = recent(engine)
    assert (action.counts, action.ended_at) == ({"done": 8}, None)
    gone = {row_id for row_id, status in states(engine).items() if status is ARCHIVED}
    assert {each.id for each in show(engine, action.name).messages} == gone
    assert store.discard(filters=Filters.parse(group="a" * 16), **WHO).done == 2
    assert undo(engine, action.name, **WHO).done == 8
    assert sorted(row_id for row_id, status in states(engine).items() if status is PENDING) == sorted(gone & set(ids))


def test_an_undo_that_is_killed_goes_on_where_it_was(
    engine: Engine, store: MessageActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undoing, "AT_ONCE", 3)
    ids = add(engine, *(row() for _ in range(8)))
    action = done(store.discard(ids, **WHO))
    count = 0
    real = undoing._mark

    def killed(*given: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        real(*given)

    monkeypatch.setattr(undoing, "_mark", killed)
    with pytest.raises(KeyboardInterrupt):
        undo(engine, action, **WHO)
    monkeypatch.setattr(undoing, "_mark", real)
    assert show(engine, action).action.counts == {"done": 2, "undone": 6}
    assert undo(engine, action, **WHO).done == 2
    assert set(states(engine).values()) == {PENDING}
    assert undo(engine, action, **WHO).changes == ()


# --- Random histories against a plain model


class History:
    """What people and a lifecycle do at random, and a plain model of what each message's state is by it.

    Every change gives a message a new version; an undo gives it the version back that it had, if it has the one that
    the action left.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.store = MessageActions(engine)
        self.chance = random.Random(seed)
        self.clock = NOW
        self.versions: dict[int, int] = {}
        self.states: list[Status] = []
        """By version."""
        self.actions: dict[str, dict[int, tuple[int, int]]] = {}
        """By action that is not undone: the version of each message before and after."""
        self.undoes: dict[str, str] = {}
        self.sent: set[int] = set()
        for number in range(24):
            status = (PENDING, MANUAL)[number % 2]
            (row_id,) = add(engine, row(status=status, next_retry_at=NOW if status is PENDING else None))
            self.change(row_id, status)

    def change(self, row_id: int, status: Status) -> tuple[int, int]:
        before = self.versions.get(row_id, -1)
        self.states.append(status)
        self.versions[row_id] = len(self.states) - 1
        return before, self.versions[row_id]

    def state(self, row_id: int) -> Status:
        return self.states[self.versions[row_id]]

    def step(self) -> None:
        self.clock += timedelta(seconds=1)
        step = self.chance.random()
        chosen = self.chance.sample(list(self.versions), self.chance.randint(1, 8))
        who: dict[str, Any] = {
            "actor": self.chance.choice(("ann", "bob", "cho")),
            "reason": "a test",
            "now": self.clock,
        }
        if step < 0.35:
            # What is under way can be discarded, and comes back to a person: another test shows that.
            chosen = [row_id for row_id in chosen if self.state(row_id) is not Status.PROCESSING]
            if chosen:
                self.count(self.store.discard(chosen, **who), {PENDING, MANUAL, FAILED}, ARCHIVED)
        elif step < 0.5:
            self.count(self.store.restore(chosen, **who), {ARCHIVED}, MANUAL)
        elif step < 0.56:
            self.run_a_job()
        elif self.actions:
            self.undo(self.chance.choice(list(self.actions)), **who)

    def count(self, changes: Changes, starts: set[Status], end: Status) -> None:
        lines = {}
        for change in changes.changes:
            assert change.id is not None
            assert change.is_done == (self.state(change.id) in starts), change
            if change.is_done:
                lines[change.id] = self.change(change.id, end)
        if lines:
            self.actions[done(changes)] = lines

    def run_a_job(self) -> None:
        """What is due is sent, or cannot be sent and is a person's."""
        taken = claim(self.engine, "w", self.clock, limit=3)
        tokens = {each.row_id: each.token for each in taken}
        numbers = begin_attempts(self.engine, tokens, Strategy.IMMEDIATE, "w", self.clock)
        for row_id, token in tokens.items():
            assert self.state(row_id) is PENDING
            if self.chance.random() < 0.5:
                give_back(self.engine, {row_id: Back(token, MANUAL, "not routable")}, self.clock)
                self.change(row_id, MANUAL)
            else:
                assert row_id not in self.sent, "it is sent twice"
                attempts.mark_sent(self.engine, {row_id: numbers[row_id]}, self.clock)
                self.sent.add(row_id)
                self.change(row_id, Status.PROCESSING)

    def undo(self, name: str, **who: Any) -> None:
        lines = {
            row_id: (after, before)
            for row_id, (before, after) in self.actions[name].items()
            if self.versions[row_id] == after
        }
        changes = undo(self.engine, name, **who)
        assert {each.id for each in changes.changes if each.is_done} == set(lines)
        for row_id, (after, before) in lines.items():
            self.versions[row_id] = before
            del self.actions[name][row_id]
            if name in self.undoes:
                self.actions[self.undoes[name]][row_id] = (after, before)
        if lines:
            self.actions[done(changes)] = lines
            self.undoes[done(changes)] = name

    def check(self) -> None:
        assert states(self.engine) == {row_id: self.state(row_id) for row_id in self.versions}


@pytest.mark.parametrize("seed", range(2))
def test_any_history_undone_in_any_order_leaves_what_a_plain_model_says(engine: Engine, seed: int) -> None:
    """200 steps of three people beside a lifecycle; nothing is sent twice."""
    with keeping(engine):
        history = History(engine, seed)
        for _ in range(200):
            history.step()
        history.check()
        for name in history.chance.sample(list(history.actions), len(history.actions)):
            history.undo(name, **WHO)
        history.check()
    assert history.sent


# --- Decisions about the policy


BY = By("ann", "a test")


def rule(engine: Engine, name: str) -> tuple[str, Strategy] | None:
    return next(((each.pattern, each.strategy) for each in Rules(engine).all() if each.name == name), None)


def test_a_rule_is_an_action_and_its_undo_brings_the_former_rule_back(engine: Engine) -> None:
    rules = Rules(engine)
    added = rules.set("limited", pattern="429", strategy=Strategy.SCHEDULED, by=BY).action
    changed = rules.set("limited", pattern="430", by=BY).action
    removed = rules.remove("limited", by=BY)
    assert removed is not None
    assert [(each.name, each.kind, each.actor, each.reason) for each in recent(engine)] == [
        (name, "rule", "ann", "a test") for name in (removed.action, changed, added)
    ]
    with pytest.raises(NotUndoable, match="somebody has changed the rule 'limited' since"):
        undo(engine, str(changed), **WHO)
    undo(engine, str(removed.action), **WHO)
    assert rule(engine, "limited") == ("430", Strategy.SCHEDULED)
    undone = undo(engine, str(changed), **WHO)
    assert rule(engine, "limited") == ("429", Strategy.SCHEDULED)
    undo(engine, done(undone), **WHO)
    assert rule(engine, "limited") == ("430", Strategy.SCHEDULED)
    undo(engine, str(changed), **WHO)
    undo(engine, str(added), **WHO)
    assert rule(engine, "limited") is None
    rules.set("limited", pattern="429", strategy=Strategy.SCHEDULED, by=BY)
    assert rules.set("limited", pattern="429", by=BY).action is None


def test_an_event_is_an_action_and_its_undo_brings_the_former_number_back(engine: Engine) -> None:
    events = EventConfig(engine)
    added = events.set("orders.#", 3, BY).action
    changed = events.set("orders.#", None, BY).action
    removed = events.remove("orders.#", BY).action
    assert [(each.name, each.kind) for each in recent(engine)] == [
        (name, "event") for name in (removed, changed, added)
    ]
    with pytest.raises(NotUndoable, match="somebody has changed the event"):
        undo(engine, str(added), **WHO)
    numbers = []
    for name in (removed, changed, added):
        undo(engine, str(name), dry_run=True, **WHO)
        undo(engine, str(name), **WHO)
        numbers.append([each.max_retries for each in events.read()])
    assert numbers == [[None], [3], []]


def test_events_are_changed_in_a_database_without_actions(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "policy.sqlite3") as connection:
        connection.execute("CREATE TABLE dlq_event_config (id integer, name text, max_retries integer)")
    events = EventConfig(create_engine_for(f"sqlite:///{tmp_path / 'policy.sqlite3'}", connect_timeout=30))
    assert events.set("orders.#", 3, BY).action is None
    assert events.remove("orders.#", BY) == (1, None)


def test_looking_at_a_message_unmasked_is_no_change_that_stands_in_the_way(
    engine: Engine, store: MessageActions
) -> None:
    (row_id,) = add(engine, row(status=MANUAL))
    name = done(store.discard([row_id], **WHO))
    store.show(row_id, Reveal("bob", "ticket 7"))
    assert undo(engine, name, **WHO).done == 1
    assert states(engine) == {row_id: MANUAL}
