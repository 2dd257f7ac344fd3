"""Fields in the dead store: written with their messages, found by an index, and read of older messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from dead_rows import add, fill, row, store_at
from messages import encode_table, text
from query_plans import statements_of, walk
from sqlalchemy import delete, func, insert, select
from sqlalchemy import text as sql

from dlqbatch.amqp.fields import Fields
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.backfill_fields import AT_ONCE, backfill
from dlqbatch.messages.edit import Editing
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.field_tables import BACKFILLS, FIELDS
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from sqlalchemy import Engine

BY = Fields({"order": "$.order", "tenant": "header:x-tenant"})


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def stored(engine: Engine) -> dict[int, set[tuple[str, str]]]:
    with reading(engine) as connection:
        found: dict[int, set[tuple[str, str]]] = {}
        for line in connection.execute(select(FIELDS)):
            found.setdefault(line.message_id, set()).add((line.name, line.value))
    return found


def ids(store: MessageActions, **words: object) -> list[int]:
    return sorted(record.id for record in store.page(Filters.parse(**words), 1000).messages)  # type: ignore[arg-type]


def test_messages_are_found_by_their_fields_and_a_long_value_by_all_of_it(engine: Engine) -> None:
    long = "x" * 5000
    pairs = [[("order", "P-1"), ("tenant", "a")], [("order", "P-2"), ("tenant", "a")], [("order", long)], []]
    one, two, three, four = add(engine, *(row(fields=each) for each in pairs))
    store = MessageActions(engine)
    assert ids(store, field="order=P-1") == [one]
    assert ids(store, field=["order=P-1", "order=P-2"]) == [one, two]
    assert ids(store, field=["order=P-1", "tenant=a"]) == [one]
    assert ids(store, field=["order=P-1", "tenant=b"]) == []
    assert ids(store, field=f"order={long}") == [three]
    assert ids(store, field=f"order={long}y") == []
    (five,) = add(engine, row(message_id=b"m-5"))
    assert ids(store, field=["message_id=m-5", "message_id=m-6"]) == [five]
    assert store.values_not_found(Filters.parse(field=["message_id=m-5", "message_id=m-6"])) == [
        "1 of the values of message_id are not found: m-6"
    ]
    assert ids(store, unwanted="field=tenant=a") == [three, four, five]
    assert ids(store, unwanted=["field=order=P-1"], field="tenant=a") == [two]
    with writing(engine) as connection:
        connection.execute(delete(MESSAGES).where(MESSAGES.c.id == one))
    assert one not in stored(engine)


def test_a_pasted_list_names_what_no_message_has(engine: Engine) -> None:
    one, two = add(engine, *(row(fields=[("order", f"P-{number}")]) for number in (1, 2)))
    store = MessageActions(engine)
    wanted = [f"P-{number}" for number in range(1, 5000)]
    filters = Filters.parse(field_lists=[("order", wanted)])
    assert sorted(record.id for record in store.page(filters).messages) == [one, two]
    (sentence,) = store.values_not_found(filters)
    assert sentence.startswith("4,997 of the values of order are not found: P-3, P-4, ")
    assert sentence.endswith(" and 3,997 more")
    assert store.near(Filters.parse(field="ordr=P-1")) == [
        "no message has the field ordr; there are message_id, order; dlqbatch.fields.NAME describes one"
    ]
    with pytest.raises(NotUnderstood, match="100,001 values"):
        Filters.parse(field_lists=[("order", list(map(str, range(100_001))))])
    for wrong in ("order", "order=", "=x"):
        with pytest.raises(NotUnderstood, match="NAME=VALUE"):
            Filters.parse(field=wrong)
    with pytest.raises(NotUnderstood, match="NAME=VALUE"):
        Filters.parse(unwanted="field=order")


def test_an_edit_has_the_fields_of_its_new_body(engine: Engine) -> None:
    (row_id,) = add(engine, row(body=b'{"order": 1}', fields=[("order", "1")]))
    done = Editing(engine, BY).edit(row_id, actor="ann", reason="r", body=b'{"order": 2}')
    assert done.id is not None
    assert stored(engine) == {row_id: {("order", "1")}, done.id: {("order", "2")}}


def test_older_messages_get_their_fields_batch_by_batch_and_again_after_a_cut(engine: Engine) -> None:
    table = encode_table([(b"x-tenant", text("a"))])
    held = b"\x20\x00" + len(table).to_bytes(4, "big") + table
    number = 2 * AT_ONCE + 7
    rows = add(engine, *(row(body=b'{"order": %d}' % place, properties=held) for place in range(number)))
    (own,) = add(engine, row(body=b'{"order": "new"}', fields=[("order", "new")]))
    calls = iter([False, True])
    first = backfill(engine, BY, seconds=60, stopped=lambda: next(calls))
    assert (first.messages, first.is_complete) == (AT_ONCE, False)
    assert len(stored(engine)) == AT_ONCE + 1
    rest = backfill(engine, BY, seconds=60)
    assert (rest.messages, rest.is_complete) == (number + 1 - AT_ONCE, True)
    expected = {each: {("order", str(place)), ("tenant", "a")} for place, each in enumerate(rows)}
    assert stored(engine) == expected | {own: {("order", "new")}}
    # The same fields once more: nothing is left to do; other fields begin anew.
    assert backfill(engine, BY, seconds=60).messages == 0
    assert backfill(engine, Fields({"order": "$.order"}), seconds=60).messages == number + 1
    assert stored(engine)[rows[0]] == {("order", "0")}
    assert backfill(engine, BY, seconds=60, again=True).messages == number + 1
    with reading(engine) as connection:
        assert connection.scalar(select(func.count()).select_from(BACKFILLS)) == 2


def test_a_call_without_time_does_one_batch_so_that_it_always_ends_some_day(engine: Engine) -> None:
    add(engine, *(row() for _ in range(AT_ONCE + 1)))
    assert backfill(engine, BY, seconds=0).messages == AT_ONCE
    assert backfill(engine, BY, seconds=0).is_complete


def test_a_lookup_by_a_field_reads_the_index_and_no_table_whole(engine: Engine) -> None:
    fill(engine, 20_000, 0)
    with writing(engine) as connection:
        order = sql("'P-' || id")
        connection.execute(
            insert(FIELDS).from_select(["name", "value", "message_id"], select(sql("'order'"), order, MESSAGES.c.id))
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sql("ANALYZE"))
    store = MessageActions(engine)
    with statements_of(engine) as seen:
        assert ids(store, field="order=P-77")
        assert ids(store, field_lists=[("order", [f"P-{each}" for each in range(50)])])
        assert ids(store, field="order=nothing") == []
        assert ids(store, field="message_id=nothing") == []
        store.values_not_found(Filters.parse(field="order=P-77"))
    assert len(seen) >= 3
    assert [found for found in (walk(engine, *each) for each in seen) if found is not None] == []
