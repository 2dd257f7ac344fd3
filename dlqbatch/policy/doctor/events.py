"""The policy held against the bindings: events that cannot fail, and failures that no event names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlqbatch.policy.doctor import commands
from dlqbatch.policy.doctor.finding import Code, Finding
from dlqbatch.policy.doctor.routing import RETURN_PREFIX, overlap
from dlqbatch.policy.events import Policy
from dlqbatch.policy.topic import is_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.policy.doctor.facts import DatabaseFacts, Deployment
    from dlqbatch.policy.doctor.scene import Scene


def examine(scene: Scene | None, stored: DatabaseFacts, deployment: Deployment) -> Iterator[Finding]:
    if stored.unreachable is not None or stored.unreadable is not None:
        return
    policy = Policy.build(stored.rows or (), deployment.events, deployment.default_max_retries)
    if not policy:
        if deployment.first_stage and not deployment.allow_empty_policy:
            what = "not a single event is configured, in the table or in application.properties: a drain moves nothing"
            first = "" if stored.rows is not None else "dlqbatch db upgrade && "
            fix = f"{first}{commands.set_event('#', deployment.default_max_retries)}"
            yield Finding(Code.POLICY_EMPTY, stored.where, what, fix)
        return
    if scene is None or not scene.origins:
        return
    names = {row.name for row in stored.rows or () if row.name is not None}
    # One with blanks around it is a finding already, and another name as soon as that is mended.
    yield from _without_binding(scene, {name for name in names if name == name.strip()})
    yield from _without_event(scene, policy, names | deployment.events.keys())


def _without_binding(scene: Scene, names: set[str]) -> Iterator[Finding]:
    """Only of the table: what a file says its owner may keep for other virtual hosts."""
    patterns = []
    plumbing = (scene.deployment.own_queues | scene.deployment.read) - scene.origins
    for binding in scene.there.bindings:
        if not binding.to_queue or binding.destination in plumbing or binding.source.startswith(RETURN_PREFIX):
            continue
        pattern = scene.routes.pattern(binding)
        if pattern is None:
            return  # any key may come this way
        patterns.append(pattern)
    queues = scene.there.queues.keys() - plumbing
    for name in sorted(names):
        if any(overlap(name, pattern) for pattern in patterns) or any(overlap(name, queue) for queue in queues):
            continue
        what = "no binding lets such a routing key into any queue of this virtual host"
        yield Finding(Code.EVENT_WITHOUT_BINDING, name, what, commands.remove_event(name))


def _without_event(scene: Scene, policy: Policy, names: set[str]) -> Iterator[Finding]:
    for queue in sorted(scene.origins):
        for binding in scene.routes.into(queue):
            key = scene.routes.pattern(binding)
            if key is None or binding.source.startswith(RETURN_PREFIX):
                continue
            if any(overlap(key, name) for name in names) if is_pattern(key) else policy.max_retries(key) is not None:
                continue
            what = (
                f"failures of '{queue}' arrive with the key '{key}' (exchange '{binding.source}'), which no event "
                "names: they become dead letters at once, not-configured"
            )
            fix = commands.set_event(key, scene.deployment.default_max_retries)
            yield Finding(Code.BINDING_WITHOUT_EVENT, queue, what, fix)
