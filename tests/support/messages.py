"""Messages for the tests of the pure core: an encoder and a decoder of their own, and strategies for any content."""

from __future__ import annotations

import struct
from typing import NamedTuple

from hypothesis import strategies as st

FIXED = {b"t": 1, b"b": 1, b"B": 1, b"s": 2, b"u": 2, b"I": 4, b"i": 4, b"l": 8, b"L": 8}
FIXED |= {b"f": 4, b"d": 8, b"D": 5, b"T": 8, b"V": 0}
PREFIXED = (b"S", b"x", b"A", b"F")


class Value(NamedTuple):
    """A tag and the encoded value after it (without the length of a prefixed type)."""

    tag: bytes
    content: bytes


Entry = tuple[bytes, Value]


def text(value: str | bytes) -> Value:
    return Value(b"S", value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value)


def long(number: int) -> Value:
    return Value(b"l", struct.pack(">q", number))


def timestamp(seconds: int) -> Value:
    return Value(b"T", struct.pack(">Q", seconds))


def array(*values: Value) -> Value:
    return Value(b"A", b"".join(map(encode_value, values)))


def nested(*entries: Entry) -> Value:
    return Value(b"F", encode_table(entries))


def encode_value(value: Value) -> bytes:
    size = struct.pack(">I", len(value.content)) if value.tag in PREFIXED else b""
    return value.tag + size + value.content


def encode_table(entries: list[Entry] | tuple[Entry, ...]) -> bytes:
    return b"".join(bytes([len(name)]) + name + encode_value(value) for name, value in entries)


def decode_table(data: bytes) -> list[Entry]:
    """Slow, strict and obvious; nested values stay encoded."""
    entries, rest = [], data
    while rest:
        size, rest = rest[0], rest[1:]
        name, rest = rest[:size], rest[size:]
        assert len(name) == size
        value, rest = take_value(rest)
        entries.append((name, value))
    return entries


def decode_array(data: bytes) -> list[Value]:
    values, rest = [], data
    while rest:
        value, rest = take_value(rest)
        values.append(value)
    return values


def take_value(data: bytes) -> tuple[Value, bytes]:
    tag, rest = data[:1], data[1:]
    if tag in PREFIXED:
        assert len(rest) >= 4
        size, rest = int.from_bytes(rest[:4], "big"), rest[4:]
    else:
        size = FIXED[tag]
    assert len(rest) >= size
    return Value(tag, rest[:size]), rest[size:]


# Name, flag, and how many bytes a value takes; None: a short string, which says so itself.
PROPERTIES: list[tuple[str, int, int | None]] = [
    ("content_type", 0x8000, None),
    ("content_encoding", 0x4000, None),
    ("headers", 0x2000, None),
    ("delivery_mode", 0x1000, 1),
    ("priority", 0x0800, 1),
    ("correlation_id", 0x0400, None),
    ("reply_to", 0x0200, None),
    ("expiration", 0x0100, None),
    ("message_id", 0x0080, None),
    ("timestamp", 0x0040, 8),
    ("type", 0x0020, None),
    ("user_id", 0x0010, None),
    ("app_id", 0x0008, None),
    ("cluster_id", 0x0004, None),
]


def encode_properties(values: dict[str, bytes]) -> bytes:
    """The table of `headers` without its length, a short string without its length, everything else encoded."""
    flags, parts = 0, b""
    for name, flag, size in PROPERTIES:
        if name in values:
            value = values[name]
            flags |= flag
            if name == "headers":
                parts += struct.pack(">I", len(value))
            elif size is None:
                parts += bytes([len(value)])
            parts += value
    return struct.pack(">H", flags) + parts


def decode_properties(data: bytes) -> dict[str, bytes]:
    assert len(data) >= 2
    flags, rest = int.from_bytes(data[:2], "big"), data[2:]
    values = {}
    for name, flag, fixed in PROPERTIES:
        if flags & flag:
            size = fixed or 0
            if name == "headers":
                assert len(rest) >= 4
                size, rest = int.from_bytes(rest[:4], "big"), rest[4:]
            elif fixed is None:
                size, rest = rest[0], rest[1:]
            assert len(rest) >= size
            values[name], rest = rest[:size], rest[size:]
    assert not rest
    return values


def headers_of(data: bytes) -> list[Entry]:
    return decode_table(decode_properties(data).get("headers", b""))


def with_headers(*entries: Entry, **others: bytes) -> bytes:
    return encode_properties({"headers": encode_table(entries), **others})


def death(
    queue: str = "orders", exchange: str = "shop", key: str = "orders.created", reason: str = "rejected"
) -> Value:
    return nested(
        (b"count", long(1)),
        (b"reason", text(reason)),
        (b"queue", text(queue)),
        (b"time", timestamp(1_700_000_000)),
        (b"exchange", text(exchange)),
        (b"routing-keys", array(text(key))),
    )


