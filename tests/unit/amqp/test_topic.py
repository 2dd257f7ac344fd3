from __future__ import annotations

import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.patterns import TopicTrie, is_pattern, matches, rank, specificity

# Few letters and short texts, so that patterns and keys meet often; '' makes leading, trailing and doubled dots.
KEYS = st.lists(st.sampled_from(["a", "b", "", "*", "#"]), max_size=5).map(".".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "", "*", "#", "#"]), max_size=5).map(".".join)


def obviously_matches(pattern: list[str], key: list[str]) -> bool:
    if not pattern:
        return not key
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(obviously_matches(rest, key[taken:]) for taken in range(len(key) + 1))
    return bool(key) and head in {"*", key[0]} and obviously_matches(rest, key[1:])


def split(text: str) -> list[str]:
    return text.split(".") if text else []


@given(PATTERNS, KEYS)
def test_matching_agrees_with_the_obvious_definition(pattern: str, key: str) -> None:
    assert matches(pattern, key) == obviously_matches(split(pattern), split(key))


@given(st.lists(PATTERNS, max_size=20), KEYS)
def test_the_trie_finds_what_asking_every_pattern_finds_in_the_order_of_rank(patterns: list[str], key: str) -> None:
    expected = sorted({pattern for pattern in patterns if matches(pattern, key)}, key=rank)
    trie = TopicTrie(patterns)
    assert trie.matching(key) == expected
    assert trie.best(key) == (expected[0] if expected else None)
    assert len(trie) == len(set(patterns))


# 'z' stands for every word that no pattern names; six words are more than any of these patterns can tell apart.
WORLD = [".".join(words) for length in range(7) for words in product("abz", repeat=length)]
SHORT_PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=4).map(".".join)


@given(SHORT_PATTERNS, SHORT_PATTERNS)
def test_a_pattern_that_matches_only_a_part_of_another_is_the_more_specific(one: str, other: str) -> None:
    of_one = {key for key in WORLD if matches(one, key)}
    of_other = {key for key in WORLD if matches(other, key)}
    if of_one < of_other:
        assert specificity(one) < specificity(other)
    if of_one == of_other:
        assert specificity(one) == specificity(other)


@given(PATTERNS, PATTERNS)
def test_rank_never_leaves_two_patterns_tied(one: str, other: str) -> None:
    assert (rank(one) == rank(other)) == (one == other)


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ("orders.eu.created", "orders.*.created"),  # more literal words
        ("payment.card.#", "payment.*.*"),
        ("a.#.b.#", "a.#"),
        ("a.*", "a.#"),  # fewer '#'
        ("*.#", "#"),  # more '*': at least one word
        ("a.*.c", "*.b.c"),  # literals further left
        ("#.a.#.b", "#.a.#.c"),  # text
    ],
)
def test_the_more_specific_pattern_comes_first(more: str, less: str) -> None:
    assert sorted([less, more], key=rank) == [more, less]


@pytest.mark.parametrize(
    ("pattern", "key"),
    [("", ""), ("#", ""), ("a.#", "a"), ("#.b", "b"), ("a.#.c", "a.c"), (".", "."), ("*.*", "."), ("a.*.b", "a..b")],
)
def test_edges_that_match(pattern: str, key: str) -> None:
    assert matches(pattern, key)


@pytest.mark.parametrize(
    ("pattern", "key"),
    [("*", ""), ("", "a"), ("*.#", ""), ("a", "a."), ("#.a", "a."), ("a*", "ab"), ("#a", "b.a"), ("*", ".")],
)
def test_edges_that_do_not_match(pattern: str, key: str) -> None:
    assert not matches(pattern, key)


@pytest.mark.parametrize("name", ["*", "#", "a.*", "#.b", "a.#.b", ".*"])
def test_a_wildcard_is_a_whole_word(name: str) -> None:
    assert is_pattern(name)


@pytest.mark.parametrize("name", ["", "a", "a.b", "a*", "#a", "a.b*.c", "**", "##"])
def test_a_sign_within_a_word_is_no_wildcard(name: str) -> None:
    assert not is_pattern(name)


def test_many_hashes_against_a_long_key_take_no_time() -> None:
    pattern = ".".join(["#", "a"] * 60)
    key = ".".join("a" * 127) + ".b"
    trie = TopicTrie([pattern, pattern + ".#.c", ".".join(["#.*"] * 60), ".".join("#" * 120)])
    began = time.process_time()
    assert not matches(pattern, key)
    assert trie.matching(key) == [".".join(["#.*"] * 60), ".".join("#" * 120)]
    assert time.process_time() - began < 0.5


def test_a_hundred_thousand_patterns_are_indexed_at_once_and_asked_quickly() -> None:
    patterns = [f"app{n % 97}.team{n % 1009}.*.event{n}.#" if n % 2 else f"*.service{n}.#" for n in range(100_000)]
    began = time.process_time()
    trie = TopicTrie(patterns)
    built = time.process_time()
    for n in range(1, 10_000, 2):
        assert trie.best(f"app{n % 97}.team{n % 1009}.x.event{n}.y") == patterns[n]
    assert built - began < 3  # about 0.3 s on a small machine
    assert time.process_time() - built < 3  # about 5 µs a key
