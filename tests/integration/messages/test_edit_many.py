"""Many messages are edited as one action, on both databases."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, row, store_at
from messages import encode_table, text
from plan_rows import reserve

from dlqbatch.actions.queries import show
from dlqbatch.actions.undo import undo
from dlqbatch.messages import edit_many as module
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.changes import Changes
from dlqbatch.messages.edit import EditRefused, header_edits
from dlqbatch.messages.edit_many import ManyEdited, edit_many, edits
from dlqbatch.messages.selection import NumberUnexpected
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.tables import PLAN_ITEMS

if TYPE_CHECKING:
    from sqlalchemy import Engine

WHO: dict[str, Any] = {"actor": "ann", "reason": "the currency was missing"}
EURO = edits(['body.currency="EUR"'])


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def order(number: int, **columns: Any) -> dict[str, Any]:
    return row(body=b'{"order": %d, "amount": 10.50}' % number, fingerprint="a" * 16, **columns)


def test_many_are_edited_replayed_by_the_action_and_undone(engine: Engine) -> None:
    ids = add(engine, *(order(number) for number in range(120)))
    store = MessageActions(engine)
    wanted = Filters.parse(group="a" * 16)
    with pytest.raises(NumberUnexpected):
        edit_many(engine, EURO, filters=wanted, **WHO)
    planned = edit_many(engine, EURO, filters=wanted, dry_run=True, **WHO)
    assert (planned.action, planned.done, len(planned.messages)) == (None, 120, 120)
    assert {each.differences for each in planned.messages} == {(("body.currency", None, '"EUR"'),)}
    done = edit_many(engine, EURO, filters=wanted, expect=120, **WHO)
    assert (done.done, done.action) == (120, "A-1")
    made = {each.id: each.new for each in done.messages}
    assert sorted(made) == sorted(ids)
    for number, row_id in enumerate(ids[:3]):
        edited = store.show(made[row_id] or 0)
        assert edited.record.status is Status.MANUAL
        assert store.show(row_id).record.status is Status.ARCHIVED
        assert edited.record.parent == store.show(row_id).record.identity
        assert edited.content.body == b'{"order": %d, "amount": 10.50, "currency": "EUR"}' % number

    frozen = freeze(engine, Selection(Filters.parse(action="A-1")), now=NOW, **WHO)
    with reading(engine) as connection:
        items = set(connection.scalars(PLAN_ITEMS.select().with_only_columns(PLAN_ITEMS.c.message_id)))
    assert (frozen.size, items) == (120, set(made.values()))

    undone = undo(engine, "A-1", **WHO)
    assert (undone.done, undone.not_done) == (240, 0)
    assert {store.show(row_id).record.status for row_id in ids} == {Status.PENDING}


def test_edits_are_replayed_in_the_order_in_which_their_originals_came(engine: Engine) -> None:
    came = [NOW + timedelta(minutes=minute) for minute in (5, 3, 9, 1, 7, 2, 8, 4, 6, 0)]
    ids = add(engine, *(order(number, created_at=at) for number, at in enumerate(came)))
    new = {each.id: each.new for each in edit_many(engine, EURO, ids, **WHO).messages}
    originals = [row_id for _, row_id in sorted(zip(came, ids, strict=True))]
    assert [new[row_id] for row_id in originals] == sorted(each or 0 for each in new.values())


def test_what_cannot_be_edited_stays_and_is_listed(engine: Engine) -> None:
    fine, list_, packed, already, reserved, gone = add(
        engine,
        order(1),
        row(body=b"[1]"),
        row(body=b"\x1f\x8b\xff"),
        row(body=b'{"currency": "EUR"}'),
        order(2),
        order(3, status=Status.MANUAL),
    )
    reserve(engine, reserved)
    MessageActions(engine).discard([gone], **WHO)
    done = edit_many(engine, EURO, [fine, list_, packed, already, reserved, gone, 10**9], **WHO)
    why = {each.id: each.why for each in done.messages if not each.is_done}
    assert done.done == 1
    assert why[list_] == "body is no object"
    assert "no UTF-8" in why[packed]
    assert why[already] == "it is like that already"
    assert "has reserved it" in why[reserved]
    assert "it is archived" in why[gone]
    assert why[10**9] == "there is no such message"
    refused = show(engine, str(done.action), state="refused").messages
    assert {each.id for each in refused} == {list_, packed, already, reserved, gone}
    assert done.as_dict()["not_done"] == 6


def test_headers_are_changed_in_all_and_a_body_is_not(engine: Engine) -> None:
    table = encode_table([(b"tenant", text("red")), (b"other", text("stays"))])
    properties = b"\x20\x00" + len(table).to_bytes(4, "big") + table
    ids = add(engine, *(row(body=b"\xff\0", properties=properties) for _ in range(2)))
    done = edit_many(engine, edits(headers=header_edits([("tenant", "blue")])), ids, **WHO)
    assert {each.differences for each in done.messages} == {(("header tenant", "red", "blue"),)}
    shown = MessageActions(engine).show(done.messages[0].new or 0)
    assert shown.content.body == b"\xff\0"
    assert shown.readable.headers["tenant"] == "blue"
    assert shown.readable.headers["other"] == "stays"


def test_headers_are_changed_beside_a_body_that_should_be_json_and_is_not(engine: Engine) -> None:
    kind = b"application/json"
    properties = b"\x80\x00" + bytes([len(kind)]) + kind
    (broken,) = add(engine, row(body=b'{"a":', properties=properties))
    done = edit_many(engine, edits(headers=header_edits([("tenant", "blue")])), [broken], **WHO)
    assert (done.done, done.messages[0].why) == (1, "")
    assert MessageActions(engine).show(done.messages[0].new or 0).content.body == b'{"a":'


def test_a_byte_order_mark_stays_before_what_is_edited(engine: Engine) -> None:
    (marked,) = add(engine, row(body=b'\xef\xbb\xbf{"n": 1.0}'))
    done = edit_many(engine, edits(["body.n=2"]), [marked], **WHO)
    assert done.messages[0].differences == (("body.n", "1.0", "2"),)
    assert MessageActions(engine).show(done.messages[0].new or 0).content.body == b'\xef\xbb\xbf{"n": 2}'


def test_a_secret_is_masked_in_the_differences(engine: Engine) -> None:
    ids = add(engine, row(body=b'{"password": "hunter2", "n": 1}'))
    done = edit_many(engine, edits(['body.password="hunter3"', "body.n=2"]), ids, dry_run=True, **WHO)
    assert "hunter" not in str(done.as_dict())
    assert ("body.n", "1", "2") in done.messages[0].differences
    made = edit_many(engine, edits(['body.password="hunter3"']), ids, **WHO)
    assert "hunter" not in str(show(engine, str(made.action)).as_dict())


def test_an_edit_that_is_killed_shows_what_it_did(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlqbatch.messages.edit_many.AT_ONCE", 2)
    ids = add(engine, *(order(number) for number in range(5)))
    count = 0
    real = module.put_in_their_place

    def killed(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(module, "put_in_their_place", killed)
    with pytest.raises(KeyboardInterrupt):
        edit_many(engine, EURO, ids, **WHO)
    monkeypatch.setattr(module, "put_in_their_place", real)
    assert show(engine, "A-1").action.counts == {"done": 4}
    again: ManyEdited = edit_many(engine, EURO, filters=Filters.parse(group="a" * 16, is_edit=False), **WHO)
    assert again.done == 3
    undone: Changes = undo(engine, "A-1", **WHO)
    assert undone.done == 4


@pytest.mark.parametrize(
    "wrong",
    [
        "body.currency",
        "body.currency=EUR",
        "body=1",
        "body..x=1",
        "body.a[*]=1",
        "body.=1",
        "body.a b=1",
        "bodyx.a=1",
        "body['a=1",
        "body.\udcff=1",
        "body." + "a." * 5000 + "b=1",
    ],
)
def test_what_is_no_place_and_value_is_refused_before_anything_is_read(wrong: str) -> None:
    with pytest.raises(EditRefused):
        edits([wrong])


@pytest.mark.parametrize("patch", [b"", b"[]", b"null", b'"x"', b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_merge_patch_is_refused(patch: bytes) -> None:
    with pytest.raises(EditRefused):
        edits(patch=patch)


def test_a_merge_patch_that_is_too_large_or_too_deep_is_refused_before_anything_is_read() -> None:
    deep = b'{"a":' * 101 + b"1" + b"}" * 101
    assert edits(patch=b'{"a":' * 100 + b"1" + b"}" * 100).patch is not None
    for patch, why in (
        (deep, "nested deeper than 100 objects"),
        (b'{"a":' + deep + b"}", "nested deeper than 100 objects"),
        (b'{"a":"' + b"x" * 1024 * 1024 + b'"}', "larger than 1,048,576 bytes"),
    ):
        with pytest.raises(EditRefused, match=why):
            edits(patch=patch)


@pytest.mark.parametrize(
    "value", ['"\\u0000\\u001b[31m"', '"\u202e"', '"\' OR 1=1 --"', "[" * 400 + "]" * 400, '"%_\\\\"']
)
def test_a_hostile_value_is_written_as_it_is_and_nothing_else(engine: Engine, value: str) -> None:
    (row_id,) = add(engine, order(1))
    for wanted in (edits([f"body.currency={value}"]), edits(patch=f'{{"currency": {value}}}'.encode())):
        done = edit_many(engine, wanted, [row_id], dry_run=True, **WHO)
        assert [difference.path for difference in done.messages[0].differences] == ["body.currency"]
        body = b'{"currency": 1, "kept": 1.0}'
        assert wanted.body(body)[0] == body.replace(b"1,", value.encode() + b",", 1)


def test_a_patch_that_matches_nothing_changes_nothing_and_one_of_everything_all(engine: Engine) -> None:
    body = b'{"a": 1, "b": {"c": 2}}'
    for patch in (b"{}", b'{"x": null}', b'{"b": {"x": null}}', b'{"a": 1}'):
        assert edits(patch=patch).body(body) == (body, [])
    emptied, differences = edits(patch=b'{"a": null, "b": null}').body(body)
    assert (emptied, len(differences)) == (b"{}", 2)


def test_nothing_named_is_refused(engine: Engine) -> None:
    (row_id,) = add(engine, order(1))
    for named in ({}, {"filters": Filters()}, {"row_ids": [row_id], "filters": Filters.parse(text="x")}):
        with pytest.raises(NotUnderstood):
            edit_many(engine, EURO, **named, **WHO)
    with pytest.raises(EditRefused):
        edits()
