"""Three people at once beside a lifecycle: 200 actions, then undone in any order, against a plain model.

Who was first is read from the journal: the changes of one message stand in it one after the other.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from dead_rows import NOW, add, begin_attempts, row, store_at
from program import HANGS_AFTER
from sqlalchemy import func, select, update

from dlqbatch.actions.undo import NotUndoable, undo
from dlqbatch.errors import DlqbatchError
from dlqbatch.groups import decisions
from dlqbatch.lifecycle import attempts
from dlqbatch.lifecycle.leases import claim, give_back
from dlqbatch.lifecycle.strategy import Back
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.edit import Editing
from dlqbatch.store.action_tables import GROUPS
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.filters import Filters
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Engine

    from dlqbatch.messages.changes import Changes

ACTIONS = 200
PEOPLE = ("ann", "bob", "cho")
MESSAGES_OF_ALL = 40


class Done(NamedTuple):
    name: str
    undoes: str | None
    row_ids: frozenset[int]


class Incident:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.seed = engine, seed
        rows = [row(status=(Status.PENDING, Status.MANUAL)[number % 2]) for number in range(MESSAGES_OF_ALL)]
        self.ids = add(engine, *(each | {"next_retry_at": NOW} for each in rows if each["status"] is Status.PENDING))
        self.ids += add(engine, *(each for each in rows if each["status"] is Status.MANUAL))
        self.done: dict[str, Done] = {}
        """By the reason, which is that action's alone."""
        self.sent: list[int] = []
        self._people_are_done = threading.Event()

    def happen(self) -> None:
        with ThreadPoolExecutor(len(PEOPLE) + 1) as together:
            jobs = together.submit(self._run_jobs)
            people = [together.submit(self._act, name, ACTIONS // len(PEOPLE) + 1) for name in PEOPLE]
            try:
                for each in people:
                    each.result(HANGS_AFTER)
            finally:
                self._people_are_done.set()
            jobs.result(HANGS_AFTER)

    def _act(self, person: str, number: int) -> None:
        chance, store = random.Random(f"{self.seed} {person}"), MessageActions(self.engine)
        for turn in range(number):
            reason = f"{person} {turn}."
            who: dict[str, Any] = {"actor": person, "reason": reason, "now": NOW + timedelta(seconds=turn)}
            chosen, step, known = (
                chance.sample(self.ids, chance.randint(1, 8)),
                chance.random(),
                list(self.done.values()),
            )
            if step < 0.35:
                self._keep(reason, store.discard(chosen, **who))
            elif step < 0.55 or not known:
                self._keep(reason, store.restore(chosen, **who))
            else:
                name = chance.choice(known).name
                self._keep(reason, undo(self.engine, name, **who), name)

    def _keep(self, reason: str, changes: Changes, undoes: str | None = None) -> None:
        if changes.action is not None:
            ids = frozenset(each.id for each in changes.changes if each.is_done and each.id is not None)
            self.done[reason] = Done(changes.action, undoes, ids)

    def _run_jobs(self) -> None:
        """What is due is sent, or cannot be sent and is a person's."""
        chance = random.Random(f"{self.seed} jobs")
        while not self._people_are_done.is_set():
            taken = claim(self.engine, "w", NOW + timedelta(days=1), limit=2)
            tokens = {each.row_id: each.token for each in taken}
            numbers = begin_attempts(self.engine, tokens, Strategy.IMMEDIATE, "w", NOW)
            for row_id, token in tokens.items():
                if chance.random() < 0.3:
                    give_back(self.engine, {row_id: Back(token, Status.MANUAL, "not routable")}, NOW)
                else:
                    attempts.mark_sent(self.engine, {row_id: numbers[row_id]}, NOW)
                    self.sent.append(row_id)
            self._people_are_done.wait(0.02)

    def undo_all(self) -> None:
        chance = random.Random(f"{self.seed} undo")
        left = list(self.done.values())
        for number, each in enumerate(chance.sample(left, len(left))):
            reason = f"all {number}."
            self._keep(reason, undo(self.engine, each.name, actor="ann", reason=reason), each.name)

    def check(self) -> None:
        """Each change in the journal is what the model expects, and the last one says what state a message is in."""
        with reading(self.engine) as connection:
            lines = connection.execute(select(TRANSITIONS).order_by(TRANSITIONS.c.message_id, TRANSITIONS.c.id)).all()
            found = dict(connection.execute(select(MESSAGES.c.id, MESSAGES.c.status)).all())
        seen: defaultdict[str, set[int]] = defaultdict(set)
        for row_id, of_row in groupby(lines, lambda line: line.message_id):
            # An action may take several steps to get where it goes.
            steps = [(reason, list(some)) for reason, some in groupby(of_row, lambda line: line.reason)]
            assert found[row_id] == self._state_by_the_model(row_id, steps, seen), (self.seed, row_id)
        assert seen == {reason: set(each.row_ids) for reason, each in self.done.items() if each.row_ids}, self.seed

    def _state_by_the_model(self, row_id: int, steps: list[tuple[str, list[Any]]], seen: dict[str, set[int]]) -> Status:
        by_action = {each.name: reason for reason, each in self.done.items()}
        states = [steps[0][1][-1].to_status]
        """By version: each change makes one, and an undo brings one back."""
        version = 0
        changed: dict[str, tuple[int, int]] = {}
        """By the reason of an action: the versions before and after."""
        for said, some in steps[1:]:
            reason, after = said.rpartition(": ")[2], some[-1].to_status
            assert some[0].from_status == states[version], (self.seed, some)
            before, action = version, self.done.get(reason)
            if action is None or action.undoes is None:
                states.append(after)
                version = len(states) - 1
            else:
                version, left = changed[by_action[action.undoes]]
                assert left == before, (self.seed, "it had changed since, and was put back all the same", some)
                # What became of its retry was not watched meanwhile.
                states[version] = Status.MANUAL if states[version] is Status.PROCESSING else states[version]
                assert after == states[version], (self.seed, some)
            if action is not None:
                changed[reason] = (before, version)
                seen[reason].add(row_id)
        return states[version]


def test_what_three_people_did_at_once_is_undone_in_any_order(database_url: str) -> None:
    engine, seed = store_at(database_url), secrets.randbits(32)
    with keeping(engine):
        incident = Incident(engine, seed)
    incident.happen()
    incident.check()
    incident.undo_all()
    incident.check()
    assert len(incident.sent) == len(set(incident.sent)), f"seed {seed}: sent twice"
    assert incident.sent
    assert len(incident.done) > ACTIONS // 2, f"seed {seed}"


class IncidentOfEdits(Incident):
    """They also edit, and hold the groups of messages; each message has a group of its own, as its edits do."""

    def __init__(self, engine: Engine, seed: int) -> None:
        super().__init__(engine, seed)
        self.groups = {row_id: f"{row_id:016x}" for row_id in self.ids}
        self.edits: list[int] = []
        self.taken_though_held: list[int] = []
        with writing(engine) as connection:
            for row_id, group in self.groups.items():
                connection.execute(update(MESSAGES).where(MESSAGES.c.id == row_id).values(fingerprint=group))

    def _act(self, person: str, number: int) -> None:
        chance, store = random.Random(f"{self.seed} {person}"), MessageActions(self.engine)
        for turn in range(number):
            who: dict[str, Any] = {"actor": person, "reason": f"{person} {turn}."}
            row_id, step, known = chance.choice(self.ids), chance.random(), list(self.done.values())
            with suppress(DlqbatchError):  # somebody was first, or there is nothing to change
                if step < 0.2:
                    self._keep(who["reason"], store.discard([row_id], **who))
                elif step < 0.3:
                    # By a filter: what an edit took the place of would go out beside it.
                    self._keep(who["reason"], store.restore(filters=Filters(groups=(self.groups[row_id],)), **who))
                elif step < 0.5:
                    self._edit(chance.choice([row_id, *self.edits]), turn, who)
                elif step < 0.7 or not known:
                    change = chance.choice((decisions.hold, decisions.unhold))
                    decided = change(self.engine, self.groups[row_id], **who, now=NOW + timedelta(seconds=turn))
                    self.done[who["reason"]] = Done(decided.action, None, frozenset())
                else:
                    name = chance.choice(known).name
                    self._keep(who["reason"], undo(self.engine, name, **who), name)

    def _edit(self, row_id: int, turn: int, who: dict[str, Any]) -> None:
        edited = Editing(self.engine).edit(row_id, body=b"mended %d" % turn, force=True, **who)
        assert edited.id is not None
        assert edited.action is not None
        self.edits.append(edited.id)
        self.done[who["reason"]] = Done(edited.action, None, frozenset())

    def _run_jobs(self) -> None:
        chance = random.Random(f"{self.seed} jobs")
        while not self._people_are_done.is_set():
            held = self._held()
            taken = claim(self.engine, "w", NOW + timedelta(days=1), limit=2)
            tokens = {each.row_id: each.token for each in taken}
            all_the_time = held & self._held()
            found = {row_id: group for row_id, group in self._groups_of(tokens).items() if group in dict(all_the_time)}
            self.taken_though_held += found
            numbers = begin_attempts(self.engine, tokens, Strategy.IMMEDIATE, "w", NOW)
            for row_id, token in tokens.items():
                if chance.random() < 0.3:
                    give_back(self.engine, {row_id: Back(token, Status.MANUAL, "not routable")}, NOW)
                else:
                    attempts.mark_sent(self.engine, {row_id: numbers[row_id]}, NOW)
                    self.sent.append(row_id)
            self._people_are_done.wait(0.02)

    def _held(self) -> set[tuple[str, Any]]:
        with reading(self.engine) as connection:
            held = select(GROUPS.c.fingerprint, GROUPS.c.held_at, GROUPS.c.held_why).where(
                GROUPS.c.held_at.is_not(None)
            )
            return {(row.fingerprint, (row.held_at, row.held_why)) for row in connection.execute(held)}

    def _groups_of(self, row_ids: Iterable[int]) -> dict[int, str]:
        with reading(self.engine) as connection:
            found = select(MESSAGES.c.id, MESSAGES.c.fingerprint).where(MESSAGES.c.id.in_(list(row_ids)))
            return dict(connection.execute(found).all())

    def undo_all(self) -> None:
        chance = random.Random(f"{self.seed} undo")
        left = list(self.done.values())
        for number, each in enumerate(chance.sample(left, len(left))):
            with suppress(NotUndoable):  # somebody has decided something else since
                undo(self.engine, each.name, actor="ann", reason=f"all {number}.")

    def check(self) -> None:
        """A message and its edits are one piece of work: one of them stands for it, and one of them goes out."""
        with reading(self.engine) as connection:
            columns = (MESSAGES.c.id, MESSAGES.c.identity, MESSAGES.c.parent, MESSAGES.c.status)
            rows = connection.execute(select(*columns).order_by(MESSAGES.c.id)).all()
            last = select(func.max(TRANSITIONS.c.id)).group_by(TRANSITIONS.c.message_id)
            lines = connection.execute(select(TRANSITIONS).where(TRANSITIONS.c.id.in_(last))).all()
        assert {row.id: row.status for row in rows} == {line.message_id: line.to_status for line in lines}, self.seed
        works: dict[str, str] = {}
        alive: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for each in rows:  # a parent has the smaller id
            work = works[each.identity] = works.get(each.parent or "", each.identity)
            alive[work] += each.status is not Status.ARCHIVED
            sent[work] += self.sent.count(each.id)
        assert max(alive.values()) <= 1, (self.seed, alive)
        assert max(sent.values()) <= 1, (self.seed, sent)
        assert self.taken_though_held == [], self.seed


def test_edits_and_holds_of_three_people_are_undone_in_any_order_and_no_work_is_doubled(database_url: str) -> None:
    engine, seed = store_at(database_url), secrets.randbits(32)
    with keeping(engine):
        incident = IncidentOfEdits(engine, seed)
    incident.happen()
    incident.check()
    assert incident.edits, f"seed {seed}"
    incident.undo_all()
    incident.check()
