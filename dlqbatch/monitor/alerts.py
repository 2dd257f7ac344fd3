"""The rows of alerts: each fires once, ends once, and is sent to each receiver once, by any number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, and_, case, exists, func, literal, or_, select, text, update

from dlqbatch.logs import masked, plain
from dlqbatch.messages.queries import groups
from dlqbatch.monitor import measure as metrics
from dlqbatch.monitor.alert_rules import (
    MOST_TRIES,
    STANDING,
    TURN,
    Alert,
    LargestGroup,
    NewGroup,
    Notice,
    Sample,
    Settled,
    Severity,
    Turn,
    Waiting,
    changes,
    pause_after,
)
from dlqbatch.monitor.measure import FOR_A_PERSON
from dlqbatch.monitor.metrics import Metrics, Reported
from dlqbatch.store.bulk import in_list, insert_into
from dlqbatch.store.counts import sizes
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters
from dlqbatch.store.scopes import own, scope_of
from dlqbatch.store.states import NEW_GROUP, Status
from dlqbatch.store.tables import ALERT_RECEIVERS, ALERTS, MESSAGES
from dlqbatch.store.text import key

# The most new groups that one run takes up; the others wait for the next run.
GROUPS_AT_ONCE: Final = 10_000
# The most groups, the largest ones, for which a sample message is read.
SAMPLED: Final = 20
_LONGEST_SAMPLE: Final = 200
_SENT_AT_ONCE: Final = 10_000
_LONGEST_PAUSE: Final = pause_after(MOST_TRIES)
_A: Final = ALERTS.c
_R: Final = ALERT_RECEIVERS.c
_M: Final = MESSAGES.c
_FIRED, _RESOLVED = "fired", "resolved"
_NOTICE: Final = (_A.id, _A.name, _A.subject, _A.severity, _A.summary, _A.value, _A.threshold, _A.fired_at)
_ACTIVE: Final = text("resolved_at IS NULL")
# The condition of a partial index, word for word.
_UNSENT: Final = text("(fired_told_at IS NULL OR (resolved_at IS NOT NULL AND resolved_told_at IS NULL))")
_NOT_TAKEN: Final = or_(_R.told.is_(None), and_(_A.resolved_at.is_not(None), _R.told != _RESOLVED))


class Alerts:
    """Each call has its own transaction or none; none is open while alerts are sent."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def measure(
        self,
        now: datetime,
        overdue_before: Mapping[Status, datetime] | None = None,
        depths: Reported | None = None,
    ) -> Metrics:
        with reading(self._engine) as connection:
            return metrics.measure(connection, now, overdue_before, depths)

    def note_look(self, measured: Metrics) -> None:
        """Store this measurement's count of arrivals, from which the next one goes on."""
        with writing(self._engine) as connection:
            metrics.note_look(connection, measured)

    def active(self) -> tuple[Notice, ...]:
        with reading(self._engine) as connection:
            return active(connection)

    def new_groups(self) -> tuple[NewGroup, ...]:
        """The groups that no alert has named yet, the largest first."""
        with reading(self._engine) as connection:
            waiting = sizes(connection, FOR_A_PERSON).subquery()
            known = exists().where(_own(connection), _A.name == NEW_GROUP, _A.subject == waiting.c.fingerprint)
            largest = select(waiting).where(~known).order_by(waiting.c.size.desc(), waiting.c.fingerprint)
            found = connection.execute(largest.limit(GROUPS_AT_ONCE)).all()
            return tuple(
                NewGroup(fingerprint, number, _sample(connection, fingerprint) if place < SAMPLED else None)
                for place, (fingerprint, number) in enumerate(found)
            )

    def settle(
        self,
        standing: Sequence[Alert],
        groups: Sequence[Alert],
        now: datetime,
        *,
        receivers: Sequence[str] = (),
        dry_run: bool = False,
    ) -> Settled:
        """Store the alerts that fire and that end, to be sent to these receivers; a dry run only returns them."""
        with (reading if dry_run else writing)(self._engine) as connection:
            if not dry_run:
                _lock_alerts(connection)
            rows = connection.execute(select(*_NOTICE).where(_own(connection), _A.name.in_(sorted(STANDING)), _ACTIVE))
            stand = {(row.name, row.subject): row for row in rows}
            # The column holds a subject as `key` makes it, because names of queues may have any letters.
            standing = [replace(alert, subject=key(alert.subject)) for alert in standing]
            fire, over = changes(standing, stand)
            fire += _never_fired(connection, groups)
            ended = [*(stand[name] for name in sorted(over)), *_groups_at_rest(connection)]
            resolved = tuple(_notice(row, now) for row in ended)
            if dry_run:
                return Settled(tuple(_unwritten(alert, now) for alert in fire), resolved)
            for alert in standing:
                # An alert that stands shows the figure of now, not the one with which it fired.
                if (row := stand.get((alert.name, alert.subject))) is not None and row.summary != alert.summary:
                    values = {"summary": alert.summary, "value": alert.value}
                    connection.execute(update(ALERTS).where(_A.id == row.id).values(values))
            told_at = None if receivers else now
            ended_ids = [row.id for row in ended]
            ending = update(ALERTS).where(in_list(connection, _A.id, ended_ids), _ACTIVE)
            connection.execute(ending.values(resolved_at=now, resolved_told_at=told_at))
            fired = _fire(connection, fire, now, told_at)
            if receivers:
                _expect(connection, receivers, ended_ids, now)
            return Settled(fired, resolved)

    def largest_group(self) -> LargestGroup | None:
        """The group with most of the messages that are not over yet."""
        with reading(self._engine, is_snapshot=True) as connection:
            found = groups(connection, Filters(), 1).groups
        if not found:
            return None
        (group,) = found
        counts = {status.value: number for status, number in group.counts.items()}
        return LargestGroup(group.fingerprint, _clean(group.sample.error_type), counts)

    def take_turn(
        self, receiver: str, now: datetime, *, is_well: bool = False, limit: int | None = None
    ) -> Turn | None:
        """Claim for a minute the alerts that are still to be sent to this receiver; None if there are none.

        With `is_well`, because the receiver has just taken something, also those whose pause is not over.
        """
        until = now + TURN
        # The last term: a clock that was far ahead must not silence everybody.
        is_free = or_(_R.telling_until.is_(None), _R.telling_until <= now, _R.telling_until > until)
        has_waited = or_(_R.next_try_at <= now, _R.next_try_at > now + _LONGEST_PAUSE)
        waits = and_(_R.receiver == receiver, _NOT_TAKEN, _R.tries < MOST_TRIES, is_free)
        gravest = (case((_A.severity == Severity.CRITICAL, 0), else_=1), case((_A.name == NEW_GROUP, 1), else_=0))
        claim = (
            select(*_NOTICE, _A.resolved_at, _R.tries)
            .join(ALERT_RECEIVERS, _R.alert_id == _A.id)
            .where(_UNSENT, waits if is_well else and_(waits, has_waited))
            .order_by(*gravest, _A.id)
            .limit(limit or _SENT_AT_ONCE)
            .with_for_update(of=ALERT_RECEIVERS, skip_locked=True)
        )
        with writing(self._engine) as connection:
            rows = connection.execute(claim.where(_own(connection))).all()
            by_tries: dict[int, list[int]] = {}
            for row in rows:
                by_tries.setdefault(row.tries + 1, []).append(row.id)
            for tries, ids in by_tries.items():
                # Counted before the call, because a worker that dies in the call has tried as well.
                mine = update(ALERT_RECEIVERS).where(_R.receiver == receiver, in_list(connection, _R.alert_id, ids))
                values = {"telling_until": until, "tries": tries, "next_try_at": now + pause_after(tries)}
                connection.execute(mine.values(values))
        return Turn(until, tuple(_notice(row, row.resolved_at) for row in rows)) if rows else None

    def end_turn(self, receiver: str, turn: Turn, now: datetime, *, taken: bool) -> int:
        """Store whether the receiver took them; return how many alerts are dropped for it after too many tries."""
        ids = [notice.id for notice in turn.notices]
        # An alert that ended during the call was sent as fired, and has still to be sent as resolved.
        ended = [notice.id for notice in turn.notices if notice.resolved_at is not None]
        given_up = 0
        with writing(self._engine) as connection:
            _lock_alerts(connection)
            these = (_R.receiver == receiver, in_list(connection, _R.alert_id, ids))
            ours = update(ALERT_RECEIVERS).where(*these)
            connection.execute(ours.where(_R.telling_until == turn.until).values(telling_until=None))
            if taken:
                connection.execute(ours.where(_R.told.is_(None)).values(told=_FIRED))
                connection.execute(ours.where(in_list(connection, _R.alert_id, ended)).values(told=_RESOLVED))
                connection.execute(ours.values(told_at=now, tries=0))
            else:
                given_up = connection.scalar(select(func.count()).where(*these, _R.tries >= MOST_TRIES)) or 0
            _close(connection, ids, now)
        return given_up

    def waiting(self, receiver: str) -> Waiting | None:
        """The alerts that this receiver did not take and that are sent again later; None if there are none."""
        waits = (_UNSENT, _R.receiver == receiver, _NOT_TAKEN, _R.tries > 0, _R.tries < MOST_TRIES)
        counted = select(func.count(), func.min(_R.next_try_at)).join(ALERTS, _R.alert_id == _A.id)
        with reading(self._engine) as connection:
            counted = counted.where(*waits, _own(connection), _R.telling_until.is_(None))
            number, next_try = connection.execute(counted).one()
        return Waiting(number, next_try) if number else None


