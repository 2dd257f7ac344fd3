from __future__ import annotations

from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.console.drawing import Station, bar, sparkline, way
from dlqbatch.console.queue_watch import QueueNow, trouble

HOSTILE = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40)


@given(st.lists(st.integers(0, 10**9), max_size=30), HOSTILE)
def test_a_line_is_well_formed_whatever_it_is_called(numbers: list[int], label: str) -> None:
    root = ET.fromstring(str(sparkline(numbers, label)))
    assert root.attrib["aria-label"] == label


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
def test_the_parts_of_a_bar_never_leave_it(numbers: list[int]) -> None:
    root = ET.fromstring(str(bar([("part", number) for number in numbers], sum(numbers), "x")))
    for each in root[1:]:
        assert float(each.attrib["x"]) + float(each.attrib["width"]) <= 100.02
        assert float(each.attrib["width"]) >= 0


@given(HOSTILE, HOSTILE, st.none() | st.integers(0, 10**9))
def test_a_queue_with_a_hostile_name_is_only_text_in_the_drawing(name: str, note: str, depth: int | None) -> None:
    stations = {"a": (0, 0, Station(name, note, depth)), "b": (1, 0, Station("dead", is_store=True))}
    root = ET.fromstring(str(way(stations, [("a", "b")], ["one", "two"], name)))
    kinds = {each.tag for each in root.iter()}
    assert kinds <= {"svg", "g", "rect", "text", "path", "title"}


def test_what_is_wrong_with_a_queue_is_said_in_words() -> None:
    steady = [(float(at), QueueNow(5, 0, 0, 2, 1.0, 0.0)) for at in range(0, 60, 5)]
    assert trouble([]) == ""
    assert trouble(steady) == ""
    assert trouble([*steady, (61.0, QueueNow(5, 0, 0, 0))]) == "no consumer"
    assert trouble([*steady, (61.0, QueueNow(5, 1, 0, 2, 1.0, 0.4))]) == "its head is redelivered"
    assert trouble([(float(at), QueueNow(5, 0, 0, at % 2 + 1, 1.0)) for at in range(9)]) == "consumers come and go"
    assert trouble([(float(at), QueueNow(5, 0, 0, 2, 0.0)) for at in range(0, 60, 5)]) == "its depth does not fall"
    assert trouble([(0.0, QueueNow(5, 0, 0, 2, 0.0))]) == ""
