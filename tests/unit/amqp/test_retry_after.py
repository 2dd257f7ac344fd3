"""`Retry-After` as failures bring it: seconds and dates, and whatever else somebody writes there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from struct import pack

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.headers import NONE, Headers, scan
from dlqbatch.amqp.retry_after import LONGEST, seconds_asked

NOW = datetime(2026, 2, 11, 12, tzinfo=UTC)
OURS, OTHERS = b"dlqbatch-retry-after", b"Retry-After"


def headers(*entries: messages.Entry) -> Headers:
    table = messages.encode_table(entries)
    return scan(table, 0, len(table))


def asked(value: messages.Value, name: bytes = OTHERS) -> int:
    return seconds_asked(headers((name, value)), int(NOW.timestamp()))


@pytest.mark.parametrize("name", [OURS, OTHERS, b"retry-after", b"X-Retry-After", b"x-retry-after"])
def test_the_names_of_the_header(name: bytes) -> None:
    assert asked(messages.text("30"), name) == 30
    assert asked(messages.text("30"), name.upper()) == 0 or name.upper() == name


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (messages.text("120"), 120),
        (messages.text(" 7 "), 7),
        (messages.text("1.2"), 2),
        (messages.text("1.0"), 1),
        (messages.long(90), 90),
        (messages.Value(b"d", pack(">d", 0.25)), 1),
        (messages.Value(b"f", pack(">f", 2.5)), 3),
        (messages.timestamp(int(NOW.timestamp()) + 5), 5),
        (messages.text("Wed, 11 Feb 2026 12:01:00 GMT"), 60),
        (messages.text("Wednesday, 11-Feb-26 12:00:09 GMT"), 9),
        (messages.text("Wed Feb 11 12:00:03 2026"), 3),
        # What asks for nothing, or for what nobody can wait.
        (messages.text(""), 0),
        (messages.text("0"), 0),
        (messages.text("-5"), 0),
        (messages.long(-(2**63)), 0),
        (messages.text("NaN"), 0),
        (messages.text("soon"), 0),
        (messages.text("1e9"), 0),
        (messages.Value(b"d", pack(">d", float("nan"))), 0),
        (messages.Value(b"d", pack(">d", float("-inf"))), 0),
        (messages.Value(b"d", pack(">d", float("inf"))), 0),
        (messages.timestamp(0), 0),
        (messages.text("Thu, 01 Jan 1970 00:00:00 GMT"), 0),
        (messages.text("Wed, 99 Feb 99999999 12:01:00 GMT"), 0),
        (messages.nested(), 0),
        (messages.text("9" * 60), LONGEST),
        (messages.text("9" * 65), 0),
        (messages.long(2**63 - 1), LONGEST),
        (messages.timestamp(2**64 - 1), LONGEST),
        (messages.text("Fri, 31 Dec 9999 23:59:59 GMT"), LONGEST),
    ],
    ids=str,
)
def test_what_it_may_say(value: messages.Value, seconds: int) -> None:
    assert asked(value) == seconds


def test_our_own_header_goes_before_what_stays_in_the_message() -> None:
    found = headers((OTHERS, messages.text("5")), (OURS, messages.text("60")))
    assert seconds_asked(found, 0) == 60
    assert seconds_asked(NONE, 0) == 0


@given(st.integers(-(10**6), 10**6))
def test_a_date_is_as_far_away_as_it_says(seconds: int) -> None:
    date = format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)
    assert asked(messages.text(date)) == max(seconds, 0)


@given(messages.values, st.sampled_from([OURS, OTHERS]))
def test_whatever_it_says_is_a_number_of_seconds(value: messages.Value, name: bytes) -> None:
    assert 0 <= asked(value, name) <= LONGEST


@given(st.text(max_size=70))
def test_whatever_text_it_is_is_a_number_of_seconds(text: str) -> None:
    assert 0 <= asked(messages.text(text.encode("utf-8", "replace"))) <= LONGEST
