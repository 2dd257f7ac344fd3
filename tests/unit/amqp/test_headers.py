from __future__ import annotations

from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import TYPE_CHECKING

import messages
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.headers import BROKERS, CLAIMS, OURS, scan, walk
from dlqbatch.amqp.table import UnreadableTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.amqp.headers import Headers


def test_the_names_are_those_of_the_contract() -> None:
    assert sorted(OURS) == sorted(messages.OURS)
    assert sorted(BROKERS) == sorted(messages.BROKERS)
    assert sorted(CLAIMS) == sorted(messages.CLAIMS)


@given(messages.tables)
def test_entries_are_sorted_as_a_slow_reading_says(table: list[messages.Entry]) -> None:
    before, after = b"before", b"after"
    encoded = messages.encode_table(table)
    found = scan(before + encoded + after, len(before), len(before + encoded))
    passed = [(name, value) for name, value in table if name not in messages.OURS and name not in messages.BROKERS]
    assert found.foreign == messages.encode_table(passed)
    for names, group in ((OURS, found.ours), (BROKERS, found.brokers), (CLAIMS, found.claims)):
        first: dict[bytes, messages.Value] = {}
        for name, value in table:
            if name in names:
                first.setdefault(name, value)
        assert {name: (bytes([field.tag]), field.value) for name, field in group.items()} == first


def outcome(of: Callable[[bytes, int, int], Headers], data: bytes, start: int, end: int) -> Headers | str:
    try:
        return of(data, start, end)
    except (UnreadableTable, IndexError, StructError):
        return "unreadable"


@given(messages.tables, st.data())
def test_a_table_like_one_seen_before_is_read_as_if_it_were_the_first(
    table: list[messages.Entry], data: st.DataObject
) -> None:
    before, encoded, after = b"before", messages.encode_table(table), b"after"
    start, end = len(before), len(before + encoded)
    for _ in range(3):  # it takes two for the third to be known
        found = scan(before + encoded + after, start, end)
        assert found == walk(before + encoded + after, start, end)
    # As long, and with any of its bytes another: a value, a name, a length.
    changed = bytearray(encoded)
    for place in data.draw(st.lists(st.integers(0, max(len(encoded) - 1, 0)), max_size=4)) if encoded else ():
        changed[place] = data.draw(st.integers(0, 255))
    like = before + bytes(changed) + after
    assert outcome(scan, like, start, end) == outcome(walk, like, start, end)
    assert outcome(scan, like[: end - 1], start, end) == outcome(walk, like[: end - 1], start, end)


@given(messages.any_properties)
def test_an_envelope_is_readable_exactly_if_its_table_is(data: bytes) -> None:
    envelope = open_envelope("", "", False, 0, data)
    try:
        messages.headers_of(data)
    except (AssertionError, KeyError, IndexError):
        return
    assert (envelope.headers is None) == bool(data[1] & 1)


def test_a_name_that_only_resembles_ours_is_foreign() -> None:
    table = [
        (name, messages.long(1))
        for name in (b"dlqbatch-worker-retries", b"dlqbatch-", b"DLQBATCH-ID", b"cc", b"x-stream-offset")
    ]
    encoded = messages.encode_table(table)
    assert scan(encoded, 0, len(encoded)).foreign == encoded
