from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.jobs import RunOptions, bounds_of
from dlqbatch.settings import load

SECONDS = st.floats(0.001, 3_000)


def settings_of(taking: float = 50, settling: float = 5, margin: float = 5) -> object:
    given = {"max_seconds": taking, "settle_seconds": settling, "lambda_margin_seconds": margin}
    return load(given, {"DLQBATCH_CONFIG": "/dev/null"})


def test_a_run_without_a_platform_takes_what_the_settings_say_and_five_seconds() -> None:
    began = time.monotonic()
    bounds = bounds_of(settings_of(30, 4), RunOptions())
    ended = time.monotonic()
    assert began + 30 <= bounds.stop_at <= ended + 30
    assert began + 39 <= bounds.end_at <= ended + 39


def test_settling_and_the_margin_are_kept_out_of_the_platforms_time() -> None:
    began = time.monotonic()
    bounds = bounds_of(settings_of(), RunOptions(seconds_left=40))
    ended = time.monotonic()
    assert began + 30 <= bounds.stop_at <= ended + 30
    assert bounds.give_up_after == 5
    assert bounds.end_at <= ended + 37.5


@given(left=SECONDS, taking=SECONDS, settling=SECONDS, margin=st.floats(0, 900))
def test_a_run_is_over_before_the_second_half_of_the_margin(
    left: float, taking: float, settling: float, margin: float
) -> None:
    run_options = RunOptions(seconds_left=left)
    bounds = bounds_of(settings_of(taking, settling, margin), run_options)
    ends_in = bounds.end_at - run_options.at
    # The clock went on between the two, on a busy machine by more than a little.
    late = time.monotonic() - run_options.at
    assert ends_in <= left - min(margin, left) / 2 + late
    assert bounds.stop_at - run_options.at <= taking + late
    assert 0 <= bounds.give_up_after <= settling
    assert bounds.last_answers >= -1e-6


def test_what_an_occasion_has_left_becomes_less() -> None:
    began = time.monotonic()
    run_options = RunOptions(seconds_left=30, at=began - 20)
    left = run_options.now().seconds_left
    assert left is not None
    assert 10 - (time.monotonic() - began) <= left <= 10
    assert bounds_of(settings_of(), run_options).end_at < time.monotonic() + 10
    assert RunOptions(seconds_left=1, at=time.monotonic() - 20).now().seconds_left == 0
