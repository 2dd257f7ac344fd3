"""An audit that looked nothing up says so, and does not end well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.audited import CLEAN, UNKNOWN, VULNERABLE, judge

GOOD: dict[str, Any] = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": []}]}
SKIPPED = {"name": "skipped", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("packages", "code", "words"),
    [
        ([GOOD], CLEAN, "1 packages, no known vulnerability"),
        ([GOOD, BAD], VULNERABLE, "bad 2: PYSEC-1, fixed in 3"),
        ([GOOD, SKIPPED], UNKNOWN, "1 of 2 packages were NOT looked up"),
        ([BAD, SKIPPED], VULNERABLE, "NOT looked up"),
        ([], UNKNOWN, "0 of 0"),
    ],
)
def test_only_what_was_looked_up_counts_as_clean(packages: list[Any], code: int, words: str) -> None:
    found, said = judge(json.dumps({"dependencies": packages, "fixes": []}), "pypi")
    assert found == code
    assert words in "\n".join(said)


@pytest.mark.parametrize("found", ["", "no JSON", "[]", "{}"])
def test_no_answer_is_no_good_answer(found: str) -> None:
    assert judge(found, "osv")[0] == UNKNOWN