def active(connection: Connection) -> tuple[Notice, ...]:
    """The alerts that stand, the gravest first, then the newest."""
    gravest = case((_A.severity == Severity.CRITICAL, 0), else_=1)
    stand = select(*_NOTICE).where(_own(connection), _ACTIVE)
    found = connection.execute(stand.order_by(gravest, _A.fired_at.desc(), _A.id))
    return tuple(_notice(row, None) for row in found)


def _own(connection: Connection) -> ColumnElement[bool]:
    return own(connection, _A.scope_id)


def recent(connection: Connection, limit: int) -> tuple[Notice, ...]:
    """The alerts that have ended, the newest first."""
    ended = select(*_NOTICE, _A.resolved_at).where(_own(connection), _A.resolved_at.is_not(None))
    newest = ended.order_by(_A.resolved_at.desc(), _A.id).limit(limit)
    return tuple(_notice(row, row.resolved_at) for row in connection.execute(newest))


def _lock_alerts(connection: Connection) -> None:
    """Let one worker at a time write alerts; in SQLite the transaction itself does so.

    No index prevents a second alert for a group whose alert is resolved: the worker has to see it. And no worker waits
    for the row of an alert while it holds that of a receiver.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE dlq_alerts IN SHARE ROW EXCLUSIVE MODE"))


def _sample(connection: Connection, fingerprint: str) -> Sample | None:
    newest = (
        select(_M.id, _M.error_type, _M.error_message)
        .where(own(connection), _M.fingerprint == fingerprint, _M.status.in_(FOR_A_PERSON))
        .order_by(_M.created_at.desc(), _M.id.desc())
        .limit(1)
    )
    row = connection.execute(newest).one_or_none()
    return row and Sample(row.id, _clean(row.error_type), _clean(row.error_message))


def _clean(shown: str | None) -> str | None:
    """One line that is safe in any terminal, log and chat."""
    return shown and plain(masked(" ".join(shown[: 4 * _LONGEST_SAMPLE].split())), _LONGEST_SAMPLE)


def _never_fired(connection: Connection, groups: Sequence[Alert]) -> tuple[Alert, ...]:
    subjects = in_list(connection, _A.subject, [alert.subject for alert in groups])
    known = set(connection.scalars(select(_A.subject).where(_own(connection), _A.name == NEW_GROUP, subjects)))
    return tuple(alert for alert in groups if alert.subject not in known)


def _groups_at_rest(connection: Connection) -> Sequence[Any]:
    """Active alerts of groups in which no message waits for a person any more."""
    # One condition for each state, so that both use the index by state and group.
    waits = or_(
        *(exists().where(own(connection), _M.status == status, _M.fingerprint == _A.subject) for status in FOR_A_PERSON)
    )
    over = select(*_NOTICE).where(_own(connection), _A.name == NEW_GROUP, _ACTIVE, ~waits).order_by(_A.id)
    return connection.execute(over.limit(GROUPS_AT_ONCE)).all()


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
            "scope_id": scope_of(connection),
        }
        for alert in alerts
    ]
    adding = insert_into(connection, ALERTS)
    # If two workers come here at once after all, the index of active alerts decides.
    found = connection.execute(adding.on_conflict_do_nothing().returning(*_NOTICE), rows)
    return tuple(sorted((_notice(row, None) for row in found), key=lambda notice: notice.id))


def _expect(connection: Connection, receivers: Sequence[str], ended: Sequence[int], now: datetime) -> None:
    """Queue every alert that is not settled for these receivers; the tries of those that have `ended` begin anew."""
    adding = insert_into(connection, ALERT_RECEIVERS)
    names = [_R.alert_id, _R.receiver, _R.next_try_at]
    for receiver in receivers:
        unsent = select(_A.id, literal(receiver, _R.receiver.type), literal(now, _R.next_try_at.type))
        unsent = unsent.where(_own(connection), _UNSENT)
        connection.execute(adding.from_select(names, unsent).on_conflict_do_nothing())
    again = update(ALERT_RECEIVERS).where(in_list(connection, _R.alert_id, ended))
    connection.execute(again.values(tries=0, next_try_at=now))


def _close(connection: Connection, alerts: Sequence[int], now: datetime) -> None:
    """Mark as settled the alerts that each receiver has taken, or has been tried with often enough."""
    waits = (_R.alert_id == _A.id, _R.tries < MOST_TRIES)
    these = update(ALERTS).where(in_list(connection, _A.id, alerts))
    fired = these.where(_A.fired_told_at.is_(None), ~exists().where(*waits, _R.told.is_(None)))
    connection.execute(fired.values(fired_told_at=now))
    over = these.where(_A.resolved_at.is_not(None), _A.resolved_told_at.is_(None), _A.fired_told_at.is_not(None))
    unheard = or_(_R.told.is_(None), _R.told != _RESOLVED)
    connection.execute(over.where(~exists().where(*waits, unheard)).values(resolved_told_at=now))


def _notice(row: Any, resolved_at: datetime | None) -> Notice:
    shown = (row.id, row.name, row.subject, Severity(row.severity), row.summary, row.value, row.threshold)
    return Notice(*shown, row.fired_at, resolved_at)


def _unwritten(alert: Alert, now: datetime) -> Notice:
    return Notice(0, alert.name, alert.subject, alert.severity, alert.summary, alert.value, alert.threshold, now, None)
