from __future__ import annotations

import messages
from hypothesis import given

from dlqbatch.message.envelope import open_envelope
from dlqbatch.message.headers import BROKERS, CLAIMS, OURS, scan


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


@given(messages.any_properties)
def test_an_envelope_is_readable_exactly_if_its_table_is(data: bytes) -> None:
    envelope = open_envelope("", "", False, 0, data)
    try:
        messages.headers_of(data)
    except (AssertionError, KeyError, IndexError):
        return
    assert (envelope.headers is None) == bool(data[1] & 1)


def test_a_name_that_only_resembles_ours_is_foreign() -> None:
    table = [(name, messages.long(1)) for name in (b"dlqbatch-worker-retries", b"dlqbatch-", b"DLQBATCH-ID", b"cc")]
    encoded = messages.encode_table(table)
    assert scan(encoded, 0, len(encoded)).foreign == encoded
