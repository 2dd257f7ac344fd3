"""At the end every ticket is looked for, in the books of the workers, in every queue and in every row."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from endurance.traffic import PARKED, PARKED_MESSAGES, Books, ticket_of
from rawamqp import Peer

if TYPE_CHECKING:
    from endurance.world import World

_PAGE = 2_000
_SHOWN = 20


class Account(NamedTuple):
    published: int
    unknown: int
    """Publishes that the broker neither confirmed nor refused; each may be there or not."""
    done: int
    in_queues: int
    in_rows: int
    lost: list[int]
    changed: list[str]
    doubled: int
    """Copies beyond the first, wherever they are."""
    parked: int
    """Of the messages that a check only ever looks at."""

    @property
    def is_even(self) -> bool:
        return not self.lost and not self.changed and self.parked == PARKED_MESSAGES


def settle(world: World, books: Books) -> Account:
    """Takes everything out of the queues."""
    changed = list(books.changed)
    queues, parked = _in_queues(world, changed)
    rows = _in_rows(world, changed)
    lost, doubled = [], 0
    for ticket, confirmed in enumerate(books.confirmed):
        found = books.done[ticket] + queues[ticket] + rows[ticket]
        if not found and confirmed == 1:
            lost.append(ticket)
        doubled += max(found - 1, 0)
    return Account(
        published=len(books.confirmed),
        unknown=books.confirmed.count(2),
        done=len(books.done) - books.waiting,
        in_queues=queues.total(),
        in_rows=rows.total(),
        lost=lost,
        changed=changed[:_SHOWN],
        doubled=doubled,
        parked=parked,
    )


def _in_queues(world: World, changed: list[str]) -> tuple[Counter[int], int]:
    found: Counter[int] = Counter()
    parked = 0
    with Peer(world.node.url) as peer:
        for queue in sorted(one["name"] for one in world.management.queues()):
            for seen in peer.read(queue):
                if queue == PARKED:
                    parked += 1
                elif (ticket := ticket_of(seen.body)) is None:
                    changed.append(f"{queue}: {seen.body[:40]!r}")
                else:
                    found[ticket.number] += 1
    return found, parked


def _in_rows(world: World, changed: list[str]) -> Counter[int]:
    """Rows that still stand for their message; what is resolved has to be in a worker's books."""
    found: Counter[int] = Counter()
    asking = "SELECT id, status, body FROM dlq_messages WHERE id > %s ORDER BY id LIMIT %s"
    last = 0
    with psycopg.connect(world.database, autocommit=True) as connection:
        while rows := connection.execute(asking, (last, _PAGE)).fetchall():
            for row_id, status, body in rows:
                ticket = ticket_of(bytes(body))
                if ticket is None:
                    changed.append(f"row {row_id}: {bytes(body)[:40]!r}")
                elif status in {"pending", "manual", "failed", "archived"}:
                    found[ticket.number] += 1
            last = rows[-1][0]
    return found
