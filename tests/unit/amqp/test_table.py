from __future__ import annotations

import struct
from contextlib import suppress

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.table import (
    TEXT_TAGS,
    Field,
    UnreadableTable,
    encode_field,
    encode_integer,
    encode_item,
    encode_text,
    encode_timestamp,
    fields,
    first_fields,
    first_item,
    first_texts,
    is_array,
    items,
    to_bytes,
    to_text,
)


@given(messages.tables)
def test_every_entry_comes_back_with_its_name_type_and_bytes(table: list[messages.Entry]) -> None:
    encoded = messages.encode_table(table)
    found = list(fields(encoded))
    assert [(name, (bytes([field.tag]), field.value)) for name, field in found] == table
    assert b"".join(encode_field(name, field) for name, field in found) == encoded
    assert first_fields(encoded) == dict(reversed(found))


def texts_one_by_one(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    with suppress(UnreadableTable, IndexError, struct.error):
        for name, field in fields(data):
            if field.tag in TEXT_TAGS:
                found.setdefault(name, field.value)
    return found


@given(messages.tables, st.integers(0, 40))
def test_the_texts_of_a_table_are_read_as_far_as_it_is_whole(table: list[messages.Entry], cut: int) -> None:
    encoded = messages.encode_table(table)
    data = encoded[: len(encoded) - cut]
    assert first_texts(data) == texts_one_by_one(data)


@given(st.binary(max_size=60))
def test_the_texts_of_what_is_no_table_are_read_up_to_there(data: bytes) -> None:
    assert first_texts(data) == texts_one_by_one(data)


@given(st.lists(messages.values, max_size=6))
def test_every_item_of_an_array_comes_back(values: list[messages.Value]) -> None:
    content = messages.array(*values).content
    assert b"".join(map(encode_item, items(content))) == content
    assert is_array(content)
    assert first_item(content) == next(items(content), None)


@given(st.binary(max_size=60))
def test_bytes_are_an_array_exactly_if_they_can_be_read_as_one(data: bytes) -> None:
    try:
        messages.decode_array(data)
    except (AssertionError, KeyError):
        assert not is_array(data)
        with pytest.raises((UnreadableTable, IndexError)):
            list(items(data))
    else:
        assert is_array(data)
        assert len(list(items(data))) == len(messages.decode_array(data))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_table_are_refused(data: bytes) -> None:
    try:
        wanted = messages.decode_table(data)
    except (AssertionError, KeyError):
        with pytest.raises((UnreadableTable, IndexError)):
            list(fields(data))
        with pytest.raises((UnreadableTable, IndexError)):
            first_fields(data)
    else:
        assert [name for name, _ in fields(data)] == [name for name, _ in wanted]


@pytest.mark.parametrize(
    ("tag", "code", "number"),
    [
        ("b", "b", -1),
        ("B", "B", 255),
        ("s", "h", -2),
        ("u", "H", 65535),
        ("I", "i", -3),
        ("i", "I", 2**32 - 1),
        ("l", "q", -(2**63)),
        ("L", "q", -1),  # signed for the broker, whatever its name
    ],
)
def test_an_integer_is_read_in_every_width(tag: str, code: str, number: int) -> None:
    assert Field(ord(tag), struct.pack(">" + code, number)).as_integer() == number


@pytest.mark.parametrize("tag", "tfdDTVSxAF")
def test_nothing_else_is_an_integer(tag: str) -> None:
    assert Field(ord(tag), b"\x01" * messages.FIXED.get(tag.encode(), 3)).as_integer() is None


@given(st.binary())
def test_any_bytes_survive_as_text(data: bytes) -> None:
    assert to_bytes(to_text(data)) == data
    assert Field(ord("S"), data).as_text() == Field(ord("x"), data).as_text() == to_text(data)


def test_what_is_written_can_be_read() -> None:
    encoded = encode_text(b"a", "ö\udcff") + encode_integer(b"b", 2**64) + encode_timestamp(b"c", 7)
    found = dict(fields(encoded))
    assert found[b"a"].as_text() == "ö\udcff"
    assert found[b"b"].as_integer() == 2**63 - 1
    assert found[b"c"].as_timestamp() == 7
