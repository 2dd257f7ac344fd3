"""What the broker shows of the queues that a message was sent to: by the management API, else by AMQP.

Which queues those are follows from bindings, and where their dead letters lead from options and policies.

What the management API says of a queue is a statistic. The queue's own counts (ready, unacknowledged, delayed) and its
counters (published, acknowledged) are collected apart from each other, each up to 10 s late with RabbitMQ's own
settings: a counter that already shows a publish says nothing of how old the counts beside it are (docs/outcomes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.connection import Connection, NoAnswer
from dlqbatch.broker.facts import (
    BindingFacts,
    ChannelReading,
    ExchangeFacts,
    Map,
    Policies,
    QueueCounters,
    QueueFacts,
    QueueReading,
    Target,
)
from dlqbatch.broker.management import SECONDS, Api, CheckedApi, Unanswered
from dlqbatch.broker.routing import DeadLetters, Routes, drops_after, follow, may_drop
from dlqbatch.broker.versions import DELAYS_RETRIES, LIMITS_DELIVERIES
from dlqbatch.errors import ChannelRefused

_WORKING: Final = frozenset({"running", "idle", "flow", "live", "syncing"})
"""The states of a queue whose statistics are its own; a queue without a state has none yet."""
_CHANNEL_COLUMNS: Final = (
    "name,consumer_count,prefetch_count,global_prefetch_count,messages_unacknowledged,"
    "message_stats.ack,message_stats.deliver_no_ack,message_stats.get,message_stats.get_no_ack"
)
_MOST_EXCHANGES: Final = 200
"""The most exchanges whose bindings are followed in a run."""
_QUEUE_COLUMNS: Final = (
    "name,type,durable,auto_delete,exclusive,arguments,policy,consumers,state,messages,messages_ready,"
    "messages_unacknowledged,messages_delayed,messages_dlx,messages_by_priority,delayed_retry,delivery_limit,"
    "message_stats.publish,message_stats.ack,message_stats.deliver_no_ack,message_stats.get_no_ack,"
    "message_stats.redeliver,consumer_details.prefetch_count,consumer_details.channel_details.name"
)
_HOLDS_BACK: Final = "x-delayed-message"
# So Dramatiq and remoulade name the two queues beside each of theirs.
_DELAYED, _DEAD = ".DQ", ".XQ"
_HIDDEN: Final = "its consumers' channels are not shown: they are new, or this login lacks the tag 'monitoring'"


class Readings:
    """Made for a single run: a queue is read anew each time; bindings, options and policies are read once."""

    def __init__(
        self,
        api: Api,
        connection: Connection,
        *,
        is_watched: Callable[[str], bool] = lambda _: False,
        seconds: float = SECONDS,
    ) -> None:
        """`is_watched` says of a queue whether some job of ours takes from it."""
        self._api = CheckedApi(api, connection, seconds=seconds)
        self._connection = connection
        self.is_watched = is_watched
        self._known_policies: Policies | None = None
        self._exchanges: dict[str, ExchangeFacts | None] = {}
        self._bindings: list[BindingFacts] = []
        self._queues: dict[str, QueueFacts | None] = {}
        self._targets: dict[Origin, Target] = {}
        self._keys: dict[str, set[str | None]] = {}
        self._letters: dict[str, DeadLetters | None] = {}
        self._hiding: dict[str, bool | None] = {}
        self._held: dict[str, int | None] = {}

    def read(self, queues: Collection[str], at: datetime) -> dict[str, QueueReading]:
        """A reading for each queue; a queue that neither the API nor AMQP could show is not in it."""
        found: dict[str, QueueReading] = {}
        channels: dict[str, Mapping[str, Any]] = {}
        for name in dict.fromkeys(queues):
            try:
                found[name] = self._read_by_api(name, channels, at)
            except Unanswered as failure:
                why = str(failure)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                why = str(self._api.is_not_rabbitmq(error))
            else:
                continue
            reading = self._read_by_amqp(name, at, why)
            if reading is not None:
                found[name] = reading
        return found

    def _read_by_api(self, queue: str, channels: dict[str, Mapping[str, Any]], at: datetime) -> QueueReading:
        described = self.describe(queue)
        if described is None:
            return QueueReading(queue, at, False, by_management=True)
        facts, answer = described
        state = answer.get("state")
        if state is None or "messages_unacknowledged" not in answer:
            raise Unanswered("the broker has no statistics of this queue yet")
        if state not in _WORKING:
            raise Unanswered(f"the queue is '{state}'")
        consumers = answer.get("consumer_details") or ()
        if consumers and not channels:
            every = self._api.get("vhosts", self._api.vhost, "channels", query=f"columns={_CHANNEL_COLUMNS}")
            channels.update((one["name"], one) for one in every or ())
        held, hidden = _channels_of(consumers, channels)
        letters = self.letters_of(queue)
        names = ("messages_ready", "messages_unacknowledged", "messages_delayed", "messages_dlx")
        ready, unacknowledged, delayed, dead = (_number(answer.get(name)) for name in names)
        return QueueReading(
            queue,
            at,
            True,
            ready=ready,
            unacknowledged=unacknowledged,
            delayed=delayed,
            total=max(_number(answer.get("messages")), ready + unacknowledged + delayed + dead),
            consumers=_number(answer.get("consumers")),
            counters=_counters(answer.get("message_stats")) if self._api.has_counters else None,
            in_order=self._is_in_order(facts, answer),
            may_drop=may_drop(facts, letters),
            drops_after=drops_after(facts, letters, self._connection.version),
            channels=held,
            by_management=True,
            missing=hidden,
        )

    def _is_in_order(self, facts: QueueFacts, answer: Mapping[str, Any]) -> bool:
        if facts.number("max-priority") is not None:
            return False
        if facts.type != "quorum" or self._connection.version < LIMITS_DELIVERIES:
            return True
        # Every quorum queue of 4.x has priorities. From 4.3 on it says of how many the waiting messages are.
        by_priority = answer.get("messages_by_priority")
        retries = str(answer.get("delayed_retry", "disabled"))
        return isinstance(by_priority, dict) and len(by_priority) <= 1 and retries.startswith("disabled")

    def _read_by_amqp(self, queue: str, at: datetime, why: str) -> QueueReading | None:
        try:
            with self._connection.scratch_for(queue) as scratch:
                found = scratch.look("queue", queue)
        except ChannelRefused as refused:
            return QueueReading(queue, at, False, missing=why) if refused.is_gone else None
        except (NoAnswer, UnicodeEncodeError):
            return None
        ready = int(found.message_count)
        may_hide = self._connection.version >= DELAYS_RETRIES
        return QueueReading(
            queue,
            at,
            True,
            ready=ready,
            total=ready,
            consumers=int(found.consumer_count),
            may_hide_delayed=may_hide,
            missing=why,
        )

    def target(self, origin: Origin) -> Target:
        """The queues that a message sent to the origin can have gone to."""
        if origin not in self._targets:
            try:
                self._targets[origin] = self._target(origin)
            except Unanswered as failure:
                self._targets[origin] = self._target_by_amqp(origin, str(failure))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                self._targets[origin] = self._target_by_amqp(origin, str(self._api.is_not_rabbitmq(error)))
        return self._targets[origin]

    def letters_of(self, queue: str) -> DeadLetters | None:
        """Where its dead letters lead; None if the way is too long."""
        if queue not in self._letters:
            self._letters[queue] = follow(queue, self._keys.get(queue, {None}), self)
        return self._letters[queue]

    def may_hide(self, queue: str) -> bool | None:
        """Whether delayed retry holds messages back there, or would: who looks into the queue does not see them.

        None where nobody knows, without an answer of the management API.
        """
        if self._connection.version < DELAYS_RETRIES:
            return False
        if queue not in self._hiding:
            try:
                described = self.describe(queue)
                # What is held back stays so when the policy is removed.
                self._hiding[queue] = described is not None and (
                    described[0].delayed_retry is not None or _number(described[1].get("messages_delayed")) > 0
                )
            except (Unanswered, AttributeError, LookupError, TypeError, ValueError):
                self._hiding[queue] = None
        return self._hiding[queue]

    def held(self, queue: str) -> int | None:
        """How many of its messages somebody has taken and not settled; None where nobody knows.

        Who looks into the queue does not see them, and they can come back to it.
        """
        if queue not in self._held:
            try:
                described = self.describe(queue)
                self._held[queue] = 0 if described is None else _number(described[1].get("messages_unacknowledged"))
            except (Unanswered, AttributeError, LookupError, TypeError, ValueError):
                self._held[queue] = None
        return self._held[queue]

    def describe(self, queue: str) -> tuple[QueueFacts, Mapping[str, Any]] | None:
        """Its options with the policies in effect, and the whole answer of the API; requested every time."""
        answer = self._api.get("queues", self._api.vhost, queue, query=f"columns={_QUEUE_COLUMNS}")
        return None if answer is None else (self._policies.on(answer), answer)

    def queue(self, name: str) -> QueueFacts | None:
        """Its options with the policies in effect; None if it is not there."""
        if name not in self._queues:
            described = self.describe(name)
            self._queues[name] = None if described is None else described[0]
        return self._queues[name]

    def queues_behind(self, exchange: str, key: str | None) -> dict[str, bool] | None:
        """Every queue that a message may reach, and whether it surely does; None if there is no such exchange."""
        if not exchange:
            return {key: True} if key is not None and self.queue(key) is not None else {}
        if self._load(exchange) is None:
            return None
        there = {name: facts for name, facts in self._exchanges.items() if facts is not None}
        # Only the default exchange needs to know the queues, and it is behind no other exchange.
        routes = Routes(Map({}, there, tuple(self._bindings)))
        sure = routes.certain(exchange, key)
        return {queue: queue in sure for queue in routes.possible(exchange, key)}

    def _target(self, origin: Origin) -> Target:
        queue = _queue_of(origin)
        found = {queue: True} if queue is not None else self.queues_behind(origin.exchange or "", origin.key)
        if found is not None and not found:
            return Target(
                unknown=f"no binding of exchange '{origin.exchange}' leads the key '{origin.key}' to a queue any more; "
                "a queue that had one may hold the message"
            )
        queues = {name: self.queue(name) for name in sorted(found or ())}
        there = tuple(name for name, facts in queues.items() if facts is not None)
        if not there:
            return Target(is_gone=True)
        unknown = self._hidden(origin, queues) if queue is None else _stream(queues)
        ends: set[str] = set()
        delays: set[str] = set()
        for name in there:
            # Who names only a queue does not know the key that the message carries.
            self._keys.setdefault(name, set()).add(origin.key or None)
            letters = follow(name, [origin.key or None], self)
            if letters is None:
                return Target(there, unknown)
            ends.update(letters.ends)
            delays.update(letters.delays)
        return Target(
            there,
            unknown,
            False,
            tuple(sorted(ends - {*there})),
            tuple(sorted(delays - {*there})),
            tuple((name, name + _DELAYED) for name in there if self._is_dramatiqs(name)),
        )

    def _is_dramatiqs(self, name: str) -> bool:
        """Whether it is declared with the arguments that Dramatiq gives its queues."""
        facts = self.queue(name)
        leads_to = None if facts is None else (facts.dead_letter_exchange, facts.dead_letter_key)
        return leads_to == ("", name + _DEAD) and self.queue(name + _DELAYED) is not None

    def _hidden(self, origin: Origin, queues: Mapping[str, QueueFacts | None]) -> str:
        types = (there.type for there in self._exchanges.values() if there is not None)
        if _HOLDS_BACK in types:
            return (
                f"exchange '{origin.exchange}' or one behind it is of the type {_HOLDS_BACK}, and hides what it holds"
            )
        return _stream(queues)

    def _target_by_amqp(self, origin: Origin, why: str) -> Target:
        queue = _queue_of(origin)
        kind, name = ("queue", queue) if queue is not None else ("exchange", origin.exchange or "")
        try:
            with self._connection.scratch_for(name) as scratch:
                scratch.look(kind, name)
        except ChannelRefused as refused:
            if refused.is_gone:
                return Target(is_gone=True)
        except (NoAnswer, UnicodeEncodeError):
            pass
        if queue is not None:
            return Target((queue,))
        return Target(unknown=f"the queues behind exchange '{origin.exchange}' are not known: {why}")

    def _load(self, exchange: str) -> ExchangeFacts | None:
        """The exchange, and every exchange that it may lead to."""
        pending = [exchange]
        while pending:
            name = pending.pop()
            if name in self._exchanges:
                continue
            if len(self._exchanges) >= _MOST_EXCHANGES:
                raise Unanswered(f"the ways of this run lead through more than {_MOST_EXCHANGES} exchanges")
            answer = self._api.get("exchanges", self._api.vhost, name)
            facts = None if answer is None else self._policies.over(answer)
            bindings = [] if facts is None else self._api.get("exchanges", self._api.vhost, name, "bindings", "source")
            found = [BindingFacts.of(one) for one in bindings or ()]
            self._exchanges[name] = facts
            self._bindings += found
            pending += [one.destination for one in found if not one.to_queue]
            if facts is not None and facts.alternate:
                pending.append(facts.alternate)
        return self._exchanges[exchange]

    @property
    def _policies(self) -> Policies:
        if self._known_policies is None:
            users = self._api.get("policies", self._api.vhost)
            self._known_policies = Policies(users or [], self._api.get("operator-policies", self._api.vhost) or [])
        return self._known_policies


def _queue_of(origin: Origin) -> str | None:
    """The queue that the origin names; behind the default exchange that is the key."""
    return origin.queue if origin.queue is not None else None if origin.exchange else origin.key


def _stream(queues: Mapping[str, QueueFacts | None]) -> str:
    streams = (name for name, facts in queues.items() if facts is not None and facts.type == "stream")
    name = next(streams, None)
    return "" if name is None else f"'{name}' is a stream: what is read there stays, and nobody acknowledges it"


def _channels_of(
    consumers: Iterable[Mapping[str, Any]], channels: Mapping[str, Mapping[str, Any]]
) -> tuple[tuple[ChannelReading, ...], str]:
    """The channels that these consumers are on; or none, and why."""
    prefetches: dict[str, list[int]] = {}
    for consumer in consumers:
        name = str((consumer.get("channel_details") or {}).get("name"))
        prefetches.setdefault(name, []).append(_number(consumer.get("prefetch_count")))
    found: list[ChannelReading] = []
    for name, each in prefetches.items():
        answer = channels.get(name)
        if answer is None or "messages_unacknowledged" not in answer:
            return (), _HIDDEN
        stats = answer.get("message_stats") or {}
        polls = _number(stats.get("get")) + _number(stats.get("get_no_ack"))
        is_only = _number(answer.get("consumer_count")) == len(each) and not polls
        settled = _number(stats.get("ack")) + _number(stats.get("deliver_no_ack"))
        prefetch = _prefetch(each, _number(answer.get("global_prefetch_count")))
        held = _number(answer.get("messages_unacknowledged"))
        found.append(ChannelReading(name, held, prefetch, settled if is_only else 0))
    return tuple(found), ""


def _prefetch(each: list[int], of_all: int) -> int:
    """What a channel may hold: each of its consumers has a limit, and all of them together may have another."""
    own = 0 if 0 in each else sum(each)
    return min((one for one in (own, of_all) if one), default=0)


def _counters(answer: object) -> QueueCounters:
    stats: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
    settled = sum(_number(stats.get(name)) for name in ("ack", "deliver_no_ack", "get_no_ack"))
    return QueueCounters(_number(stats.get("publish")), settled, _number(stats.get("redeliver")))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
