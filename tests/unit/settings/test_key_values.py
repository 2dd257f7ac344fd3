from __future__ import annotations

import io
from time import process_time

import javaproperties
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlqbatch.settings.properties import BrokenEscape, pairs, unescaped

# What means something to the format comes often, the rest now and then.
TEXT = st.text(st.sampled_from("ab=: \t\f\\#!\nu0D8é𝄞\x85\u2028") | st.characters(exclude_characters="\r"), max_size=60)
ESCAPES = st.lists(st.sampled_from(["\\ud834", "\\udd1e", "\\u00e9", "\\t", "\\:", "\\\\", "a", "="])).map("".join)


@given(TEXT | ESCAPES)
@example("a = 1 \\\n   # no comment\n! a comment \\\nb:2")
@example("\\\n\\\n\nlast\\")
@example("key\\ with\\=all\\:of=it")
@example("\\ud834\\udd1e=\\udd1e\\ud834")
@example("broken=\\u12")
def test_a_file_is_read_as_the_library_for_this_format_reads_it(text: str) -> None:
    ours: list[tuple[str, str]] | None
    theirs: list[tuple[str, str]] | None
    try:
        ours = [(unescaped(key), unescaped(value)) for _, key, value in pairs(text)]
    except BrokenEscape:
        ours = None
    try:
        theirs = javaproperties.load(io.StringIO(text, newline="\n"), list)
    except javaproperties.InvalidUEscapeError:
        theirs = None
    assert ours == theirs


def test_each_pair_has_the_number_of_its_first_line() -> None:
    text = "# one\n\na=1\\\n  2\n \t\n! six\nb\nc \\\n\nd=\\\\\ne"
    assert list(pairs(text)) == [(3, "a", "12"), (7, "b", ""), (8, "c", ""), (10, "d", "\\\\"), (11, "e", "")]


@pytest.mark.parametrize("escape", ["\\u", "\\u12", "\\u00zz", "\\u-123", "\\u 123"])
def test_a_broken_escape_is_refused(escape: str) -> None:
    with pytest.raises(BrokenEscape):
        unescaped(f"a{escape}")


def test_a_value_over_very_many_lines_is_read_in_a_time_that_grows_with_its_length() -> None:
    lines = 100_000
    began = process_time()
    assert list(pairs("a=" + "b\\\n" * lines)) == [(1, "a", "b" * lines)]
    assert process_time() - began < 60  # each line looked at with all before it took minutes
