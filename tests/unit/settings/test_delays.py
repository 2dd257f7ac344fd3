"""The delays of events as people write them, and what is said of the rest."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.errors import SettingsError
from dlqbatch.settings import load, topologies
from dlqbatch.settings.delays import steps
from dlqbatch.topology.kinds import Ladder

if TYPE_CHECKING:
    from pathlib import Path

    from dlqbatch.settings import Settings

SECOND, MINUTE, HOUR = 1000, 60_000, 3_600_000


def written(folder: Path, text: str) -> Settings:
    config = folder / "application.properties"
    config.write_text("".join(f"dlqbatch.{line}\n" for line in text.splitlines()))
    return load({}, {"DLQBATCH_CONFIG": str(config)})


def problems(folder: Path, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        written(folder, text)
    [problem] = caught.value.problems
    return problem.replace(str(folder / "application.properties"), "FILE")


@pytest.mark.parametrize(
    ("text", "delays"),
    [
        ("10s,1m,10m", [10 * SECOND, MINUTE, 10 * MINUTE]),
        (" 1H , 500ms,1h ", [HOUR, 500, HOUR]),
        ("10s*2..1m", [10 * SECOND, 20 * SECOND, 40 * SECOND, MINUTE]),
        ("1s * 10 .. 100s", [SECOND, 10 * SECOND, 100 * SECOND]),
        ("1m*2..1m", [MINUTE]),
    ],
)
def test_what_can_be_written(text: str, delays: list[int]) -> None:
    assert list(steps(text)) == delays


@given(st.integers(1, 10**6), st.integers(2, 10), st.integers(0, 10**9))
def test_growing_delays_grow_by_the_factor_up_to_the_longest(first: int, factor: int, more: int) -> None:
    grown = steps(f"{first}ms*{factor}..{first + more}ms")
    assert (grown[0], grown[-1]) == (first, first + more)
    assert all(after == before * factor for before, after in pairwise(grown[:-1]))
    assert all(before < after <= before * factor for before, after in pairwise(grown))


@given(st.text(alphabet="0123456789smhd,.*-+e ", max_size=30))
def test_any_other_text_is_refused_with_words(text: str) -> None:
    try:
        assert all(0 < delay < 2**32 for delay in steps(text))
    except ValueError as error:
        assert str(error).startswith(("has ", "is ", "grows ", "begins "))  # noqa: PT017


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("events.pay.delays=10", "dlqbatch.events.pay.delays (FILE:1) has the delay '10', which has no unit; write"),
        ("events.pay.delays=", "dlqbatch.events.pay.delays (FILE:1) has the delay '', which is no delay; write delays"),
        ("events.pay.delays=10s,soon", "(FILE:1) has the delay 'soon', which is no delay; write delays with a unit"),
        ("events.pay.delays=0s", "(FILE:1) has the delay '0s'; each must be above 0 and at most 4294967295 ms"),
        ("events.pay.delays=60d", "(FILE:1) has the delay '60d'; each must be above 0"),
        ("events.pay.delays=10s..1h", "(FILE:1) is no growing delay; write the first one, * and a factor, .. and"),
        ("events.pay.delays=10s*1..1h", "grows by the factor '1'; it must be a whole number from 2 to 10"),
        ("events.pay.delays=10s*1.5..1h", "is no growing delay"),
        ("events.pay.delays=1h*2..10s", "begins with 1h, which is longer than 10s, where it ends"),
        ("retry-after-delays=30", "dlqbatch.retry-after-delays (FILE:1) has the delay '30', which has no unit"),
        ("retry-after=false\nretry-after-delays=30s", "(FILE:2) is set, but dlqbatch.retry-after is false"),
        ("ladder=false\nevents.pay.delays=1m", "dlqbatch.events.pay.delays takes a ladder, and there is none"),
        (
            "topology.p.kind=per-queue\ntopology.p.queue=pay\ntopology.p.exchange=shop\nevents.pay.delays=1m",
            "has one delay; set dlqbatch.topology.p.ttl in its place",
        ),
        ("delay-queue=x\nretry-queue=x.60s\nevents.pay.delays=1m", "makes queue 'x.60s' stand for two of its parts"),
        (
            "events.pay.delays=" + ",".join(f"{30 + each}s" for each in range(33)),
            "take 33 delay queues besides the tiers of 'ladder', and a ladder has at most 32: give several events",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, line: str, problem: str) -> None:
    assert problem in problems(tmp_path, line)


def test_events_share_the_queues_of_equal_delays(tmp_path: Path) -> None:
    text = """events.pay.created.delays=10s,1m,10m
events.mail.#.delays=1m*10..10m
events.mail.#=5
retry-after-delays=1m,1h"""
    settings = written(tmp_path, text)
    assert settings.event_delays == {
        "pay.created": (10 * SECOND, MINUTE, 10 * MINUTE),
        "mail.#": (MINUTE, 10 * MINUTE),
    }
    assert settings.events == {"mail.#": 5}
    assert topologies(settings) == {"ladder": Ladder(more_delays=(10 * SECOND, MINUTE, 10 * MINUTE, HOUR))}
    assert topologies(settings)["ladder"].delay_queues[3:] == (
        "queue.delay.60s",
        "queue.delay.600s",
        "queue.delay.3600s",
    )


def test_every_ladder_has_them(tmp_path: Path) -> None:
    slow = "topology.slow.kind=ladder\ntopology.slow.tier-ttls=1m\nevents.pay.delays=1m,2m"
    both = topologies(written(tmp_path, slow))
    assert both["ladder"].delay_queues[3:] == ("queue.delay.60s", "queue.delay.120s")
    assert both["slow"].delay_queues == ("slow.delay-queue.1", "slow.delay-queue.120s")
