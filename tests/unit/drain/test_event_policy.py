from __future__ import annotations

import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.patterns import is_pattern, matches, overlap, specificity
from dlqbatch.drain.event_policy import EventRow, Policy, Rule

DEFAULT = 3
NAMES = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=3).map(".".join)


def policy(*rows: tuple[int, str | None, int | None], **properties: int) -> Policy:
    return Policy([EventRow(*row) for row in rows], properties, DEFAULT)


def test_an_event_that_nothing_names_is_not_configured() -> None:
    assert policy((1, "orders.created", 5)).max_retries("orders.deleted") is None


def test_a_null_count_is_the_default() -> None:
    assert policy((1, "orders.created", None)).max_retries("orders.created") == DEFAULT


def test_the_lookup_goes_from_exact_in_the_table_to_exact_in_the_properties_to_patterns() -> None:
    rows = [EventRow(1, "both", 1), EventRow(2, "orders.#", 2), EventRow(3, "orders.*.created", 3)]
    built = Policy(rows, {"both": 10, "orders.eu.created": 11, "orders.us.*": 12, "orders.#": 13}, DEFAULT)
    assert built.explain("both") == Rule("table", "both", 1, 1)
    assert built.explain("orders.eu.created") == Rule("properties", "orders.eu.created", 11)
    assert built.explain("orders.us.created") == Rule("properties", "orders.us.*", 12)  # its literals are further left
    assert built.explain("orders.asia.created") == Rule("table", "orders.*.created", 3, 3)
    assert built.explain("orders") == Rule("table", "orders.#", 2, 2)  # the same pattern in both: the table
    assert built.explain("payments") is None


def test_the_table_wins_between_patterns_that_say_equally_much() -> None:
    built = Policy([EventRow(1, "#.b.#.d", 1)], {"#.a.#.d": 2}, DEFAULT)
    assert built.max_retries("a.b.c.d") == 1


def test_a_routing_key_that_holds_a_wildcard_is_first_looked_up_as_it_stands() -> None:
    built = policy((1, "orders.*", 1), (2, "*.*", 2), **{"orders.#": 3})
    assert built.max_retries("orders.#") == 3
    assert built.max_retries("orders.*") == 1
    assert built.max_retries("*.*") == 2


def test_the_empty_routing_key_can_be_configured() -> None:
    assert policy((1, "", 4)).max_retries("") == 4
    assert policy((1, "#", 5)).max_retries("") == 5


@given(
    st.lists(st.tuples(st.one_of(st.none(), NAMES), st.one_of(st.none(), st.integers(-2, 9))), max_size=8),
    st.dictionaries(NAMES, st.integers(0, 9), max_size=4),
    NAMES,
)
def test_the_policy_decides_as_the_rules_say(
    pairs: list[tuple[str | None, int | None]], properties: dict[str, int], event: str
) -> None:
    rows = [EventRow(number, *pair) for number, pair in enumerate(pairs)]
    built = Policy(reversed(rows), properties, DEFAULT)
    table = {name: count for name, count in pairs if name is not None}  # the last one, of the highest id, stays
    if event in table:
        names = [(0, event)]
    elif event in properties:
        names = [(1, event)]
    else:
        candidates = [(0, name) for name in table if is_pattern(name) and matches(name, event)]
        candidates += [(1, name) for name in properties if is_pattern(name) and matches(name, event)]
        names = sorted(candidates, key=lambda it: (specificity(it[1]), it))[:1]
    if not names:
        assert built.max_retries(event) is None
    else:
        (source, name) = names[0]
        count = table[name] if source == 0 else properties[name]
        assert built.max_retries(event) == max(DEFAULT if count is None else count, 0)
    assert bool(built) == (built.size > 0) == bool(table or properties)


def test_rows_without_a_name_are_reported_and_count_for_nothing() -> None:
    built = policy((1, None, 5), (2, None, 6))
    assert built.warnings == ("dlq_event_config: rows without a name are ignored: 1, 2",)
    assert not built
    assert built.size == 0


def test_of_rows_with_one_name_the_highest_id_counts_and_all_are_reported() -> None:
    built = policy((9, "a", 9), (3, "a", 3), (5, "a", 5))
    assert built.max_retries("a") == 9
    assert built.warnings == (
        "dlq_event_config: a name stands in more than one row, and the highest id counts: 'a' (row 9 counts, not 3, 5)",
    )


def test_a_negative_count_is_reported_and_counts_as_none() -> None:
    built = policy((1, "a", -1))
    assert built.max_retries("a") == 0
    assert built.warnings == ("a max_retries below zero counts as 0: 'a' (row 1: -1)",)


def test_a_name_with_blanks_is_reported_and_used_as_it_stands() -> None:
    built = policy((1, " a", 1))
    assert built.max_retries(" a") == 1
    assert built.max_retries("a") is None
    assert "' a' (row 1)" in built.warnings[0]


def test_a_thousand_slips_are_one_short_warning() -> None:
    built = Policy([EventRow(number, None, None) for number in range(1000)], {}, DEFAULT)
    assert built.warnings == (
        "dlq_event_config: rows without a name are ignored: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more",
    )


def test_an_event_in_the_properties_alone_is_a_policy() -> None:
    built = policy(a=2)
    assert built
    assert built.size == 1
    assert not built.warnings


def test_a_name_in_both_places_is_one_event() -> None:
    assert policy((1, "a", 1), a=2, b=3).size == 2


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule("table", "a.#", 2, 7), "'a.#' in row 7 of dlq_event_config: 2 retries"),
        (Rule("properties", "a", 0), "'a' in application.properties: 0 retries"),
    ],
)
def test_a_rule_says_where_it_stands(rule: Rule, text: str) -> None:
    assert str(rule) == text


def test_invented_routing_keys_do_not_fill_the_memory() -> None:
    built = policy((1, "a.#", 1))
    for number in range(20_000):
        built.max_retries(f"a.{number}")
    assert built.explain.cache_info().currsize < 10_000


def test_a_hundred_thousand_rows_are_a_policy_at_once() -> None:
    rows = [EventRow(n, f"app{n % 97}.*.event{n}.#" if n % 2 else f"event.{n}", None) for n in range(100_000)]
    began = time.process_time()
    built = Policy(rows, {}, DEFAULT)
    assert time.process_time() - began < 3  # about 0.3 s on a small machine
    assert built.max_retries("app5.x.event4467.y") == built.max_retries("event.2") == DEFAULT


def test_delays_that_no_retry_uses_are_a_warning() -> None:
    rows = [EventRow(1, "mail.sent", 0), EventRow(2, "orders.*", None), EventRow(3, "old.#", 0)]
    delayed = ["mail.sent", "mail.#", "orders.eu", "#.eu", "payments", "paid.*", "old.*", "*.late"]
    (warning,) = Policy(rows, {"paid.late": 2}, DEFAULT, delayed).warnings
    assert warning.endswith(": 'mail.sent', 'mail.#', 'payments', 'old.*'")
    assert not Policy([EventRow(1, "a", None)], {"#": 1}, DEFAULT, ["mail.#", "payments"]).warnings


KEYS = [".".join(words) for size in range(5) for words in product(("a", "b", "c"), repeat=size)]


@given(NAMES, NAMES)
def test_two_patterns_overlap_exactly_if_a_key_matches_both(one: str, other: str) -> None:
    assert overlap(one, other) == any(matches(one, key) and matches(other, key) for key in KEYS)
