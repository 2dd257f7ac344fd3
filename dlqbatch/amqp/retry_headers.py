"""The headers of ours that count retries and name the origin: read, and held to their ranges."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final, NamedTuple

from dlqbatch.amqp import headers as names
from dlqbatch.amqp.headers import Headers
from dlqbatch.amqp.table import LONGEST_NAME, TEXT_TAGS, new, to_bytes, to_text
from dlqbatch.amqp.x_death import LATEST_TIME

RETURN_PREFIX: Final = "dlqbatch.return."
"""The beginning of the name of each return exchange."""
_LONGEST_PLAIN: Final = LONGEST_NAME - 4
"""A name with a hash is longer even where up to three bytes of a cut character went, so that the two never meet."""


_DELAY: Final = re.compile(r"(?:[01]\.){28}").match
_BITS: Final = 56


class Origin(NamedTuple):
    """Where a message failed; the queue is None when only exchange and key are known."""

    queue: str | None
    exchange: str | None
    key: str

    @property
    def name(self) -> str:
        """What a message is returned to; behind the default exchange the key is the queue."""
        return self.queue if self.queue is not None else self.exchange or self.key

    @property
    def event(self) -> str:
        """The key as the policy knows it: without the 28 bits in which Celery and NServiceBus write a delay.

        Their delays on quorum queues are made of 28 queues of the broker; the bits say which of them a message takes.
        """
        key = self.key
        return key[_BITS:] if key[1:2] == "." and _DELAY(key) else key


def return_exchange(queue: str) -> str:
    """The name of the fanout exchange that is bound to this queue alone, so that what returns keeps its routing key.

    A name that would grow too long ends in a hash of the queue's.
    """
    name = to_bytes(RETURN_PREFIX + queue)
    if len(name) <= _LONGEST_PLAIN:
        return RETURN_PREFIX + queue
    digest = "~" + sha256(to_bytes(queue)).hexdigest()
    # Cutting bytes may cut a character in two; what is left of it must not make the name invalid UTF-8.
    return name[: LONGEST_NAME - len(digest)].decode("utf-8", "ignore") + digest


class Journey(NamedTuple):
    """What our headers say of a message; the id is empty until a run of ours has made one."""

    id: str = ""
    parent: str | None = None
    retries: int | None = 0
    trips: int = 0
    origin: Origin | None = None
    first_failed_at: int | None = None
    attempt: int | None = None
    expiration: str | None = None
    digest: str | None = None
    """The digest of the message that these headers were written for; None where a version before 0.1 wrote them."""
    invalid_count: str = ""
    """The name of a count that is not valid; without it nobody knows how often the message was tried."""
    is_new: bool = False
    """Another message than our headers were written for: its publisher passed on the headers that it had received."""


UNMARKED: Final = Journey()
"""The journey of a message that carries no header of ours."""


def journey_so_far(headers: Headers) -> Journey:
    """What our headers record; a header that is not valid counts as missing, and `invalid_count` names a count."""
    if not headers.ours:
        return UNMARKED
    texts: dict[bytes, str] = {}
    numbers: dict[bytes, int] = {}
    invalid_count = ""
    range_of = _VALID_RANGES.get
    for name, field in headers.ours.items():
        tag, value = field
        if name in _TEXTS:
            if tag in TEXT_TAGS and len(value) <= LONGEST_NAME:
                texts[name] = to_text(value)
        elif (valid := range_of(name)) is not None:
            number = field.as_timestamp() if name == names.FIRST_FAILED_AT else field.as_integer()
            if number is not None and number in valid:
                numbers[name] = number
            elif name in _COUNTS:
                invalid_count = name.decode()
    text_of, number_of = texts.get, numbers.get
    recorded = (
        text_of(names.ID, ""),
        text_of(names.PARENT),
        number_of(names.RETRIES, 0),
        number_of(names.TRIPS, 0),
        _origin(text_of(names.ORIGIN_QUEUE), text_of(names.ORIGIN_EXCHANGE), text_of(names.ORIGIN_KEY)),
        number_of(names.FIRST_FAILED_AT),
        number_of(names.ATTEMPT),
        text_of(names.EXPIRATION),
        # A digest that is not valid agrees with no message.
        text_of(names.DIGEST, "") if names.DIGEST in headers.ours else None,
        invalid_count,
        False,
    )
    return new(Journey, recorded)


_TEXTS: Final = frozenset(
    (
        names.ID,
        names.PARENT,
        names.EXPIRATION,
        names.DIGEST,
        *(names.ORIGIN_QUEUE, names.ORIGIN_EXCHANGE, names.ORIGIN_KEY),
    )
)
_COUNTS: Final = (names.RETRIES, names.TRIPS)
_VALID_RANGES: Final = {
    names.RETRIES: range(2**63),
    names.TRIPS: range(2**63),
    names.ATTEMPT: range(1, 2**63),
    names.FIRST_FAILED_AT: range(LATEST_TIME + 1),
}


def _origin(queue: str | None, exchange: str | None, key: str | None) -> Origin | None:
    if key is None:
        return None
    if exchange is not None and exchange.startswith(RETURN_PREFIX):
        # Ours are a way back, never a place where a message failed.
        exchange = None
    # Behind the default exchange the key is the queue. An empty name stands for none at all: the broker would take
    # it for the queue that was declared last.
    queue = queue or (key if exchange == "" else None) or None
    return Origin(queue, exchange, key) if queue or exchange else None
