"""The engine as a whole: every message taken is counted once and is somewhere, whatever happens around it."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from socket import SHUT_RDWR
from typing import TYPE_CHECKING

import pytest
from broker_client import PERSISTENT, SINK, Side, body_of, connected, keep, move, publish, transfer
from program import HANGS_AFTER

from dlqbatch.amqp.delivery import AwaitOrigin, Gather, Offer, Route
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.transfer import WINDOW, Bounds, Take, Transfer
from dlqbatch.errors import DatabaseUnreadable
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dlqbatch.amqp.delivery import Delivery, Instruction
    from dlqbatch.broker.connection import Connection

SOURCE = "source"
PUBLISH, BODY = b"\x00\x3c\x00\x28", 3


@pytest.fixture(params=["classic", "quorum"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def side(broker_url: str, kind: str) -> Iterator[Side]:
    side = Side(broker_url)
    side.queue(SOURCE, kind)
    side.queue(SINK)
    yield side
    side.close()


def take(kind: str, limit: int) -> list[Take]:
    return [Take(SOURCE, limit, kind == "quorum")]


def numbered(count: int) -> list[bytes]:
    return [b"%05d" % number for number in range(count)]


def gather(delivery: Delivery) -> Gather:
    return Gather(body_of(delivery))


def swallow_publishes(connection: Connection) -> None:
    """As a network would that is about to break: what is published never gets there, and is never confirmed."""
    put = connection.wire.put

    def put_most(frames: bytes) -> None:
        if frames[7:11] != PUBLISH and frames[0] != BODY:
            put(frames)

    connection.wire.put = put_most  # type: ignore[method-assign]


@pytest.mark.parametrize("ended_by", ["time", "signal"])
def test_what_is_never_confirmed_is_left_when_the_wait_is_over(
    side: Side, broker_url: str, kind: str, ended_by: str
) -> None:
    side.fill(SOURCE, numbered(1000))
    started = time.monotonic()
    with connected(broker_url) as connection:
        swallow_publishes(connection)
        tally = transfer(
            connection,
            take(kind, 1000),
            move,
            seconds=0.3 if ended_by == "time" else 60,
            give_up_after=0.5,
            stopped=lambda: ended_by == "signal" and time.monotonic() > started + 0.3,
        )
    assert time.monotonic() - started < 45  # of the minute that it has without its bound
    assert (tally.stopped_by, tally.lost) == (ended_by, None)
    assert tally.results == {("left", "not-confirmed"): tally.got}
    assert sorted(message.body for message in side.empty(SOURCE)) == numbered(1000)


def test_a_signal_ends_the_wait_even_when_everything_was_taken(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, numbered(10))
    started = time.monotonic()
    with connected(broker_url) as connection:
        swallow_publishes(connection)
        tally = transfer(
            connection,
            take(kind, 10),
            move,
            seconds=60,
            give_up_after=0.5,
            stopped=lambda: time.monotonic() > started + 0.5,
        )
    assert time.monotonic() - started < 45  # of the minute that it has without its bound
    assert tally.results == {("left", "not-confirmed"): tally.got}


@pytest.mark.parametrize("give_up_after", [0.0, 0.001, 0.01, 0.05])
def test_what_arrives_after_the_end_is_not_taken(side: Side, broker_url: str, kind: str, give_up_after: float) -> None:
    side.fill(SOURCE, numbered(2000))
    with connected(broker_url) as connection:
        tally = transfer(connection, take(kind, 2000), move, seconds=0.0, give_up_after=give_up_after)
        handed_over = tally.got
        connection.wait(lambda: not connection.wire.readers, "the channels' end")
        assert tally.got == handed_over == sum(tally.results.values())
    found: set[bytes] = set()

    def all_there() -> bool:
        found.update(message.body for queue in (SOURCE, SINK) for message in side.empty(queue))
        return found == set(numbered(2000))

    side.wait(all_there)  # a quorum queue may be putting back what its channel left behind


class _Store:
    """Rows that come a hundred at a time, each time from a database that takes longer than the broker's confirms."""

    def __init__(self, rows: int, may: int = 1 << 30) -> None:
        self._left, self._may = rows, may

    def more(self, room: int) -> list[Offer] | None:
        time.sleep(0.02)
        first, self._left = self._left, max(self._left - min(room, 100), 0)
        return [Offer(number, "", "k", b"\0\0", b"row") for number in range(first, self._left, -1)] or None

    def may_publish(self) -> bool:
        self._may -= 1
        return self._may >= 0

    def confirmed(self, tag: int) -> None: ...
    def held(self, tag: int, reason: str | None) -> None: ...
    def flush(self) -> None: ...


