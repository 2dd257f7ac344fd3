"""Alerts as rows: fired once and resolved once however many workers look, told until somebody has heard of it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import case, exists, func, or_, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from dlqbatch.deadstore import metrics
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.metrics import FOR_A_PERSON
from dlqbatch.deadstore.tables import ALERTS, MESSAGES
from dlqbatch.logs import masked, plain
from dlqbatch.policy.alerts import (
    NEW_GROUP,
    STANDING,
    Alert,
    NewGroup,
    Notice,
    Sample,
    Settled,
    Severity,
    Turn,
    changes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Engine

    from dlqbatch.policy.metrics import Metrics

GROUPS_AT_ONCE: Final = 10_000
"""New groups that one run takes up; what is more waits for the next."""
SAMPLED: Final = 20
"""The largest of them, for which a message is looked up."""
MOST_TRIES: Final = 200
"""So many runs in a row fail to tell of an alert; then nobody is told any more."""
TURN: Final = timedelta(minutes=1)
"""How long a worker has for telling; longer than any call it makes."""
_TOLD_AT_ONCE: Final = 10_000
_LONGEST_SAMPLE: Final = 200
_A: Final = ALERTS.c
_M: Final = MESSAGES.c
_ACTIVE: Final = text("resolved_at IS NULL")
_UNTOLD: Final = text("(fired_told_at IS NULL OR (resolved_at IS NOT NULL AND resolved_told_at IS NULL))")
_NOTICE: Final = (_A.id, _A.name, _A.subject, _A.severity, _A.summary, _A.value, _A.threshold, _A.fired_at)
_TAKEN_AT_ONCE: Final = 1_000


class Alerts:
    """Each call is on its own; it holds no connection in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def measure(self, now: datetime) -> Metrics:
        with reading(self._engine) as connection:
            return metrics.measure(connection, now)

    def new_groups(self) -> tuple[NewGroup, ...]:
        """Those of which nobody was ever told, the largest first."""
        with reading(self._engine) as connection:
            return _new_groups(connection)

    def settle(
        self, standing: Sequence[Alert], groups: Sequence[Alert], now: datetime, *, to_tell: bool, dry_run: bool = False
    ) -> Settled:
        """Write what fires and what ends; `to_tell`: somebody is to be told of it afterwards.

        A dry run says what it would write.
        """
        with (reading if dry_run else writing)(self._engine) as connection:
            if not dry_run and connection.dialect.name == "postgresql":
                # Workers settle one after the other: each sees what the one before it wrote, down to groups whose
                # alert was fired and resolved already, which no index keeps from firing again.
                connection.execute(text("LOCK TABLE dlq_alerts IN SHARE ROW EXCLUSIVE MODE"))
            stand = connection.execute(select(*_NOTICE).where(_A.name.in_(sorted(STANDING)), _ACTIVE))
            active = {(row.name, row.subject): row for row in stand}
            fire, over = changes(standing, active)
            fire += _never_fired(connection, groups)
            ended = [*(active[key] for key in sorted(over)), *_groups_at_rest(connection)]
            if dry_run:
                return Settled(tuple(_as_notice(alert, now) for alert in fire), tuple(_notice(r, now) for r in ended))
            told_at = None if to_tell else now
            for some in _pieces([row.id for row in ended]):
                connection.execute(
                    update(ALERTS)
                    .where(_A.id.in_(some), _ACTIVE)
                    .values(resolved_at=now, resolved_told_at=told_at, tries=0)
                )
            fired = _fire(connection, fire, now, told_at)
            return Settled(fired, tuple(_notice(row, now) for row in ended))

    def active(self) -> tuple[Notice, ...]:
        """The gravest first, then the newest."""
        with reading(self._engine) as connection:
            return active(connection)

    def take_turn(self, now: datetime) -> Turn | None:
        """What somebody is still to be told of, this worker's to tell for a minute; None: there is nothing."""
        until = now + TURN
        # A clock that was far ahead must not silence everybody.
        is_free = or_(_A.telling_until.is_(None), _A.telling_until <= now, _A.telling_until > until)
        gravest = (case((_A.severity == Severity.CRITICAL, 0), else_=1), case((_A.name == NEW_GROUP, 1), else_=0))
        asked = select(*_NOTICE, _A.resolved_at).where(_UNTOLD, _A.tries < MOST_TRIES, is_free)
        with writing(self._engine) as connection:
            rows = connection.execute(
                asked.order_by(*gravest, _A.id).limit(_TOLD_AT_ONCE).with_for_update(skip_locked=True)
            ).all()
            for some in _pieces([row.id for row in rows]):
                # Counted before the call: whoever dies in it has tried as well.
                mine = update(ALERTS).where(_A.id.in_(some))
                connection.execute(mine.values(telling_until=until, tries=_A.tries + 1))
        return Turn(until, tuple(_notice(row, row.resolved_at) for row in rows)) if rows else None

    def end_turn(self, turn: Turn, now: datetime, *, told: bool) -> None:
        with writing(self._engine) as connection:
            for some in _pieces([notice.id for notice in turn.notices]):
                ours = update(ALERTS).where(_A.id.in_(some))
                connection.execute(ours.where(_A.telling_until == turn.until).values(telling_until=None))
                if told:
                    connection.execute(ours.values(fired_told_at=func.coalesce(_A.fired_told_at, now), tries=0))
            # Not more than was told: an alert that ended meanwhile is still to be told as resolved.
            ended = [notice.id for notice in turn.notices if notice.resolved_at is not None]
            for some in _pieces(ended if told else []):
                connection.execute(update(ALERTS).where(_A.id.in_(some)).values(resolved_told_at=now))


