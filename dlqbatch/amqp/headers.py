"""The names of headers, and the header table sorted in one pass: ours, the broker's, and foreign bytes."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from dlqbatch.amqp.table import LENGTH, SIZES, Field, UnreadableTable, new

PREFIX: Final = b"dlqbatch-"
ID: Final = b"dlqbatch-id"
PARENT: Final = b"dlqbatch-parent"
RETRIES: Final = b"dlqbatch-retries"
TRIPS: Final = b"dlqbatch-trips"
ORIGIN_QUEUE: Final = b"dlqbatch-origin-queue"
ORIGIN_EXCHANGE: Final = b"dlqbatch-origin-exchange"
ORIGIN_KEY: Final = b"dlqbatch-origin-key"
FIRST_FAILED_AT: Final = b"dlqbatch-first-failed-at"
HISTORY: Final = b"dlqbatch-history"
EXPIRATION: Final = b"dlqbatch-expiration"
USER_ID: Final = b"dlqbatch-user-id"
ATTEMPT: Final = b"dlqbatch-attempt"
REASON: Final = b"dlqbatch-reason"
DEAD_AT: Final = b"dlqbatch-dead-at"
DIGEST: Final = b"dlqbatch-digest"
"""The digest of body and message_id; empty on what goes through a return exchange of ours, whose name is enough.

Every message that we send to a client carries this header. With our id and without it, an earlier version sent it.
"""
FAILED_QUEUE: Final = b"dlqbatch-failed-queue"
FAILED_EXCHANGE: Final = b"dlqbatch-failed-exchange"
FAILED_KEY: Final = b"dlqbatch-failed-key"
"""With the two before: how a client that hands a failure over had received the message; the client writes all three.

They are of this failure alone: nothing of ours is sent on with them.
"""
RETRY_AFTER: Final = b"dlqbatch-retry-after"
"""How long the client that failed asks to wait. It is of this failure alone, like the three before."""
WORKER_RETRIES: Final = b"dlqbatch-worker-retries"
"""The consumer's count on classic queues; the drain lets it pass like a foreign header."""

OURS: Final = (
    *(ID, PARENT, RETRIES, TRIPS, ORIGIN_QUEUE, ORIGIN_EXCHANGE, ORIGIN_KEY, FIRST_FAILED_AT),
    *(HISTORY, EXPIRATION, USER_ID, ATTEMPT, REASON, DEAD_AT, DIGEST),
    *(FAILED_QUEUE, FAILED_EXCHANGE, FAILED_KEY, RETRY_AFTER),
)

WORKER_FAILED: Final = "worker-failed"
UNKNOWN_EVENT: Final = "unknown-event"
WORKERS_REASONS: Final = frozenset((WORKER_FAILED, UNKNOWN_EVENT))
"""Why `dlqbatch.consumer` gives a message up; every other reason is a drain's."""

X_DEATH: Final = b"x-death"
LAST_DEATH_QUEUE: Final = b"x-last-death-queue"
LAST_DEATH_REASON: Final = b"x-last-death-reason"
_OF_DEATHS: Final = (
    X_DEATH,
    *(b"x-%b-death-%b" % (which, what) for which in (b"first", b"last") for what in (b"queue", b"reason", b"exchange")),
)
DELIVERY_COUNT: Final = b"x-delivery-count"
DELIVERY_COUNTS: Final = (DELIVERY_COUNT, b"x-acquired-count")
"""What a quorum queue adds to a message that it delivers once more."""
STREAM_OFFSET: Final = b"x-stream-offset"
"""Where a message stands in the stream that it was read from; from any other queue, a header of its client."""
# A republished CC routes copies; the counts belong to the queue the message leaves.
BROKERS: Final = (*_OF_DEATHS, b"CC", b"BCC", *DELIVERY_COUNTS)
"""What the broker writes into a message it delivers; none of it may be republished."""

SPRING_EXCHANGE: Final = b"x-original-exchange"
SPRING_KEY: Final = b"x-original-routingKey"
NSERVICEBUS_QUEUE: Final = b"NServiceBus.FailedQ"
MASSTRANSIT_ADDRESS: Final = b"MT-Fault-InputAddress"
MOLECULER_CHANNEL: Final = b"x-original-channel"
MOLECULER_GROUP: Final = b"x-original-group"
RASCAL: Final = b"rascal"
OTHERS_RETRY_AFTER: Final = (b"Retry-After", b"retry-after", b"X-Retry-After", b"x-retry-after")
"""The header of HTTP, where a client has copied it from the answer that it got."""
PLACES: Final = frozenset(
    (
        *(SPRING_EXCHANGE, SPRING_KEY, NSERVICEBUS_QUEUE, MASSTRANSIT_ADDRESS),
        *(MOLECULER_CHANNEL, MOLECULER_GROUP, RASCAL),
    )
)
"""Foreign headers in which other software says where a message failed."""
CLAIMS: Final = (*PLACES, *OTHERS_RETRY_AFTER)
"""Foreign headers that are read; they stay in the message."""

