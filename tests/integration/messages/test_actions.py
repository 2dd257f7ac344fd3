"""What people do to dead messages, on both databases."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, begin_attempts, lock, row, store_at
from messages import array, encode_table, long, nested, text, timestamp
from plan_rows import reserve
from sqlalchemy import update

from dlqbatch.lifecycle import attempts
from dlqbatch.lifecycle.leases import claim
from dlqbatch.messages import discard as discarding
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.changes import Changes
from dlqbatch.messages.edit import Editing
from dlqbatch.messages.selection import NumberUnexpected
from dlqbatch.messages.shown import Reveal
from dlqbatch.store import journal as states
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import writing
from dlqbatch.store.filters import Filters, NoSuchMessage, NotUnderstood, parse_time
from dlqbatch.store.states import Status, Strategy, path
from dlqbatch.store.tables import MESSAGES
from dlqbatch.store.text import json_ready

if TYPE_CHECKING:
    from sqlalchemy import Engine

LATER = NOW + timedelta(hours=1)
HOSTILE = ["' OR 1=1 --", "%", "_", "\\", "%' ; DROP TABLE dlq_messages; --", "\0", "\x1b[31m", "\udcff", "🙂" * 5000]


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@pytest.fixture
def review(engine: Engine) -> MessageActions:
    return MessageActions(engine)


def in_state(engine: Engine, status: Status, **columns: Any) -> int:
    """A new row, led there by allowed moves of a person; locked by token `t` in processing."""
    (row_id,) = add(engine, row(**columns))
    for step in path(Status.PENDING, status, by_person=True):
        locking: dict[str, Any] = lock() if step.end is Status.PROCESSING else {}
        token = "t" if step.start is Status.PROCESSING else None
        with writing(engine) as connection:
            assert states.move(connection, row_id, step.start, step.end, token, NOW, "somebody", "led", **locking)
    return row_id


def discard(review: MessageActions, *row_ids: int, **given: Any) -> Changes:
    return review.discard(row_ids, **({"actor": "somebody", "reason": "of no use", "now": LATER} | given))


def restore(review: MessageActions, *row_ids: int, **given: Any) -> Changes:
    return review.restore(row_ids, **({"actor": "somebody", "reason": "needed", "now": LATER} | given))


def properties(*entries: Any) -> bytes:
    table = encode_table(entries)
    return b"\x20\x00" + len(table).to_bytes(4, "big") + table


# --- Looking


def test_pages_go_on_where_the_one_before_ended(engine: Engine, review: MessageActions) -> None:
    ids = add(engine, *(row() for _ in range(7)))
    seen: list[int] = []
    after = None
    while True:
        page = review.page(Filters(), 3, after)
        seen += [one.id for one in page.messages]
        after = page.next
        if after is None:
            break
    assert seen == sorted(ids, reverse=True)


@pytest.mark.parametrize("token", ["", "x", "2030-06-01", "2030-06-01/x", "2030-06-01/²", f"2030-06-01/{'9' * 5000}"])
def test_a_page_after_anything_else_is_not_understood(review: MessageActions, token: str) -> None:
    with pytest.raises(NotUnderstood):
        review.page(Filters(), 3, token)


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_filter_is_a_text_like_any_other(engine: Engine, review: MessageActions, hostile: str) -> None:
    raw = hostile.encode("utf-8", "surrogateescape")
    (wanted,) = add(engine, row(error_type=raw, error_message=raw, event=raw, origin_queue=raw))
    add(engine, *(row(error_message="another") for _ in range(3)))
    for name in ("error_type", "event", "origin", "text"):
        found = review.page(Filters.parse(**{name: hostile}))
        assert [one.id for one in found.messages] == [wanted], name
    assert review.page(Filters.parse(group=hostile)).messages == ()
    assert [one.sample.id for one in review.groups(Filters.parse(text=hostile)).groups] == [wanted]


def test_a_filter_that_is_empty_is_not_one_for_everything(review: MessageActions) -> None:
    for name in ("error_type", "event", "origin", "text", "group", "since", "until"):
        with pytest.raises(NotUnderstood):
            Filters.parse(**{name: ""})


def test_times_are_utc_unless_they_say_otherwise(review: MessageActions) -> None:
    given = ("2030-06-01", "2030-06-01T00:00", "2030-06-01T00:00:00Z", "2030-06-01T02:00:00+02:00")
    assert len({parse_time(each) for each in given}) == 1
    for wrong in ("", "tomorrow", "2 fortnights", "2030-13-01", "0001-01-01T00:00:00+14:00"):
        with pytest.raises(NotUnderstood):
            parse_time(wrong)


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("2030-06-01", 2),
        ("20300601", 2),
        ("2030-05-31", 0),
        ("2030-06-02T00:00", 3),
        ("2030-06-01T12:00", 1),
        ("2030-06-01T11:59:59.999999Z", 0),
    ],
)
def test_a_date_as_an_end_is_its_whole_day(engine: Engine, review: MessageActions, end: str, found: int) -> None:
    for at in (NOW, NOW.replace(hour=23, minute=59, second=59, microsecond=999_999), NOW.replace(day=2, hour=0)):
        add(engine, row(), at=at)
    filters = Filters.parse(until=end)
    assert len(review.page(filters).messages) == sum(group.size for group in review.groups(filters).groups) == found
    assert len(discard(review, filters=filters, dry_run=True).changes) == found
    with pytest.raises(NotUnderstood):
        Filters.parse(until="9999-12-31")


def test_the_sample_of_a_group_is_the_newest_also_among_equal_times(engine: Engine, review: MessageActions) -> None:
    add(engine, *(row(status=status) for status in (Status.MANUAL, Status.PENDING) for _ in range(3)))
    newest = review.page(Filters.parse()).messages[0].id
    for asked in (Filters.parse(), Filters.parse(text="id-")):
        assert [group.sample.id for group in review.groups(asked).groups] == [newest]


def test_the_story_is_told_in_its_order(engine: Engine, review: MessageActions) -> None:
    died = int((NOW - timedelta(minutes=9)).timestamp())
    death = nested(
        (b"count", long(3)),
        (b"reason", text("rejected")),
        (b"queue", text("orders-queue")),
        (b"time", timestamp(died)),
        (b"exchange", text("orders")),
        (b"routing-keys", array(text("orders.created"))),
    )
    earlier = nested((b"reason", text("expired")), (b"queue", text("queue.delay.1")), (b"time", timestamp(died - 60)))
    held = properties(
        (b"x-death", array(death)),
        (b"dlqbatch-history", array(earlier)),
        (b"dlqbatch-reason", text("retries-exhausted")),
        (b"dlqbatch-dead-at", timestamp(died + 60)),
    )
    (row_id,) = add(engine, row(properties=held))
    with writing(engine) as connection:
        states.move(connection, row_id, Status.PENDING, Status.PROCESSING, None, LATER, "lifecycle", "due", **lock())
    found = review.show(row_id).timeline
    assert [(step.kind, step.what, step.actor, step.reason) for step in found] == [
        ("death", "it waited in 'queue.delay.1' until its time was over", None, None),
        ("death", "a consumer of 'orders-queue' rejected it, 3 times", None, None),
        ("death", "dlqbatch put it among the dead letters", "drain", "retries-exhausted"),
        ("state", "arrived, pending", "ingest", "test"),
        ("state", "pending → processing", "lifecycle", "due"),
    ]
    times = [step.at for step in found if step.at is not None]
    assert times == sorted(times)
    assert len(times) == len(found)


@pytest.mark.parametrize(
    ("reason", "actor"), [("worker-failed", "consumer"), ("unknown-event", "consumer"), ("not-configured", "drain")]
)
def test_the_story_says_who_gave_it_up(engine: Engine, review: MessageActions, reason: str, actor: str) -> None:
    held = properties((b"dlqbatch-reason", text(reason)), (b"dlqbatch-dead-at", timestamp(int(NOW.timestamp()))))
    (row_id,) = add(engine, row(properties=held))
    [told] = [step for step in review.show(row_id).timeline if step.kind == "death"]
    assert (told.actor, told.reason) == (actor, reason)


def test_attempts_stand_in_the_story(engine: Engine, review: MessageActions) -> None:
    row_id = in_state(engine, Status.PROCESSING)
    minutes = [NOW + timedelta(minutes=number) for number in range(4)]
    begin_attempts(engine, {row_id: "t"}, Strategy.IMMEDIATE, "worker-1", minutes[1])
    attempts.mark_sent(engine, {row_id: 1}, minutes[2])
    with writing(engine) as connection:
        attempts.close_attempts(connection, {row_id: 1}, "failed", minutes[3])
    told = [(step.at, step.what, step.actor) for step in review.show(row_id).timeline if step.kind == "attempt"]
    assert told == [
        (minutes[1], "attempt 1 began (immediate)", "worker-1"),
        (minutes[2], "attempt 1 sent, the broker confirmed it", None),
        (minutes[3], "attempt 1 failed", None),
    ]


def test_a_message_is_shown_whole_whatever_it_holds(engine: Engine, review: MessageActions) -> None:
    deep = b""
    for _ in range(5000):
        deep = encode_table([(b"d", type(long(0))(b"F", deep))])
    held = properties((b"nul", text("a\0b")), (b"same", long(1)), (b"same", long(2)), (b"raw", text(b"\xff")))
    bodies = {
        b"\xff\xfe\0": "hex",
        b"": "text",
        b"\x1b[31mred\n": "text",
        b'{"a": [1, 2.50, "\\u00e9"], "a": {}}': "json",
        b'{"a": ': "text",
        b"[" * 100_000: "text",
    }
    for body, form in bodies.items():
        (row_id,) = add(engine, row(body=body, properties=held))
        assert review.show(row_id).readable.headers == {"nul": "a\0b", "same": 1, "same (2)": 2, "raw": "\\xff"}
        shown = review.show(row_id, Reveal("ann", "r"))
        assert shown.body_form == form
        told = json.loads(json.dumps(shown.as_dict()))
        assert base64.b64decode(told["body_base64"]) == body
        assert base64.b64decode(told["properties_base64"]) == held
        assert told["headers"] == {"nul": "a\0b", "same": 1, "same (2)": 2, "raw": "\\xff"}
        assert list(shown.body_lines()) is not None
    for broken in (properties((b"deep", type(long(0))(b"F", deep))), b"", b"\x20\x00\xff\xff\xff\xff", b"\xff\xff"):
        (row_id,) = add(engine, row(properties=broken))
        json.dumps(review.show(row_id).as_dict())


def test_json_is_indented_and_otherwise_as_it_was_written(engine: Engine, review: MessageActions) -> None:
    body = b'{"n": 1.10, "n": 12345678901234567890123, "t": "a,{\\"b\\u00e9", "e": {}, "l": [ ], "x": [1,[2]]}'
    (row_id,) = add(engine, row(body=body))
    lines = list(review.show(row_id).body_lines())
    assert lines[:4] == ["{", '  "n": 1.10,', '  "n": 12345678901234567890123,', '  "t": "a,{\\"b\\u00e9",']
    assert lines[4:] == ['  "e": {},', '  "l": [],', '  "x": [', "    1,", "    [", "      2", "    ]", "  ]", "}"]


def test_the_head_of_ten_megabytes_is_there_at_once(engine: Engine, review: MessageActions) -> None:
    body = b'{"k": "' + b"x" * 10_000_000 + b'"}'
    (row_id,) = add(engine, row(body=body))
    began = time.process_time()
    shown = review.show(row_id)
    assert next(shown.body_lines()).startswith('{"k": "xxx')
    revealed = review.show(row_id, Reveal("ann", "r"))
    assert next(revealed.body_lines()) == "{"
    assert time.process_time() - began < 8
    assert revealed.content.body == body


@pytest.mark.parametrize("number", [0, -1, 10**6, 2**63, 2**70])
def test_a_message_that_is_not_there(review: MessageActions, number: int) -> None:
    with pytest.raises(NoSuchMessage, match=f"archive show {number}"):
        review.show(number)
    assert review.journal(number).entries == ()
    (change,) = discard(review, number).changes
    assert (change.is_done, change.before) == (False, None)


def test_the_journal_tells_who_and_when(engine: Engine, review: MessageActions) -> None:
    one, other = add(engine, row(), row())
    discard(review, one, actor="Ä person")
    found = review.journal().entries
    assert [(entry.message_id, entry.to_status) for entry in found] == [
        (one, "archived"),
        (one, "manual"),
        (one, "processing"),
        (other, "pending"),
        (one, "pending"),
    ]
    assert {entry.actor for entry in review.journal(actor="Ä person").entries} == {"Ä person"}
    assert len(review.journal(since=LATER).entries) == 3
    assert [entry.message_id for entry in review.journal(other).entries] == [other]
    assert len(review.journal(limit=2).entries) == 2
    for hostile in HOSTILE:
        assert review.journal(actor=hostile).entries == ()


# --- Changing


@pytest.mark.parametrize("status", [Status.PENDING, Status.MANUAL, Status.FAILED])
def test_what_is_discarded_takes_only_allowed_moves_and_is_journalled(
    engine: Engine, review: MessageActions, status: Status
) -> None:
    row_id = in_state(engine, status)
    before = len(review.journal(row_id).entries)
    assert discard(review, row_id).done == 1
    shown = review.show(row_id)
    assert shown.record.status is Status.ARCHIVED
    assert (shown.record.lock_token, shown.record.lock_owner, shown.record.next_retry_at) == (None, None, None)
    new = shown.transitions[before:]
    assert [one.from_status for one in new] == [status, *(one.to_status for one in new[:-1])]
    assert {(one.actor, one.reason, one.at) for one in new} == {("somebody", "of no use", LATER)}
    assert len(new) == {Status.PENDING: 3}.get(status, 1)


def test_a_message_that_waits_for_its_time_is_not_due_once_it_is_back(engine: Engine, review: MessageActions) -> None:
    (row_id,) = add(engine, row(next_retry_at=NOW))
    discard(review, row_id)
    assert restore(review, row_id).done == 1
    record = review.show(row_id).record
    assert (record.status, record.next_retry_at) == (Status.MANUAL, None)


def test_what_is_being_processed_is_refused(engine: Engine, review: MessageActions) -> None:
    row_id = in_state(engine, Status.PROCESSING)
    (refused,) = discard(review, row_id).changes
    assert not refused.is_done
    assert "w works on it until 2030-06-01 12:05:00" in refused.why
    assert review.show(row_id).record.lock_token == "t"


@pytest.mark.parametrize("state", [Status.PENDING, Status.PROCESSING, Status.MANUAL])
def test_what_a_plan_has_reserved_is_refused_until_the_plan_is_over(
    engine: Engine, review: MessageActions, state: Status
) -> None:
    row_id = in_state(engine, state)
    reserve(engine, row_id)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == row_id).values(lease_until=None))
    (refused,) = discard(review, row_id).changes
    assert not refused.is_done
    assert "has reserved it" in refused.why
    reserve(engine, row_id, state="done")
    assert discard(review, row_id).done == 1


def test_what_a_plan_that_is_over_has_sent_can_be_discarded_though_its_lease_is_written_there(
    engine: Engine, review: MessageActions
) -> None:
    (row_id,) = add(engine, row(next_retry_at=NOW))
    tokens = {each.row_id: each.token for each in claim(engine, "w", NOW)}
    numbers = begin_attempts(engine, tokens, Strategy.IMMEDIATE, "w", NOW)
    reserve(engine, row_id, state="done")
    (refused,) = discard(review, row_id).changes
    assert "w works on it until" in refused.why
    with writing(engine) as connection:
        attempts.confirm(connection, numbers, NOW)
    assert discard(review, row_id).done == 1


def test_what_is_under_observation_can_be_discarded_and_comes_back_as_a_linked_row(
    engine: Engine, review: MessageActions
) -> None:
    """A retry whose origin cannot be looked at would stay for ever; its attempt is nobody's any more."""
    (row_id,) = add(engine, row(next_retry_at=NOW))
    numbers = begin_attempts(
        engine, {each.row_id: each.token for each in claim(engine, "w", NOW)}, Strategy.IMMEDIATE, "w", NOW
    )
    attempts.mark_sent(engine, numbers, NOW)
    assert discard(review, row_id, dry_run=True).done == discard(review, row_id).done == 1
    shown = review.show(row_id)
    assert [one.to_status for one in shown.transitions[-3:]] == ["processing", "manual", "archived"]
    assert (shown.record.status, shown.record.lock_token) == (Status.ARCHIVED, None)
    assert [(one.outcome, one.closed_at) for one in shown.attempts] == [("abandoned", LATER)]
    assert restore(review, row_id).done == 1


