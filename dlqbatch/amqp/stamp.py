"""Properties for a republished message: foreign header bytes as they were, the broker's gone, ours written anew."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from dlqbatch.amqp import headers as names
from dlqbatch.amqp.delivery import Envelope
from dlqbatch.amqp.headers import X_DEATH, Headers
from dlqbatch.amqp.identity import NONE_NEEDED
from dlqbatch.amqp.properties import join
from dlqbatch.amqp.rascal import without_immediate_nack
from dlqbatch.amqp.retry_headers import Journey, Origin
from dlqbatch.amqp.table import (
    ARRAY,
    BYTES,
    TABLE,
    TEXT_TAGS,
    Field,
    encode_array,
    encode_field,
    encode_integer,
    encode_item,
    encode_text,
    encode_timestamp,
    fields,
    is_array,
    items,
    to_text,
)

_NO_DIGEST: Final = encode_text(names.DIGEST, NONE_NEEDED)
HISTORY_LIMIT: Final = 8192
"""The history that travels with a message has at most so many bytes; the oldest deaths are left out first."""
UNREADABLE: Final = b"dlqbatch-unreadable"


def stamp(
    envelope: Envelope,
    journey: Journey,
    *,
    login: bytes | None,
    limit: int,
    digest: str | None,
    reason: str | None = None,
    dead_at: int | None = None,
) -> bytes | None:
    """The encoded properties, at most `limit` bytes; None if our required headers do not fit.

    `digest` is the message's own, NONE_NEEDED where a return exchange of ours brings it back, and None where it comes
    to us again before any client sees it.

    A header table cannot be split over frames, so the history goes first, then what is optional of ours.
    `login` is the user we are connected as; `dead_at` in seconds since 1970.
    """
    headers = envelope.headers or names.NONE
    if journey.is_new:
        # What else it brought of ours belongs to the message that its publisher had received.
        headers = headers._replace(ours={}, foreign=without(headers.foreign, names.WORKER_RETRIES))
    required = _required(journey, reason, dead_at, digest)
    optional = _optional(envelope, headers, journey, login)
    if reason is not None and (asked := headers.ours.get(names.RETRY_AFTER)) is not None:
        # The dead store waits as long as well. A message that is delayed has waited for it by then.
        optional += encode_field(names.RETRY_AFTER, asked)
    if journey.retries is None:
        # Unknown retries mark a message whose own headers are not valid: they stay as evidence.
        required += _evidence(headers, journey, required + optional)
    foreign = headers.foreign
    if names.RASCAL in headers.claims and digest is not None:
        foreign = without_immediate_nack(foreign)
    if envelope.headers is None:
        foreign = encode_field(UNREADABLE, Field(BYTES, envelope.properties.data))
    history = _history(headers)
    encoded = join(envelope.properties, foreign + required + optional + history, login)
    if len(encoded) <= limit:
        return encoded
    for ours in (required + optional, required):
        encoded = join(envelope.properties, foreign + ours, login)
        if len(encoded) <= limit:
            return encoded
    return None


def _evidence(headers: Headers, journey: Journey, written: bytes) -> bytes:
    passed_over = {name for name, _ in fields(written)} | _NEVER_EVIDENCE
    if journey.origin is not None:
        passed_over |= _ORIGIN_NAMES
    return b"".join(encode_field(name, field) for name, field in headers.ours.items() if name not in passed_over)


_NEVER_EVIDENCE: Final = frozenset((names.REASON, names.DEAD_AT, names.HISTORY))
_ORIGIN_NAMES: Final = frozenset((names.ORIGIN_QUEUE, names.ORIGIN_EXCHANGE, names.ORIGIN_KEY))


def without(table: bytes, *unwanted: bytes) -> bytes:
    """A table's content without the entries of these names."""
    return b"".join(encode_field(name, field) for name, field in fields(table) if name not in unwanted)


