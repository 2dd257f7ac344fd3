from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.settings import load
from dlqbatch.wiring.occasion import Occasion, bounds_of

SECONDS = st.floats(0.001, 3_000)


def settings_of(taking: float = 50, settling: float = 5, margin: float = 5) -> object:
    given = {"max_seconds": taking, "settle_seconds": settling, "lambda_margin_seconds": margin}
    return load(given, {"DLQBATCH_CONFIG": "/dev/null"})


def test_a_run_without_a_platform_takes_what_the_settings_say_and_five_seconds() -> None:
    began = time.monotonic()
    bounds = bounds_of(settings_of(30, 4), Occasion())
    assert began + 30 <= bounds.stop_at < began + 31
    assert began + 39 <= bounds.end_at < began + 40


def test_settling_and_the_margin_are_kept_out_of_the_platforms_time() -> None:
    began = time.monotonic()
    bounds = bounds_of(settings_of(), Occasion(seconds_left=40))
    assert began + 29 <= bounds.stop_at < began + 31
    assert bounds.give_up_after == 5
    assert bounds.end_at < began + 38.5


@given(left=SECONDS, taking=SECONDS, settling=SECONDS, margin=st.floats(0, 900))
def test_a_run_is_over_before_the_second_half_of_the_margin(
    left: float, taking: float, settling: float, margin: float
) -> None:
    occasion = Occasion(seconds_left=left)
    bounds = bounds_of(settings_of(taking, settling, margin), occasion)
    ends_in = bounds.end_at - occasion.at
    # The clock went on between the two, on a busy machine by more than a little.
    late = time.monotonic() - occasion.at
    assert ends_in <= left - min(margin, left) / 2 + late
    assert bounds.stop_at - occasion.at <= taking + late
    assert 0 <= bounds.give_up_after <= settling
    assert bounds.last_answers >= -1e-6


def test_what_an_occasion_has_left_becomes_less() -> None:
    occasion = Occasion(seconds_left=30, at=time.monotonic() - 20)
    left = occasion.now().seconds_left
    assert left is not None
    assert 9 < left <= 10
    assert bounds_of(settings_of(), occasion).end_at < time.monotonic() + 10
    assert Occasion(seconds_left=1, at=time.monotonic() - 20).now().seconds_left == 0