@pytest.mark.parametrize("ended_by", ["time", "signal"])
def test_an_end_is_seen_although_the_next_confirms_are_always_there_already(
    side: Side, broker_url: str, ended_by: str
) -> None:
    with connected(broker_url) as connection:
        over = time.monotonic() + 1
        stop_at = over if ended_by == "time" else over + 60
        bounds = Bounds(stop_at, 20, 1 << 40, lambda: ended_by == "signal" and time.monotonic() > over)
        origins = Origins(connection)
        engine = Transfer(
            connection, origins, lambda each: publish(each, Route("", SINK)), bounds, source=_Store(20_000)
        )
        tally = engine.run(())
    assert tally.stopped_by == ended_by
    assert 0 < tally.got < 10_000
    assert len(side.empty(SINK)) == tally.got


@pytest.mark.parametrize("may", [0, 30])
def test_a_stop_acts_before_the_next_publish_in_the_middle_of_a_burst(side: Side, broker_url: str, may: int) -> None:
    with connected(broker_url) as connection:
        bounds = Bounds(time.monotonic() + HANGS_AFTER, 20, 1 << 40, lambda: False)
        source = _Store(100, may)
        engine = Transfer(
            connection, Origins(connection), lambda each: publish(each, Route("", SINK)), bounds, source=source
        )
        tally = engine.run(())
    assert tally.results == Counter({("moved", None): may, ("left", "stopped"): 100 - may}) - Counter()
    assert len(side.empty(SINK)) == may


def test_one_connection_serves_several_transfers_and_forgets_their_channels(
    side: Side, broker_url: str, kind: str
) -> None:
    side.fill(SOURCE, numbered(300))
    with connected(broker_url) as connection:
        for _ in range(3):
            assert transfer(connection, take(kind, 50), move).results == {("moved", None): 50}
            assert transfer(connection, take(kind, 10), keep).results == {("left", "kept"): 10}
        connection.wait(lambda: not connection.wire.readers, "the channels' end")
        assert connection.wire.after_read is None
    side.wait(lambda: side.depth(SOURCE) == 150)


@pytest.mark.parametrize(("spare", "taken"), [(0, 10), (20, 30), (1000, 100)])
def test_what_another_channel_put_back_is_taken_although_it_was_not_counted(
    side: Side, broker_url: str, kind: str, spare: int, taken: int
) -> None:
    """A queue tells its depth before it has put everything back; the limit is then too low."""
    side.fill(SOURCE, numbered(100))
    with connected(broker_url) as connection:
        transfer(connection, take(kind, 100), keep)
        side.wait(lambda: side.depth(SOURCE) == 100)
        assert transfer(connection, take(kind, 10), move, spare=spare).got == taken


def test_what_only_arrives_now_is_left_to_the_next_run(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, numbered(10))
    side.channel.confirm_delivery()
    later: list[bytes] = numbered(100)[10:]

    def fill_and_move(delivery: Delivery) -> Instruction:
        # Confirmed is in the queue; how many are ready changes meanwhile, as more of the ten are taken.
        for body in later:
            side.channel.basic_publish("", SOURCE, body, PERSISTENT)
        later.clear()
        return move(delivery)

    with connected(broker_url) as connection:
        assert transfer(connection, take(kind, 10), fill_and_move, spare=1000).got == 10


