"""Which queues are quorum queues and which are streams: no AMQP method shows the type, but a refusal names it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.broker.connection import Connection, NoAnswer
from dlqbatch.broker.refusals import NOT_FOUND, PRECONDITION_FAILED
from dlqbatch.broker.versions import DELAYS_RETRIES, delivery_limit
from dlqbatch.errors import BrokerUnreachable, ChannelRefused, SettingsError, TopologyMismatch

if TYPE_CHECKING:
    # A drain that finds nothing needs no HTTP.
    from dlqbatch.broker.management import Api

_log = logs.get(__name__)

_KNOWN_TYPES: Final = ("classic", "quorum", "stream")
# Before this end of a refusal stand names, which anybody may choose; a text that was cut ends with dots.
_TYPE: Final = re.compile(r" of queue type (?:rabbit_)?(?P<type>\w+?)(?:_queue)?\Z")
# Nothing but a stream is said to be only on other nodes; a get from it ends the connection all the same.
_STREAM_ELSEWHERE: Final = re.compile(
    r"\w+ - queue '.*' does not have a (?:running )?replica on the local node", re.DOTALL
)
_CUT_OFF: Final = "cut off"
"""The type of a queue whose name is so long that the refusal has no room for the type."""


def quorum_queues(
    connection: Connection,
    queues: Iterable[str],
    *,
    otherwise: bool,
    cut_off: bool | None = None,
    known: Mapping[str, str] | None = None,
    refuse_streams: bool = False,
) -> frozenset[str]:
    """Which of these are quorum queues; `otherwise` is the answer where the broker does not say.

    `cut_off` is the answer for queues whose name is too long, if it differs from `otherwise`. `known` has the types
    that the management API has shown. With `refuse_streams` a stream is a SettingsError: a get from a stream ends the
    connection, and with it what is taken from every other queue.
    """
    quorum, streams = quorum_queues_and_streams(connection, queues, otherwise=otherwise, cut_off=cut_off, known=known)
    if streams and refuse_streams:
        raise SettingsError(
            *(f"'{queue}' is a stream, and from a stream no message can be taken away" for queue in sorted(streams)),
            "nothing was looked at or moved; leave streams out of the queues that are named",
        )
    return quorum


def quorum_queues_and_streams(
    connection: Connection,
    queues: Iterable[str],
    *,
    otherwise: bool,
    cut_off: bool | None = None,
    known: Mapping[str, str] | None = None,
) -> tuple[frozenset[str], frozenset[str]]:
    """Both in one question."""
    types = _types(connection, queues, known or {})
    answers = {None: otherwise, _CUT_OFF: otherwise if cut_off is None else cut_off}
    quorum = frozenset(queue for queue, kind in types.items() if answers.get(kind, kind == "quorum"))
    return quorum, frozenset(queue for queue, kind in types.items() if kind == "stream")


def types_by_api(api: Api, queues: Iterable[str]) -> dict[str, str]:
    """The types of these queues, as far as the management API answers; the first failure ends the requests."""
    found: dict[str, str] = {}
    for queue in queues:
        try:
            answer = api.ask("queues", api.vhost, queue, query="columns=type").content
        except (BrokerUnreachable, UnicodeEncodeError) as failure:
            if getattr(failure, "code", None) != NOT_FOUND:
                _log.info("the management API does not tell the types of queues", why=str(failure))
                break
            continue
        kind = answer.get("type") if isinstance(answer, dict) else None
        if kind in _KNOWN_TYPES:
            found[queue] = kind
    return found


def held_back(connection: Connection, api: Api, queues: Iterable[str]) -> dict[str, str]:
    """What delayed retry (RabbitMQ 4.3) hides in these quorum queues from every run; the API's count is seconds old."""
    found: dict[str, str] = {}
    for queue in queues if connection.version >= DELAYS_RETRIES else ():
        try:
            answer = api.ask("queues", api.vhost, queue, query="columns=messages_delayed").content
        except (BrokerUnreachable, UnicodeEncodeError) as failure:
            if getattr(failure, "code", None) != NOT_FOUND:
                _log.info("the management API does not tell what queues hide", why=str(failure))
                break
            continue
        number = answer.get("messages_delayed") if isinstance(answer, dict) else None
        if isinstance(number, int) and number > 0:
            found[queue] = f"delayed retry hides {number} message(s) in it until their time (see `dlqbatch doctor`)"
    return found


def why_looking_costs(connection: Connection, queue: str, api: Api) -> str | None:
    """What a look at this quorum queue costs its messages, by its delivery limit; None if it costs nothing."""
    try:
        answer = api.ask("queues", api.vhost, queue, query="columns=arguments,effective_policy_definition").content
    except BrokerUnreachable as failure:
        return f"whether it has a delivery limit is not known: {failure.why}"
    options = answer if isinstance(answer, dict) else {}
    places = (
        (options.get("arguments"), "x-delivery-limit"),
        (options.get("effective_policy_definition"), "delivery-limit"),
    )
    found = [place.get(name) for place, name in places if isinstance(place, dict)]
    limit = delivery_limit([one for one in found if isinstance(one, int)], connection.version)
    if limit is None:
        return None
    if connection.version >= DELAYS_RETRIES:
        return f"a run that is cut costs each message that it held one of {limit} deliveries, and none left drops it"
    return f"a look costs each message that stays one of {limit} deliveries, and none left drops it"


def compare_types(connection: Connection, queues: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The types of these queues; TopologyMismatch if a queue has another type than `queues` wants.

    Where the broker does not say, the queue counts as having the wanted type.
    """
    for queue, kind in _types(connection, queues, known).items():
        if kind in _KNOWN_TYPES and kind != queues[queue]:
            raise TopologyMismatch("queue", queue, "x-queue-type", kind, queues[queue])
    return dict(queues)


def _types(connection: Connection, queues: Iterable[str], known: Mapping[str, str]) -> dict[str, str | None]:
    """The type of each queue; None if it is refused to us or not there, _CUT_OFF if the text was cut before the type.

    The broker refuses a consumer that only a stream can serve, and names the type. A declaration with another type
    would show it only if no other argument differed. Each refusal stands in the broker's log.
    """
    found: dict[str, str | None] = {}
    for queue in queues:
        if queue in known:
            found[queue] = known[queue]
            continue
        try:
            with connection.scratch_for(queue) as scratch:
                scratch.call("basic_qos", prefetch_count=1)
                # Only a stream accepts this consumer, and what a stream sends is not taken away by that.
                offset = {"x-stream-offset": "next"}
                scratch.call("basic_consume", queue=queue, on_message_callback=lambda *_: None, arguments=offset)
            found[queue] = "stream"
        except ChannelRefused as refused:
            named = _TYPE.search(refused.text)
            if named is not None:
                found[queue] = named["type"]
            elif _STREAM_ELSEWHERE.fullmatch(refused.text) is not None:
                found[queue] = "stream"
            else:
                found[queue] = _CUT_OFF if refused.code == PRECONDITION_FAILED else None
        except NoAnswer:
            found[queue] = _CUT_OFF
    return found
