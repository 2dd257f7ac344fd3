"""Whether the queues that a replay sends to say that it does harm: decided from looks at them, without I/O.

A message that kills its consumer is put back at the head of its queue, and kills the next one. So the first consumer
that goes while messages of a replay are there pauses the replay; a person may know better, and resume it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final, NamedTuple

MOST_REDELIVERIES: Final = 5
"""Messages that may be delivered again without as many acknowledgements."""
STANDS_STILL: Final = timedelta(seconds=60)
"""How long consumers may have messages before them without taking one."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of one queue at one time."""

    queue: str
    at: datetime
    ready: int
    consumers: int
    channels: frozenset[str] | None = None
    """The channels of its consumers; None: only the management API shows them."""
    redelivered: int | None = None
    """Messages that were delivered again since the broker counts; the broker shows it some seconds late."""
    acknowledged: int | None = None


class Harm(NamedTuple):
    """Why a replay is paused."""

    queue: str
    why: str


def harm(looks: Sequence[Look]) -> Harm | None:
    """What the looks at one queue since the replay began, in their order, say against going on."""
    for before, now in pairwise(looks):
        if now.consumers < before.consumers:
            gone = before.consumers - now.consumers
            return Harm(now.queue, f"{gone} of {before.consumers} consumer(s) of '{now.queue}' went away")
    # A look without the management API shows no channels: those before and after it are compared.
    shown = [look for look in looks if look.channels is not None]
    for before, now in pairwise(shown):
        if lost := (before.channels or frozenset()) - (now.channels or frozenset()):
            why = f"{len(lost)} consumer(s) of '{now.queue}' went away, though others may have come in their place"
            return Harm(now.queue, why)
    return _redelivered(looks) or _stands_still(looks)


def _redelivered(looks: Sequence[Look]) -> Harm | None:
    counted = [look for look in looks if look.redelivered is not None and look.acknowledged is not None]
    if not counted:
        return None
    first, last = counted[0], counted[-1]
    again = (last.redelivered or 0) - (first.redelivered or 0)
    acknowledged = (last.acknowledged or 0) - (first.acknowledged or 0)
    if again > max(acknowledged, MOST_REDELIVERIES):
        return Harm(
            last.queue,
            f"messages of '{last.queue}' were delivered again {again} times, and {acknowledged} were acknowledged",
        )
    return None


def _stands_still(looks: Sequence[Look]) -> Harm | None:
    """A queue whose consumers take nothing: every look of the last minute shows messages, consumers and no progress."""
    if not looks:
        return None
    since = last = looks[-1]
    acknowledged = None
    for look in reversed(looks):
        if not (look.ready and look.consumers) or since.ready < look.ready:
            break
        if look.acknowledged is not None:
            if acknowledged not in {None, look.acknowledged}:
                break
            acknowledged = look.acknowledged
        since = look
    if last.at - since.at < STANDS_STILL:
        return None
    return Harm(
        last.queue,
        f"{last.ready:,} messages wait in '{last.queue}', and its {last.consumers} consumer(s) have taken none for "
        f"{(last.at - since.at).total_seconds():.0f} s",
    )
