"""A few seconds of the fuzzer (scripts/fuzz), and everything that it has found."""

from __future__ import annotations

import secrets
import sys

import pytest
from hostile_fuzz import known, loop
from hostile_targets import TARGETS

RUNS = {"messages": 300}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_that_once_broke_a_reader_breaks_it_again(target: str) -> None:
    for data in known(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_a_reader_of_foreign_bytes_takes_whatever_comes(target: str) -> None:
    seed = secrets.randbits(31)
    sys.stdout.write(f"scripts/fuzz --seed {seed} {target}\n")  # pytest shows it when the test fails
    number, broken = loop(target, seed, RUNS.get(target, 1_000), 60)
    assert not broken, broken
    assert number == RUNS.get(target, 1_000)
