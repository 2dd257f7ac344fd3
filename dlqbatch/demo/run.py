"""A demonstration on a real broker: its own queues and consumers, a watcher, drains, and the deletion of all that."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from pika import BasicProperties, BlockingConnection, ConnectionParameters
from pika.exceptions import AMQPError, ChannelClosedByBroker

from dlqbatch import jobs, logs
from dlqbatch.amqp.retry_headers import return_exchange
from dlqbatch.broker.access import broker_parameters
from dlqbatch.broker.refusals import NO_PERMISSION
from dlqbatch.demo.scenario import MAX_RETRIES, Kind, Result, Step, Trail
from dlqbatch.drain.event_config import event_config
from dlqbatch.errors import BrokerLost, BrokerUnreachable, ChannelRefused, SettingsError, TopologyMissing
from dlqbatch.settings import Settings
from dlqbatch.settings.topologies import default_ladder as ladder_of
from dlqbatch.topology.declare import apply_topology
from dlqbatch.topology.kinds import Ladder, demonstration
from dlqbatch.topology.model import Binding, Exchange, Queue, Topology

log = logs.get(__name__)

_GRACE_SECONDS: Final = 10.0
"""On top of all delays, until a message that has not arrived counts as lost."""
_BETWEEN_DRAINS_SECONDS: Final = 0.25
_TOGETHER_SECONDS: Final = 0.01
_BODY: Final = b'{"demo": true}'
_NAMES: Final = ("retry_exchange", "retry_queue", "delay_exchange", "delay_queue", "dlq_exchange", "dlq_queue")


def own_settings(prefix: str, folder: Path, ttls: Sequence[int]) -> dict[str, object]:
    """What the demo sets whatever the user has set, so that it never meets the user's messages or policy."""
    own: dict[str, object] = {name: prefix + getattr(Ladder(), name) for name in _NAMES}
    return own | {"tier_ttls": ",".join(map(str, ttls)), "database_url": f"sqlite:///{folder / 'policy.sqlite3'}"}


def perform(
    settings: Settings,
    prefix: str,
    trails: Sequence[Trail],
    see: Callable[[Trail], None],
    stopped: Callable[[], bool],
) -> Result:
    """Publish, play the consumers, run drain after drain until every message is where it stays; `see` each step."""
    from dlqbatch.store import migrate  # noqa: PLC0415  (Alembic, which only the demo itself needs)

    migrate.upgrade(settings.database_url.get_secret_value())
    policy = event_config(settings)
    for trail in trails:
        policy.set(trail.part.event, MAX_RETRIES)
    delays = [ttl / 1000 for ttl in settings.tier_ttls]
    counts: Counter[str] = Counter()
    drains = 0
    with _demonstration(settings, prefix, trails, see) as shown:
        deadline = shown.started + sum(delays) + _GRACE_SECONDS
        is_last = False
        while not is_last:
            # A last drain when all is over: it has to find nothing.
            is_last = all(trail.is_over for trail in trails) or time.monotonic() > deadline or stopped()
            shown.watch(0 if is_last else _BETWEEN_DRAINS_SECONDS)
            counts.update(jobs.run("drain", settings, jobs.RunOptions(stopped=stopped)).counts)
            drains += 1
            shown.watch(0)
        return Result(trails, counts, drains, time.monotonic() - shown.started)


@contextmanager
def _demonstration(
    settings: Settings, prefix: str, trails: Sequence[Trail], see: Callable[[Trail], None]
) -> Iterator[_Demonstration]:
    ladder = ladder_of(settings)
    tests = _prefixed(demonstration(ladder), prefix)
    with standing(settings, prefix, tests), connected(settings) as connection:
        yield _Demonstration(connection, ladder, tests, prefix, trails, see)


@contextmanager
def standing(settings: Settings, prefix: str, tests: Topology) -> Iterator[None]:
    """The ladder of the demo stands on the broker; at the end that and the queues of the tests are deleted."""
    parameters = broker_parameters(settings, "dlqbatch demo")
    with ExitStack() as at_the_end:
        at_the_end.callback(_delete_everything, parameters, ladder_of(settings).topology() + tests, prefix)
        try:
            apply_topology(settings)
        except BrokerUnreachable:
            at_the_end.pop_all()
            raise
        except TopologyMissing as error:
            raise SettingsError(
                f"the broker's user may not make queues and exchanges named {prefix}*; the demo needs the "
                "permissions to configure, write and read ^demo- and, as every drain, ^dlqbatch\\.return\\."
            ) from error
        yield


@contextmanager
def connected(settings: Settings) -> Iterator[BlockingConnection]:
    try:
        with BlockingConnection(broker_parameters(settings, "dlqbatch demo")) as connection:
            yield connection
    except ChannelClosedByBroker as error:
        raise ChannelRefused(error.reply_code, error.reply_text) from error
    except AMQPError as error:
        raise BrokerLost(str(error) or type(error).__name__) from error