def active(connection: Connection) -> tuple[Notice, ...]:
    gravest = case((_A.severity == Severity.CRITICAL, 0), else_=1)
    found = connection.execute(select(*_NOTICE).where(_ACTIVE).order_by(gravest, _A.fired_at.desc(), _A.id))
    return tuple(_notice(row, None) for row in found)


def _new_groups(connection: Connection) -> tuple[NewGroup, ...]:
    size = func.count().label("size")
    waiting = select(_M.fingerprint, size).where(_M.status.in_(FOR_A_PERSON)).group_by(_M.fingerprint).subquery()
    known = exists().where(_A.name == NEW_GROUP, _A.subject == waiting.c.fingerprint)
    found = connection.execute(
        select(waiting).where(~known).order_by(waiting.c.size.desc(), waiting.c.fingerprint).limit(GROUPS_AT_ONCE)
    ).all()
    return tuple(
        NewGroup(fingerprint, number, _sample(connection, fingerprint) if place < SAMPLED else None)
        for place, (fingerprint, number) in enumerate(found)
    )


def _sample(connection: Connection, fingerprint: str) -> Sample | None:
    newest = (
        select(_M.id, _M.error_type, _M.error_message)
        .where(_M.fingerprint == fingerprint, _M.status.in_(FOR_A_PERSON))
        .order_by(_M.created_at.desc(), _M.id.desc())
        .limit(1)
    )
    row = connection.execute(newest).one_or_none()
    return row and Sample(row.id, _clean(row.error_type), _clean(row.error_message))


def _clean(shown: str | None) -> str | None:
    """One line that any terminal, log and chat may show."""
    return shown and plain(masked(" ".join(shown[: 4 * _LONGEST_SAMPLE].split())), _LONGEST_SAMPLE)


def _never_fired(connection: Connection, groups: Sequence[Alert]) -> tuple[Alert, ...]:
    known: set[str] = set()
    for some in _pieces([alert.subject for alert in groups]):
        known.update(connection.scalars(select(_A.subject).where(_A.name == NEW_GROUP, _A.subject.in_(some))))
    return tuple(alert for alert in groups if alert.subject not in known)


def _groups_at_rest(connection: Connection) -> Sequence[Any]:
    """Active alerts of groups of which nothing waits for a person any more."""
    # Each state on its own: so both are looked up in the index by state and group.
    waits = or_(*(exists().where(_M.status == status, _M.fingerprint == _A.subject) for status in FOR_A_PERSON))
    asked = select(*_NOTICE).where(_A.name == NEW_GROUP, _ACTIVE, ~waits).order_by(_A.id)
    return connection.execute(asked.limit(GROUPS_AT_ONCE)).all()


def _fire(
    connection: Connection, alerts: Sequence[Alert], now: datetime, told_at: datetime | None
) -> tuple[Notice, ...]:
    if not alerts:
        return ()
    rows = [
        {
            "name": alert.name,
            "subject": alert.subject,
            "severity": alert.severity,
            "fired_at": now,
            "value": alert.value,
            "threshold": alert.threshold,
            "summary": alert.summary,
            "fired_told_at": told_at,
        }
        for alert in alerts
    ]
    adding = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(ALERTS)
    # The index of the active ones decides, should two come here at once after all.
    found = connection.execute(adding.on_conflict_do_nothing().returning(*_NOTICE), rows)
    return tuple(sorted((_notice(row, None) for row in found), key=lambda notice: notice.id))


def _notice(row: Any, resolved_at: datetime | None) -> Notice:
    return Notice(
        row.id,
        row.name,
        row.subject,
        Severity(row.severity),
        row.summary,
        row.value,
        row.threshold,
        row.fired_at,
        resolved_at,
    )


def _as_notice(alert: Alert, now: datetime) -> Notice:
    return Notice(0, alert.name, alert.subject, alert.severity, alert.summary, alert.value, alert.threshold, now, None)


def _pieces(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """A statement has a bounded number of parameters."""
    return (values[start : start + _TAKEN_AT_ONCE] for start in range(0, len(values), _TAKEN_AT_ONCE))
