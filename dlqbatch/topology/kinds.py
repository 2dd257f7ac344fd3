"""The kinds of topology that a deployment can keep, any number of each."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Final

from dlqbatch.topology.ladder import Ladder
from dlqbatch.topology.model import NOTHING, Topology
from dlqbatch.topology.per_queue import PerQueue
from dlqbatch.topology.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Ladder | PerQueue | Pipeline
Drained = Ladder | PerQueue
"""Those that a drain takes from."""

KINDS: Final = ("ladder", "per-queue", "pipeline")


def whole(kinds: Iterable[Kind], *, unlimited_deliveries: bool = False) -> Topology:
    """All that has to be declared, what they share once."""
    return reduce(add, (kind.topology(unlimited_deliveries=unlimited_deliveries) for kind in kinds), NOTHING)
