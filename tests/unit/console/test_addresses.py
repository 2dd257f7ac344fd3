from __future__ import annotations

import shlex
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.console.addresses import NAMES, chips, command_words, filters_of
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status

WORD = st.text("abcdefghij#.*-_'\" %", min_size=1, max_size=8).map(str.strip).filter(bool)
PAIRS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("origin", "event", "error-type", "source", "tag", "text", "group")), WORD),
        st.tuples(st.just("status"), st.sampled_from([status.value for status in Status])),
    ),
    max_size=5,
)


def test_an_address_means_what_the_command_line_means() -> None:
    found = filters_of(
        [("status", "manual"), ("error-type", "TimeoutError"), ("not", "event=orders.#"), ("after", "x")]
    )
    assert found == Filters.parse(statuses=[Status.MANUAL], error_type="TimeoutError", unwanted="event=orders.#")


def test_every_filter_of_the_command_line_has_a_name_in_the_address() -> None:
    assert {
        "status",
        "error-type",
        "group",
        "event",
        "origin",
        "source",
        "tag",
        "text",
        "since",
        "until",
        "edits",
        "not",
    } <= set(NAMES)


@pytest.mark.parametrize("pair", [("status", "dead"), ("edits", "maybe"), ("since", "soon"), ("not", "x")])
def test_what_makes_no_sense_is_an_error_and_not_everything(pair: tuple[str, str]) -> None:
    with pytest.raises(NotUnderstood):
        filters_of([pair])


@given(PAIRS)
def test_without_a_chip_the_other_conditions_stay(pairs: list[tuple[str, str]]) -> None:
    for index, chip in enumerate(chips(pairs)):
        rest = [*pairs[:index], *pairs[index + 1 :]]
        assert filters_of(parse_qsl(chip.without)) == filters_of(rest)


@given(PAIRS)
def test_the_command_says_the_same_filter(pairs: list[tuple[str, str]]) -> None:
    words = shlex.split(command_words(pairs))
    assert list(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True)) == pairs