def x_death(*entries: Value) -> Entry:
    return b"x-death", array(*entries)


OURS = [
    b"dlqbatch-" + name
    for name in (
        b"id",
        b"parent",
        b"retries",
        b"trips",
        b"origin-queue",
        b"origin-exchange",
        b"origin-key",
        b"first-failed-at",
        b"history",
        b"expiration",
        b"user-id",
        b"attempt",
        b"reason",
        b"dead-at",
        b"digest",
        b"failed-queue",
        b"failed-exchange",
        b"failed-key",
        b"retry-after",
    )
]
BROKERS = [b"x-death", b"CC", b"BCC", b"x-delivery-count", b"x-acquired-count"]
BROKERS += [b"x-%b-death-%b" % (a, b) for a in (b"first", b"last") for b in (b"queue", b"exchange", b"reason")]
CLAIMS = [b"x-original-exchange", b"x-original-routingKey", b"NServiceBus.FailedQ", b"MT-Fault-InputAddress"]
CLAIMS += [b"x-original-channel", b"x-original-group", b"rascal"]
CLAIMS += [b"Retry-After", b"retry-after", b"X-Retry-After", b"x-retry-after"]

ODD_NUMBERS = [-(2**63), -1, 0, 1, 2, 3, 99, 100, 101, 10**18, 2**63 - 1]
ODD_TEXTS = [b"", b"three", b"-1", b"\xff\xfe", b"a" * 255, b"a" * 256, "ö".encode() * 200, b"queue.delay.1"]
ODD_TEXTS += [b"Fri, 31 Dec 9999 23:59:59 GMT", b"NaN", b"9" * 64]
ODD_TEXTS += [b"retry-queue", b"retry-exchange", b"orders", b"shop", b"dlqbatch.return.orders", b"dlqbatch.return."]

scalars = st.one_of(
    st.sampled_from(sorted(FIXED.items())).flatmap(
        lambda kind: st.builds(Value, st.just(kind[0]), st.binary(min_size=kind[1], max_size=kind[1]))
    ),
    st.sampled_from(ODD_NUMBERS).map(long),
    st.sampled_from(ODD_TEXTS).map(text),
    st.just(Value(b"L", b"\xff" * 8)),
    st.binary(max_size=20).map(lambda content: Value(b"S", content)),
    st.binary(max_size=20).map(lambda content: Value(b"x", content)),
)
names = st.one_of(st.binary(max_size=12), st.sampled_from([*OURS, *BROKERS, *CLAIMS, b"dlqbatch-worker-retries"]))
plain_names = names.filter(lambda name: name not in OURS and name not in BROKERS)
_in_deaths = st.sampled_from(
    [b"queue", b"exchange", b"reason", b"count", b"time", b"routing-keys", b"original-expiration"]
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: array(*items)),
        st.lists(st.tuples(st.one_of(_in_deaths, names), inner), max_size=4).map(lambda entries: nested(*entries)),
    ),
    max_leaves=6,
)
deaths = st.builds(
    death,
    queue=st.sampled_from(["orders", "mail", "orders.XQ", "queue.delay.1", "retry-queue", "", "ö" * 128, "a" * 300]),
    exchange=st.sampled_from(["shop", "", "dlqbatch.return.orders", "retry-exchange", "x" * 300]),
    key=st.sampled_from(["orders.created", "mail.sent", "", "k" * 255, "k" * 256]),
    reason=st.sampled_from(["rejected", "expired", "maxlen", "delivery_limit"]),
)
entries = st.one_of(
    st.tuples(names, values),
    st.lists(st.one_of(deaths, values), max_size=3).map(lambda items: x_death(*items)),
    st.lists(deaths, min_size=1, max_size=3).map(lambda items: x_death(*items)),
    st.tuples(st.sampled_from(OURS), scalars),
)
tables = st.lists(entries, max_size=10)
short_strings = st.binary(max_size=20)
other_properties = st.fixed_dictionaries(
    {},
    optional={
        name: short_strings if size is None else st.binary(min_size=size, max_size=size)
        for name, _, size in PROPERTIES
        if name != "headers"
    },
)
valid_properties = st.builds(
    lambda others, table: encode_properties({**others, **({} if table is None else {"headers": encode_table(table)})}),
    other_properties,
    st.none() | tables,
)


@st.composite
def mutated_properties(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(valid_properties))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["set", "insert", "cut", "end"]))
        if change == "set" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif change == "insert":
            data[at:at] = draw(st.binary(max_size=6))
        elif change == "cut":
            del data[at : at + draw(st.integers(1, 6))]
        elif change == "end":
            del data[at:]
    return bytes(data)


any_properties = st.one_of(st.binary(max_size=80), valid_properties, mutated_properties())
