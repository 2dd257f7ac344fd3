"""Dead letters are read from a stream: each becomes one row, whatever cuts the runs, and what is lost is told."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pika
import psycopg
import pytest
from arrivals import arrival
from broker_client import Side, connected
from dead_rows import NOW
from program import HANGS_AFTER, Program, eventually
from ready_store import make_tables
from sqlalchemy import text as sql

from dlqbatch import jobs
from dlqbatch.amqp.readable import readable
from dlqbatch.broker.streams import End
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.ingest.streams import STORED_BEFORE, Arrival, Position, StreamReplaced, _Stored, position_of
from dlqbatch.settings import load
from dlqbatch.store.engine import create_engine_for, reading
from scripts.servers.management import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.jobs import Report
    from scripts.servers.management import Management

STREAM = "dead.letters"
NO_FILE = {"DLQBATCH_CONFIG": "/dev/null"}


class Scene:
    def __init__(self, broker_url: str, database_url: str) -> None:
        self.options = {"broker_url": broker_url, "database_url": database_url, "ingest_queues": STREAM}
        self.side = Side(broker_url)
        self.side.channel.confirm_delivery()
        self.engine = create_engine_for(database_url, connect_timeout=30)

    def declare(self, **arguments: object) -> None:
        self.side.queue(STREAM, "stream", **arguments)

    def publish(self, *bodies: bytes) -> None:
        for body in bodies:
            self.side.channel.basic_publish("", STREAM, body)

    def ingest(self, **options: str) -> Report:
        dry_run = options.pop("dry_run", "") == "yes"
        return jobs.run("ingest", load({**self.options, **options}, NO_FILE), jobs.RunOptions(dry_run=dry_run))

    def bodies(self) -> list[bytes]:
        with reading(self.engine) as connection:
            return [bytes(body) for body in connection.scalars(sql("SELECT body FROM dlq_messages ORDER BY id"))]


@pytest.fixture
def scene(broker_url: str, database_url: str) -> Iterator[Scene]:
    make_tables(database_url)
    made = Scene(broker_url, database_url)
    yield made
    made.side.close()


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%05d" % number for number in range(first, end)]


@pytest.mark.usefixtures("on_every_broker")
def test_what_is_stored_of_a_stream_has_no_offset_and_from_a_queue_it_is_the_clients_own(scene: Scene) -> None:
    scene.declare()
    scene.publish(b"streamed")
    own = pika.BasicProperties(headers={"x-stream-offset": 7, "tenant": "a"})
    scene.side.queue("dead")
    scene.side.channel.basic_publish("", "dead", b"queued", own)
    scene.side.wait(lambda: scene.side.depth("dead") == 1)
    assert scene.ingest(ingest_queues=f"{STREAM},dead").counts["recorded"] == 2
    with reading(scene.engine) as connection:
        stored = dict(connection.execute(sql("SELECT body, properties FROM dlq_messages")).all())
    found = {bytes(body): readable(bytes(properties)).headers for body, properties in stored.items()}
    assert found == {b"streamed": {}, b"queued": {"x-stream-offset": 7, "tenant": "a"}}


@pytest.mark.usefixtures("on_every_broker")
def test_each_run_goes_on_behind_what_is_stored(scene: Scene) -> None:
    scene.declare()
    scene.publish(*numbered(0, 30))
    assert scene.ingest(dry_run="yes").counts["recorded"] == 30
    first = scene.ingest()
    assert (first.outcome, first.stopped_by, first.counts["recorded"]) == ("ok", "empty", 30)
    assert (first.emptied, first.queues[STREAM], first.warnings) == ((STREAM,), jobs.Depth(30, 0), ())
    assert scene.ingest().counts["got"] == 0
    scene.publish(*numbered(30, 35))
    third = scene.ingest()
    assert (third.counts["recorded"], third.queues[STREAM].found) == (5, 5)
    assert scene.bodies() == numbered(0, 35)


def test_the_broker_s_own_dead_letters_say_where_they_failed(broker43_url: str, database_url: str) -> None:
    """RabbitMQ 3.10 loses them on their way to a stream."""
    make_tables(database_url)
    scene = Scene(broker43_url, database_url)
    scene.declare()
    origin = scene.side.queue("orders", dead_letter_exchange="", dead_letter_routing_key=STREAM)
    scene.side.fill(origin, [b"00000"])
    method, _, _ = scene.side.channel.basic_get(origin)
    scene.side.channel.basic_reject(method.delivery_tag, requeue=False)
    scene.side.wait(lambda: scene.ingest().counts["recorded"])
    with reading(scene.engine) as connection:
        query = sql("SELECT origin_queue, event, source_queue FROM dlq_messages")
        assert connection.execute(query).one() == ("orders", "orders", STREAM)
    findings = Program(scene.options).run("doctor", "--json").told["findings"]
    assert not [found for found in findings if STREAM in str(found.values())], findings
    scene.side.close()


@pytest.mark.usefixtures("on_every_broker")
def test_a_bound_ends_a_run_and_the_next_run_takes_the_rest(scene: Scene) -> None:
    scene.declare()
    scene.publish(*numbered(0, 20))
    done = scene.ingest(max_messages="8")
    assert (done.outcome, done.stopped_by, done.counts["got"], done.emptied) == ("ok", "messages", 8, ())
    assert done.queues[STREAM] == jobs.Depth(20, 12)
    assert scene.ingest(max_bytes="15").stopped_by == "bytes"
    scene.ingest()
    assert scene.bodies() == numbered(0, 20)


@pytest.mark.usefixtures("on_every_broker")
def test_what_retention_deletes_before_it_is_read_is_told_once_and_stops_nothing(scene: Scene, broker_url: str) -> None:
    scene.declare(max_length_bytes=50_000, stream_max_segment_size_bytes=20_000)
    scene.publish(*numbered(0, 5))
    assert scene.ingest().outcome == "ok"
    scene.publish(*(body + bytes(1_000) for body in numbered(5, 300)))
    with connected(broker_url) as connection:
        assert eventually(lambda: (End(connection, STREAM, HANGS_AFTER).first or 0) > 5)
        oldest = End(connection, STREAM, HANGS_AFTER).first
    done = scene.ingest()
    assert oldest is not None
    stored = scene.bodies()
    assert (done.outcome, done.stopped_by) == ("partial", "empty")
    [warning] = done.warnings
    assert "retention has deleted up to" in warning
    assert done.details["streams"][STREAM]["missing"] >= 300 - len(stored) - 20  # type: ignore[index]
    assert done.details["streams"][STREAM]["missing"] >= oldest - 5  # type: ignore[index]
    assert [body[:5] for body in stored[5:]] == numbered(300 - len(stored) + 5, 300)
    again = scene.ingest()
    assert (again.outcome, again.warnings, scene.bodies()) == ("ok", (), stored)


@pytest.mark.parametrize("messages", [3, 10, 15], ids=["shorter", "as long", "longer"])
@pytest.mark.usefixtures("on_every_broker")
def test_a_stream_that_was_deleted_and_made_anew_is_read_from_its_beginning(scene: Scene, messages: int) -> None:
    scene.declare()
    scene.publish(*numbered(0, 10))
    scene.ingest()
    scene.side.channel.queue_delete(STREAM)
    scene.declare()
    scene.publish(*numbered(100, 100 + messages))
    done = scene.ingest()
    assert scene.bodies() == numbered(0, 10) + numbered(100, 100 + messages)
    assert done.warnings == (f"'{STREAM}' was deleted and made anew: it is read from its beginning",)
    scene.publish(b"next")
    assert scene.ingest().counts["recorded"] == 1


def test_an_empty_stream_is_nothing_to_do_and_not_called_empty(scene: Scene) -> None:
    scene.declare()
    done = scene.ingest()
    assert (done.outcome, done.counts["got"], done.emptied) == ("ok", 0, ())


@pytest.mark.usefixtures("on_every_broker")
def test_a_stream_that_is_written_to_all_the_time_has_an_end(scene: Scene, broker_url: str) -> None:
    scene.declare()
    over = threading.Event()

    def write() -> None:
        writer = Side(broker_url)
        while not over.is_set():
            for _ in range(200):
                writer.channel.basic_publish("", STREAM, b"x")
        writer.close()

    writing = threading.Thread(target=write)
    writing.start()
    try:
        with connected(broker_url) as connection:
            assert eventually(lambda: (End(connection, STREAM, HANGS_AFTER).last or 0) > 1_000)
    finally:
        over.set()
        writing.join()


def test_a_stream_that_cannot_be_read_keeps_no_queue_from_being_read(scene: Scene, management: Management) -> None:
    name = f"blind-{management.vhost}"
    management.put(f"users/{quoted(name)}", {"password": "p", "tags": ""})
    rights = {"configure": "^$", "write": "^$", "read": "^dlq$"}
    management.put(f"permissions/{quoted(management.vhost)}/{quoted(name)}", rights)
    try:
        scene.declare()
        scene.publish(b"unread")
        scene.side.queue("dlq")
        scene.side.fill("dlq", [b"read"])
        # With the type known from elsewhere.
        url = "http://guest:guest@{}:{}".format(*management._address)
        broker_url = scene.options["broker_url"].replace("guest:guest@", f"{name}:p@")
        done = scene.ingest(broker_url=broker_url, management_url=url, ingest_queues=f"dlq,{STREAM}")
    finally:
        management.delete(f"users/{quoted(name)}")
    assert (done.outcome, scene.bodies()) == ("partial", [b"read"])
    assert any(f"'{STREAM}' was not read to its end" in warning for warning in done.warnings)


def test_a_queue_and_a_stream_share_a_run(scene: Scene) -> None:
    scene.declare()
    scene.publish(*numbered(0, 10))
    scene.side.queue("dlq")
    scene.side.fill("dlq", numbered(10, 20))
    done = scene.ingest(ingest_queues=f"dlq,{STREAM}", max_messages="10")
    assert (done.counts["recorded"], done.stopped_by, done.queues[STREAM]) == (10, "messages", jobs.Depth(10, 5))
    scene.ingest(ingest_queues=f"dlq,{STREAM}")
    assert sorted(scene.bodies()) == numbered(0, 20)


def test_of_two_runs_at_once_each_message_is_stored_by_one(scene: Scene) -> None:
    scene.declare()
    scene.publish(*numbered(0, 1_000))
    program = Program(scene.options)
    runs = [program.start("ingest", "--json") for _ in range(3)]
    for run in runs:
        out, err = run.communicate(timeout=HANGS_AFTER)
        assert run.returncode == 0, (out, err)
    assert scene.bodies() == numbered(0, 1_000)


def test_a_run_that_is_killed_at_any_instant_neither_loses_nor_doubles(scene: Scene) -> None:
    scene.declare()
    scene.publish(*numbered(0, 3_000))
    program = Program(scene.options)
    with psycopg.connect(scene.options["database_url"].replace("+psycopg", ""), autocommit=True) as watching:

        def rows() -> int:
            found = watching.execute("SELECT count(*) FROM dlq_messages").fetchone()
            return int(found[0]) if found else 0

        for wanted in (1, 400, 900, 1_500):
            process = program.start("ingest", "--json")
            assert eventually(lambda wanted=wanted, process=process: rows() >= wanted or process.poll() is not None)
            process.kill()
            process.communicate(timeout=HANGS_AFTER)
    # What the server was about to commit when the run was killed is there, or it is not.
    assert scene.ingest().outcome == "ok"
    assert scene.bodies() == numbered(0, 3_000)


@pytest.mark.parametrize("database", ["database_url", "sqlite_url"])
def test_an_offset_that_moved_undoes_what_was_stored_with_it(request: pytest.FixtureRequest, database: str) -> None:
    """The faster run has stored more than the slower one holds, and then a part of it."""
    url = str(request.getfixturevalue(database))
    make_tables(url)
    engine = create_engine_for(url, connect_timeout=30)
    slower, faster = (_Stored(STREAM, None, 0, Ingestion(engine), lambda: NOW) for _ in range(2))
    batch = [Arrival(arrival(body=body), int(body), body) for body in numbered(0, 10)]
    new, known = ("recorded", None), ("duplicate", STORED_BEFORE)
    assert faster.store_batch(batch[:6]) == [new] * 6
    assert slower.store_batch(batch[:3]) == [known] * 3
    assert slower.store_batch(batch[3:8]) == [known] * 3 + [new] * 2
    assert faster.store_batch(batch[6:]) == [known] * 2 + [new] * 2
    with reading(engine) as connection:
        assert [bytes(body) for body in connection.scalars(sql("SELECT body FROM dlq_messages ORDER BY id"))] == (
            numbered(0, 10)
        )
        assert position_of(connection, STREAM) == Position(9, b"00009", 0)
    anew = _Stored(STREAM, Position(9, b"00009", 0), 1, Ingestion(engine), lambda: NOW)
    assert anew.store_batch([Arrival(arrival(body=b"x"), 0, b"x")]) == [new]
    with pytest.raises(StreamReplaced, match="made anew"):
        faster.store_batch([Arrival(arrival(body=b"y"), 10, b"y")])