class _Demonstration:
    def __init__(
        self,
        connection: BlockingConnection,
        ladder: Ladder,
        tests: Topology,
        prefix: str,
        trails: Sequence[Trail],
        see: Callable[[Trail], None],
    ) -> None:
        self._connection, self._ladder, self._prefix, self._see = connection, ladder, prefix, see
        self._trails = {trail.part.event: trail for trail in trails}
        self._seen = 0
        self._channel = channel = connection.channel()
        for exchange in tests.exchanges:
            channel.exchange_declare(exchange.name, exchange.type, durable=True)
        for queue in tests.queues:
            channel.queue_declare(queue.name, durable=True, arguments=dict(queue.arguments))
            channel.basic_consume(queue.name, partial(self._consume, queue.name))
        for binding in tests.bindings:
            channel.queue_bind(binding.queue, binding.exchange, binding.key)
        # A copy of every message that passes an exchange of the ladder shows where the message is.
        watcher = f"{prefix}watcher"
        channel.queue_declare(watcher, exclusive=True)
        for exchange in ladder.topology().exchanges:
            if exchange.name != ladder.dlq_exchange:
                channel.queue_bind(watcher, exchange.name, "#")
        channel.basic_consume(watcher, self._watch, auto_ack=True)
        channel.confirm_delivery()
        self.started = time.monotonic()
        for event, trail in self._trails.items():
            properties = BasicProperties(message_id=event, content_type="application/json", delivery_mode=2)
            channel.basic_publish(tests.exchanges[0].name, event, _BODY, properties, mandatory=True)
            self._note(trail, tests.exchanges[0].name, Kind.PUBLISHED)

    def watch(self, seconds: float) -> None:
        """Wait at most so long until something happens; what happens together is seen together."""
        self._connection.process_data_events(seconds)
        seen = -1
        while seen != self._seen:
            seen = self._seen
            self._connection.process_data_events(_TOGETHER_SECONDS)
        # Not acknowledged, so that it stays where it is; not consumed, because a policy may drop what has to wait.
        method, properties, body = self._channel.basic_get(self._ladder.dlq_queue)
        if method is not None:
            self._note(self._trails[properties.message_id], self._ladder.dlq_queue, Kind.DEAD, properties, body)

    def _consume(self, queue: str, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        trail = self._trails[properties.message_id]
        trail.changed |= method.routing_key != trail.part.event
        fails = trail.deliveries < trail.part.failures
        self._note(trail, queue, Kind.REJECTED if fails else Kind.PASSED, properties, body)
        if fails:
            channel.basic_reject(method.delivery_tag, requeue=False)
        else:
            channel.basic_ack(method.delivery_tag)

    def _watch(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        trail = self._trails[properties.message_id]
        tier = int(method.routing_key.rpartition(".")[2]) if method.exchange != self._ladder.retry_exchange else 0
        if not tier:
            self._note(trail, self._ladder.retry_queue, Kind.FAILED, properties, body)
        elif method.exchange == self._ladder.delay_exchange:
            self._note(trail, f"{self._ladder.delay_queue}.{tier}", Kind.DELAYED, properties, body, tier)
        else:
            self._note(trail, f"{self._ladder.retry_queue}-{tier}", Kind.EXPIRED, properties, body, tier)

    def _note(
        self, trail: Trail, where: str, kind: Kind, properties: Any = None, body: bytes = _BODY, tier: int = 0
    ) -> None:
        headers = getattr(properties, "headers", None) or {}
        step = Step(
            at=time.monotonic() - self.started,
            where=where.removeprefix(self._prefix),
            kind=kind,
            retries=headers.get("dlqbatch-retries", 0),
            tier=tier,
            ttl=self._ladder.tier_ttls[tier - 1] / 1000 if tier else 0.0,
            reason=headers.get("dlqbatch-reason"),
        )
        trail.changed |= body != _BODY
        trail.steps.append(step)
        self._seen += 1
        self._see(trail)


def _prefixed(topology: Topology, prefix: str) -> Topology:
    return Topology(
        tuple(Exchange(prefix + exchange.name, exchange.type) for exchange in topology.exchanges),
        tuple(Queue(prefix + queue.name, queue.arguments) for queue in topology.queues),
        tuple(Binding(prefix + one.exchange, one.key, prefix + one.queue) for one in topology.bindings),
    )


def _delete_everything(parameters: Sequence[ConnectionParameters], topology: Topology, prefix: str) -> None:
    """Delete all that may have been made."""
    returns = (return_exchange(queue.name) for queue in topology.queues)
    doomed = [("queue_delete", queue.name) for queue in topology.queues]
    doomed += [("exchange_delete", name) for name in (*(one.name for one in topology.exchanges), *returns)]
    left = []
    try:
        with BlockingConnection(parameters) as connection:
            for method, name in doomed:
                try:
                    with connection.channel() as channel:
                        getattr(channel, method)(name)
                except ChannelClosedByBroker as error:
                    # A login that may not delete it could not make it either.
                    if error.reply_code != NO_PERMISSION:
                        left.append(name)
    except AMQPError:
        left.append(f"{prefix}*")
    if left:
        log.warning("the demo could not delete everything it made", left=left)
