"""In-order plans: per key the next message goes only when the one before it was acknowledged."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, store_at
from dead_rows import add as arrive
from plan_rows import LATER, LEASE, add, applying, dead, freeze, go_to
from sqlalchemy import select, update

from dlqbatch.amqp.fields import CORRELATION_ID
from dlqbatch.lifecycle.attempts import close_attempts
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.order import key_of, place_of, says
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Engine

    from dlqbatch.replay.items import PlanItems

IN_ORDER = Selection(everything=True, in_order="$.account")


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def of(account: object) -> bytes:
    return f'{{"account": "{account}"}}'.encode()


def acknowledge(engine: Engine, *row_ids: int) -> None:
    with writing(engine) as connection:
        sent = (ATTEMPTS.c.message_id.in_(row_ids), ATTEMPTS.c.closed_at.is_(None))
        connection.execute(update(ATTEMPTS).where(*sent).values(acknowledged_at=LATER, proof="a test"))


def come_back(engine: Engine, *row_ids: int) -> None:
    with writing(engine) as connection:
        close_attempts(connection, dict.fromkeys(row_ids, 1), "failed", LATER)
        rest = {"status": Status.MANUAL, "lock_token": None, "lock_owner": None, "lease_until": None}
        connection.execute(MESSAGES.update().where(MESSAGES.c.id.in_(row_ids)).values(rest))


def sends(items: PlanItems) -> list[int]:
    numbers = items.take(100, None, LATER).numbers
    items.sent(numbers, LATER)
    return list(numbers)


def test_one_of_each_key_is_under_way_and_those_without_a_key_go_beside(engine: Engine) -> None:
    bodies = [of("a"), of("b"), of("a"), b"no json", of("a"), of("b")]
    a1, b1, a2, none, a3, b2 = add(engine, *(dead(body=body) for body in bodies))
    frozen = freeze(engine, IN_ORDER)
    assert frozen.left_out == {"of the order: they have no $.account": 1}
    items = applying(engine, frozen)
    items.reserve()
    assert sends(items) == [a1, b1, none]
    assert sends(items) == []
    acknowledge(engine, b1)
    assert sends(items) == [b2]
    acknowledge(engine, a1, b2)
    assert sends(items) == [a2]
    acknowledge(engine, a2)
    assert sends(items) == [a3]


def test_what_came_back_holds_its_key_until_a_person_has_decided(engine: Engine) -> None:
    a1, a2, b1, b2 = add(engine, *(dead(body=of(account)) for account in "aabb"))
    items = applying(engine, freeze(engine, IN_ORDER))
    items.reserve()
    assert sends(items) == [a1, b1]
    come_back(engine, a1)
    acknowledge(engine, b1)
    assert sends(items) == [b2]
    held, under_way = items.held_keys()
    assert [(each.key, each.message_id, each.behind) for each in held] == [("a", a1, 1)]
    assert under_way == 1
    assert f"'a' by message {a1} (manual)" in says(held)
    go_to(engine, a1, Status.MANUAL, Status.ARCHIVED)
    assert sends(items) == [a2]


class History:
    """What has become of each message, by a plain model, and the check that nothing overtook another one."""

    def __init__(self, engine: Engine, plan_id: int, rng: random.Random) -> None:
        self.rng, self.engine = rng, engine
        with reading(engine) as connection:
            items = select(PLAN_ITEMS.c.message_id, PLAN_ITEMS.c.order_key).where(PLAN_ITEMS.c.plan_id == plan_id)
            self.key: dict[int, str] = dict(connection.execute(items.order_by(PLAN_ITEMS.c.place)).all())
        self.queue: defaultdict[str, list[int]] = defaultdict(list)
        for row_id, key in self.key.items():
            self.queue[key].append(row_id)
        self.out: list[int] = []
        self.acknowledged: set[int] = set()
        self.failed: set[str] = set()

    def sent(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            key = self.key[row_id]
            assert key not in self.failed, "a failed message holds its key"
            before = self.queue[key][: self.queue[key].index(row_id)]
            assert self.acknowledged.issuperset(before), "the one in front of it was not acknowledged"
            self.out.append(row_id)

    def under_way(self) -> list[int]:
        settled = self.acknowledged
        return [row_id for row_id in self.out if row_id not in settled and self.key[row_id] not in self.failed]

    def settle(self) -> None:
        """Most of what is under way is acknowledged, and a few come back."""
        settled = [row_id for row_id in self.under_way() if self.rng.random() < 0.9]
        bad = {row_id for row_id in settled if self.rng.random() < 0.002}
        self.failed |= {self.key[row_id] for row_id in bad}
        self.acknowledged |= set(settled) - bad
        acknowledge(self.engine, *(set(settled) - bad))
        come_back(self.engine, *bad)


def test_ten_thousand_messages_of_five_hundred_keys_with_failures_and_kills(database_url: str) -> None:
    """A random history: per key no message goes before the one in front of it was acknowledged."""
    engine, rng = store_at(database_url), random.Random(16)
    size, keys = 10_000, 500
    for hour in range(10):
        rows = [dead(body=of(rng.randrange(keys))) for _ in range(size // 10)]
        arrive(engine, *rows, at=NOW + timedelta(hours=hour))
    frozen = freeze(engine, IN_ORDER)
    history = History(engine, frozen.plan_id, rng)
    assert (frozen.size, len(history.queue)) == (size, keys)
    now = LATER
    items = applying(engine, frozen)
    items.reserve()
    while True:
        numbers = items.take(1_000, None, now).numbers
        if rng.random() < 0.1:
            # Killed before its publishes: whoever comes next sends under the same number, after the lease.
            now += LEASE + timedelta(seconds=1)
            items = applying(engine, frozen, f"after {now}", now=now)
            continue
        items.sent(numbers, now)
        history.sent(numbers)
        if not numbers and not history.under_way():
            break
        history.settle()
    assert len(history.out) == len(set(history.out)), "nothing is sent twice"
    held, _ = items.held_keys()
    assert {each.key for each in held} <= history.failed
    assert history.failed
    assert len(history.out) + sum(each.behind for each in held) == size


def test_a_field_is_named_by_the_settings_or_by_its_place() -> None:
    assert place_of("account", {"account": "$.account.id"}) == "$.account.id"
    assert place_of("header:tenant", {}) == "header:tenant"
    assert place_of(CORRELATION_ID, {}) == CORRELATION_ID
    with pytest.raises(NotUnderstood, match="Fields with a name are: account"):
        place_of("acount", {"account": "$.account.id"})
    assert key_of("$.account.id", b'{"account": {"id": 7}}', b"\0\0") == "7"
    assert key_of("$.account.id", b"{}", b"\0\0") is None
    assert NOW < LATER
