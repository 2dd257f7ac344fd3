"""While a batch is being stored, the next one comes in; and whatever happens to either connection, none is lost."""

from __future__ import annotations

from socket import SHUT_RDWR
from typing import TYPE_CHECKING

import pytest
from broker_side import Side, body_of, connected, transfer
from sqlalchemy import text

from dlqbatch.broker.transfer import Take
from dlqbatch.deadstore.engine import create_engine_for, keeping, writing
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.message.delivery import Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.transfer import Tally
    from dlqbatch.message.delivery import Delivery

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
        self.came: list[bytes] = []
        """In the order in which they were handed over."""
        self.stored: list[bytes] = []
        self.came_meanwhile = 0
        self.during: Callable[[], object] = lambda: None
        """What else happens when the next message comes in while the server is at it."""
        self.beside_the_last: Callable[[], object] = lambda: None
        """What happens while the server is at the last batch."""
        self._is_storing = False
        self._engine = create_engine_for(database_url, connect_timeout=10, statement_timeout=patience)
        with writing(self._engine) as connection:
            connection.execute(text("CREATE TABLE kept (body text)"))

    def gather(self, delivery: Delivery) -> Gather:
        body = body_of(delivery)
        self.came.append(body)
        if self.came_meanwhile == 0 and self._is_storing:
            self.during()
        self.came_meanwhile += self._is_storing
        return Gather(body)

    def run(self, connection: Connection, kind: str) -> Tally:
        with keeping(self._engine) as kept:
            kept.beside = connection

            def store(batch: Sequence[bytes]) -> list[tuple[str, str | None]]:
                self._is_storing = True
                try:
                    with writing(kept) as storing:
                        rows = [{"body": body.decode()} for body in batch]
                        storing.execute(text("INSERT INTO kept VALUES (:body)"), rows)
                        if len(self.stored) + len(batch) == MESSAGES:
                            self.beside_the_last()
                        storing.execute(text("SELECT pg_sleep(0.2)"))
                finally:
                    self._is_storing = False
                self.stored += batch
                return [STORED] * len(batch)

            return transfer(connection, [Take(SOURCE, MESSAGES, kind == "quorum")], self.gather, store=store)

    def rows(self) -> list[bytes]:
        with writing(self._engine) as connection:
            return sorted(body.encode() for body in connection.execute(text("SELECT body FROM kept")).scalars())


def test_the_next_batch_comes_in_while_one_is_stored(side: Side, broker_url: str, database_url: str, kind: str) -> None:
    store = Store(database_url)
    with connected(broker_url) as connection:
        tally = store.run(connection, kind)
    assert tally.results == {STORED: MESSAGES}
    assert store.came_meanwhile > MESSAGES / 4
    assert store.rows() == sorted(store.came)
    assert side.depth(SOURCE) == 0


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


def test_the_broker_that_goes_away_beside_the_last_batch_is_not_taken_to_have_seen_its_acknowledgements(
    side: Side, broker_url: str, database_url: str, kind: str
) -> None:
    store = Store(database_url)
    with connected(broker_url) as connection:
        store.beside_the_last = lambda: connection.wire._transport._sock.shutdown(SHUT_RDWR)
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


def test_a_server_that_gives_up_in_the_middle_costs_no_message_that_came_in_meanwhile(
    side: Side, broker_url: str, database_url: str, kind: str
) -> None:
    store = Store(database_url, patience=0.1)
    with connected(broker_url) as connection:
        tally = store.run(connection, kind)
        assert isinstance(tally.failure, DatabaseUnreadable)
        assert tally.results == {("left", "not-stored"): tally.got}
        assert store.rows() == []
        side.wait(lambda: side.depth(SOURCE) == MESSAGES)


def test_what_goes_wrong_in_what_comes_in_meanwhile_is_raised_and_what_was_stored_is_kept(
    side: Side, broker_url: str, database_url: str, kind: str
) -> None:
    """Not through the driver of the database, whose connection would be of no use after that."""

    def fail() -> None:
        raise ZeroDivisionError

    store = Store(database_url)
    store.during = fail
    with connected(broker_url) as connection, pytest.raises(ZeroDivisionError):
        store.run(connection, kind)
    assert len(store.rows()) == len(store.stored) > 0
