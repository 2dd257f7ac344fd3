"""Which events are retried, and how often, by the rows of dlq_event_config and by the properties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dlqbatch.amqp.patterns import TopicTrie, is_pattern, overlap, specificity

_REMEMBERED = 8192  # routing keys whose rule is kept at hand; bounded, for anyone can invent routing keys
_NAMED_IN_A_WARNING = 10


@dataclass(frozen=True, slots=True)
class EventRow:
    """A row of `dlq_event_config`."""

    id: int
    name: str | None
    max_retries: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What decides about an event; `row_id` is set when it comes from the table."""

    source: Literal["table", "properties"]
    name: str
    max_retries: int
    row_id: int | None = None

    def __str__(self) -> str:
        where = f"row {self.row_id} of dlq_event_config" if self.source == "table" else "application.properties"
        return f"'{self.name}' in {where}: {self.max_retries} retries"


class Policy:
    """Every event that is configured; it never changes once built."""

    explain: Callable[[str], Rule | None]
    """The rule that decides about an event."""

    def __init__(
        self,
        rows: Iterable[EventRow],
        properties: Mapping[str, int],
        default_max_retries: int,
        delayed: Iterable[str] = (),
    ) -> None:
        """`delayed` are the names and patterns that have delays of their own, which only a retry uses."""
        self._table: dict[str, EventRow] = {}
        self._properties = dict(properties)
        self._default = default_max_retries
        nameless: list[int] = []
        doubled: defaultdict[str, list[int]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.id):
            if row.name is None:
                nameless.append(row.id)
                continue
            if (lower := self._table.get(row.name)) is not None:
                doubled[row.name].append(lower.id)
            self._table[row.name] = row
        self._table_patterns = TopicTrie(name for name in self._table if is_pattern(name))
        self._property_patterns = TopicTrie(name for name in properties if is_pattern(name))
        self.explain = lru_cache(maxsize=_REMEMBERED)(self._find)
        unused = [name for name in delayed if not self._retries_some(name)]
        self.warnings = tuple(_warnings(self._table, self._properties, nameless, doubled, unused))

    @property
    def size(self) -> int:
        return len(self._table.keys() | self._properties.keys())

    def __bool__(self) -> bool:
        return bool(self._table or self._properties)

    def max_retries(self, event: str) -> int | None:
        """How many delayed retries the event gets; None if nothing configures it."""
        rule = self.explain(event)
        return None if rule is None else rule.max_retries

    def _retries_some(self, name: str) -> bool:
        """Whether an event of this name or pattern has a retry; of a pattern it may say so in doubt."""
        if not is_pattern(name):
            return (self.max_retries(name) or 0) > 0
        rules = [self._from_table(each) for each in self._table]
        rules += [self._from_properties(each) for each in self._properties if each not in self._table]
        return any(rule.max_retries and overlap(name, rule.name) for rule in rules)

    def _find(self, event: str) -> Rule | None:
        # A name is looked up as it stands first, so that a routing key which itself holds a wildcard can be configured.
        if event in self._table:
            return self._from_table(event)
        if event in self._properties:
            return self._from_properties(event)
        in_table = self._table_patterns.best(event)
        in_properties = self._property_patterns.best(event)
        if in_properties is None:
            return None if in_table is None else self._from_table(in_table)
        if in_table is not None and specificity(in_table) <= specificity(in_properties):
            return self._from_table(in_table)
        return self._from_properties(in_properties)

    def _from_table(self, name: str) -> Rule:
        row = self._table[name]
        return Rule("table", name, max(self._default if row.max_retries is None else row.max_retries, 0), row.id)

    def _from_properties(self, name: str) -> Rule:
        return Rule("properties", name, max(self._properties[name], 0))


def _warnings(
    table: Mapping[str, EventRow],
    properties: Mapping[str, int],
    nameless: Sequence[int],
    doubled: Mapping[str, Sequence[int]],
    unused: Sequence[str],
) -> Iterator[str]:
    if nameless:
        yield f"dlq_event_config: rows without a name are ignored: {_first(nameless)}"
    if doubled:
        names = [f"'{name}' (row {table[name].id} counts, not {_first(ids)})" for name, ids in doubled.items()]
        yield f"dlq_event_config: a name stands in more than one row, and the highest id counts: {_first(names)}"
    rows = table.values()
    negative = [f"'{row.name}' (row {row.id}: {row.max_retries})" for row in rows if (row.max_retries or 0) < 0]
    negative += [f"'{name}' (application.properties: {count})" for name, count in properties.items() if count < 0]
    if negative:
        yield f"a max_retries below zero counts as 0: {_first(negative)}"
    blanks = [f"'{name}' (row {row.id})" for name, row in table.items() if name != name.strip()]
    if blanks:
        only = "a name with blanks around it matches only a routing key that has them"
        yield f"dlq_event_config: {only}: {_first(blanks)}"
    if unused:
        only = "delays say when a retry comes, not how often, and these events have none (`dlqbatch events set`)"
        yield f"application.properties: {only}: {_first([repr(name) for name in unused])}"


def _first(things: Sequence[int] | Sequence[str]) -> str:
    """The first few by name: a table full of the same mistake is a single line in the log."""
    left = len(things) - _NAMED_IN_A_WARNING
    return ", ".join(map(str, things[:_NAMED_IN_A_WARNING])) + (f" and {left} more" if left > 0 else "")
