"""The rows that a message may be already: by its id, by its framework's id, or by its content.

A message without an id can be delivered again as long as nobody knows that its acknowledgement has arrived. That is
known of a run as a whole: its name stands in `dlq_unproven_runs` from its first such row until the broker has seen all
of its acknowledgements. To mark each row would be to write it twice.

A row that a message was taken for is flagged `possible_duplicate` until the acknowledgement of that message is certain:
if the run is cut before, the next one cannot tell whether it sees this message again or another that is like it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, delete, literal_column, select, text, update

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.ingest.arrivals import Known, SameFrameworkId
from dlqbatch.ingest.examine import Examined
from dlqbatch.store.bulk import in_list
from dlqbatch.store.scopes import own as own_scope
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.tables import ACK_UNPROVEN, ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS, TAKEN_BY, UNPROVEN_RUNS
from dlqbatch.store.text import key

_M: Final = MESSAGES.c
_COLUMNS: Final = (
    *(_M.id, _M.identity, _M.digest, _M.status, _M.strategy, _M.dlq_retry_count, _M.lock_token, _M.plan_id),
    *(_M.origin_queue, _M.origin_exchange, _M.origin_key, _M.framework_id, _M.returned_digest, _M.scope_id),
)


def rows_by_identity(connection: Connection, ids: Sequence[str]) -> dict[str, Row[*tuple[Any, ...]]]:
    if not ids:
        return {}
    return {row.identity: row for row in _locked(connection, in_list(connection, _M.identity, ids))}


def known_of(connection: Connection, rows: Iterable[Row[*tuple[Any, ...]]]) -> dict[int, Known]:
    by_id = {row.id: row for row in rows}
    attempts: defaultdict[int, list[tuple[int, str | None]]] = defaultdict(list)
    if by_id:
        found = connection.execute(
            select(ATTEMPTS.c.message_id, ATTEMPTS.c.number, ATTEMPTS.c.outcome).where(
                in_list(connection, ATTEMPTS.c.message_id, by_id)
            )
        )
        for row_id, number, outcome in found:
            attempts[row_id].append((number, outcome))
    return {
        row_id: Known(
            status=row.status,
            digest=bytes(row.digest),
            open_attempt=max((number for number, outcome in attempts[row_id] if outcome is None), default=None),
            failed_attempts=frozenset(number for number, outcome in attempts[row_id] if outcome == "failed"),
            resolved_by=max((number for number, outcome in attempts[row_id] if outcome == "succeeded"), default=None),
        )
        for row_id, row in by_id.items()
    }


def rows_by_framework_id(
    connection: Connection, arrivals: Iterable[Examined]
) -> defaultdict[str, list[Row[*tuple[Any, ...]]]]:
    """The rows with the framework's id of a message, by that id; only for messages that have no id of ours."""
    found: defaultdict[str, list[Row[*tuple[Any, ...]]]] = defaultdict(list)
    ids = [key(each.framework_id) for each in arrivals if each.framework_id is not None and not each.id]
    if ids:
        # The second condition is that of the index.
        same = (own_scope(connection), in_list(connection, _M.framework_id, ids), _M.framework_id.is_not(None))
        for row in _locked(connection, *same):
            found[row.framework_id].append(row)
    return found


def of_same_framework_id(
    connection: Connection, each: Examined, rows: Iterable[Row[*tuple[Any, ...]]]
) -> list[SameFrameworkId]:
    """The rows with the same framework's id that failed in the same place as this message."""
    there = [row for row in rows if not is_elsewhere(connection, each.origin, row)]
    if not there:
        return []
    known = known_of(connection, there)
    begun: defaultdict[int, dict[int, datetime]] = defaultdict(dict)
    attempts = select(ATTEMPTS.c.message_id, ATTEMPTS.c.number, ATTEMPTS.c.created_at)
    for row_id, number, at in connection.execute(attempts.where(in_list(connection, ATTEMPTS.c.message_id, known))):
        begun[row_id][number] = at
    return [SameFrameworkId(row.id, row.identity, known[row.id], begun[row.id], row.returned_digest) for row in there]


def _locked(connection: Connection, *conditions: ColumnElement[bool]) -> Sequence[Row[*tuple[Any, ...]]]:
    # As everywhere: rows before attempts, in one order, so that nobody waits in a circle.
    return connection.execute(select(*_COLUMNS).where(*conditions).order_by(_M.id).with_for_update()).all()


