"""The order of the tests for several workers of pytest-xdist.

At the beginning each worker is sent a share of equal size, from the front of the list to its end; later, whoever has
nothing left takes from the end of the longest share.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


def spread(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Put the slow tests at the beginning of two shares in three, file by file, in front of the other tests.

    Most of a slow test is waiting: the other shares use the cores meanwhile. A slow test that began last would be
    waited for alone.
    """
    if workers == 1:
        return [*items]
    slow: list[list[pytest.Item]] = [[] for _ in range(workers)]
    # In the order of the files, which is the same in each worker.
    files = itertools.groupby((item for item in items if is_slow(item)), key=lambda item: item.path)
    for (_, tests), share in zip(files, itertools.cycle(range(max(2 * workers // 3, 1))), strict=False):
        slow[share] += tests
    others = iter([item for item in items if not is_slow(item)])
    found: list[pytest.Item] = []
    for share, first in enumerate(slow):
        size = (len(items) - len(found)) // (workers - share)
        found += first
        found += itertools.islice(others, max(size - len(first), 0))
    return [*found, *others]


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None
