"""The header table in one pass: what is ours, what the broker wrote, and the foreign bytes that pass through."""

from __future__ import annotations

from typing import Final, NamedTuple

from dlqbatch.message.table import LENGTH, SIZES, Field, UnreadableTable

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

OURS: Final = (
    ID,
    PARENT,
    RETRIES,
    TRIPS,
    ORIGIN_QUEUE,
    ORIGIN_EXCHANGE,
    ORIGIN_KEY,
    FIRST_FAILED_AT,
    HISTORY,
    EXPIRATION,
    USER_ID,
    ATTEMPT,
    REASON,
    DEAD_AT,
)

X_DEATH: Final = b"x-death"
LAST_DEATH_QUEUE: Final = b"x-last-death-queue"
LAST_DEATH_REASON: Final = b"x-last-death-reason"
_OF_DEATHS: Final = (
    X_DEATH,
    *(b"x-%b-death-%b" % (which, what) for which in (b"first", b"last") for what in (b"queue", b"reason", b"exchange")),
)
# A republished CC routes copies; the counts belong to the queue the message leaves.
_OF_DELIVERY: Final = (b"CC", b"BCC", b"x-delivery-count", b"x-acquired-count")
BROKERS: Final = (*_OF_DEATHS, *_OF_DELIVERY)
"""What the broker writes into a message it delivers; none of it may be republished."""

SPRING_EXCHANGE: Final = b"x-original-exchange"
SPRING_KEY: Final = b"x-original-routingKey"
NSERVICEBUS_QUEUE: Final = b"NServiceBus.FailedQ"
MASSTRANSIT_ADDRESS: Final = b"MT-Fault-InputAddress"
CLAIMS: Final = (SPRING_EXCHANGE, SPRING_KEY, NSERVICEBUS_QUEUE, MASSTRANSIT_ADDRESS)
"""Foreign headers in which other software says where a message failed."""

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
    """Sort a table's entries; of two entries with one name the first counts, as for the broker.

    This is the hot path of every run: one loop, no call per entry.
    """
    ours: dict[bytes, Field] = {}
    brokers: dict[bytes, Field] = {}
    claims: dict[bytes, Field] = {}
    found = (claims, ours, brokers)
    foreign = b""
    span_start = position
    sizes, kind_of, length, new = SIZES, _KINDS.get, LENGTH, tuple.__new__
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
            # What Field(tag, ...) does, at half its price.
            found[kind][name] = new(Field, (tag, data[start:position]))
        if kind:
            if entry_start > span_start:
                foreign += data[span_start:entry_start]
            span_start = position
    if position > stop:
        raise UnreadableTable
    if stop > span_start:
        foreign += data[span_start:stop]
    return Headers(foreign, ours, brokers, claims)
