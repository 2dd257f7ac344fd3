"""What is unpacked to be read, and that no body makes it take much memory or time."""

from __future__ import annotations

import base64
import gzip
import json
import tracemalloc
import zlib
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import encode_properties
from planted_secrets import PLAIN, leaks

from dlqbatch.amqp.packed import LARGEST_UNPACKED, unpack
from dlqbatch.messages.content import shown_content

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT = json.dumps({"order": 4711, "password": PLAIN}).encode()


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # the name of a test may not hold the time


def raw(data: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush()


@pytest.mark.parametrize(
    ("body", "encoding", "packings"),
    [
        (gzipped(DOCUMENT), None, ("gzip",)),
        (gzipped(DOCUMENT), "gzip", ("gzip",)),
        (gzipped(DOCUMENT[:9]) + gzipped(DOCUMENT[9:]), "x-gzip", ("gzip",)),
        (zlib.compress(DOCUMENT), None, ("deflate",)),
        (zlib.compress(DOCUMENT, 1), "gzip", ("deflate",)),
        (raw(DOCUMENT), "deflate", ("deflate",)),
        (base64.b64encode(DOCUMENT), None, ("base64",)),
        (base64.urlsafe_b64encode(DOCUMENT).rstrip(b"="), None, ("base64",)),
        (base64.encodebytes(DOCUMENT * 9)[:77] + base64.encodebytes(DOCUMENT * 9)[77:], "base64", ("base64",)),
        (base64.b64encode(gzipped(DOCUMENT)), "gzip, base64", ("base64", "gzip")),
        (gzipped(base64.b64encode(DOCUMENT)), "base64, gzip", ("gzip", "base64")),
    ],
)
def test_what_is_packed_is_unpacked_and_what_is_secret_in_it_is_hidden(
    body: bytes, encoding: str | None, packings: tuple[str, ...]
) -> None:
    found = unpack(body, encoding)
    assert (found.packings, found.is_whole, found.encoding) == (packings, True, None)
    assert found.body in {DOCUMENT, DOCUMENT * 9}
    properties = encode_properties({"content_encoding": encoding.encode()} if encoding else {})
    shown = shown_content(properties, body)
    assert shown.is_masked
    assert b"4711" in shown.unpacked.body
    assert not leaks(shown.unpacked.body)
    revealed = shown_content(properties, body, is_revealed=True)
    assert (revealed.unpacked.body, revealed.is_masked) == (found.body, False)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"x^2 + y^2 is no zlib", None),
        (b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", None),
        (b"HelloWorldHelloWorld", None),
        (b"plain text", "gzip"),
        (b"plain text", "br"),
        (b"no base64!", "base64"),
        (zlib.compress(DOCUMENT)[:-1], "deflate"),
        (gzipped(DOCUMENT)[:-8] + b"12345678", "gzip"),
        (b"", "gzip"),
    ],
)
def test_what_is_not_packed_or_broken_stays_as_it_is(body: bytes, encoding: str | None) -> None:
    found = unpack(body, encoding)
    assert (found.body, found.packings, found.encoding) == (body, (), encoding)


def test_what_cannot_be_unpacked_here_is_hidden_whole() -> None:
    properties = encode_properties({"content_encoding": b"zstd, gzip"})
    for body in (b"\x28\xb5\x2f\xfd" + PLAIN.encode(), zlib.compress(DOCUMENT)[:-1]):
        assert shown_content(properties, gzipped(body)).unpacked[:2] == (b"***", ("gzip",))


def layers(data: bytes, times: int) -> bytes:
    return data if not times else layers(gzipped(data), times - 1)


def test_more_layers_than_anybody_needs_are_hidden() -> None:
    assert unpack(layers(DOCUMENT, 4)).body == DOCUMENT
    assert shown_content(encode_properties({}), layers(DOCUMENT, 5)).unpacked.body == b"***"


def test_what_stands_behind_the_packed_part_is_not_taken_for_the_whole() -> None:
    found = unpack(gzipped(b"all of it") + b"password=" + PLAIN.encode())
    assert (found.body, found.is_whole) == (b"all of it", False)


@cache
def bomb() -> bytes:
    """A quarter of a gibibyte of nothing in a megabyte."""
    deflate = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    zeros = bytes(1 << 22)
    return b"".join(deflate.compress(zeros) for _ in range(64)) + deflate.flush()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(bomb, id="a bomb"),
        pytest.param(lambda: gzipped(bomb()), id="a bomb in a bomb"),
        pytest.param(lambda: base64.b64encode(bomb()), id="a bomb as base64"),
        pytest.param(lambda: gzipped(b"") * 100_000, id="members without end"),
        pytest.param(lambda: b"\x1f\x8b\x08" + bytes(8) + b"\0\0\0\xff\xff" * 4_000_000, id="blocks without end"),
        pytest.param(lambda: b"A" * 16_000_000, id="letters without end"),
    ],
)
def test_what_is_made_to_fill_the_memory_unpacks_to_a_megabyte_at_most(body: Callable[[], bytes]) -> None:
    packed = body()
    tracemalloc.start()
    try:
        found = unpack(packed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.body) <= LARGEST_UNPACKED or not found.packings
    assert peak < 24 * LARGEST_UNPACKED


def test_a_letter_that_the_bound_cuts_leaves_the_text_a_text() -> None:
    found = unpack(gzipped(b"x" + "ä".encode() * LARGEST_UNPACKED))
    assert not found.is_whole
    assert found.body.decode().endswith("ä")


@given(st.binary(max_size=200), st.sampled_from([None, "gzip", "deflate", "base64", "gzip, br", ",", "x" * 300]))
def test_nothing_makes_it_raise(body: bytes, encoding: str | None) -> None:
    unpack(body, encoding)
    assert unpack(gzipped(body)).packings[:1] == ("gzip",)
    assert unpack(base64.b64encode(body), "base64").body == body or not body or unpack(body).packings
