"""What will bite, from what is there: facts in, findings out, the worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlqbatch.policy.doctor import broker, database, events, letters, queues
from dlqbatch.policy.doctor.finding import Code, Finding, Severity, rank
from dlqbatch.policy.doctor.scene import Scene

if TYPE_CHECKING:
    from dlqbatch.policy.doctor.facts import BrokerFacts, DatabaseFacts, Deployment

__all__ = ["Code", "Finding", "Severity", "examine"]


def examine(told: BrokerFacts, stored: DatabaseFacts, deployment: Deployment) -> tuple[Finding, ...]:
    """Of what nobody told nothing is said."""
    scene = None if told.map is None else Scene(told, told.map, deployment)
    found = [*broker.examine(told, deployment), *database.examine(stored), *events.examine(scene, stored, deployment)]
    if scene is not None:
        found += [*letters.examine(scene), *queues.examine(scene)]
    # One queue may be wrong in one way for two reasons; the same sentence twice helps nobody.
    return tuple(sorted(dict.fromkeys(found), key=rank))