def _required(journey: Journey, reason: str | None, dead_at: int | None, digest: str | None) -> bytes:
    identity, _, retries, trips, origin, _, attempt, _, _, _, _ = journey
    parts = encode_text(names.ID, identity) + _standing(trips, retries, origin, attempt)
    if digest is not None:
        parts += _NO_DIGEST if digest == NONE_NEEDED else encode_text(names.DIGEST, digest)
    if reason is not None:
        parts += encode_text(names.REASON, reason)
    if dead_at is not None:
        parts += encode_timestamp(names.DEAD_AT, dead_at)
    return parts


def _optional(envelope: Envelope, headers: Headers, journey: Journey, login: bytes | None) -> bytes:
    parts = b""
    if journey.parent is not None:
        parts += encode_text(names.PARENT, journey.parent)
    if journey.first_failed_at is not None:
        parts += _first_failed_at(journey.first_failed_at)
    expiration = envelope.properties.expiration
    if expiration is not None:
        parts += encode_text(names.EXPIRATION, to_text(expiration))
    elif journey.expiration is not None:
        parts += encode_text(names.EXPIRATION, journey.expiration)
    user = envelope.properties.user_id
    if user is not None and user != login:
        parts += encode_text(names.USER_ID, to_text(user))
    elif (recorded := headers.ours.get(names.USER_ID)) is not None and recorded.tag in TEXT_TAGS:
        parts += encode_field(names.USER_ID, recorded)
    return parts


# The same few places and small numbers come thousands of times in a run.
@lru_cache(maxsize=4096)
def _standing(trips: int, retries: int | None, origin: Origin | None, attempt: int | None) -> bytes:
    """How far a message has come on its journey, and where that began."""
    parts = encode_integer(names.TRIPS, trips)
    if retries is not None:
        parts += encode_integer(names.RETRIES, retries)
    if origin is not None:
        if origin.queue is not None:
            parts += encode_text(names.ORIGIN_QUEUE, origin.queue)
        if origin.exchange is not None:
            parts += encode_text(names.ORIGIN_EXCHANGE, origin.exchange)
        parts += encode_text(names.ORIGIN_KEY, origin.key)
    if attempt is not None:
        parts += encode_integer(names.ATTEMPT, attempt)
    return parts


@lru_cache(maxsize=1024)
def _first_failed_at(seconds: int) -> bytes:
    return encode_timestamp(names.FIRST_FAILED_AT, seconds)


_DEATHS_TELL_IT: Final = frozenset(name for name in names.BROKERS if name.startswith((b"x-first", b"x-last", X_DEATH)))


def _history(headers: Headers) -> bytes:
    """The deaths so far as an entry of the header table, newest first, the broker's entries byte for byte."""
    brokers, old = headers.brokers, headers.ours.get(names.HISTORY)
    if not brokers and old is None:
        return b""
    x_death = brokers.get(X_DEATH)
    content = x_death.value if x_death is not None and _is_readable(x_death) else b""
    # What no death says is kept as a table of its own; an array that cannot be read is kept as plain bytes.
    noted = b""
    if not content or not brokers.keys() <= _DEATHS_TELL_IT:
        for name, field in brokers.items():
            if not content or name not in _DEATHS_TELL_IT:
                noted += encode_field(name, _as_bytes(field) if name == X_DEATH else field)
    before = b""
    if old is not None:
        if _is_readable(old):
            before = old.value
        else:
            noted += encode_field(names.HISTORY, _as_bytes(old))
    if noted:
        content += encode_item(Field(TABLE, noted))
    content += before
    if len(content) > HISTORY_LIMIT:
        content = _cut(content)
    return encode_array(names.HISTORY, content)


def _is_readable(field: Field) -> bool:
    return field.tag == ARRAY and is_array(field.value)


def _as_bytes(field: Field) -> Field:
    return Field(BYTES, field.value) if field.tag == ARRAY else field


def _cut(content: bytes) -> bytes:
    kept: list[bytes] = []
    size = 0
    for item in items(content):
        encoded = encode_item(item)
        # What does not fit may be a note, such as a long CC: that must not cost the deaths behind it.
        if size + len(encoded) <= HISTORY_LIMIT:
            size += len(encoded)
            kept.append(encoded)
    return b"".join(kept)
