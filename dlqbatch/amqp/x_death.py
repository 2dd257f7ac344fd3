"""The header x-death: where and why a message died, by the word of the broker."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from dlqbatch.amqp.headers import HISTORY, LAST_DEATH_QUEUE, LAST_DEATH_REASON, X_DEATH, Headers
from dlqbatch.amqp.table import (
    ARRAY,
    LONGEST_NAME,
    SECONDS,
    TABLE,
    Field,
    UnreadableTable,
    first_fields,
    first_item,
    items,
    new,
)

LATEST_TIME: Final = 253402300799
"""The last second of the year 9999; a later time is no date that anything else understands."""
_REMEMBERED: Final = 1024
# Only x-death headers up to this size in bytes are remembered; larger headers would fill the memory.
_ORDINARY_SIZE: Final = 2048
_EXPIRED: Final = "expired"
_DRAMATIQ_DEAD, _DRAMATIQ_DELAYED = ".XQ", ".DQ"


class Death(NamedTuple):
    """An entry of x-death; what is missing or of another type is empty."""

    queue: str = ""
    exchange: str = ""
    routing_key: str = ""
    reason: str = ""
    times: int = 0
    time: int | None = None
    """Seconds since 1970."""
    original_expiration: str | None = None


def deaths(headers: Headers) -> tuple[Death, ...]:
    """The deaths, newest first; the list ends at the first entry that cannot be read."""
    x_death = headers.brokers.get(X_DEATH)
    if x_death is None or x_death.tag != ARRAY:
        return ()
    return _remembered(x_death.value) if len(x_death.value) <= _ORDINARY_SIZE else _read_all(x_death.value)


def past_deaths(headers: Headers) -> tuple[Death, ...]:
    """The deaths, newest first: those in x-death, then those of earlier trips, which our history keeps."""
    history = headers.ours.get(HISTORY)
    if history is None or history.tag != ARRAY:
        return deaths(headers)
    # Beside deaths the history holds tables of other headers, which name no queue.
    return deaths(headers) + tuple(death for death in _read_all(history.value) if death.queue)


def newest_death(headers: Headers, ignored_queues: Container[str], *, trust_last_death: bool) -> Death | None:
    """The latest death outside `ignored_queues`, and outside queues that only made the message wait.

    x-death[0] is the newest on 3.x. From 4.0 the broker names the newest in x-last-death-*; before that, such a
    header is a client's.
    """
    told = deaths(headers)
    if len(told) == 1:
        # As of most failures: there is nothing to choose from.
        return told[0] if told[0].queue and told[0].queue not in ignored_queues else None
    counting = [death for death in told if death.queue and death.queue not in ignored_queues]
    if len(counting) > 1:
        if counting[0].queue.endswith(_DRAMATIQ_DEAD):
            # Dramatiq keeps its dead in NAME.XQ; a message that died there too failed where it died before.
            name = counting[0].queue.removesuffix(_DRAMATIQ_DEAD)
            counting = [death for death in counting if death.queue in (name, name + _DRAMATIQ_DELAYED)] or counting
        if trust_last_death:
            last = tuple(
                headers.brokers.get(name, _NOTHING).as_text() for name in (LAST_DEATH_QUEUE, LAST_DEATH_REASON)
            )
            for place, death in enumerate(counting):
                if (death.queue, death.reason) == last:
                    return _before_it_waited(counting, by_broker_alone=trust_last_death) if place == 0 else death
        return _before_it_waited(counting, by_broker_alone=trust_last_death)
    return counting[0] if counting else None


def _before_it_waited(counting: Sequence[Death], *, by_broker_alone: bool) -> Death:
    """The newest death that is not the end of a wait: of a delay that a team has put between its queue and us.

    A message waited in a queue if dead-lettering brought it there and its time ran out there. From 4.0 the broker alone
    writes x-death, so the entry before such a death says how the message came there. Before 4.0 a client can have
    published the message there with the x-death that it had received, and the order of more than two deaths is not
    certain. So before 4.0 it has to be the only other death, not an expiry itself, and from another exchange.
    """
    newest, *older = counting
    if not by_broker_alone:
        is_wait = len(older) == 1 and _can_have_led_to(older[0], newest) and older[0].reason != _EXPIRED
        return older[0] if is_wait and older[0].exchange != newest.exchange else newest
    while older and _can_have_led_to(older[0], newest):
        newest, *older = older
    return newest


def _can_have_led_to(before: Death, wait: Death) -> bool:
    """Whether dead-lettering can have led from `before` to `wait`; what happened twice went in a circle."""
    return wait.reason == _EXPIRED and wait.times == before.times == 1 and before.queue != wait.queue


def _read_all(x_death: bytes) -> tuple[Death, ...]:
    found: list[Death] = []
    try:
        for item in items(x_death):
            if item.tag == TABLE:
                found.append(_read(item.value))  # noqa: PERF401  (what came before an unreadable one counts)
    except (UnreadableTable, IndexError):
        return tuple(found)
    return tuple(found)


def _read_again(x_death: bytes) -> tuple[Death, ...]:
    """The same as `_read_all`; where a death differs from a known death in its time alone, only the time is read."""
    before, _, after = x_death.partition(_TIME)
    if _TIME in after:
        return _read_several_again(x_death)
    # Most failures have a single death.
    known = _timeless((before, after[_SIZE_OF_TIME:])) if len(after) >= _SIZE_OF_TIME else None
    return _read_all(x_death) if known is None else (_at(SECONDS(after)[0], known[0]),)


def _read_several_again(x_death: bytes) -> tuple[Death, ...]:
    before, *rest = x_death.split(_TIME)
    known = _timeless((before, *[piece[_SIZE_OF_TIME:] for piece in rest]))
    if known is None or min(map(len, rest)) < _SIZE_OF_TIME:
        return _read_all(x_death)
    return tuple([_at(SECONDS(piece)[0], death) for death, piece in zip(known, rest, strict=True)])


def _at(time: int, death: Death) -> Death:
    queue, exchange, routing_key, reason, times, _, expiration = death
    told = time if time <= LATEST_TIME else None
    return new(Death, (queue, exchange, routing_key, reason, times, told, expiration))


@lru_cache(maxsize=_REMEMBERED)
def _timeless(pieces: tuple[bytes, ...]) -> tuple[Death, ...] | None:
    """The deaths of an x-death that was cut at its times; None if the bytes that were cut out are not times.

    The pieces are joined with the times 1, 2, 3, and each death must then have its own time. That shows that these
    bytes are read as times and as nothing else, so any other time in their place leaves the rest as it is.
    """
    numbers = range(1, len(pieces))
    x_death = pieces[0] + b"".join(_TIME + number.to_bytes(_SIZE_OF_TIME, "big") + pieces[number] for number in numbers)
    found = _read_all(x_death)
    return found if numbers and [death.time for death in found] == [*numbers] else None


_TIME: Final = b"\x04timeT"
_SIZE_OF_TIME: Final = 8

# Messages that failed in the same queue in the same second, with the same key, have the same death.
_remembered = lru_cache(maxsize=_REMEMBERED)(_read_again)


def _read(content: bytes) -> Death:
    get = first_fields(content).get
    keys, time = get(b"routing-keys", _NOTHING), get(b"time", _NOTHING).as_timestamp()
    key = first_item(keys.value) if keys.tag == ARRAY else None
    expiration = get(b"original-expiration", _NOTHING)
    return Death(
        get(b"queue", _NOTHING).as_text() or "",
        get(b"exchange", _NOTHING).as_text() or "",
        (key.as_text() or "") if key is not None else "",
        get(b"reason", _NOTHING).as_text() or "",
        get(b"count", _NOTHING).as_integer() or 0,
        time if time is not None and time <= LATEST_TIME else None,
        expiration.as_text() if len(expiration.value) <= LONGEST_NAME else None,
    )


_NOTHING: Final = Field(ord("V"), b"")
