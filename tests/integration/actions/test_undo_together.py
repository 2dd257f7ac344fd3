"""Three people at once beside a lifecycle: 200 actions, then undone in any order, against a plain model.

Who was first is read from the journal: the changes of one message stand in it one after the other.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from dead_rows import NOW, add, begin_attempts, row, store_at
from program import HANGS_AFTER
from sqlalchemy import select

from dlqbatch.actions.undo import undo
from dlqbatch.lifecycle import attempts
from dlqbatch.lifecycle.leases import claim, give_back
from dlqbatch.lifecycle.strategy import Back
from dlqbatch.messages.actions import MessageActions
from dlqbatch.store.engine import keeping, reading
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import MESSAGES, TRANSITIONS

if TYPE_CHECKING:
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
