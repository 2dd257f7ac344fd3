"""`traceparent` as W3C Trace Context writes it, in a message of anybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from messages import mutated_properties, nested, text, with_headers

from dlqbatch.amqp.trace_context import TraceContext, trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
READ = TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled=True)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (f"00-{TRACE}-{SPAN}-01", READ),
        (f"00-{TRACE}-{SPAN}-00", READ._replace(is_sampled=False)),
        (f"00-{TRACE}-{SPAN}-03", READ),
        # A later version may say more.
        (f"01-{TRACE}-{SPAN}-01-what.comes", READ),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
        ("\udcff", None),
    ],
)
def test_it_is_read_as_the_standard_says(written: str, read: TraceContext | None) -> None:
    properties = with_headers((b"other", text("x")), (b"traceparent", text(written.encode("utf-8", "surrogateescape"))))
    assert trace_context(properties) == read


def test_only_the_header_itself_counts() -> None:
    entry = (b"traceparent", text(f"00-{TRACE}-{SPAN}-01"))
    assert trace_context(with_headers((b"inner", nested(entry)))) is None
    assert trace_context(with_headers((b"inner", nested(entry)), entry)) == READ
    assert trace_context(with_headers((b"x-traceparent", text(f"00-{TRACE}-{SPAN}-01")))) is None


@given(mutated_properties())
def test_no_message_makes_it_raise(properties: bytes) -> None:
    trace_context(properties)
    trace_context(properties + b"traceparent")
