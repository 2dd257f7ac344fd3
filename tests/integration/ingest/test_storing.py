"""Whatever happens to the broker or to the database while a batch is being stored, no message is lost."""

from __future__ import annotations

from socket import SHUT_RDWR
from typing import TYPE_CHECKING

import pytest
from broker_client import Side, body_of, connected, transfer
from sqlalchemy import text

from dlqbatch.amqp.delivery import Gather
from dlqbatch.broker.transfer import Take
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.store.engine import create_engine_for, keeping, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlqbatch.amqp.delivery import Delivery
    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.transfer import Tally

SOURCE, MESSAGES = "source", 1000
NUMBERED = [b"%05d" % number for number in range(MESSAGES)]
STORED: tuple[str, str | None] = ("recorded", None)


@pytest.fixture(params=["classic", "quorum"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def side(broker_url: str, kind: str) -> Iterator[Side]:
    side = Side(broker_url)
    side.queue(SOURCE, kind)
    side.fill(SOURCE, NUMBERED)
    yield side
    side.close()


class Store:
    """A real server, which takes its time over every batch."""

    def __init__(self, database_url: str, *, patience: float = 30.0) -> None:
        self.stored: list[bytes] = []
        self.during: Callable[[], object] = lambda: None
        """What else happens while the server is at the first batch."""
        self.during_the_last: Callable[[], object] = lambda: None
        """What else happens while the server is at the last batch."""
        self._engine = create_engine_for(database_url, connect_timeout=30, statement_timeout=patience)
        with writing(self._engine) as connection:
            connection.execute(text("CREATE TABLE kept (body text)"))

    def gather(self, delivery: Delivery) -> Gather:
        return Gather(body_of(delivery))

    def run(self, connection: Connection, kind: str) -> Tally:
        with keeping(self._engine) as kept:

            def store(batch: Sequence[bytes]) -> list[tuple[str, str | None]]:
                with writing(kept) as storing:
                    rows = [{"body": body.decode()} for body in batch]
                    storing.execute(text("INSERT INTO kept VALUES (:body)"), rows)
                    if not self.stored:
                        self.during()
                    if len(self.stored) + len(batch) == MESSAGES:
                        self.during_the_last()
                    storing.execute(text("SELECT pg_sleep(0.2)"))
                self.stored += batch
                return [STORED] * len(batch)

            return transfer(connection, [Take(SOURCE, MESSAGES, kind == "quorum")], self.gather, store=store)

    def rows(self) -> list[bytes]:
        with writing(self._engine) as connection:
            return sorted(body.encode() for body in connection.execute(text("SELECT body FROM kept")).scalars())


def test_the_broker_that_goes_away_while_a_batch_is_stored_takes_nothing_of_it_back(
    side: Side, broker_url: str, database_url: str, kind: str
) -> None:
    store = Store(database_url)
    with connected(broker_url) as connection:
        store.during = lambda: connection.wire._transport._sock.shutdown(SHUT_RDWR)
        tally = store.run(connection, kind)
    assert tally.lost is not None
    assert tally.results[STORED] == len(store.stored) == len(store.rows()) > 0
    assert tally.results["left", "not-stored"] + tally.results["left", "connection-lost"] == tally.got - len(
        store.stored
    )
    # What was committed and never acknowledged is there twice: the next run finds out that it has it.
    side.wait(lambda: side.depth(SOURCE) >= MESSAGES - len(store.stored))
    waiting = {message.body for message in side.empty(SOURCE)}
    assert waiting | set(store.rows()) == set(NUMBERED)
    assert waiting & set(store.rows())


def test_the_broker_that_goes_away_during_the_last_batch_is_not_taken_to_have_seen_its_acknowledgements(
    side: Side, broker_url: str, database_url: str, kind: str
) -> None:
    store = Store(database_url)
    with connected(broker_url) as connection:
        store.during_the_last = lambda: connection.wire._transport._sock.shutdown(SHUT_RDWR)
        tally = store.run(connection, kind)
    assert tally.lost is not None
    assert tally.results == {STORED: MESSAGES}
    assert store.rows() == NUMBERED
    side.wait(lambda: side.depth(SOURCE) > 0)


def test_the_queue_that_is_deleted_while_a_batch_is_stored_is_told_of_and_the_batch_is_kept(
    side: Side, broker_url: str, database_url: str, kind: str
) -> None:
    store = Store(database_url)
    with connected(broker_url) as connection:
        store.during = lambda: side.channel.queue_delete(SOURCE)
        tally = store.run(connection, kind)
    assert tally.lost is None
    assert tally.results[STORED] == len(store.rows()) > 0
    assert tally.results.total() == tally.got


def test_a_server_that_gives_up_in_the_middle_costs_no_message(
    side: Side, broker_url: str, database_url: str, kind: str
) -> None:
    store = Store(database_url, patience=0.1)
    with connected(broker_url) as connection:
        tally = store.run(connection, kind)
        assert isinstance(tally.failure, DatabaseUnreadable)
        assert tally.results == {("left", "not-stored"): tally.got}
        assert store.rows() == []
        side.wait(lambda: side.depth(SOURCE) == MESSAGES)
