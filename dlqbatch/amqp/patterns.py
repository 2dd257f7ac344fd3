"""Topic patterns as RabbitMQ matches them, which of several says most about a key, and wildcards of queue names.

A key is a list of words split at every dot. Empty words are words like any other ('a..b' has three), and the empty key
has no word at all. In a pattern `*` is exactly one word and `#` is any number of words, none included; `a*` is a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

_ONE, _ANY = "*", "#"
_LITERAL, _STAR, _HASH = range(3)  # the words of a shape, in the order in which they win


def words_of(text: str) -> list[str]:
    return text.split(".") if text else []


def is_pattern(name: str) -> bool:
    # Most names have neither sign, and every row of the table comes here.
    return (_ONE in name or _ANY in name) and any(word in {_ONE, _ANY} for word in name.split("."))


def matches(pattern: str, key: str) -> bool:
    """Whether a topic exchange would route `key` along the binding `pattern`; at most words times words steps."""
    wanted, given = words_of(pattern), words_of(key)
    at, taken = 0, 0
    resume_at, resume_taken = -1, 0
    while taken < len(given):
        if at < len(wanted) and wanted[at] == _ANY:
            resume_at, resume_taken = at + 1, taken
            at += 1
        elif at < len(wanted) and wanted[at] in {_ONE, given[taken]}:
            at, taken = at + 1, taken + 1
        elif resume_at >= 0:
            # Only the last `#` needs to take more: whatever an earlier one could add, this one can take as well.
            resume_taken += 1
            at, taken = resume_at, resume_taken
        else:
            return False
    return all(word == _ANY for word in wanted[at:])


def overlap(pattern: str, other: str) -> bool:
    """Whether a key could match both; a name that is no pattern is a pattern of one key."""
    rows, columns = words_of(pattern), words_of(other)
    # Whether the words before this one in `pattern` and those before each in `other` have a key in common.
    reached = [all(word == _ANY for word in columns[:number]) for number in range(len(columns) + 1)]
    for row in rows:
        before, reached = reached, [row == _ANY and reached[0]]
        for number, column in enumerate(columns, 1):
            if _ANY in {row, column}:
                met = before[number] or reached[number - 1]
            else:
                met = before[number - 1] and (row == column or _ONE in {row, column})
            reached.append(met)
    return reached[-1]


class Specificity(NamedTuple):
    """How much a pattern says; the lesser sorts first and is the more specific.

    More literal words win, then fewer `#`, then more `*` (`*.#` asks for one word more than `#`), then literals further
    to the left. Runs of wildcards count in their shortest form: `#.#` is `#`, and `#.*` is `*.#`. So a pattern that
    matches only a part of what another one matches always comes before it.
    """

    minus_literals: int
    hashes: int
    minus_stars: int
    shape: tuple[int, ...]


def specificity(pattern: str) -> Specificity:
    shape: list[int] = []
    open_ended = False
    for word in words_of(pattern):
        if word == _ANY:
            open_ended = True  # counted once, at the end of its run of wildcards
        elif word == _ONE:
            shape.append(_STAR)
        else:
            shape.extend((_HASH, _LITERAL) if open_ended else (_LITERAL,))
            open_ended = False
    if open_ended:
        shape.append(_HASH)
    return Specificity(-shape.count(_LITERAL), shape.count(_HASH), -shape.count(_STAR), tuple(shape))


def rank(pattern: str) -> tuple[Specificity, str]:
    """A total order over patterns: by specificity, then by text."""
    return specificity(pattern), pattern


class _Node:
    __slots__ = ("any_words", "one_word", "pattern", "repeats", "words")

    def __init__(self, *, repeats: bool = False) -> None:
        self.words: dict[str, _Node] = {}
        self.one_word: _Node | None = None
        self.any_words: _Node | None = None
        self.repeats = repeats  # this place is a `#`: it can take one more word and stay
        self.pattern: str | None = None


class TopicTrie:
    """Many patterns as a tree: a lookup walks the key's words once, however many patterns there are."""

    __slots__ = ("_root", "_size")

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._root = _Node()
        self._size = 0
        for pattern in patterns:
            self._add(pattern)

    def __len__(self) -> int:
        return self._size

    def _add(self, pattern: str) -> None:
        node = self._root
        for word in words_of(pattern):
            if word == _ONE:
                node.one_word = child = node.one_word or _Node()
            elif word == _ANY:
                node.any_words = child = node.any_words or _Node(repeats=True)
            elif (found := node.words.get(word)) is not None:
                child = found
            else:
                node.words[word] = child = _Node()
            node = child
        self._size += node.pattern is None
        node.pattern = pattern

    def matching(self, key: str) -> list[str]:
        """Every pattern that matches, the most specific first."""
        # All places that the words so far can have led to, as a set: '#.#.#' has one, not one for every way to split.
        places = _with_empty_hashes({self._root})
        for word in words_of(key):
            reached: set[_Node] = set()
            for node in places:
                if node.repeats:
                    reached.add(node)
                if (child := node.words.get(word)) is not None:
                    reached.add(child)
                if node.one_word is not None:
                    reached.add(node.one_word)
            places = _with_empty_hashes(reached)
        return sorted((node.pattern for node in places if node.pattern is not None), key=rank)

    def best(self, key: str) -> str | None:
        found = self.matching(key)
        return found[0] if found else None


def _with_empty_hashes(places: set[_Node]) -> set[_Node]:
    """Add to `places` whatever lies behind a `#` that takes no word."""
    pending = list(places)
    while pending:
        child = pending.pop().any_words
        if child is not None and child not in places:
            places.add(child)
            pending.append(child)
    return places


ANY: Final = re.compile(r"[*?]")
_MEANS: Final = {"*": "(.*)", "?": "(.)"}


def is_wildcard(name: str) -> bool:
    return ANY.search(name) is not None


def pattern(name: str) -> re.Pattern[str]:
    """Matches what the wildcard stands for; a group for each `*` and `?`."""
    return re.compile("".join(_MEANS.get(letter, re.escape(letter)) for letter in name), re.DOTALL)
