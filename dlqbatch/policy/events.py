"""Which events are retried, and how often: the table and the properties as one policy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from dlqbatch.policy.topic import TopicTrie, is_pattern, specificity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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

    __slots__ = ("_default", "_properties", "_property_patterns", "_rule", "_table", "_table_patterns", "warnings")

    warnings: tuple[str, ...]

    def __init__(self, table: Mapping[str, EventRow], properties: Mapping[str, int], default: int) -> None:
        """Use `build`; here names are unique and present."""
        self._table = table
        self._properties = properties
        self._default = default
        self._table_patterns = TopicTrie(name for name in table if is_pattern(name))
        self._property_patterns = TopicTrie(name for name in properties if is_pattern(name))
        self._rule = lru_cache(maxsize=_REMEMBERED)(self._find)
        self.warnings = ()

    @classmethod
    def build(cls, rows: Iterable[EventRow], properties: Mapping[str, int], default_max_retries: int) -> Policy:
        table: dict[str, EventRow] = {}
        nameless: list[int] = []
        doubled: defaultdict[str, list[int]] = defaultdict(list)
        for row in sorted(rows, key=_row_id):
            if row.name is None:
                nameless.append(row.id)
                continue
            if (lower := table.get(row.name)) is not None:
                doubled[row.name].append(lower.id)
            table[row.name] = row
        policy = cls(table, dict(properties), default_max_retries)
        policy.warnings = (
            *_nameless_rows(nameless),
            *_doubled_names(doubled, table),
            *_negative_counts(table, properties),
            *_names_with_blanks(table),
        )
        return policy

    @property
    def size(self) -> int:
        return len(self._table) + sum(name not in self._table for name in self._properties)

    def __bool__(self) -> bool:
        return bool(self._table or self._properties)

    def max_retries(self, event: str) -> int | None:
        """How many delayed retries the event gets; None if nothing configures it."""
        rule = self._rule(event)
        return None if rule is None else rule.max_retries

    def explain(self, event: str) -> Rule | None:
        """The rule that decides about the event, for a person who asks why."""
        return self._rule(event)

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
        wanted = self._default if row.max_retries is None else row.max_retries
        return Rule("table", name, max(wanted, 0), row.id)

    def _from_properties(self, name: str) -> Rule:
        return Rule("properties", name, max(self._properties[name], 0))


def _row_id(row: EventRow) -> int:
    return row.id


def _nameless_rows(ids: list[int]) -> Iterator[str]:
    if ids:
        yield f"dlq_event_config: rows without a name are ignored: {_some(ids)}"


def _doubled_names(doubled: Mapping[str, list[int]], table: Mapping[str, EventRow]) -> Iterator[str]:
    if doubled:
        told = [f"'{name}' (row {table[name].id} counts, not {_some(ids)})" for name, ids in doubled.items()]
        yield f"dlq_event_config: a name stands in more than one row, and the highest id counts: {_some(told)}"


def _negative_counts(table: Mapping[str, EventRow], properties: Mapping[str, int]) -> Iterator[str]:
    told = [
        f"'{row.name}' (row {row.id}: {row.max_retries})"
        for row in table.values()
        if row.max_retries is not None and row.max_retries < 0
    ]
    told += [f"'{name}' (application.properties: {count})" for name, count in properties.items() if count < 0]
    if told:
        yield f"a max_retries below zero counts as 0: {_some(told)}"


def _names_with_blanks(table: Mapping[str, EventRow]) -> Iterator[str]:
    told = [f"'{name}' (row {row.id})" for name, row in table.items() if name != name.strip()]
    if told:
        yield f"dlq_event_config: a name with blanks around it matches only a routing key that has them: {_some(told)}"


def _some(things: list[int] | list[str]) -> str:
    """Name the first few; a table full of the same slip is still one line in the log."""
    left = len(things) - _NAMED_IN_A_WARNING
    return ", ".join(map(str, things[:_NAMED_IN_A_WARNING])) + (f" and {left} more" if left > 0 else "")
