"""The other side of a broker in tests: queues, raw messages in and out by pika alone, and one transfer in one call."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pika
from pika.exceptions import ChannelClosedByBroker
from program import HANGS_AFTER

from dlqbatch.amqp.delivery import Delivery, Hold, Instruction, Publish, Route
from dlqbatch.amqp.headers import ID
from dlqbatch.amqp.properties import join, split
from dlqbatch.amqp.table import encode_text
from dlqbatch.broker.access import Access, connect
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.transfer import Bounds, Store, Take, Tally, Transfer, stores_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlqbatch.amqp.retry_headers import Origin

SINK = "sink"
PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Message(NamedTuple):
    body: bytes
    redelivered: bool
    exchange: str
    routing_key: str
    properties: pika.BasicProperties


class Side:
    """A connection of pika's own; nothing of ours is in it."""

    def __init__(self, url: str) -> None:
        parameters = pika.URLParameters(url)
        parameters.heartbeat = 0  # nobody serves it while a test waits for something else
        self._connection = pika.BlockingConnection(parameters)
        self.channel = self._connection.channel()

    def queue(self, name: str, kind: str = "classic", **arguments: object) -> str:
        wanted = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        self.channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind, **wanted})
        return name

    def fill(self, queue: str, bodies: Iterable[bytes], properties: pika.BasicProperties = PERSISTENT) -> None:
        """Publish, and wait until all are ready."""
        sent = self.depth(queue)
        for body in bodies:
            self.channel.basic_publish("", queue, body, properties)
            sent += 1
        self.wait(lambda: self.depth(queue) == sent)

    def depth(self, queue: str) -> int:
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)

    def exists(self, queue: str) -> bool:
        try:
            self.depth(queue)
        except ChannelClosedByBroker:
            self.channel = self._connection.channel()
            return False
        return True

    def empty(self, queue: str) -> list[Message]:
        """All that is in the queue; the last get goes through a quorum queue's log, behind all that was settled."""
        taken: list[Message] = []
        while True:
            count = self.depth(queue)
            if count > 1:
                self.channel.basic_qos(prefetch_count=count)
                for method, properties, body in itertools.islice(self.channel.consume(queue), count):
                    taken.append(_message(method, properties, body))
                    if len(taken) % count == 0:
                        self.channel.basic_ack(method.delivery_tag, multiple=True)
                self.channel.cancel()
            method, properties, body = self.channel.basic_get(queue, auto_ack=True)
            if method is None:
                return taken
            taken.append(_message(method, properties, body))

    def wait(self, until: Callable[[], object], seconds: float = HANGS_AFTER) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "what was waited for did not come"
            self._connection.process_data_events(0.005)

    def close(self) -> None:
        if self._connection.is_open:
            self._connection.close()


def _message(method: object, properties: pika.BasicProperties, body: bytes) -> Message:
    return Message(body, method.redelivered, method.exchange, method.routing_key, properties)  # type: ignore[attr-defined]


@contextmanager
def connected(*urls: str, **options: object) -> Iterator[Connection]:
    connection = connect(Access(urls, **options))  # type: ignore[arg-type]
    try:
        yield connection
    finally:
        connection.close()


def transfer(
    connection: Connection,
    takes: Iterable[Take],
    handle: Callable[[Delivery], Instruction],
    *,
    origins: Origins | None = None,
    seconds: float = HANGS_AFTER,
    give_up_after: float = 20.0,
    max_bytes: int = 1 << 40,
    stopped: Callable[[], bool] = lambda: False,
    spare: int = 0,
    store: Store = stores_nothing,
) -> Tally:
    """One transfer, whose counts must add up."""
    bounds = Bounds(time.monotonic() + seconds, give_up_after, max_bytes, stopped)
    tally = Transfer(connection, origins or Origins(connection), handle, bounds, store).run(list(takes), spare)
    assert tally.got == sum(tally.results.values()), tally
    return tally


_numbers = itertools.count()


def publish(
    delivery: Delivery,
    route: Route,
    *,
    identity: str | None = None,
    login: bytes = b"guest",
    origin: Origin | None = None,
) -> Publish:
    """The message as it came, with an id."""
    chosen = identity or f"id-{next(_numbers)}"
    properties = join(split(delivery.properties), encode_text(ID, chosen), login)
    return Publish(chosen, route, properties, "moved", origin=origin)


def move(delivery: Delivery) -> Publish:
    return publish(delivery, Route("", SINK))


def keep(_: Delivery) -> Hold:
    return Hold("left", "kept")


def body_of(delivery: Delivery) -> bytes:
    return b"".join(chunk[:-1] for chunk in delivery.chunks or ())