_IS_CLAIM, _IS_OURS, _IS_BROKERS = 0, 1, 2
_KINDS: Final = {
    **dict.fromkeys(OURS, _IS_OURS),
    **dict.fromkeys(BROKERS, _IS_BROKERS),
    **dict.fromkeys(CLAIMS, _IS_CLAIM),
}


class Headers(NamedTuple):
    foreign: bytes
    """Encoded entries that are neither ours nor the broker's, in their order."""
    ours: dict[bytes, Field]
    brokers: dict[bytes, Field]
    """What must not be republished; it goes into the history."""
    claims: dict[bytes, Field]


NONE: Final = Headers(b"", {}, {}, {})


def scan(data: bytes, position: int, stop: int) -> Headers:
    """Sort a table's entries; of two entries with the same name the first counts, as for the broker.

    The hot path of every run. Messages that failed alike have tables alike: a table with the same entries as an earlier
    table, and other values in them, need not be walked.
    """
    layout = _layouts.get(stop - position)
    if layout is not None and stop <= len(data):
        parts = layout.cut(data, position)
        if parts[::2] == layout.heads:
            found: tuple[dict[bytes, Field], ...] = ({}, {}, {})
            for kind, name, tag, number in layout.kept:
                found[kind][name] = new(Field, (tag, parts[number]))
            foreign = b"".join([data[position + start : position + end] for start, end in layout.foreign])
            return new(Headers, (foreign, found[_IS_OURS], found[_IS_BROKERS], found[_IS_CLAIM]))
    headers = walk(data, position, stop)
    if layout is None and stop - position <= _ORDINARY_SIZE:
        _remember(data[position:stop])
    return headers


def walk(data: bytes, position: int, stop: int) -> Headers:
    """The same headers as `scan`, read entry by entry in a loop without calls."""
    ours: dict[bytes, Field] = {}
    brokers: dict[bytes, Field] = {}
    claims: dict[bytes, Field] = {}
    found = (claims, ours, brokers)
    foreign = b""
    span_start = position
    sizes, kind_of, length = SIZES, _KINDS.get, LENGTH
    while position < stop:
        entry_start = position
        name_end = position + 1 + data[position]
        name = data[position + 1 : name_end]
        tag = data[name_end]
        start = name_end + 1
        size = sizes[tag]
        if size == -1:
            start += 4
            position = start + length(data, name_end + 1)[0]
        elif size >= 0:
            position = start + size
        else:
            raise UnreadableTable
        kind = kind_of(name)
        if kind is None:
            continue
        if name not in found[kind]:
            found[kind][name] = new(Field, (tag, data[start:position]))
        if kind:
            if entry_start > span_start:
                foreign += data[span_start:entry_start]
            span_start = position
    if position > stop:
        raise UnreadableTable
    if stop > span_start:
        foreign += data[span_start:stop]
    return new(Headers, (foreign, ours, brokers, claims))


class _Layout(NamedTuple):
    """The entries of a table without their values."""

    cut: Callable[[bytes, int], tuple[bytes, ...]]
    """Cuts a table into what stands before each value and the value itself, which is empty if it is foreign."""
    heads: tuple[bytes, ...]
    """Name, type and length of each: with the same, a table has its values in the same places."""
    kept: tuple[tuple[int, bytes, int, int], ...]
    """What is not foreign: its kind, name and type, and which of the parts its value is."""
    foreign: tuple[tuple[int, int], ...]
    """The first and the last byte of each foreign span, counted from the table's start."""


_LAYOUTS_KEPT: Final = 1024
# Only layouts of tables up to this size in bytes are remembered; larger tables would fill the memory.
_ORDINARY_SIZE: Final = 8192
# The layouts by the size of their table; None after the first table of a size, which may be the only one.
_layouts: dict[int, _Layout | None] = {}


def _remember(table: bytes) -> None:
    if len(table) not in _layouts:
        if len(_layouts) >= _LAYOUTS_KEPT:
            _layouts.clear()
        _layouts[len(table)] = None
    else:
        _layouts[len(table)] = _layout(table)


def _layout(table: bytes) -> _Layout:
    """The layout of a table that was walked before, so that its lengths are known to add up."""
    form, position = "", 0
    heads: list[bytes] = []
    kept: dict[bytes, tuple[int, bytes, int, int]] = {}
    spans = [(0, 0)]
    while position < len(table):
        start = position
        name_end = position + 1 + table[position]
        name, tag = table[position + 1 : name_end], table[name_end]
        size, position = SIZES[tag], name_end + 1
        if size < 0:
            size, position = LENGTH(table, position)[0], position + 4
        kind = _KINDS.get(name)
        heads.append(table[start:position])
        form += f"{position - start}s{0 if kind is None else size}s{size if kind is None else 0}x"
        position += size
        if kind is not None:
            kept.setdefault(name, (kind, name, tag, 2 * len(heads) - 1))
        if not kind:
            if spans[-1][1] == start:
                start, _ = spans.pop()
            spans.append((start, position))
    return _Layout(Struct(form).unpack_from, tuple(heads), tuple(kept.values()), tuple(spans))