def test_a_batch_is_acknowledged_after_it_was_stored_and_put_back_if_it_was_not(
    side: Side, broker_url: str, kind: str
) -> None:
    side.fill(SOURCE, numbered(1000))
    stored: list[bytes] = []

    def store(batch: Sequence[bytes]) -> list[tuple[str, str | None]]:
        assert side.depth(SOURCE) <= 1000 - len(stored)
        if len(stored) + len(batch) > 600:
            raise DatabaseUnreadable("a test", "it is full")
        stored.extend(batch)
        return [("recorded", None)] * len(batch)

    with connected(broker_url) as connection:
        tally = transfer(connection, take(kind, 1000), gather, store=store)
        assert isinstance(tally.failure, DatabaseUnreadable)
        assert tally.results["recorded", None] == len(stored) > 0
        side.wait(lambda: side.depth(SOURCE) == 1000 - len(stored))
        del stored[:]
        assert not transfer(connection, take(kind, 100), gather, store=store).failure
    assert len(stored) == 100


def test_what_is_being_stored_when_the_time_is_over_is_stored_and_acknowledged(
    side: Side, broker_url: str, kind: str
) -> None:
    side.fill(SOURCE, numbered(1000))
    stored: list[bytes] = []
    over = 2.0

    def store(batch: Sequence[bytes]) -> list[tuple[str, str | None]]:
        if not stored:
            time.sleep(over)
        stored.extend(batch)
        return [("recorded", None)] * len(batch)

    with connected(broker_url) as connection:
        tally = transfer(connection, take(kind, 1000), gather, store=store, seconds=over, give_up_after=0.2)
        side.wait(lambda: side.depth(SOURCE) == 1000 - len(stored))
    assert tally.stopped_by == "time"
    assert tally.results["recorded", None] == len(stored) > 0
    assert tally.results["left", "not-stored"] == tally.got - len(stored)


def test_what_was_stored_while_the_connection_was_lost_counts_as_stored(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, numbered(1000))
    stored: list[bytes] = []

    def store(batch: Sequence[bytes]) -> list[tuple[str, str | None]]:
        assert not stored
        connection.wire._transport._sock.shutdown(SHUT_RDWR)
        side.wait(lambda: side.depth(SOURCE) == 1000)
        stored.extend(batch)
        return [("recorded", None)] * len(batch)

    with connected(broker_url) as connection:
        tally = transfer(connection, take(kind, 1000), gather, store=store)
    assert tally.lost is not None
    assert tally.results["recorded", None] == len(stored) > 0
    assert side.depth(SOURCE) == 1000


class Known(Origins):
    """Origins that take a moment to be looked for."""

    def prepare(self, _: Origin) -> None:
        with self._connection.scratch() as scratch:
            for _ in range(3):
                scratch.call("queue_declare", queue=SINK, passive=True)

    def forget(self, origin: Origin) -> None: ...
    def unroutable(self, _: Origin) -> bool:
        return False


def test_waiting_for_origins_while_messages_are_refused_and_returned(side: Side, broker_url: str, kind: str) -> None:
    """Unroutable, refused, awaiting an origin, held, all at once: the engine is entered from within its own waits."""
    side.fill(SOURCE, numbered(1500))
    side.channel.exchange_declare("doomed", "fanout")
    asked: set[bytes] = set()

    def handle(delivery: Delivery) -> Instruction:
        number = int(body_of(delivery))
        if number == 500 and not delivery.resent:
            side.channel.exchange_delete("doomed")
        match number % 5:
            case 0:
                return publish(delivery, Route("doomed", "key"))
            case 1 if delivery.routing_key and body_of(delivery) not in asked:
                asked.add(body_of(delivery))
                return AwaitOrigin(Origin(f"origin-{number % 37}", None, "key"))
            case 2:
                return keep(delivery)
            case 3:
                return publish(delivery, Route("", "nowhere"), origin=Origin("nowhere", None, "key"))
            case _:
                return move(delivery)

    with connected(broker_url) as connection:
        tally = transfer(connection, take(kind, 1500), handle, origins=Known(connection))  # type: ignore[arg-type]
    assert (tally.got, tally.lost) == (1500, None)
    # Nobody was bound to the exchange, so before its end what went there was returned.
    to_doomed = tally.results["left", "publish-refused"] + tally.results["left", "unroutable"] - 300
    assert to_doomed == 300
    assert tally.results["left", "kept"] == 300
    assert tally.results["moved", None] == 600
    assert len(side.empty(SOURCE)) == 900


