from __future__ import annotations

from contextlib import suppress

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.identity import header_digest
from dlqbatch.amqp.retry_headers import journey_so_far
from dlqbatch.messages.edit import (
    LARGEST_BODY,
    LARGEST_PROPERTIES,
    EditRefused,
    HeaderEdits,
    as_meant,
    check_body,
    edit_headers,
    header_edits,
    readdress,
)

JSON = messages.encode_properties({"content_type": b"application/json"})
header_texts = st.binary(max_size=12)
wishes = st.dictionaries(messages.plain_names.filter(bool), st.none() | header_texts, max_size=4)


def edited(properties: bytes, *given: tuple[str, str], removed: tuple[str, ...] = ()) -> bytes:
    return edit_headers(properties, header_edits(given, removed))


def present(data: bytes) -> set[bytes]:
    return {name for name, _ in messages.headers_of(data)}


@given(messages.other_properties, st.none() | messages.tables, wishes)
def test_only_what_was_asked_for_changes(
    others: dict[str, bytes], table: list[messages.Entry] | None, wanted: dict[bytes, bytes | None]
) -> None:
    data = messages.encode_properties(others if table is None else {**others, "headers": messages.encode_table(table)})
    there = {name for name, _ in table or ()}
    wanted = {name: value for name, value in wanted.items() if value is not None or name in there}
    after = messages.decode_properties(edit_headers(data, HeaderEdits(wanted)))
    entries = messages.decode_table(after.pop("headers", b""))
    assert after == others
    assert [entry for entry in entries if entry[0] not in wanted] == [
        entry for entry in table or () if entry[0] not in wanted
    ]
    for name, value in wanted.items():
        found = [each for entry, each in entries if entry == name]
        assert [each.content for each in found] == ([] if value is None else [value])
        assert all(each.tag in b"Sx" for each in found)


@given(messages.any_properties)
def test_without_a_wish_nothing_changes_whatever_it_is(data: bytes) -> None:
    assert edit_headers(data, HeaderEdits()) == data


@given(messages.any_properties)
def test_whatever_the_bytes_are_it_is_an_edit_or_a_refusal(data: bytes) -> None:
    with suppress(EditRefused):
        assert b"tenant" in edited(data, ("tenant", "blue"))
    assert isinstance(readdress(data, "new", "old", b"body", "was"), bytes)


@pytest.mark.parametrize("data", [b"", b"\0", b"\x20\x00\xff\xff\xff\xff", b"\x20\x00\0\0\0\x01\xff"])
def test_headers_that_cannot_be_read_are_left_alone(data: bytes) -> None:
    with pytest.raises(EditRefused, match="cannot be read"):
        edited(data, ("tenant", "blue"))
    assert readdress(data, "new", "old", b"body", "was") == data


def test_a_header_keeps_its_place_and_the_others_their_types() -> None:
    table = [(b"a", messages.long(1)), (b"b", messages.text("x")), (b"c", messages.Value(b"d", b"\x3f" * 8))]
    data = messages.with_headers(*table, (b"b", messages.text("again")), correlation_id=b"7", timestamp=b"\xff" * 8)
    assert edited(data, ("b", "ö"), ("new", "")) == messages.with_headers(
        table[0],
        (b"b", messages.text("ö")),
        table[2],
        (b"new", messages.text("")),
        correlation_id=b"7",
        timestamp=b"\xff" * 8,
    )
    assert edited(data, removed=("b",)) == messages.with_headers(
        table[0], table[2], correlation_id=b"7", timestamp=b"\xff" * 8
    )


def test_the_text_that_is_there_already_changes_nothing() -> None:
    data = messages.with_headers((b"a", messages.Value(b"x", b"raw")), (b"b", messages.text(b"\xff")))
    assert edited(data, ("a", "raw"), ("b", "\udcff")) == data


def test_a_message_without_headers_gets_some() -> None:
    data = messages.encode_properties({"content_type": b"text/plain", "delivery_mode": b"\x02", "priority": b"\x05"})
    after = messages.decode_properties(edited(data, ("tenant", "blue")))
    assert messages.decode_table(after.pop("headers")) == [(b"tenant", messages.text("blue"))]
    assert after == messages.decode_properties(data)


@pytest.mark.parametrize(
    "name",
    [
        *("", "n" * 256, "ö" * 128, "\ud800"),
        *("dlqbatch-id", "dlqbatch-anything", "x-death", "x-death-of-mine", "CC", "BCC"),
        *("x-first-death-queue", "x-last-death-reason", "x-delivery-count", "x-acquired-count"),
    ],
)
def test_a_name_that_is_not_ours_to_give_is_refused(name: str) -> None:
    for wish in (((name, "x"),), ()):
        with pytest.raises(EditRefused, match=r"Nothing was changed\.$"):
            header_edits(wish, () if wish else (name,))


