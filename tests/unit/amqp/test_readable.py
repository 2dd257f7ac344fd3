from __future__ import annotations

import json
import struct

from hypothesis import given
from hypothesis import strategies as st
from messages import Value, array, encode_table, long, nested, text, timestamp

from dlqbatch.amqp.readable import body_form, body_lines, readable


def with_headers(table: bytes) -> bytes:
    return b"\x20\x00" + len(table).to_bytes(4, "big") + table


@given(st.binary(max_size=200))
def test_whatever_the_bytes_are_they_are_shown_as_far_as_they_go(data: bytes) -> None:
    for properties in (data, with_headers(data), b"\xff\xfc" + data):
        found = readable(properties)
        json.dumps([dict(found.properties), dict(found.headers)], allow_nan=False)
    lines = list(body_lines(data, body_form(data)))
    assert all("\n" not in line for line in lines)


def test_every_property_has_its_name() -> None:
    short = [b"text/plain", b"gzip", b"c", b"r", b"9", b"m", b"y", b"u", b"a", b"k"]
    s = [bytes([len(one)]) + one for one in short]
    data = b"\xff\xfc" + s[0] + s[1] + b"\0\0\0\0\x02\x07" + b"".join(s[2:6]) + struct.pack(">Q", 60) + b"".join(s[6:])
    assert readable(data).properties == {
        "content_type": "text/plain",
        "content_encoding": "gzip",
        "delivery_mode": 2,
        "priority": 7,
        "correlation_id": "c",
        "reply_to": "r",
        "expiration": "9",
        "message_id": "m",
        "timestamp": "1970-01-01T00:01:00+00:00",
        "type": "y",
        "user_id": "u",
        "app_id": "a",
        "cluster_id": "k",
    }
    assert readable(data).is_whole
    for end in range(len(data)):
        assert set(readable(data[:end]).properties) <= set(readable(data).properties)


def test_every_type_of_value_is_read() -> None:
    entries = [
        (b"text", text("é")),
        (b"bytes", Value(b"x", b"\xff")),
        (b"yes", Value(b"t", b"\1")),
        (b"byte", Value(b"b", b"\xff")),
        (b"long", long(-(2**62))),
        (b"half", Value(b"d", struct.pack(">d", 0.5))),
        (b"nan", Value(b"f", struct.pack(">f", float("nan")))),
        (b"money", Value(b"D", struct.pack(">Bi", 2, 1995))),
        (b"nothing", Value(b"V", b"")),
        (b"time", timestamp(0)),
        (b"no date", timestamp(2**64 - 1)),
        (b"list", array(long(1), text("a"))),
        (b"table", nested((b"k", long(1)), (b"k", long(2)))),
    ]
    assert readable(with_headers(encode_table(entries))).headers == {
        "text": "é",
        "bytes": "\\xff",
        "yes": True,
        "byte": -1,
        "long": -(2**62),
        "half": 0.5,
        "nan": "nan",
        "money": "19.95",
        "nothing": None,
        "time": "1970-01-01T00:00:00+00:00",
        "no date": 2**64 - 1,
        "list": [1, "a"],
        "table": {"k": 1, "k (2)": 2},
    }


def test_what_came_before_a_broken_header_is_shown() -> None:
    found = readable(with_headers(encode_table([(b"good", long(1))]) + b"\x05broken"))
    assert (found.headers, found.is_whole) == ({"good": 1}, False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(st.lists(JSON) | st.dictionaries(st.text(), JSON), st.sampled_from([None, 1]), st.booleans())
def test_pretty_json_says_the_same(value: object, indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    form = body_form(body)
    if form != "hex":
        assert form == "json"
        assert json.loads("\n".join(body_lines(body, form))) == value
