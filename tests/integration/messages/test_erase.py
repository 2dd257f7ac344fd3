"""Erase: nothing of the content is left in any table, nothing brings it back, and what happened stays."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, lock, row, store_at
from messages import encode_table
from messages import text as header
from plan_rows import reserve
from sqlalchemy import insert, inspect, select, text, update

from dlqbatch.actions.undo import NotUndoable, undo
from dlqbatch.errors import DlqbatchError
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.edit import Editing, NotEditable
from dlqbatch.messages.erase import erase
from dlqbatch.messages.selection import NumberUnexpected
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.tables import COLD_COPIES, MESSAGES

if TYPE_CHECKING:
    from sqlalchemy import Engine

LATER = NOW + timedelta(hours=1)
SECRET = "max.mustermann"
WHO: dict[str, Any] = {"actor": "ann", "reason": "request 12", "now": LATER}


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def personal(engine: Engine, status: Status = Status.MANUAL, **columns: Any) -> int:
    table = encode_table([(b"x-customer", header(SECRET))])
    held = {
        "body": f'{{"customer": "{SECRET}"}}'.encode(),
        "properties": b"\x20\x00" + len(table).to_bytes(4, "big") + table,
        "message_id": f"of-{SECRET}".encode(),
        "error_message": f"no account for {SECRET}",
        "error_stack": f"Error: no account for {SECRET}",
        "reason": f"rejected: {SECRET}",
        "source": SECRET,
        "tags": [SECRET],
        "fields": [("customer", SECRET)],
    }
    arrives = status if status in (Status.PENDING, Status.MANUAL) else Status.PENDING
    (row_id,) = add(engine, row(**held, status=arrives, **columns))
    if status != arrives:
        with writing(engine) as connection:
            held_by = lock() if status is Status.PROCESSING else {}
            connection.execute(update(MESSAGES).where(MESSAGES.c.id == row_id).values(status=status, **held_by))
    return row_id


def everything(engine: Engine) -> str:
    """All live rows of all tables, as text and as the text that bytes stand for."""
    with reading(engine) as connection:
        found = []
        for table in inspect(connection).get_table_names():
            for line in connection.execute(text(f"SELECT * FROM {table}")):
                cells = (bytes(each) if isinstance(each, bytes | memoryview) else each for each in line)
                found += [each.decode("latin-1") if isinstance(each, bytes) else str(each) for each in cells]
    return "\n".join(found)


def test_nothing_of_the_content_is_left_and_what_happened_stays(engine: Engine) -> None:
    ids = [personal(engine, status) for status in (Status.PENDING, Status.MANUAL, Status.FAILED, Status.ARCHIVED)]
    before = MessageActions(engine).show(ids[0]).record
    assert SECRET in everything(engine)
    dry = erase(engine, ids, dry_run=True, **WHO)
    assert (dry.done, dry.action) == (4, None)
    assert SECRET in everything(engine)
    done = erase(engine, ids, **WHO)
    assert (done.done, done.not_done) == (4, 0)
    assert SECRET not in everything(engine)
    for row_id in ids:
        shown = MessageActions(engine).show(row_id)
        assert (shown.content.body, shown.record.status) == (b"", Status.ARCHIVED)
        assert shown.transitions[-1].reason == "erased: request 12"
    after = MessageActions(engine).show(ids[0]).record
    kept = ("id", "identity", "digest", "fingerprint", "origin_queue", "created_at", "first_failed_at", "error_type")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
    assert {each.why for each in erase(engine, ids, **WHO).changes} == {"it is erased already"}


def test_what_may_be_out_or_is_reserved_is_refused(engine: Engine) -> None:
    held, resolved = personal(engine, Status.PROCESSING), personal(engine, Status.RESOLVED)
    reserved = personal(engine)
    reserve(engine, reserved)
    changes = erase(engine, [held, resolved, reserved, 10**6], **WHO).changes
    assert [each.is_done for each in changes] == [False] * 4
    for each, why in zip(changes, ("under way", "retain", "has reserved it", "no such message"), strict=True):
        assert why in each.why
    assert everything(engine).count(f'"customer": "{SECRET}"') == 3


def test_nothing_brings_an_erased_message_back(engine: Engine) -> None:
    row_id = personal(engine)
    store = MessageActions(engine)
    discarded = store.discard([row_id], actor="ann", reason="r")
    done = erase(engine, [row_id], **WHO)
    assert done.action is not None
    assert discarded.action is not None
    (refused,) = store.restore([row_id], actor="ann", reason="r").changes
    assert (refused.is_done, refused.why) == (False, "it is erased: nothing is left of it that could be sent")
    with pytest.raises(NotUndoable, match="gone"):
        undo(engine, done.action, actor="ann", reason="r")
    assert undo(engine, discarded.action, actor="ann", reason="r").done == 0
    with pytest.raises(NotEditable, match="erased"):
        Editing(engine).edit(row_id, actor="ann", reason="r", body=b"{}", force=True)
    frozen = freeze(engine, Selection(row_ids=(row_id,)), actor="ann", reason="r", now=LATER)
    assert (frozen.size, frozen.left_out) == (0, {"erased: nothing is left of them that could be sent": 1})
    # Not even a program that does not know of it, such as an older one.
    for status in (Status.MANUAL, Status.PENDING, Status.FAILED):
        with pytest.raises(DlqbatchError, match="dlq_messages_erased"), writing(engine) as connection:
            states.move(connection, row_id, Status.ARCHIVED, status, None, LATER, "ann", "r")
    assert store.show(row_id).record.status == Status.ARCHIVED


def test_copies_and_edits_that_hold_the_content_still_are_named(engine: Engine) -> None:
    row_id = personal(engine)
    edited = Editing(engine).edit(row_id, actor="ann", reason="r", body=f'{{"customer": "{SECRET}", "x": 1}}'.encode())
    with writing(engine) as connection:
        connection.execute(insert(COLD_COPIES).values(message_id=row_id, part="2030/part-7", written_at=NOW))
    (change,) = erase(engine, [row_id], **WHO).changes
    assert "cold copy in 2030/part-7 holds it still" in change.why
    assert f"message {edited.id}, with much the same content" in change.why
    shown = MessageActions(engine).show(row_id)
    assert shown.transitions[-1].reason == "erased: request 12 (a cold copy is in 2030/part-7)"
    with reading(engine) as connection:
        # Retain makes a copy of what is left before it deletes the row.
        assert connection.execute(select(COLD_COPIES)).all() == []


def test_a_filter_counts_first_and_its_words_are_not_kept(engine: Engine) -> None:
    ids = [personal(engine) for _ in range(101)]
    filters = Filters.parse(field=f"customer={SECRET}")
    with pytest.raises(NumberUnexpected, match="--expect 101"):
        erase(engine, filters=filters, **WHO)
    assert erase(engine, filters=filters, expect=101, **WHO).done == len(ids)
    assert SECRET not in everything(engine)
    for wrong in ({"row_ids": [1], "filters": filters}, {}):
        with pytest.raises(NotUnderstood, match="or by a filter"):
            erase(engine, **wrong, **WHO)