def test_a_queue_whose_channel_the_broker_closed_is_named(side: Side, broker_url: str, kind: str) -> None:
    with connected(broker_url) as connection:
        tally = transfer(connection, [Take("missing", 10, kind == "quorum"), *take(kind, 10)], move)
    assert tally.lost is None
    assert list(tally.refused) == ["missing"]
    assert "no queue 'missing'" in tally.refused["missing"]


@pytest.mark.slow
def test_a_broker_that_takes_no_publishes_is_waited_for_and_then_left(work_folder: Path) -> None:
    with RabbitNode(work_folder / "rabbitmq").start() as node:
        side = Side(node.url)
        side.queue(SOURCE)
        side.queue(SINK)
        side.fill(SOURCE, numbered(1000))
        seen = 0

        def alarm(delivery: Delivery) -> Instruction:
            nonlocal seen
            seen += 1
            if seen == 100:
                node.set_memory_limit(0.000001)
            return move(delivery)

        with connected(node.url, blocked_timeout=2.0) as connection:
            tally = transfer(connection, take("classic", 1000), alarm)
            assert connection.is_lost
        assert tally.lost is not None
        assert "locked" in tally.lost
        assert tally.got < 1000
        node.set_memory_limit(0.4)

        with connected(node.url, blocked_timeout=60.0) as connection:
            depth = side.depth(SOURCE)
            side.wait(lambda: side.depth(SOURCE) >= 1000 - tally.results["moved", None])
            depth = side.depth(SOURCE)
            seen = -(10**9)
            tally = transfer(connection, take("classic", depth), move)
        assert tally.results == {("moved", None): depth}
        assert {message.body for message in side.empty(SINK)} == set(numbered(1000))
        side.close()


@pytest.mark.slow
def test_a_message_that_is_never_confirmed_holds_up_no_other(work_folder: Path, kind: str) -> None:
    with RabbitNode(work_folder / "rabbitmq").start() as node:
        side = Side(node.url)
        for queue, its_kind in ((SOURCE, kind), (SINK, "classic"), ("stuck", "classic")):
            side.queue(queue, its_kind)
        first, *others = numbered(3000)
        side.fill(SOURCE, [first, *others])
        suspend = (
            '{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"stuck">>)), '
            "sys:suspend(amqqueue:get_pid(Q))."
        )
        node.evaluate(suspend)

        def first_to_the_stuck(delivery: Delivery) -> Instruction:
            return publish(delivery, Route("", "stuck")) if body_of(delivery) == first else move(delivery)

        with connected(node.url) as connection, ThreadPoolExecutor() as pool:
            run = pool.submit(transfer, connection, take(kind, 3000), first_to_the_stuck)
            side.wait(lambda: run.done() or side.depth(SINK) == len(others))
            side.close()
            node.evaluate('rabbit_networking:close_connections(rabbit_networking:connections(), "cut").')
            assert run.result().lost is not None
        after = Side(node.url)
        after.wait(lambda: after.depth(SOURCE) > 0)
        # All the others were acknowledged while the one was waited for: so a cut doubles no more than a window of them.
        assert len(after.empty(SOURCE)) <= WINDOW
        assert [message.body for message in after.empty(SINK)] == others
        after.close()
