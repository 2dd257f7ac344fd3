"""Each deliberate fault of `scripts/mutations` can still be made, and the tests that have to notice it are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from mutations.catalogue import MUTATIONS, Change, Mutation
from mutations.workshop import ROOT, Stale, mutated

if TYPE_CHECKING:
    from pathlib import Path

NEEDED = 10


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_can_be_put_into_the_program_as_it_is_now(mutation: Mutation) -> None:
    for file, text in mutated(mutation).items():
        assert text != (ROOT / file).read_text(encoding="utf-8")
    for test in mutation.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"\ndef {name}(" in text, test


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) > NEEDED


def test_a_text_that_is_gone_or_there_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 2\nb = 2\n")
    for old in ("c = 3\n", "b = 2\n"):
        with pytest.raises(Stale, match=r"code\.py holds this [02] times"):
            mutated(Mutation("some", "", (Change("code.py", old, "\n"),), ()), tmp_path)
