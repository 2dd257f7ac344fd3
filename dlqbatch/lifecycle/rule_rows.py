"""The table dlq_rules: people change its rows, which give failures their strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from sqlalchemy import Connection, Engine, delete, func, select, text

from dlqbatch.amqp.masking import MASK
from dlqbatch.lifecycle.rules import UNKNOWN, Match, Rule, RuleRefused, compiled, explain, in_order
from dlqbatch.logs import masked
from dlqbatch.store import action_log
from dlqbatch.store.action_log import By
from dlqbatch.store.bulk import insert_into
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import LARGEST_ID, NoSuchMessage, NotUnderstood
from dlqbatch.store.states import On, Strategy
from dlqbatch.store.tables import MESSAGES, RULES
from dlqbatch.store.text import LONGEST_NAME, visible

KIND: Final = "rule"
_STEP: Final = 10  # a rule that comes to the front leaves room for others between it and the next
_POSITIONS: Final = range(-(2**31), 2**31)
# As plain SQL: people edit the table, and typed columns fail on values that they do not know.
_SELECT_ALL: Final = text("SELECT name, position, match_on, pattern, strategy FROM dlq_rules")


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A row that cannot be a rule, because somebody edited the table; no run uses it."""

    name: str
    problem: str


@dataclass(frozen=True, slots=True)
class Changed:
    rule: Rule
    is_new: bool
    dry_run: bool
    action: str | None = None
    """What undoes it."""


@dataclass(frozen=True, slots=True)
class Removed:
    action: str | None
    """What undoes it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the rules make of one failure."""

    error_type: str | None
    message: str | None
    strategy: Strategy
    rule: str
    """The one that decides; `unknown` if none does."""
    matches: tuple[Match, ...]
    """In order: the first decides, the others would without it."""
    warnings: tuple[str, ...]