def test_contradictions_and_misses_are_refused() -> None:
    with pytest.raises(EditRefused, match="named twice"):
        header_edits([("a", "1"), ("a", "2")])
    with pytest.raises(EditRefused, match="named twice"):
        header_edits([("a", "1")], ["a"])
    with pytest.raises(EditRefused, match="no header 'b'"):
        edited(messages.with_headers((b"a", messages.long(1))), removed=("b",))
    with pytest.raises(EditRefused, match="no header 'b'"):
        edited(b"\0\0", removed=("b",))


def test_headers_that_no_frame_holds_are_refused_unless_they_shrink() -> None:
    room = LARGEST_PROPERTIES - len(edited(b"\0\0", ("big", "")))
    assert len(edited(b"\0\0", ("big", "x" * room))) == LARGEST_PROPERTIES
    with pytest.raises(EditRefused, match=r"129,0\d\d"):
        edited(b"\0\0", ("big", "x" * (room + 1)))
    # What dlqbatch and the broker wrote is written anew or left behind when it is sent.
    history = (b"dlqbatch-history", messages.array(*(messages.death() for _ in range(2_000))))
    edited(messages.with_headers(history), ("big", "x" * room))
    too_large = messages.with_headers((b"a", messages.text("x" * 200_000)), (b"b", messages.text("x" * 1_000)))
    assert present(edited(too_large, removed=("b",))) == {b"a"}


def test_an_edited_message_is_another_one_that_knows_where_it_comes_from() -> None:
    death = messages.x_death(messages.death())
    before = [
        (b"dlqbatch-id", messages.text("old")),
        (b"tenant", messages.long(7)),
        (b"dlqbatch-parent", messages.text("older")),
        (b"dlqbatch-attempt", messages.long(4)),
        death,
    ]
    data = readdress(messages.with_headers(*before), "new", "old", b"body", "was")
    assert messages.headers_of(data) == [
        (b"dlqbatch-id", messages.text("new")),
        (b"tenant", messages.long(7)),
        (b"dlqbatch-parent", messages.text("old")),
        death,
    ]
    headers = open_envelope("", "", False, 0, readdress(b"\0\0", "new", "old", b"body", "was")).headers
    assert headers is not None
    journey = journey_so_far(headers)
    assert (journey.id, journey.parent, journey.attempt) == ("new", "old", None)


@pytest.mark.parametrize("digest", ["", "was", "of another message"])
def test_a_digest_that_told_the_message_from_others_does_so_after_an_edit(digest: str) -> None:
    before = messages.with_headers((b"dlqbatch-digest", messages.text(digest)), message_id=b"m")
    after = dict(messages.headers_of(readdress(before, "new", "old", b"edited", "was")))
    expected = header_digest(b"m", 6, [b"edited"]) if digest == "was" else digest
    assert after[b"dlqbatch-digest"] == messages.text(expected)


@pytest.mark.parametrize(
    "after", [b"", b"{", b"{'a': 1}", b"[1,]", b"\xff", b"[" * 100_000, b'{"a": 1} x', b'{"a": NaN}', b"[-Infinity]"]
)
def test_json_stays_json(after: bytes) -> None:
    for before, properties in ((b'{"a": 1}', b"\0\0"), (b"not yet", JSON), (b"", JSON)):
        with pytest.raises(EditRefused, match="--force"):
            check_body(before, after, properties)
        check_body(before, after, properties, force=True)
        check_body(before, b' {"a": 2.5} ', properties)


def test_what_was_no_json_need_not_become_any() -> None:
    check_body(b"text", b"other text", b"\0\0")
    check_body(b"\x1f\x8b", b"\x1f\x8c", messages.encode_properties({"content_type": b"text/plain"}))
    compressed = messages.encode_properties({"content_type": b"application/json", "content_encoding": b"gzip"})
    check_body(b"\x1f\x8b", b"\x1f\x8c", compressed)
    with pytest.raises(EditRefused):
        check_body(b"", b"x", messages.encode_properties({"content_type": b"application/vnd.shop+JSON; v=1"}))


def test_ten_megabytes_are_fine_and_more_than_any_broker_takes_is_not() -> None:
    check_body(b"{}", b'{"k": "' + b"x" * 10_000_000 + b'"}', JSON)
    with pytest.raises(EditRefused, match="a broker takes"):
        check_body(b"", bytes(LARGEST_BODY + 1), b"\0\0", force=True)


@pytest.mark.parametrize(
    ("before", "out", "meant"),
    [
        (b"a", b"a\n", b"a"),
        (b"a", b"b\r\n", b"b"),
        (b"a\n", b"b\n", b"b\n"),
        (b"a\n", b"b", b"b"),
        (b"a", b"b\n\n", b"b\n"),
        (b"", b"\n", b""),
    ],
)
def test_the_line_end_that_an_editor_adds_is_no_edit(before: bytes, out: bytes, meant: bytes) -> None:
    assert as_meant(before, out) == meant
