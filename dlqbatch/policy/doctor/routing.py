"""Where a message would be led, followed through a map of exchanges and bindings."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from dlqbatch.policy.topic import is_pattern, matches, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.policy.doctor.facts import BindingFacts, ExchangeFacts, Map, QueueFacts

_BY_KEY: Final = frozenset({"direct", "topic"})
RETURN_PREFIX: Final = "dlqbatch.return."


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

    def into(self, queue: str) -> tuple[BindingFacts, ...]:
        return tuple(self._into[queue])

    def exact_keys(self, queue: str) -> tuple[str, ...]:
        """The routing keys that messages are known to arrive in a queue with, if they arrive at all."""
        return tuple(dict.fromkeys(binding.key for binding in self._into[queue] if self._is_exact(binding)))

    def _is_exact(self, binding: BindingFacts) -> bool:
        source = self._map.exchanges.get(binding.source)
        if source is None or source.type not in _BY_KEY:
            return False
        return source.type == "direct" or not is_pattern(binding.key)

    def keys_of(self, queue: QueueFacts) -> tuple[str, ...]:
        """As `exact_keys`; a queue without a binding is reached under its own name alone."""
        return self.exact_keys(queue.name) if self._into[queue.name] else (queue.name,)

    def selects(self, binding: BindingFacts) -> bool | None:
        """Whether its exchange looks at the routing key; None if nobody knows how it decides."""
        source = self._map.exchanges.get(binding.source)
        if source is None:
            return None
        return True if source.type in _BY_KEY else False if source.type in {"fanout", "headers"} else None

    def pattern(self, binding: BindingFacts) -> str | None:
        """What the binding lets through, as a topic pattern; None if that cannot be said as one."""
        source = self._map.exchanges.get(binding.source)
        if source is None or source.type not in _BY_KEY:
            return None
        return None if source.type == "direct" and is_pattern(binding.key) else binding.key


def _fits(exchange: ExchangeFacts, pattern: str, key: str | None) -> tuple[bool, bool]:
    """Whether a message may take the binding, and whether it surely does."""
    if exchange.type == "fanout":
        return True, True
    if key is None or exchange.type not in _BY_KEY:
        return True, exchange.type == "topic" and pattern == "#"
    fits = matches(pattern, key) if exchange.type == "topic" else pattern == key
    return fits, fits


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
