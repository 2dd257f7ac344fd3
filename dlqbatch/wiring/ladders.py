"""The topologies as the settings have them, declared or compared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.broker import declare
from dlqbatch.broker.connection import connect
from dlqbatch.errors import TopologyMismatch
from dlqbatch.policy.origin import Trust
from dlqbatch.settings.topologies import default_ladder as ladder_of
from dlqbatch.settings.topologies import topologies
from dlqbatch.topology.arguments import DELIVERY_LIMIT
from dlqbatch.topology.kinds import Kind, whole
from dlqbatch.topology.ladder import Ladder, demonstration
from dlqbatch.wiring.access import access_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlqbatch.broker.connection import Connection
    from dlqbatch.settings import Settings
    from dlqbatch.topology.model import Topology

__all__ = ["apply_topology", "dead_letter_queues", "kinds_of", "ladder_of", "limits_deliveries", "matched", "trust_of"]

log = logs.get(__name__)

_FIRST_WITH_DELIVERY_LIMIT: Final = (4, 0)
"""From here on the broker limits deliveries of quorum queues by itself, and names the newest death itself."""


def kinds_of(settings: Settings) -> tuple[Kind, ...]:
    """Every topology that this deployment keeps."""
    return tuple(topologies(settings).values())


def dead_letter_queues(settings: Settings) -> tuple[str, ...]:
    """Where the dead letters of every topology end, each queue once."""
    return tuple(dict.fromkeys(queue for kind in kinds_of(settings) for queue in kind.dead_letter_queues))


def trust_of(settings: Settings, connection: Connection, ladder: Ladder | None = None) -> Trust:
    """Every topology's own names are ours, and the given ladder's where the settings do not keep it."""
    kinds: list[Kind] = [*kinds_of(settings), *([] if ladder is None else [ladder])]
    return Trust(
        own_queues=frozenset().union(*(kind.own_queues for kind in kinds)),
        own_exchanges=frozenset().union(*(kind.own_exchanges for kind in kinds)),
        origins_allowed=settings.origins_allowed,
        last_death=limits_deliveries(connection),
    )


def matched(connection: Connection, kinds: Iterable[Kind], act: Callable[[Connection, Topology], None]) -> Topology:
    """Declare or compare, and return what is there now.

    On a broker that limits deliveries by itself, our queues have to say that they do not.
    """
    wanted = whole(kinds, unlimited_deliveries=limits_deliveries(connection))
    while True:
        try:
            act(connection, wanted)
        except TopologyMismatch as error:
            old = next((queue for queue in wanted.queues if queue.name == error.name), None)
            if old is None or error.argument != DELIVERY_LIMIT or error.found != "none":
                raise
            if old.arguments.get(DELIVERY_LIMIT) != -1:
                raise
            # Declared by an older broker, which knew no such argument: a policy can still set it.
            log.warning(
                "a queue from before RabbitMQ 4.0 drops messages after 20 deliveries",
                queue=error.name,
                do="rabbitmqctl set_policy with delivery-limit -1 on it",
            )
            as_it_is = {name: value for name, value in old.arguments.items() if name != DELIVERY_LIMIT}
            queues = (replace(one, arguments=as_it_is) if one is old else one for one in wanted.queues)
            wanted = replace(wanted, queues=tuple(queues))
        else:
            return wanted


def limits_deliveries(connection: Connection) -> bool:
    return connection.version >= _FIRST_WITH_DELIVERY_LIMIT


def apply_topology(settings: Settings, *, with_demonstration: bool = False) -> Ladder:
    """Declare all that the settings describe; idempotent."""
    connection = connect(access_to(settings, "dlqbatch topology"))
    try:
        ladder = ladder_of(settings)
        if declare.changing(connection):
            from dlqbatch.broker.delays import ChangeUnderWay  # noqa: PLC0415  (no drain changes a delay)

            raise ChangeUnderWay
        matched(connection, kinds_of(settings), declare.declare)
        if with_demonstration:
            declare.declare(connection, demonstration(ladder))
        return ladder
    finally:
        connection.close()
