"""Rows that a message without an id may be already, as long as nobody knows that its acknowledgement has arrived.

That is known of a run as a whole: its name stands in `dlq_unproven_runs` from its first such row until the broker has
seen all of its acknowledgements. To mark each row would be to write it twice.

A row that a message was taken for is flagged `possible_duplicate` until the acknowledgement of that message is certain:
if the run is cut before, the next one cannot tell whether it sees this message again or another that is like it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from sqlalchemy import delete, literal_column, select, text, update

from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.tables import ACK_UNPROVEN, MESSAGES, TAKEN_BY, UNPROVEN_RUNS
from dlqbatch.deadstore.text import key

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable
    from datetime import datetime

    from sqlalchemy import Connection

    from dlqbatch.policy.examine import Examined

    Twins = defaultdict[tuple[bytes, str], dict[int, bool]]


def likeness(each: Examined) -> tuple[bytes, str]:
    return each.full_digest, key(each.source_queue)


def announce(connection: Connection, run: str, now: datetime) -> None:
    """Its rows may come again."""
    connection.execute(UNPROVEN_RUNS.insert().values(run=run, since=now))


def prove_run(connection: Connection, run: str) -> None:
    """Every message of its rows is acknowledged."""
    connection.execute(delete(UNPROVEN_RUNS).where(UNPROVEN_RUNS.c.run == run))


def twins_of(connection: Connection, arrivals: Iterable[Examined], run: str, own: Container[int]) -> Twins:
    """By likeness the rows that a redelivered message may be, for their acknowledgement is not proven; and the flag.

    Never one of this `run`, nor one that it has taken a message for (`own`): those messages are still under way, so
    that an equal one is another.
    """
    twins: Twins = defaultdict(dict)
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
                ~MESSAGES.c.had_id,
            )
            .order_by(MESSAGES.c.id)
            .with_for_update()
        )
        for row_id, digest, queue, is_flagged in found:
            if row_id not in own:
                twins[bytes(digest), queue][row_id] = is_flagged
    return twins


def children_like(connection: Connection, each: Examined) -> dict[int, bool]:
    """Rows that a redelivered message with an id of another's may be, of any run; and whether they are flagged."""
    found = connection.execute(
        select(MESSAGES.c.id, MESSAGES.c.possible_duplicate)
        .where(
            MESSAGES.c.parent == each.id,
            MESSAGES.c.full_digest == each.full_digest,
            MESSAGES.c.source_queue == each.source_queue,
        )
        .order_by(MESSAGES.c.id)
        .with_for_update()
    )
    return {row.id: row.possible_duplicate for row in found}


def flag(connection: Connection, rows: Collection[int], *, possible_duplicate: bool = True) -> None:
    if rows:
        these = update(MESSAGES).where(among(connection, MESSAGES.c.id, rows))
        connection.execute(these.values(possible_duplicate=possible_duplicate))


def prove(connection: Connection, rows: Collection[int]) -> None:
    """Their messages are acknowledged."""
    if rows:
        connection.execute(update(MESSAGES).where(among(connection, MESSAGES.c.id, rows)).values(ack_proven=True))
