from __future__ import annotations

import messages
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.headers import RASCAL
from dlqbatch.amqp.rascal import failed_in, rascal_table, without_immediate_nack
from dlqbatch.amqp.retry_headers import Journey, Origin
from dlqbatch.amqp.stamp import stamp

FLAG = messages.Value(b"t", b"\x01")


def rascals(**recovery: list[messages.Entry]) -> list[messages.Entry]:
    entries = [(queue.encode(), messages.nested(*entry)) for queue, entry in recovery.items()]
    error = messages.nested((b"message", messages.text("no stock")), (b"code", messages.text("E17")))
    return [(b"rascal", messages.nested((b"error", error), (b"recovery", messages.nested(*entries)))), OTHER]


OTHER = (b"other", messages.nested((b"recovery", messages.text("kept")), (b"immediateNack", FLAG)))
FLAGGED = [(b"republished", messages.long(2)), (b"immediateNack", FLAG), (b"xDeath", messages.nested())]
CLEARED = [(b"republished", messages.long(2))]


def test_what_is_sent_back_is_not_rejected_on_sight() -> None:
    flagged = messages.encode_table(rascals(orders=FLAGGED, mail=[]))
    assert without_immediate_nack(flagged) == messages.encode_table(rascals(orders=CLEARED, mail=[]))


def test_a_client_gets_it_without_the_flag_and_a_delay_queue_as_it_was() -> None:
    envelope = open_envelope("", "", False, 0, messages.with_headers(*rascals(orders=FLAGGED)))
    journey = Journey(id="id-1", origin=Origin("orders", "", "orders"))
    for digest, is_there in (("0123", False), (None, True)):
        sent = stamp(envelope, journey, login=b"guest", limit=100_000, digest=digest)
        assert sent is not None
        assert (b"immediateNackt" in sent.replace(messages.encode_table([OTHER]), b"")) is is_there


@given(messages.tables)
def test_nothing_else_changes_and_nothing_raises(entries: list[messages.Entry]) -> None:
    data = messages.encode_table(entries)
    if b"immediateNack" not in data and b"xDeath" not in data:
        assert without_immediate_nack(data) == data


@given(st.binary(max_size=60))
def test_what_cannot_be_read_stays_as_it_is(content: bytes) -> None:
    assert without_immediate_nack(content) == content or b"\x06rascal" in content
    broken = messages.encode_table([(b"rascal", messages.Value(b"F", content))])
    without_immediate_nack(broken)
    envelope = open_envelope("", "", False, 0, messages.with_headers((b"rascal", messages.Value(b"F", content))))
    assert envelope.headers is not None
    rascal_table(envelope.headers.claims)
    failed_in(envelope.headers.claims)
    assert RASCAL in envelope.headers.claims