def is_elsewhere(connection: Connection, origin: Origin | None, row: Row[*tuple[Any, ...]]) -> bool:
    """The message failed in a place where the row's never was: neither at its origin nor where a plan sent it.

    In another virtual host every place is another one, whatever its name.
    """
    if row.scope_id != scope_of(connection):
        return True
    queue = key(origin.queue) if origin is not None and origin.queue is not None else None
    exchange = key(origin.exchange) if origin is not None and origin.exchange is not None else None
    if row.origin_queue is not None:
        is_there = queue == row.origin_queue
    else:
        # Behind an exchange alone every queue is its place.
        is_there = exchange == row.origin_exchange and (exchange is not None or queue is None)
    if is_there or queue is None:
        return not is_there
    sent_there = (
        select(PLANS.c.id)
        .join(PLAN_ITEMS, PLAN_ITEMS.c.plan_id == PLANS.c.id)
        .where(PLANS.c.to_queue == queue, PLAN_ITEMS.c.message_id == row.id)
    )
    return connection.scalar(sent_there.limit(1)) is None


PossibleDuplicates = defaultdict[tuple[bytes, str], dict[int, bool]]


def content_key(each: Examined) -> tuple[bytes, str]:
    return each.full_digest, key(each.source_queue)


def announce(connection: Connection, run: str, now: datetime) -> None:
    """Note that the messages of this run's rows may be delivered again."""
    connection.execute(UNPROVEN_RUNS.insert().values(run=run, since=now))


def prove_run(connection: Connection, run: str) -> None:
    """Every message of its rows is acknowledged."""
    connection.execute(delete(UNPROVEN_RUNS).where(UNPROVEN_RUNS.c.run == run))


def possible_duplicates_of(
    connection: Connection, arrivals: Iterable[Examined], run: str, own: Container[int]
) -> PossibleDuplicates:
    """The rows that a redelivered message may be already, by its content, and whether each is flagged.

    These are rows whose acknowledgement is not proven. Never one of this `run`, nor one that it has taken a message for
    (`own`): those messages are still under way, so that an equal one is another.
    """
    duplicates: PossibleDuplicates = defaultdict(dict)
    digests = {each.full_digest for each in arrivals if not each.id and each.redelivered}
    # Shared with others who look, and kept from ending in order meanwhile.
    others = select(UNPROVEN_RUNS.c.run).where(UNPROVEN_RUNS.c.run != run).with_for_update(read=True)
    runs = connection.scalars(others).all() if digests else ()
    if runs:
        # Locked, for another run may hold another message that is like the same row.
        found = connection.execute(
            select(MESSAGES.c.id, MESSAGES.c.full_digest, MESSAGES.c.source_queue, MESSAGES.c.possible_duplicate)
            .where(
                literal_column(TAKEN_BY).in_(runs),
                MESSAGES.c.full_digest.in_(digests),
                text(ACK_UNPROVEN),
                own_scope(connection),
                ~MESSAGES.c.had_id,
            )
            .order_by(MESSAGES.c.id)
            .with_for_update()
        )
        for row_id, digest, queue, is_flagged in found:
            if row_id not in own:
                duplicates[bytes(digest), queue][row_id] = is_flagged
    return duplicates


def children_like(connection: Connection, each: Examined) -> dict[int, bool]:
    """Rows that a redelivered message with an id of another's may be, of any run; and whether they are flagged."""
    found = connection.execute(
        select(MESSAGES.c.id, MESSAGES.c.possible_duplicate)
        .where(
            MESSAGES.c.parent == each.id,
            MESSAGES.c.full_digest == each.full_digest,
            MESSAGES.c.source_queue == each.source_queue,
            own_scope(connection),
        )
        .order_by(MESSAGES.c.id)
        .with_for_update()
    )
    return {row.id: row.possible_duplicate for row in found}


def flag(connection: Connection, rows: Collection[int], *, possible_duplicate: bool = True) -> None:
    if rows:
        these = update(MESSAGES).where(in_list(connection, MESSAGES.c.id, rows))
        connection.execute(these.values(possible_duplicate=possible_duplicate))


def prove(connection: Connection, rows: Collection[int]) -> None:
    """Their messages are acknowledged."""
    if rows:
        connection.execute(update(MESSAGES).where(in_list(connection, MESSAGES.c.id, rows)).values(ack_proven=True))
