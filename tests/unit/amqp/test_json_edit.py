"""A JSON text is changed where somebody wants it, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp import json_edit
from dlqbatch.amqp.json_edit import CannotChange, Difference, json_value, merge, set_value, text_at

NAMES = st.sampled_from(["a", "b", "ä b", "a.b", '"', "\\", "", "0"])
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4)
STYLES = st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, word for word."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merged(target.get(name), value)
    return target


@pytest.mark.parametrize(
    ("before", "steps", "value", "after"),
    [
        ('{"a": 1.0, "b":2}', ("b",), "3", '{"a": 1.0, "b":3}'),
        ('{"a": 1}', ("b",), '"x"', '{"a": 1,"b": "x"}'),
        ('{"a": 1, "c": 1}', ("b",), "2", '{"a": 1, "c": 1, "b": 2}'),
        ('{\n  "a": 1\n}', ("b",), "2", '{\n  "a": 1,\n  "b": 2\n}'),
        ("{}", ("b",), "2", '{"b":2}'),
        ('[{"x": [1, 2, 3]}]', (0, "x", 1), "null", '[{"x": [1, null, 3]}]'),
        (
            '{"n": 12345678901234567890.10, "a": {"b": 1e3}}',
            ("a", "b"),
            "1",
            '{"n": 12345678901234567890.10, "a": {"b": 1}}',
        ),
    ],
)
def test_one_value_is_set_and_all_else_stays(before: str, steps: tuple[str | int, ...], value: str, after: str) -> None:
    assert set_value(before, steps, value)[0] == after


def test_a_value_that_is_there_already_is_no_difference() -> None:
    assert set_value('{"a": "\\u0041"}', ("a",), '"A"') == ('{"a": "\\u0041"}', [])
    assert set_value('{"a": 1}', ("a",), "1.0") == ('{"a": 1.0}', [Difference("body.a", "1", "1.0")])
    assert set_value('{"a": 1}', ("a",), "true")[1] == [Difference("body.a", "1", "true")]


@pytest.mark.parametrize(
    ("text", "steps", "why"),
    [
        ("{}", ("a", "b"), "its body has no body.a"),
        ('{"a": 1}', ("a", "b"), "body.a is no object"),
        ('{"a": {}}', ("a", 0), "body.a is no list"),
        ("[1]", (1,), "its body has no body[1]"),
        ('{"a": 1, "a": 2}', ("a",), "body.a is there twice"),
        ("", ("a",), "its body is no JSON"),
        ("nope", ("a",), "its body is no JSON"),
        ('{"a": NaN}', ("a",), "its body is no JSON"),
        ('{"a": 1} x', ("a",), "its body is no JSON"),
        ("[" * 100_000, ("a",), "its body is no JSON"),
    ],
)
def test_what_has_no_such_place_is_refused(text: str, steps: tuple[str | int, ...], why: str) -> None:
    with pytest.raises(CannotChange) as refused:
        set_value(text, steps, "1")
    assert str(refused.value) == why


@pytest.mark.parametrize("wrong", ["", "EUR", "'EUR'", "{", "1 2", "NaN", "01", "[" * 100_000])
def test_what_is_no_json_value_is_refused(wrong: str) -> None:
    with pytest.raises(CannotChange, match="is no JSON value"):
        json_value(wrong)


@given(OBJECTS, OBJECTS, STYLES, STYLES)
def test_a_merge_patch_does_what_the_rfc_says(target: Any, patch: Any, style: Any, other: Any) -> None:
    text, differences = merge(json.dumps(target, **style), json.dumps(patch, **other))
    assert json.loads(text) == merged(target, patch)
    if not differences:
        assert text == json.dumps(target, **style)


@pytest.mark.parametrize(
    ("patch", "after"),
    [
        ('{"n": {"a": null, "b": 1, "a": null}}', {"n": {"b": 1}}),
        ('{"n": {"a": {"x": null, "x": null}, "a": null}}', {"n": {"a": {}}}),
        ('{"n": 1, "n": null, "n": 2}', {"n": 2}),
        ('{"o": {"z": null, "z": null}}', {"o": {}}),
    ],
)
def test_a_patch_that_names_a_member_twice_leaves_valid_json(patch: str, after: dict[str, Any]) -> None:
    assert json.loads(merge("{}", patch)[0]) == after


def test_a_large_patch_reads_each_object_once(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = json.dumps({str(number): {"new": number} for number in range(300)})
    reads: list[int] = []
    read = json_edit._members
    monkeypatch.setattr(json_edit, "_members", lambda *given: reads.append(1) or read(*given))
    text, differences = merge(json.dumps({str(number): {"old": 1} for number in range(150)}), patch)
    assert len(differences) == 300
    assert len(json.loads(text)) == 300
    # The two documents, and of each member of the patch and of the body it once.
    assert len(reads) <= 2 + 2 * 300


@given(OBJECTS, NAMES, VALUES, STYLES)
def test_a_set_value_is_the_only_change(target: dict[str, Any], name: str, value: Any, style: Any) -> None:
    before = json.dumps(target, **style)
    after, differences = set_value(before, (name,), json.dumps(value))
    assert json.loads(after) == {**target, name: value}
    assert list(json.loads(after)) == list(dict.fromkeys([*target, name]))
    if name in target and differences:
        at = after.index(json.dumps(value), 0) if json.dumps(value) not in before else None
        old = text_at(before, (name,))
        assert at is None or after[:at] + old + after[at + len(json.dumps(value)) :] == before
    if differences:
        assert text_at(after, (name,)) == json.dumps(value)
