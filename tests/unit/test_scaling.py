from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.policy.scaling import drains_to_start, pause_after
from dlqbatch.schedule.trigger import Trigger

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
    assert drains_to_start(depth, 1000, running, most) == more


@given(st.none() | DEPTHS, RUNNING, MOST)
def test_a_threshold_of_0_is_never(depth: int | None, running: int, most: int) -> None:
    assert drains_to_start(depth, 0, running, most) == 0


@given(DEPTHS, THRESHOLDS, RUNNING, MOST)
def test_there_are_never_more_than_may_be(depth: int, threshold: int, running: int, most: int) -> None:
    more = drains_to_start(depth, threshold, running, most)
    assert more >= 0
    assert not more or running + more <= most


@given(DEPTHS, THRESHOLDS, MOST)
def test_none_below_the_threshold_and_one_at_it_when_none_is_at_work(depth: int, threshold: int, most: int) -> None:
    assert (drains_to_start(depth, threshold, 0, most) > 0) == (depth >= threshold)
    assert drains_to_start(threshold, threshold, 0, most) == 1


@given(DEPTHS, DEPTHS, THRESHOLDS, RUNNING, MOST)
def test_a_deeper_queue_never_gets_fewer(one: int, other: int, threshold: int, running: int, most: int) -> None:
    less, more = sorted((one, other))
    assert drains_to_start(less, threshold, running, most) <= drains_to_start(more, threshold, running, most)


@given(DEPTHS, THRESHOLDS, RUNNING, MOST)
def test_looking_again_starts_no_more_while_the_depth_is_the_same(
    depth: int, threshold: int, running: int, most: int
) -> None:
    more = drains_to_start(depth, threshold, running, most)
    assert drains_to_start(depth, threshold, running + more, most) == 0


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
    looks: int = 0
    trigger: Trigger = field(init=False)

    def __post_init__(self) -> None:
        self.trigger = Trigger(self.look, lambda: self.running, self.start, self.threshold, self.most, lambda: self.now)

    def look(self) -> int | None:
        self.looks += 1
        return self.depth

    def start(self) -> bool:
        self.running += not self.is_ending
        return not self.is_ending

    def end(self, moved: int) -> None:
        self.running -= 1
        self.depth = (self.depth or 0) - moved
        self.trigger.ended(moved=moved)


def test_it_scales_up_as_the_depth_grows_and_down_when_it_is_empty() -> None:
    scene = Scene()
    seen = []
    for depth in (0, 99, 100, 250, 1_000):
        scene.depth = depth
        scene.trigger.look()
        seen.append(scene.running)
    assert seen == [0, 0, 1, 2, 3]
    while scene.running:
        scene.end(moved=min(150, scene.depth or 0))
        assert scene.running <= 3
    assert (scene.depth or 0) < 100
    scene.trigger.look()
    assert scene.running == 0


def test_a_depth_that_nobody_knows_starts_nothing() -> None:
    scene = Scene(depth=None)
    scene.trigger.look()
    scene.trigger.ended(moved=0)
    assert scene.running == 0


def test_one_that_is_off_does_not_even_look() -> None:
    scene = Scene(depth=10**6, threshold=0)
    scene.trigger.look()
    scene.trigger.ended(moved=5)
    assert (scene.running, scene.looks) == (0, 0)


def test_nothing_is_started_when_the_scheduler_is_ending(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(depth=10**6, is_ending=True)
    scene.trigger.look()
    assert scene.running == 0
    assert not caplog.messages


def test_it_says_why_it_started_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(depth=250, running=1)
    scene.trigger.look()
    scene.trigger.look()
    (record,) = caplog.records
    assert record.__dict__["fields"] == {"started": 1, "running": 2, "depth": 250}


def test_drains_that_move_nothing_are_not_followed_by_others_at_once() -> None:
    scene = Scene(depth=1_000)
    starts = []
    scene.trigger.look()
    while scene.now < 300:
        while scene.running:
            scene.end(moved=0)
        scene.now += 1
        scene.trigger.look()
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
    scene.trigger.look()
    scene.running = 1
    scene.end(moved=0)
    scene.depth = 1_000
    scene.trigger.look()
    assert scene.running == 3


def test_a_look_during_a_slow_one_returns_at_once_and_is_made_up_for() -> None:
    slow, go_on = threading.Event(), threading.Event()
    depths = [0, 100]
    started = []

    def depth() -> int:
        slow.set()
        assert go_on.wait(20)
        return depths.pop(0)

    trigger = Trigger(depth, lambda: len(started), lambda: started.append(1), 100, 4)
    looking = threading.Thread(target=trigger.look)
    looking.start()
    assert slow.wait(20)
    for _ in range(5):
        trigger.look()
    go_on.set()
    looking.join(20)
    assert (depths, len(started)) == ([], 1)


def test_looks_from_many_threads_never_start_too_many() -> None:
    scene = Scene(depth=10**6, most=7)
    threads = [threading.Thread(target=scene.trigger.look) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert scene.running == 7


def test_a_look_that_fails_does_not_stop_the_next() -> None:
    scene = Scene(depth=500)
    answers: list[int | Exception] = [ZeroDivisionError(), 500]

    def depth() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trigger = Trigger(depth, lambda: scene.running, scene.start, 100, 3)
    with pytest.raises(ZeroDivisionError):
        trigger.look()
    trigger.look()
    assert scene.running == 3
