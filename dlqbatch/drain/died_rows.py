"""How messages died, and what became of their retries from the dead store, by event; the newest of them.

From that: what would have become of them with other numbers of retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import Connection, ScalarSelect, case, func, select

from dlqbatch.drain.event_delays import EventDelays
from dlqbatch.drain.event_policy import Policy
from dlqbatch.drain.simulate import Died, Simulated, simulate
from dlqbatch.logs import plain
from dlqbatch.settings import Settings
from dlqbatch.store.filters import NotUnderstood
from dlqbatch.store.scopes import own
from dlqbatch.store.tables import ATTEMPTS, MESSAGES

LOOKED_AT: Final = 200_000
_DIGITS: Final = 9
_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c


class History(NamedTuple):
    died: tuple[Died, ...]
    is_complete: bool
    """False: only the newest messages were looked at."""


def history(connection: Connection, since: datetime, limit: int = LOOKED_AT) -> History:
    """What was ingested since then, each message with its retries until the first success.

    What was resolved and is deleted by now is not on record.
    """
    newest = select(_M.id, _M.event, _M.retry_count).where(own(connection), _M.created_at >= since)
    some = newest.order_by(_M.created_at.desc(), _M.id.desc()).limit(limit).subquery()

    def number(outcome: str) -> ScalarSelect[int]:
        counted = select(func.count()).where(_A.message_id == some.c.id, _A.outcome == outcome)
        return counted.correlate(some).scalar_subquery()

    failed, succeeded = number("failed"), number("succeeded")
    each = select(
        some.c.event,
        some.c.retry_count.label("retries"),
        failed.label("failed"),
        case((succeeded > 0, 1), else_=0).label("succeeded"),
    ).subquery()
    columns = (each.c.event, each.c.retries, each.c.failed, each.c.succeeded)
    rows = connection.execute(select(*columns, func.count()).group_by(*columns)).all()
    died = tuple(Died(event, retries, failed, bool(done), number) for event, retries, failed, done, number in rows)
    return History(died, sum(one.messages for one in died) < limit)


class Tried(NamedTuple):
    events: list[Simulated]
    is_complete: bool
    """False: only the newest messages were looked at."""


def numbers_of(pairs: Iterable[str]) -> dict[str, int]:
    """`payments.#=5` as the number of retries of each event or pattern."""
    found = {}
    for pair in pairs:
        name, equals, number = pair.rpartition("=")
        if not equals or not name or not number.isascii() or not number.isdigit() or len(number) > _DIGITS:
            raise NotUnderstood(f"'{plain(pair)}' is not NAME=N, such as payments.created=5")
        found[name] = int(number)
    return found


def tried(connection: Connection, numbers: Mapping[str, int], since: datetime, settings: Settings) -> Tried:
    """What would have become of what was ingested since then, had these events had these numbers of retries.

    The delays are those of the settings.
    """
    policy, past = Policy([], numbers, 0), history(connection, since)

    def number_of(event: str) -> tuple[str, int] | None:
        rule = policy.explain(event)
        return None if rule is None else (rule.name, rule.max_retries)

    delays, tiers = EventDelays(settings.event_delays), settings.tier_ttls if settings.ladder else None
    return Tried(simulate(past.died, number_of, lambda event: delays.of(event) or tiers), past.is_complete)
