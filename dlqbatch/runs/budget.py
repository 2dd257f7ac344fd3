"""How several queues share what a run may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def share(max_messages: int, depths: Mapping[str, int], turn: int = 0) -> dict[str, int]:
    """How many to take from each queue: as evenly as their depths allow, and never more than there was at the start.

    So a deep queue cannot starve the others, and what comes back during a run does not keep it alive. `turn` says which
    queue is the first to get of what does not divide evenly: where each run gives it another, none goes empty for ever.
    """
    shares = dict.fromkeys(depths, 0)
    left, open_queues = max_messages, [queue for queue, depth in depths.items() if depth > 0]
    first = turn % len(open_queues) if open_queues else 0
    open_queues = open_queues[first:] + open_queues[:first]
    while left > 0 and open_queues:
        part = max(left // len(open_queues), 1)
        for queue in open_queues:
            more = min(part, depths[queue] - shares[queue], left)
            shares[queue] += more
            left -= more
        open_queues = [queue for queue in open_queues if shares[queue] < depths[queue]]
    return shares
