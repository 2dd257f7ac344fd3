"""How often a quorum queue delivers a message before it drops it: AMQP does not tell, the management API does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlqbatch.broker.management import NoReply

if TYPE_CHECKING:
    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.management import Api

UNLIMITED: Final = -1
_FIRST_WITH_DEFAULT: Final = (4, 0)
_DEFAULT: Final = 20
_FREE_TO_PUT_BACK: Final = (4, 3)


def why_looking_costs(connection: Connection, queue: str, api: Api) -> str | None:
    """What a look at this quorum queue costs its messages; None if it costs nothing."""
    try:
        told = api.ask("queues", api.vhost, queue, query="columns=arguments,effective_policy_definition").content
    except NoReply as silence:
        return f"whether it has a delivery limit is not known: {silence.why}"
    limit = _limit(told if isinstance(told, dict) else {})
    if limit is None and connection.version >= _FIRST_WITH_DEFAULT:
        limit = _DEFAULT
    if limit is None or limit <= UNLIMITED:
        return None
    if connection.version >= _FREE_TO_PUT_BACK:
        return f"a run that is cut costs each message that it held one of {limit} deliveries, and none left drops it"
    return f"a look costs each message that stays one of {limit} deliveries, and none left drops it"


def is_classic(queue: str, api: Api) -> bool:
    """By the management API's word alone: AMQP does not tell the type of a queue whose name is long."""
    try:
        told = api.ask("queues", api.vhost, queue, query="columns=type").content
    except NoReply:
        return False
    return isinstance(told, dict) and told.get("type") == "classic"


def _limit(told: dict[str, Any]) -> int | None:
    """Of the queue's own argument and its policy the smaller counts, unless one of them says that there is none."""
    policy = told.get("effective_policy_definition")
    arguments = told.get("arguments")
    found = [
        value
        for source, name in ((arguments, "x-delivery-limit"), (policy, "delivery-limit"))
        if isinstance(source, dict) and isinstance(value := source.get(name), int)
    ]
    if not found:
        return None
    return max(found) if min(found) <= UNLIMITED else min(found)
