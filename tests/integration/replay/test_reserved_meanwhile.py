"""A replay plan may reserve a message between the moment at which its time was seen to be over and its deletion."""

from __future__ import annotations

from datetime import timedelta

import pytest
from dead_rows import NOW, add, row, store_at
from sqlalchemy import select, update

from dlqbatch.retain.rows import Retention
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES


@pytest.mark.parametrize("url", ["database_url", "sqlite_url"])
def test_what_a_plan_reserves_at_the_last_moment_is_neither_deleted_nor_archived(
    request: pytest.FixtureRequest, url: str
) -> None:
    engine = store_at(str(request.getfixturevalue(url)))
    reserved, free = add(engine, row(), row())
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).values(status=Status.FAILED, status_since=NOW))
    retention = Retention(engine)
    due = retention.due(Status.FAILED, NOW + timedelta(days=1), 10)
    assert {each.id for each in due} == {reserved, free}
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == reserved).values(plan_id=7))
    assert retention.copied(due[:], "part", NOW) == {free}
    assert retention.delete([each for each in due if each.id == reserved]) == set()
    with reading(engine) as connection:
        assert set(connection.scalars(select(MESSAGES.c.id))) == {reserved, free}
