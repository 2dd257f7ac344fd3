"""A lease that stands on an attempt which was sent after all: however that came about, it does not go out twice."""

from __future__ import annotations

from datetime import timedelta

import pytest
from dead_rows import NOW, add, begin_attempts, row, store_at
from sqlalchemy import select

from dlqbatch.lifecycle import attempts
from dlqbatch.lifecycle.leases import claim, take_over
from dlqbatch.store.engine import reading
from dlqbatch.store.states import Strategy
from dlqbatch.store.tables import MESSAGES

LATER = NOW + timedelta(hours=1)


@pytest.mark.parametrize("url", ["database_url", "sqlite_url"])
def test_a_lease_on_a_sent_attempt_just_ends(request: pytest.FixtureRequest, url: str) -> None:
    engine = store_at(str(request.getfixturevalue(url)))
    sent, unsent = add(engine, row(next_retry_at=NOW), row(next_retry_at=NOW))
    tokens = {each.row_id: each.token for each in claim(engine, "w", NOW)}
    begin_attempts(engine, tokens, Strategy.IMMEDIATE, "w", NOW)
    attempts.mark_sent(engine, {sent: 1}, NOW)
    assert [each.row_id for each in take_over(engine, "v", LATER)] == [unsent]
    assert take_over(engine, "v", LATER) == []
    with reading(engine) as connection:
        found = dict(connection.execute(select(MESSAGES.c.id, MESSAGES.c.lease_until)).all())
        owner = connection.scalar(select(MESSAGES.c.lock_owner).where(MESSAGES.c.id == sent))
    assert (found[sent], owner) == (None, "w")
