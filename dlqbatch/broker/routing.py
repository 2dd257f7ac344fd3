"""Where bindings lead a message, where a queue's dead letters lead, and how a message may leave without a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch.amqp.patterns import is_pattern, matches, words_of
from dlqbatch.amqp.retry_headers import RETURN_PREFIX
from dlqbatch.broker.facts import BindingFacts, ExchangeFacts, Map, QueueFacts

if TYPE_CHECKING:
    from dlqbatch.broker.readings import Readings  # which imports this module

BY_KEY: Final = frozenset({"direct", "topic"})
"""Types of exchanges that decide by the routing key."""


class Routes:
    def __init__(self, there: Map) -> None:
        self._map = there
        self._from: defaultdict[str, list[BindingFacts]] = defaultdict(list)
        self._into: defaultdict[str, list[BindingFacts]] = defaultdict(list)
        for binding in there.bindings:
            self._from[binding.source].append(binding)
            if binding.to_queue:
                self._into[binding.destination].append(binding)

    def possible(self, exchange: str, key: str | None) -> frozenset[str]:
        """Every queue that may get it; without a key, every queue that any key leads to. Empty: it would be lost."""
        return frozenset(queue for queue, _ in self._walk(exchange, key, set()))

    def certain(self, exchange: str, key: str | None) -> frozenset[str]:
        """The queues that are sure to get it; without a key, whatever its key is."""
        return frozenset(queue for queue, is_sure in self._walk(exchange, key, set()) if is_sure)

    def _walk(self, exchange: str, key: str | None, seen: set[str]) -> Iterator[tuple[str, bool]]:
        if not exchange:
            for queue in [key] if key is not None else list(self._map.queues):
                if queue in self._map.queues:
                    yield queue, key is not None
            return
        there = self._map.exchanges.get(exchange)
        if there is None or exchange in seen:
            return
        seen.add(exchange)
        is_taken = False
        for binding in self._from[exchange]:
            fits, is_sure = _fits(there, binding.key, key)
            if not fits:
                continue
            is_taken = is_taken or is_sure
            if binding.to_queue:
                yield binding.destination, is_sure
            else:
                yield from ((queue, sure and is_sure) for queue, sure in self._walk(binding.destination, key, seen))
        if there.alternate is not None and not is_taken:
            yield from ((queue, False) for queue, _ in self._walk(there.alternate, key, seen))

    def reached(self, exchange: str, pattern: str) -> frozenset[str]:
        """Every queue that some routing key of this topic pattern may be led to. Empty: all such messages are lost."""
        if not exchange:
            return frozenset(name for name in self._map.queues if overlap(pattern, name))
        found: set[str] = set()
        ways, seen = [exchange], set[str]()
        while ways:
            name = ways.pop()
            there = self._map.exchanges.get(name)
            if there is None or name in seen:
                continue
            seen.add(name)
            for binding in self._from[name]:
                if not _may_meet(there, binding.key, pattern):
                    continue
                if binding.to_queue:
                    found.add(binding.destination)
                else:
                    ways.append(binding.destination)
            if there.alternate is not None:
                ways.append(there.alternate)
        return frozenset(found)

    def binds_exact_keys_only(self, exchange: str) -> bool:
        """Whether it leads on only messages with certain keys, each of them named in a binding."""
        there = self._map.exchanges.get(exchange)
        return there is not None and there.alternate is None and all(map(self._is_exact, self._from[exchange]))

    def into(self, queue: str) -> tuple[BindingFacts, ...]:
        return tuple(self._into[queue])

    def arrivals(self, queue: str) -> tuple[BindingFacts, ...]:
        """The bindings that bring new messages: what the ladder returns comes through an exchange of its own."""
        return tuple(binding for binding in self._into[queue] if not binding.source.startswith(RETURN_PREFIX))

    def exact_keys(self, queue: str) -> tuple[str, ...]:
        """The routing keys that messages are known to arrive in a queue with, if they arrive at all."""
        return tuple(dict.fromkeys(binding.key for binding in self._into[queue] if self._is_exact(binding)))

    def _is_exact(self, binding: BindingFacts) -> bool:
        source = self._map.exchanges.get(binding.source)
        if source is None or source.type not in BY_KEY:
            return False
        return source.type == "direct" or not is_pattern(binding.key)

    def keys_of(self, queue: QueueFacts) -> tuple[str, ...]:
        """The routing keys of `exact_keys`; a queue without a binding is reached under its own name alone."""
        return self.exact_keys(queue.name) if self.arrivals(queue.name) else (queue.name,)

    def selects(self, binding: BindingFacts) -> bool | None:
        """Whether its exchange decides by the routing key; None if it is not known how it decides."""
        source = self._map.exchanges.get(binding.source)
        if source is None:
            return None
        return True if source.type in BY_KEY else False if source.type in {"fanout", "headers"} else None

    def pattern(self, binding: BindingFacts) -> str | None:
        """What the binding lets through, as a topic pattern; None if no topic pattern says that."""
        source = self._map.exchanges.get(binding.source)
        if source is None or source.type not in BY_KEY:
            return None
        return None if source.type == "direct" and is_pattern(binding.key) else binding.key


def _fits(exchange: ExchangeFacts, pattern: str, key: str | None) -> tuple[bool, bool]:
    """Whether a message may take the binding, and whether it surely does."""
    if exchange.type == "fanout":
        return True, True
    if key is None or exchange.type not in BY_KEY:
        return True, exchange.type == "topic" and pattern == "#"
    fits = matches(pattern, key) if exchange.type == "topic" else pattern == key
    return fits, fits


def _may_meet(exchange: ExchangeFacts, bound: str, pattern: str) -> bool:
    if exchange.type == "topic":
        return overlap(bound, pattern)
    return matches(pattern, bound) if exchange.type == "direct" else True


def overlap(one: str, other: str) -> bool:
    """Whether some routing key meets both topic patterns."""
    left, right = words_of(one), words_of(other)
    # reach[j]: the first i words of the left and j words of the right can stand for the same words.
    reach = _row(None, "", right)
    for word in left:
        reach = _row(reach, word, right)
    return reach[-1]


def _row(above: list[bool] | None, word: str, right: list[str]) -> list[bool]:
    row: list[bool] = []
    for place in range(len(right) + 1):
        if above is None:
            row.append(place == 0 or (row[-1] and right[place - 1] == "#"))
            continue
        many = word == "#"
        found = above[place] if many else False  # '#' stands for nothing
        if place:
            mine = right[place - 1]
            found = found or (mine == "#" and row[place - 1])
            if many or mine == "#":
                found = found or (many and row[place - 1]) or (mine == "#" and above[place])
            else:
                found = found or (above[place - 1] and (word == mine or "*" in {word, mine}))
        row.append(found)
    return row


MOST_QUEUES: Final = 100
"""The longest chain of dead-letter queues that is followed."""


class DeadLetters(NamedTuple):
    ends: tuple[str, ...] = ()
    """The queues that a dead letter can end in: it stays there until somebody takes it."""
    delays: tuple[str, ...] = ()
    """The queues that it can wait in on its way: they have a TTL and no consumer, and hand it on by themselves."""
    nowhere: str = ""
    """Why the queue's dead letters are dropped; empty if they are not."""
    loop: str = ""
    """The queue through which its dead letters come back to it; empty if they do not."""


