"""What became of messages that were told by number, counted by whoever reads queues and tables for himself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rawamqp import Seen

    from matrix.ground import Ground

SHOWN = 3


def judge(
    ground: Ground,
    expected: Mapping[bytes, Seen],
    found: Sequence[Seen],
    problems_of: Callable[[Seen, Seen], Sequence[str]],
) -> tuple[int, int, int]:
    """How many were lost, changed, doubled; and a note of which."""
    sightings = oracle.by_ticket(found)
    lost, unknown = expected.keys() - sightings.keys(), sightings.keys() - expected.keys()
    assert not unknown, f"{len(unknown)} from nowhere, such as {sorted(unknown)[:SHOWN]}"
    wrong = [
        (seen.queue, ticket, problems)
        for ticket, copies in sightings.items()
        for seen in copies
        if (problems := problems_of(expected[ticket], seen))
    ]
    if lost:
        ground.note(f"{len(lost)} lost, such as {sorted(lost)[:SHOWN]}")
    if wrong:
        ground.note(f"{len(wrong)} changed, such as {wrong[:SHOWN]}")
    return len(lost), len(wrong), len(found) - len(sightings)