class Rules:
    """Each call is a transaction of its own; a run loads the rules once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all(self) -> tuple[Rule, ...]:
        """In their order, without those that cannot be one."""
        return self.load()[0]

    def load(self) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
        """The rules in their order, and a warning for each row that is left out."""
        rules, broken = self.read()
        return rules, tuple(f"the rule '{rule.name}' is left out: {rule.problem}" for rule in broken)

    def read(self) -> tuple[tuple[Rule, ...], tuple[BrokenRule, ...]]:
        with reading(self._engine) as connection:
            found = [_rule_of(row) for row in connection.execute(_SELECT_ALL)]
        broken = sorted((rule for rule in found if isinstance(rule, BrokenRule)), key=lambda rule: rule.name)
        return tuple(in_order(rule for rule in found if isinstance(rule, Rule))), tuple(broken)

    def set(
        self,
        name: str,
        *,
        on: On | None = None,
        pattern: str | None = None,
        strategy: Strategy | None = None,
        position: int | None = None,
        dry_run: bool = False,
        by: By | None = None,
    ) -> Changed:
        """Add a rule or change one; what is None stays as it is in one that is there.

        A new rule goes to the front, for whoever adds one wants it to win. RuleRefused before anything is written.
        """
        _check_name(name)
        if pattern is not None:
            _check_pattern(pattern)
        if position is not None and position not in _POSITIONS:
            raise NotUnderstood(f"a position is a whole number of 32 bits, which {position} is not")
        with (reading if dry_run else writing)(self._engine) as connection:
            before = _before(connection, name, lock=not dry_run)
            pattern = pattern if pattern is not None else before.get("pattern")
            strategy = strategy if strategy is not None else before.get("strategy")
            if pattern is None or strategy is None:
                missing = "--pattern" if pattern is None else "--strategy"
                raise NotUnderstood(f"there is no rule '{name}' yet, and a new one needs {missing}")
            if position is None:
                position = before.get("position")
            if position is None:
                lowest = connection.scalar(select(func.min(RULES.c.position)))
                position = 0 if lowest is None else lowest - _STEP
                if position not in _POSITIONS:
                    raise NotUnderstood(f"there is no room before the first rule, at {lowest}; give it a --position")
            rule = Rule(position, name, on or before.get("match_on") or On.ANY, pattern, strategy)
            _check_pattern(rule.pattern)
            action = None
            if not dry_run:
                values = {"position": position, "match_on": rule.on, "pattern": pattern, "strategy": strategy}
                _write(connection, name, values)
                action = action_log.decide(connection, by, KIND, name, before or None, {"name": name} | values)
        return Changed(rule, not before, dry_run, action)

    def remove(self, name: str, *, dry_run: bool = False, by: By | None = None) -> Removed | None:
        """None if there is no such rule."""
        if not _can_be_stored(name):
            return None
        with (reading if dry_run else writing)(self._engine) as connection:
            before = _before(connection, name, lock=not dry_run)
            action = None
            if before and not dry_run:
                connection.execute(delete(RULES).where(RULES.c.name == name))
                action = action_log.decide(connection, by, KIND, name, before, None)
        return Removed(action) if before else None

    def like(self, name: str) -> tuple[str, ...]:
        """Names of rules that somebody may have meant."""
        with reading(self._engine) as connection:
            names = [str(row.name) for row in connection.execute(_SELECT_ALL)]
        return tuple(get_close_matches(name, names, cutoff=0.5))

    def test(self, error_type: str | None, message: str | None) -> Explanation:
        """Which rule decides about such a failure, and which others would."""
        rules, warnings = self.load()
        matches = explain(error_type, message, rules)
        strategy, name = (matches[0].rule.strategy, matches[0].rule.name) if matches else (Strategy.MANUAL, UNKNOWN)
        return Explanation(error_type, message, strategy, name, matches, warnings)

    def test_message(self, row_id: int) -> Explanation:
        """Which rule decides about the failure of a dead message."""
        query = select(MESSAGES.c.error_type, MESSAGES.c.error_message).where(MESSAGES.c.id == row_id)
        with reading(self._engine) as connection:
            row = connection.execute(query).one_or_none() if 0 < row_id <= LARGEST_ID else None
        if row is None:
            raise NoSuchMessage(row_id)
        answer = self.test(row.error_type, row.error_message)
        kind, message = (text and masked(text) for text in (row.error_type, row.error_message))
        shown = f"{kind}\n{message}"
        matches = tuple(replace(each, found=each.found if each.found in shown else MASK) for each in answer.matches)
        return replace(answer, error_type=kind, message=message, matches=matches)


def put_back(connection: Connection, details: Mapping[str, Any]) -> str:
    """Write the rule as it was before an action; if it has been changed since, say so and write nothing."""
    name, before = details[KIND], details["before"]
    if (_before(connection, name, lock=True) or None) != details["after"]:
        return f"somebody has changed the rule '{name}' since"
    if before is not None and None in before.values():
        return f"the rule '{name}' could not be used as it was before"
    if before is None:
        connection.execute(delete(RULES).where(RULES.c.name == name))
    else:
        values = {"match_on": On(before["match_on"]), "strategy": Strategy(before["strategy"])}
        _write(connection, name, {"position": before["position"], "pattern": before["pattern"]} | values)
    return ""


def _write(connection: Connection, name: str, values: Mapping[str, Any]) -> None:
    adding = insert_into(connection, RULES).values(name=name, **values)
    # Two that add one rule at once: the later has the last word.
    connection.execute(adding.on_conflict_do_update(index_elements=[RULES.c.name], set_=values))


def _check_pattern(pattern: str) -> None:
    if not _can_be_stored(pattern):
        raise RuleRefused(pattern, r"it holds a character that no database keeps as text; write it as \x00 or \ud800")
    compiled(pattern)


def _rule_of(row: Any) -> Rule | BrokenRule:
    name = visible(row.name if isinstance(row.name, (str, bytes)) else str(row.name), LONGEST_NAME)
    again = f"`dlqbatch rules set {name}` mends it"
    if not isinstance(row.pattern, str) or type(row.position) is not int:
        return BrokenRule(name, f"its pattern is no text, or its position no whole number; {again}")
    try:
        _check_pattern(row.pattern)
        return Rule(row.position, name, On(row.match_on), row.pattern, Strategy(row.strategy))
    except ValueError:
        return BrokenRule(name, f"it says '{row.match_on}' and '{row.strategy}', which nobody knows; {again}")
    except RuleRefused as refused:
        return BrokenRule(name, f"{refused}; {again}")


def _before(connection: Connection, name: str, *, lock: bool) -> dict[str, Any]:
    """The row as far as it makes sense; empty if there is none."""
    if lock and connection.dialect.name == "postgresql":
        connection.execute(select(RULES.c.name).where(RULES.c.name == name).with_for_update())
    row = next((row for row in connection.execute(_SELECT_ALL) if row.name == name), None)
    if row is None:
        return {}
    return {
        "name": row.name,
        "position": row.position if type(row.position) is int else None,
        "match_on": On(row.match_on) if row.match_on in set(On) else None,
        "pattern": row.pattern if isinstance(row.pattern, str) else None,
        "strategy": Strategy(row.strategy) if row.strategy in set(Strategy) else None,
    }


def _check_name(name: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME or name == UNKNOWN:
        raise NotUnderstood(
            f"'{visible(name, LONGEST_NAME)}' cannot be the name of a rule: it takes from 1 to {LONGEST_NAME} "
            f"printable characters, and '{UNKNOWN}' stands for what no rule knows"
        )


def _can_be_stored(value: str) -> bool:
    return visible(value, len(value)) == value
