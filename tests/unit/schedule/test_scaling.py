from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.schedule.scaling import Trigger, pause_after, runs_to_start

DEPTHS = st.integers(0, 10**9)
THRESHOLDS = st.integers(1, 10**6)
RUNNING = st.integers(0, 100)
MOST = st.integers(1, 64)


@pytest.mark.parametrize(
    ("depth", "running", "most", "more"),
    [
        (0, 0, 4, 0),
        (999, 0, 4, 0),
        (1000, 0, 4, 1),
        (1000, 1, 4, 0),  # one is at work on them already
        (1999, 0, 4, 1),
        (2000, 1, 4, 1),
        (3500, 0, 4, 3),
        (10**9, 0, 4, 4),
        (10**9, 3, 4, 1),
        (10**9, 5, 4, 0),  # more than may be: started by hand, or the setting was lowered
        (None, 0, 4, 0),
    ],
)
def test_there_is_one_drain_for_every_threshold_full(depth: int | None, running: int, most: int, more: int) -> None:
    assert runs_to_start(depth, 1000, running, most) == more


@given(st.none() | DEPTHS, RUNNING, MOST)
def test_a_threshold_of_0_is_never(depth: int | None, running: int, most: int) -> None:
    assert runs_to_start(depth, 0, running, most) == 0


@given(DEPTHS, THRESHOLDS, RUNNING, MOST)
def test_there_are_never_more_than_may_be(depth: int, threshold: int, running: int, most: int) -> None:
    more = runs_to_start(depth, threshold, running, most)
    assert more >= 0
    assert not more or running + more <= most


@given(DEPTHS, THRESHOLDS, MOST)
def test_none_below_the_threshold_and_one_at_it_when_none_is_at_work(depth: int, threshold: int, most: int) -> None:
    assert (runs_to_start(depth, threshold, 0, most) > 0) == (depth >= threshold)
    assert runs_to_start(threshold, threshold, 0, most) == 1


@given(DEPTHS, DEPTHS, THRESHOLDS, RUNNING, MOST)
def test_a_deeper_queue_never_gets_fewer(one: int, other: int, threshold: int, running: int, most: int) -> None:
    less, more = sorted((one, other))
    assert runs_to_start(less, threshold, running, most) <= runs_to_start(more, threshold, running, most)


@given(DEPTHS, THRESHOLDS, RUNNING, MOST)
def test_looking_again_starts_no_more_while_the_depth_is_the_same(
    depth: int, threshold: int, running: int, most: int
) -> None:
    more = runs_to_start(depth, threshold, running, most)
    assert runs_to_start(depth, threshold, running + more, most) == 0


@given(st.integers(0, 10**6))
def test_pauses_grow_and_end(failures: int) -> None:
    assert 0 <= pause_after(failures) <= pause_after(failures + 1) <= 60


@dataclass
class Scene:
    """What a trigger sees, and does: drains that only count."""

    depth: int | None = 0
    running: int = 0
    threshold: int = 100
    most: int = 3
    now: float = 0.0
    is_ending: bool = False
    trigger: Trigger = field(init=False)

    def __post_init__(self) -> None:
        self.trigger = Trigger("drain", lambda: self.running, self.start, self.threshold, self.most, lambda: self.now)

    def look(self) -> None:
        self.trigger.look(self.depth)

    def start(self) -> bool:
        self.running += not self.is_ending
        return not self.is_ending

    def end(self, moved: int) -> None:
        self.running -= 1
        self.depth = (self.depth or 0) - moved
        self.trigger.ended(moved=moved)
        self.look()


def test_it_scales_up_as_the_depth_grows_and_down_when_it_is_empty() -> None:
    scene = Scene()
    seen = []
    for depth in (0, 99, 100, 250, 1_000):
        scene.depth = depth
        scene.look()
        seen.append(scene.running)
    assert seen == [0, 0, 1, 2, 3]
    while scene.running:
        scene.end(moved=min(150, scene.depth or 0))
        assert scene.running <= 3
    assert (scene.depth or 0) < 100
    scene.look()
    assert scene.running == 0


def test_a_depth_that_nobody_knows_starts_nothing() -> None:
    scene = Scene(depth=None)
    scene.look()
    scene.trigger.ended(moved=0)
    assert scene.running == 0


def test_nothing_is_started_when_the_scheduler_is_ending(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(depth=10**6, is_ending=True)
    scene.look()
    assert scene.running == 0
    assert not caplog.messages


def test_it_says_why_it_started_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(depth=250, running=1)
    scene.look()
    scene.look()
    (record,) = caplog.records
    assert record.__dict__["fields"] == {"job": "drain", "started": 1, "running": 2, "depth": 250}


def test_drains_that_move_nothing_are_not_followed_by_others_at_once() -> None:
    scene = Scene(depth=1_000)
    starts = []
    scene.look()
    while scene.now < 300:
        while scene.running:
            scene.end(moved=0)
        scene.now += 1
        scene.look()
        if scene.running:
            starts.append(scene.now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[:3] == [10, 20, 40]
    assert set(pauses[3:]) == {60}
    # The first that gets on again ends the pauses.
    scene.end(moved=10)
    assert scene.running == 3


def test_drains_of_an_empty_queue_put_nothing_off() -> None:
    scene = Scene()
    scene.look()
    scene.running = 1
    scene.end(moved=0)
    scene.depth = 1_000
    scene.look()
    assert scene.running == 3
