"""How many drains a deep queue deserves: one for every threshold-full of messages, up to the most that may be at work.

depth     below the threshold │ threshold │ twice that │ three times │ …
at work   what runs already   │ 1         │ 2          │ 3           │ … `most`

Those at work count, whoever started them. Nobody is ever told to stop: a drain is one bounded run, so the number falls
by itself once no new one is started. A drain that could move nothing, for a database that is away or an origin that
refuses, would be followed by another at once, for as long as the queue is deep; so after such a one there is a pause.
"""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 60.0


def drains_to_start(depth: int | None, threshold: int, running: int, most: int) -> int:
    """How many more, now; none if the depth is not known, or the threshold is 0."""
    if depth is None or threshold <= 0:
        return 0
    return max(min(depth // threshold, most) - running, 0)


def pause_after(failures: int) -> float:
    """Seconds in which no drain is started, after so many in a row that moved nothing from a deep queue."""
    if failures <= 0:
        return 0.0
    return min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE)
