"""Which strategy a failure gets, by rules that are data: the first rule that matches, else manual.

A pattern is a regular expression that anybody may write and every message is held against. Python's matcher can take
exponential time, so only a part of the language is allowed (`compiled` says which), and only the first 2,048
characters of a text are looked at. Both together bound the steps of a match by pattern and text; see `_Parser`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from dlqbatch.errors import DlqbatchError
from dlqbatch.policy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOKED_AT: Final = 2048
"""Characters of a type or text that a pattern is held against."""
_LONGEST_PATTERN: Final = 1000
_MOST_WAYS: Final = 10_000
"""In which one pattern may match at one place of a text."""
_DEEPEST: Final = 20

UNKNOWN: Final = "unknown"
"""The name for what no rule knows."""


class On(StrEnum):
    TYPE = "type"
    TEXT = "text"
    ANY = "any"


class RuleRefused(DlqbatchError):
    """A pattern that is no regular expression, or one that could take too long."""

    exit_code = 2

    def __init__(self, pattern: str, why: str) -> None:
        self.pattern, self.why = pattern, why
        super().__init__(f"the pattern {pattern[:200]!r} cannot be a rule: {why}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the rules; the lowest position is asked first."""

    position: int
    name: str
    on: On
    pattern: str
    """A regular expression, found anywhere, in small or capital letters."""
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that matches, and by what."""

    rule: Rule
    on: On
    """Type or text."""
    found: str


def classify(failure_type: str | None, message: str | None, rules: Iterable[Rule]) -> tuple[Strategy, str]:
    """The strategy, and the name of the rule that says so."""
    match = first_match(failure_type, message, rules)
    return (Strategy.MANUAL, UNKNOWN) if match is None else (match.rule.strategy, match.rule.name)


def first_match(failure_type: str | None, message: str | None, rules: Iterable[Rule]) -> Match | None:
    for rule in in_order(rules):
        match = _match(rule, failure_type, message)
        if match is not None:
            return match
    return None


def explain(failure_type: str | None, message: str | None, rules: Iterable[Rule]) -> tuple[Match, ...]:
    """Every rule that matches, in order: the first decides, the others would without it."""
    matches = (_match(rule, failure_type, message) for rule in in_order(rules))
    return tuple(match for match in matches if match is not None)


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    return sorted(rules, key=_place)


def _place(rule: Rule) -> tuple[int, str]:
    return rule.position, rule.name


def _match(rule: Rule, failure_type: str | None, message: str | None) -> Match | None:
    pattern = compiled(rule.pattern)
    for on, text in ((On.TYPE, failure_type), (On.TEXT, message)):
        if text and rule.on in {on, On.ANY}:
            found = pattern.search(text[:LOOKED_AT])
            if found is not None:
                return Match(rule, on, found[0])
    return None


# --- Patterns that cannot run away


@lru_cache(maxsize=512)
def compiled(pattern: str) -> re.Pattern[str]:
    r"""The pattern, or RuleRefused; ask it before a rule is stored.

    Allowed: literals, `.`, classes, escapes such as \b \d \w \s, `|`, groups (plain, `(?:`, look-ahead), `? * + {m,n}`.
    """
    if not pattern or len(pattern) > _LONGEST_PATTERN:
        raise RuleRefused(pattern, f"it must have from 1 to {_LONGEST_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            # It warns of what a later Python will read otherwise, as '[[a]'.
            warnings.simplefilter("error")
            expression = re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise RuleRefused(pattern, f"{error}") from error
    if expression.match("") is not None:
        raise RuleRefused(pattern, "it matches every text; write what it is to find")
    _Parser(pattern).check()
    return expression


class _Parser:
    """Counts in how many ways a pattern can match at one place, and refuses one that has too many.

    A sequence multiplies the ways of its parts, a choice adds them up, a repetition has one way for each count. What is
    repeated a varying number of times must itself have one way only: `(a+)+` splits a text in exponentially many.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def check(self) -> None:
        ways = self._choice()
        if self._at < len(self._pattern):
            raise RuleRefused(self._pattern, f"the bracket at position {self._at} closes nothing")
        if ways > _MOST_WAYS:
            raise RuleRefused(
                self._pattern,
                f"it could match in {ways} ways at one place, and {_MOST_WAYS} are allowed; "
                "bound what it skips, as in 'read.{0,40}timed out', or make two rules of it",
            )

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _choice(self) -> int:
        ways = self._sequence()
        while self._next() == "|":
            self._at += 1
            ways += self._sequence()
        return ways

    def _sequence(self) -> int:
        ways = 1
        while self._next() not in {"", "|", ")"}:
            ways *= self._repeated(self._atom())
        return ways

    def _atom(self) -> int:
        sign = self._next()
        if sign == "(":
            return self._group()
        if sign == "[":
            # A bracket that comes first in a class, after ^ if there is one, is a member of it.
            end = self._at + (2 if self._pattern.startswith("[^", self._at) else 1)
            end += 2 if self._pattern[end] == "\\" else 1
            while self._pattern[end] != "]":
                end += 2 if self._pattern[end] == "\\" else 1
            self._at = end + 1
        elif sign == "\\":
            if self._pattern[self._at + 1] in "123456789":
                raise RuleRefused(self._pattern, "it refers back to a group")
            self._at += 2
        else:
            self._at += 1
        return 1

    def _group(self) -> int:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise RuleRefused(self._pattern, f"its groups are nested deeper than {_DEEPEST}")
        self._at += 1
        if self._next() == "?":
            if self._pattern[self._at + 1] not in ":=!":
                raise RuleRefused(self._pattern, "of the groups that begin with '(?' it may use (?:, (?= and (?! only")
            self._at += 2
        ways = self._choice()
        self._at += 1
        self._depth -= 1
        return ways

    _COUNTS: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")

    def _repeated(self, ways: int) -> int:
        sign = self._next()
        least, most = 1, 1
        if sign and sign in "?*+":
            least, most = {"?": (0, 1), "*": (0, LOOKED_AT), "+": (1, LOOKED_AT)}[sign]
            self._at += 1
        elif (counts := self._COUNTS.match(self._pattern, self._at)) and (counts[1] or counts[2]):
            least = int(counts[1] or 0)
            most = int(counts[3] or LOOKED_AT) if counts[2] else least
            self._at = counts.end()
        else:
            return ways
        if self._next() in {"?", "+"}:
            self._at += 1
        if most > 1 and ways > 1:
            raise RuleRefused(self._pattern, "what it repeats can itself match in several ways; repeat something plain")
        return ways * (min(most, LOOKED_AT) - min(least, LOOKED_AT) + 1) if most > 1 else ways + (least == 0)