def follow(queue: str, keys: Collection[str | None], readings: Readings) -> DeadLetters | None:
    """Where the dead letters of the queue with these routing keys lead; None if the way is too long to be followed.

    A message whose routing key is not known has the key None.
    """
    start = readings.queue(queue)
    if start is None:
        return DeadLetters()
    nowhere, loop = "", ""
    ends: dict[str, None] = {}
    delays: dict[str, None] = {}
    seen: set[tuple[str, str | None]] = set()
    pending = [(start, key) for key in keys]
    while pending:
        facts, key = pending.pop()
        exchange = facts.dead_letter_exchange
        if exchange is None:
            nowhere = nowhere or ("it has no dead-letter exchange" if facts.name == queue else "")
            continue
        key = facts.dead_letter_key if facts.dead_letter_key is not None else key
        found = readings.queues_behind(exchange, key)
        if not found and facts.name == queue:
            nowhere = _nowhere(exchange, key, is_there=found is not None)
        for name in _worth_following(found or {}, queue, readings):
            if name == queue:
                loop = facts.name
                continue
            if (name, key) in seen:
                continue
            seen.add((name, key))
            if len(seen) > MOST_QUEUES:
                return None
            there = readings.queue(name)
            if there is None:
                continue
            hands_on = there.dead_letter_exchange is not None and there.ttl is not None and not there.consumers
            (delays if hands_on else ends)[name] = None
            pending.append((there, key))
    return DeadLetters(tuple(sorted(ends)), tuple(sorted(delays)), nowhere, loop)


def _worth_following(found: Mapping[str, bool], queue: str, readings: Readings) -> list[str]:
    """The queues to follow further; a queue that a job of ours takes from is enough, if it surely gets a copy.

    Copies of a dead letter for other queues, such as an audit, come back to nobody.
    """
    watched = next((name for name, is_sure in sorted(found.items()) if is_sure and readings.is_watched(name)), None)
    return sorted(found) if watched is None else sorted({watched, queue} & found.keys())


def _nowhere(exchange: str, key: str | None, *, is_there: bool) -> str:
    if not exchange:
        return f"its dead letters are for the queue '{key}', which is not there"
    if not is_there:
        return f"its dead-letter exchange '{exchange}' is not there"
    return f"its dead-letter exchange '{exchange}' leads the key '{key or ''}' to no queue"


def may_drop(queue: QueueFacts, letters: DeadLetters | None) -> str:
    """Why a message may leave the queue without a consumer's doing and be lost; empty if it may not.

    What the queue dead-letters to a queue is not dropped. What a consumer rejects in a queue without a dead-letter
    exchange is discarded by that consumer.
    """
    expires = queue.number("expires")
    if expires is not None:
        return f"the broker deletes it, with all that it holds, when nobody has used it for {expires} ms (expires)"
    if queue.exclusive or queue.auto_delete or not queue.durable:
        return "it is exclusive, auto-delete or not durable: the broker may delete it, with all that it holds"
    if letters is None:
        return "the way of its dead letters is too long to be followed"
    if letters.loop:
        return f"what its consumers reject comes back to it through '{letters.loop}'"
    dropped = ""
    if queue.ttl is not None:
        dropped = f"a message is dropped after {queue.ttl} ms (TTL)"
    elif queue.longest is not None and queue.overflow == "drop-head":
        dropped = f"the oldest message is dropped beyond {queue.longest}"
    return f"{dropped}, because {letters.nowhere}" if dropped and letters.nowhere else ""


def drops_after(queue: QueueFacts, letters: DeadLetters | None, version: tuple[int, ...]) -> int | None:
    """The deliveries after which the broker drops a message; None if it dead-letters it, or has no limit."""
    return queue.delivery_limit(version) if letters is None or letters.nowhere else None