def test_a_discard_without_a_time_is_at_the_stores(
    engine: Engine, review: MessageActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention counts from there: by the clock of a machine that is years behind it would go at once."""
    (row_id,) = add(engine, row())
    monkeypatch.setattr(StoreClock, "_time_at_zero", lambda _: LATER - timedelta(seconds=time.monotonic()))
    for change in (review.discard, review.restore):
        assert change([row_id], actor="somebody", reason="r").done == 1
        assert abs(review.show(row_id).record.status_since - LATER) < timedelta(minutes=1)


def test_some_change_although_others_do_not(engine: Engine, review: MessageActions) -> None:
    free, held = in_state(engine, Status.MANUAL), in_state(engine, Status.PROCESSING)
    done = discard(review, free, held, free, 10**9)
    assert (done.done, done.not_done) == (1, 2)
    assert [one.id for one in done.changes] == [free, held, 10**9]
    assert discard(review, free).done == 0
    assert restore(review, held).done == 0
    assert (restore(review, free).done, review.show(free).record.status) == (1, Status.MANUAL)


def test_a_filter_discards_what_matches_and_is_not_over_yet(engine: Engine, review: MessageActions) -> None:
    wanted = add(engine, *(row(fingerprint="a" * 16) for _ in range(250)))
    resolved = in_state(engine, Status.RESOLVED, fingerprint="a" * 16)
    (other,) = add(engine, row())
    done = discard(review, filters=Filters.parse(group="a" * 16), expect=250)
    assert sorted(one.id for one in done.changes) == sorted(wanted)
    assert done.done == 250
    assert review.show(resolved).record.status is Status.RESOLVED
    assert review.show(other).record.status is Status.PENDING
    assert discard(review, everything=True).done == 1


def test_what_is_resolved_is_not_discarded_and_nothing_of_it_changes(engine: Engine, review: MessageActions) -> None:
    resolved = in_state(engine, Status.RESOLVED, fingerprint="a" * 16)
    for dry_run in (True, False):
        for done in (
            discard(review, resolved, dry_run=dry_run),
            discard(review, filters=Filters.parse(group="a" * 16, statuses=[Status.RESOLVED]), dry_run=dry_run),
        ):
            (change,) = done.changes
            assert (change.is_done, change.before, "it was handled" in change.why) == (False, Status.RESOLVED, True)
    assert review.show(resolved).record.status is Status.RESOLVED


def test_nothing_named_is_refused(engine: Engine, review: MessageActions) -> None:
    (row_id,) = add(engine, row())
    for wrong in ({}, {"filters": Filters()}):
        with pytest.raises(NotUnderstood):
            discard(review, **wrong)
    with pytest.raises(NotUnderstood):
        discard(review, row_id, filters=Filters.parse(event="x"))
    with pytest.raises(NotUnderstood):
        discard(review, row_id, reason=" ")
    with pytest.raises(NotUnderstood):
        restore(review, row_id, reason=" ")
    for nobody in ("", " ", "ingest", "lifecycle", "retain"):
        for change in (discard, restore):
            with pytest.raises(NotUnderstood):
                change(review, row_id, actor=nobody)
    assert len(review.journal(row_id).entries) == 1


def test_a_dry_run_changes_nothing_and_says_the_same(engine: Engine, review: MessageActions) -> None:
    ids = [in_state(engine, status) for status in Status]
    for change in (discard, restore):
        before = json_ready(review.journal(limit=1000))
        planned = change(review, *ids, dry_run=True)
        assert planned.dry_run
        assert json_ready(review.journal(limit=1000)) == before
        assert change(review, *ids).changes == planned.changes


def test_many_who_discard_the_same_do_it_once(engine: Engine, review: MessageActions) -> None:
    ids = add(engine, *(row() for _ in range(20)))
    barrier = Barrier(4)

    def hurry(number: int) -> int:
        barrier.wait()
        return discard(review, *ids, actor=f"person {number}").done

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(hurry, range(4))) == len(ids)
    for row_id in ids:
        changes = review.show(row_id).transitions
        assert [one.to_status for one in changes] == ["pending", "processing", "manual", "archived"]
        assert len({one.actor for one in changes[1:]}) == 1


# --- Many at once


def test_more_than_a_hundred_are_discarded_only_by_somebody_who_says_how_many(
    engine: Engine, review: MessageActions
) -> None:
    add(engine, *(row(fingerprint="a" * 16, origin_queue="orders", event="e") for _ in range(100)))
    add(engine, row(fingerprint="a" * 16, origin_queue="mails", status=Status.MANUAL))
    wanted = Filters.parse(group="a" * 16)
    for expect, said in ((None, "--expect 101"), (100, "100 messages were expected, and 101 match")):
        with pytest.raises(NumberUnexpected, match=said) as refused:
            discard(review, filters=wanted, expect=expect)
        assert refused.value.split.groups == {("a" * 16, "orders"): 100, ("a" * 16, "mails"): 1}
    with pytest.raises(NumberUnexpected):
        discard(review, filters=wanted, expect=7, dry_run=True)
    assert len(review.page(wanted, 200).messages) == 101
    assert {each.status for each in review.page(wanted, 200).messages} == {Status.PENDING, Status.MANUAL}
    planned = discard(review, filters=wanted, dry_run=True)
    assert planned.split is not None
    assert planned.split.events == {"e": 100, None: 1}
    assert discard(review, filters=wanted, expect=101).done == 101
    assert discard(review, filters=wanted, expect=0).done == 0


def test_a_split_names_what_should_not_be_in_a_discard_by_accident(engine: Engine, review: MessageActions) -> None:
    starts = (Status.PROCESSING, Status.MANUAL, Status.FAILED)
    _, reserved, original = (in_state(engine, each) for each in starts)
    reserve(engine, reserved)
    Editing(engine).edit(original, body=b"[]", actor="somebody", reason="r")
    split = discard(review, everything=True, dry_run=True).split
    assert split is not None
    assert (split.total, split.under_way, split.reserved, split.edits) == (3, 1, 1, 1)


def test_what_arrives_while_a_discard_runs_is_not_discarded(
    engine: Engine, review: MessageActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(engine, *(row(fingerprint="a" * 16) for _ in range(3)))
    monkeypatch.setattr(discarding, "discard_some", newcomer_first(engine, discarding.discard_some))
    monkeypatch.setattr("dlqbatch.messages.actions.discard_some", discarding.discard_some)
    done = discard(review, filters=Filters.parse(group="a" * 16), expect=3)
    assert done.done == 3
    assert len(review.page(Filters.parse(group="a" * 16, statuses=[Status.PENDING])).messages) == 1


def newcomer_first(engine: Engine, real: Any) -> Any:
    def some(connection: Any, row_ids: Any, **given: Any) -> Any:
        states.arrive(connection, [row(fingerprint="a" * 16)], NOW, "ingest", "test")
        return real(connection, row_ids, **given)

    return some
