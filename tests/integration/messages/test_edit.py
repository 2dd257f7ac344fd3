"""Editing dead messages, on both databases."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any

import messages
import pytest
from dead_rows import NOW, add, lock, row, store_at
from plan_rows import reserve
from sqlalchemy import func, select, update

from dlqbatch.amqp.delivery import Delivery, open_envelope
from dlqbatch.amqp.origin import Trust
from dlqbatch.amqp.retry_headers import journey_so_far
from dlqbatch.amqp.stamp import stamp
from dlqbatch.ingest.examine import examine
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.edit import Edited, Editing, EditRefused, NotEditable, NothingEdited, header_edits
from dlqbatch.messages.shown import Reveal
from dlqbatch.store import journal as states
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, NoSuchMessage, NotUnderstood
from dlqbatch.store.states import Status, path
from dlqbatch.store.tables import MESSAGES
from dlqbatch.topology.kinds import Ladder

if TYPE_CHECKING:
    from sqlalchemy import Engine

LATER = NOW + timedelta(hours=1)
HELD = messages.with_headers(
    (b"dlqbatch-id", messages.text("id-of-it")),
    (b"tenant", messages.text("blue")),
    (b"raw", messages.Value(b"d", b"\x3f" * 8)),
    messages.x_death(messages.death()),
    content_type=b"application/json",
    message_id=b"m-1",
    priority=b"\x05",
)


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@pytest.fixture
def editing(engine: Engine) -> Editing:
    return Editing(engine)


BY = Reveal("ann", "r")


def in_state(engine: Engine, status: Status, **columns: Any) -> int:
    (row_id,) = add(engine, row(properties=HELD, **columns))
    for step in path(Status.PENDING, status, by_person=True):
        locking: dict[str, Any] = lock() if step.end is Status.PROCESSING else {}
        token = "t" if step.start is Status.PROCESSING else None
        with writing(engine) as connection:
            assert states.move(connection, row_id, step.start, step.end, token, NOW, "somebody", "led", **locking)
    return row_id


def edit(editing: Editing, row_id: int, headers: list[tuple[str, str]] | None = None, **given: Any) -> Edited:
    wanted = header_edits(headers or ())
    return editing.edit(row_id, headers=wanted, **({"actor": "somebody", "reason": "a typo", "now": LATER} | given))


def all_of(engine: Engine, row_id: int) -> Any:
    with reading(engine) as connection:
        return connection.execute(select(MESSAGES).where(MESSAGES.c.id == row_id)).one()


def size(engine: Engine) -> int:
    with reading(engine) as connection:
        return connection.execute(select(func.count()).select_from(MESSAGES)).scalar_one()


@pytest.mark.parametrize("status", [Status.PENDING, Status.MANUAL, Status.FAILED, Status.RESOLVED])
def test_an_edit_is_a_new_message_and_the_original_is_archived(
    engine: Engine, editing: Editing, status: Status
) -> None:
    row_id = in_state(
        engine,
        status,
        origin_queue="orders",
        origin_exchange="shop",
        origin_key="orders.created",
        event="orders.created",
        error_type="TypeError",
        message_id="m-1",
        priority=5,
        tags=["orders", "vip"],
        system_state={"cpu": 0.5},
    )
    before = all_of(engine, row_id)
    done = edit(editing, row_id, [("tenant", "green")], body=b'{"a": 2}', force=status is Status.RESOLVED)
    assert done.id is not None
    assert (done.original, done.before, done.changed) == (row_id, status, ("body", "header tenant"))

    new, old = all_of(engine, done.id), all_of(engine, row_id)
    assert (old.status, old.body, old.properties) == (Status.ARCHIVED, b"{}", HELD)
    assert (new.status, new.body, new.parent, new.identity) == (
        Status.MANUAL,
        b'{"a": 2}',
        before.identity,
        done.identity,
    )
    assert new.identity not in {before.identity, "id-of-it"}
    assert (new.next_retry_at, new.lock_token, new.strategy, new.dlq_retry_count) == (None, None, None, 0)
    for name in ("source_queue", "exchange", "routing_key", "origin_queue", "origin_exchange", "origin_key", "event"):
        assert getattr(new, name) == getattr(before, name), name
    for name in ("error_type", "fingerprint", "retry_count", "first_failed_at", "priority", "tags", "system_state"):
        assert getattr(new, name) == getattr(before, name), name

    after = dict(messages.headers_of(new.properties))
    assert after.pop(b"dlqbatch-id") == messages.text(new.identity)
    assert after.pop(b"dlqbatch-parent") == messages.text(before.identity)
    kept = dict(messages.headers_of(HELD)) | {b"tenant": messages.text("green")}
    del kept[b"dlqbatch-id"]
    assert after == kept
    others = messages.decode_properties(new.properties)
    assert {**others, "headers": b""} == {**messages.decode_properties(HELD), "headers": b""}

    review = MessageActions(engine)
    (arrived,) = review.show(done.id).transitions
    assert (arrived.to_status, arrived.actor, arrived.at) == (Status.MANUAL, "somebody", LATER)
    assert arrived.reason == f"an edit of message {row_id} (body, header tenant): a typo"
    last = review.show(row_id).transitions[-1]
    assert (last.to_status, last.actor) == (Status.ARCHIVED, "somebody")
    assert last.reason == f"edited: message {done.id} takes its place: a typo"


def test_an_edited_message_that_fails_again_is_known_again(engine: Engine, editing: Editing) -> None:
    done = edit(editing, in_state(engine, Status.MANUAL), body=b'{"a": 2}')
    assert done.id is not None
    new = all_of(engine, done.id)
    envelope = open_envelope(new.exchange, new.routing_key, False, len(new.body), new.properties)
    assert envelope.headers is not None
    journey = journey_so_far(envelope.headers)
    assert not isinstance(journey, str)
    sent = stamp(envelope, journey, login=b"guest", limit=131_000, digest="")
    assert sent is not None

    class Queue:
        queue = "dlq-queue"

        def settle(self, tag: int) -> None:
            raise AssertionError(tag)

        hold = settle

    delivery = Delivery(Queue(), 1, "dlq-exchange", "dlq", redelivered=False)
    delivery.properties, delivery.body_size, delivery.chunks = sent, len(new.body), [new.body + b"\xce"]
    ladder = Ladder()
    arrival = examine(delivery, Trust(ladder.queue_names, ladder.exchange_names), LATER)
    assert (arrival.id, arrival.digest) == (new.identity, bytes(new.digest))
    assert Ingestion(engine).store([arrival], LATER) == [("duplicate", None)]
    assert size(engine) == 2


def test_what_is_on_its_way_is_refused(engine: Engine, editing: Editing) -> None:
    held, gone, reserved = (in_state(engine, each) for each in (Status.PROCESSING, Status.ARCHIVED, Status.MANUAL))
    reserve(engine, reserved)
    for row_id, why in ((held, "under way"), (gone, "restore"), (reserved, "replay plan [0-9a-f]{16} has reserved it")):
        for attempt in (lambda each: edit(editing, each, body=b"[]"), lambda each: editing.original(each, BY)):
            with pytest.raises(NotEditable, match=why):
                attempt(row_id)
    for number in (0, -1, 10**6, 2**70):
        with pytest.raises(NoSuchMessage):
            edit(editing, number, body=b"[]")
    assert size(engine) == 3


def test_an_edit_without_a_time_is_at_the_stores(
    engine: Engine, editing: Editing, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_id = in_state(engine, Status.MANUAL)
    monkeypatch.setattr(StoreClock, "_time_at_zero", lambda _: LATER - timedelta(seconds=time.monotonic()))
    assert edit(editing, row_id, body=b"[]", now=None).id is not None
    assert abs(all_of(engine, row_id).status_since - LATER) < timedelta(minutes=1)


def test_what_was_handled_already_is_edited_only_by_force(engine: Engine, editing: Editing) -> None:
    row_id = in_state(engine, Status.RESOLVED)
    for attempt in (lambda: edit(editing, row_id, body=b"[]"), lambda: editing.original(row_id, BY)):
        with pytest.raises(NotEditable, match="handled already"):
            attempt()
    assert size(engine) == 1
    assert editing.original(row_id, BY, force=True).body == b"{}"
    assert edit(editing, row_id, body=b"[]", force=True).id is not None


def test_a_filter_restores_an_edit_and_not_the_original_that_it_replaced(engine: Engine, editing: Editing) -> None:
    """Who takes a wrong discard back by a filter would have the same work in the store twice."""
    people = {"actor": "somebody", "reason": "wrong group", "now": LATER}
    original = in_state(engine, Status.MANUAL, event="orders.paid")
    newer = edit(editing, original, body=b"[]").id
    store, these = MessageActions(engine), Filters.parse(event="orders.paid")
    assert [one.id for one in store.discard(filters=these, **people).changes if one.is_done] == [newer]
    for dry_run in (True, False):
        changes = {one.id: one for one in store.restore(filters=these, dry_run=dry_run, **people).changes}
        assert [row_id for row_id, one in changes.items() if one.is_done] == [newer]
        assert f"message {newer}" in (changes[original].why or "")
        assert "by its id" in (changes[original].why or "")
    assert store.restore([original], **people).changes[0].is_done


def test_a_restored_original_names_what_took_its_place(engine: Engine, editing: Editing) -> None:
    row_id, other = (in_state(engine, Status.MANUAL) for _ in range(2))
    child = row(parent=all_of(engine, other).identity)
    add(engine, child)
    new = edit(editing, row_id, body=b"[]").id
    review = MessageActions(engine)
    review.discard((other,), actor="somebody", reason="of no use", now=LATER)
    for dry_run in (True, False):
        done = review.restore((row_id, other), actor="somebody", reason="back", now=LATER, dry_run=dry_run)
        edited, child_only = done.changes
        assert (edited.is_done, edited.why.startswith(f"message {new} (manual) took its place")) == (True, True)
        assert (child_only.is_done, child_only.why) == (True, "")
    assert all_of(engine, row_id).status == Status.MANUAL


def test_an_edit_that_changes_nothing_is_none(engine: Engine, editing: Editing) -> None:
    row_id = in_state(engine, Status.MANUAL)
    for given in ({}, {"body": b"{}"}, {"headers": [("tenant", "blue")]}):
        with pytest.raises(NothingEdited):
            edit(editing, row_id, **given)
    assert (size(engine), all_of(engine, row_id).status) == (1, Status.MANUAL)


def test_an_edit_that_is_not_valid_writes_nothing(engine: Engine, editing: Editing) -> None:
    row_id = in_state(engine, Status.PENDING)
    broken = in_state(engine, Status.PENDING)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == broken).values(properties=b"\x20\x00\xff\xff"))
    refused: list[tuple[int, dict[str, Any]]] = [
        (row_id, {"body": b"{"}),
        (row_id, {"headers": [("big", "x" * 131_072)]}),
        (broken, {"headers": [("tenant", "blue")]}),
    ]
    for each, given in refused:
        with pytest.raises(EditRefused):
            edit(editing, each, **given)
    for given in ({"actor": "ingest"}, {"actor": ""}, {"reason": " "}):
        with pytest.raises(NotUnderstood):
            edit(editing, row_id, body=b"[]", **given)
    assert (size(engine), all_of(engine, row_id).status) == (2, Status.PENDING)
    assert edit(editing, row_id, body=b"{", force=True).id is not None
    assert edit(editing, broken, body=b"[]").id is not None


def test_a_dry_run_says_the_same_and_writes_nothing(engine: Engine, editing: Editing) -> None:
    row_id = in_state(engine, Status.PENDING)
    planned = edit(editing, row_id, [("tenant", "green")], dry_run=True)
    assert (planned.id, planned.dry_run, size(engine)) == (None, True, 1)
    done = edit(editing, row_id, [("tenant", "green")])
    assert (done.changed, done.before, done.parent) == (planned.changed, planned.before, planned.parent)


def test_bytes_of_any_kind_and_ten_megabytes_are_kept(engine: Engine, editing: Editing) -> None:
    for body in (b"\xff\0\x1b", b"", b'{"k": "' + b"x" * 10_000_000 + b'"}'):
        (row_id,) = add(engine, row(body=b"text"))
        done = edit(editing, row_id, body=body)
        assert done.id is not None
        assert all_of(engine, done.id).body == body


def test_many_who_edit_one_message_make_one_of_it(engine: Engine, editing: Editing) -> None:
    row_id = in_state(engine, Status.PENDING)
    barrier = Barrier(4)

    def hurry(number: int) -> bool:
        barrier.wait()
        try:
            edit(editing, row_id, body=b'{"n": %d}' % number)
        except NotEditable:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(hurry, range(4))) == 1
    assert size(engine) == 2
