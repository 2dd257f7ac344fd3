"""How many examples Hypothesis tries: a tenth of them in a quick run, which `scripts/test --quick` starts."""

from __future__ import annotations

import os

IS_QUICK = os.environ.get("DLQBATCH_TEST_QUICK") == "1"


def examples(number: int) -> int:
    """What a test gives as max_examples: the number is that of a full run."""
    return max(1, number // 10) if IS_QUICK else number
