"""The broker itself, our rights on it, and our own topologies."""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING, Final

from dlqbatch.policy.doctor import commands
from dlqbatch.policy.doctor.facts import BindingFacts, listed
from dlqbatch.policy.doctor.finding import Code, Finding
from dlqbatch.policy.doctor.routing import RETURN_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dlqbatch.policy.doctor.facts import BrokerFacts, Deployment, Part, QueueFacts

OLDEST: Final = (3, 13)
SKEW: Final = 30.0
"""Seconds that two clocks may differ."""
_UNLIMITED: Final = ("x-delivery-limit", -1)
_TTL: Final = "x-message-ttl"
_DEFAULT_EXCHANGE: Final = "amq.default"
"""The name of the default exchange where permissions are concerned."""


def examine(told: BrokerFacts, deployment: Deployment) -> Iterator[Finding]:
    where = f"virtual host '{told.vhost}'"
    for alarm in told.alarms:
        what = f"{alarm}: until it is over the broker takes no message, so that no run can move one"
        yield Finding(
            Code.ALARM, "broker", what, "rabbitmq-diagnostics alarms && rabbitmq-diagnostics memory_breakdown"
        )
    if told.version and told.version < OLDEST:
        number = ".".join(map(str, told.version))
        what = f"RabbitMQ {number} gets no more fixes; go to 3.13 with every feature flag enabled, then to 4"
        yield Finding(Code.OLD_BROKER, "broker", what, "rabbitmqctl enable_feature_flag all")
    if told.skew is not None and abs(told.skew) > SKEW:
        yield Finding(Code.CLOCK_SKEW_BROKER, "broker", f"its clock is {ahead(told.skew)} ours", SYNCHRONISE)
    if told.silent is not None:
        what = f"{told.silent}. Without it queues, bindings and policies cannot be looked at, nor wildcards be used"
        yield Finding(
            Code.MANAGEMENT_SILENT,
            told.api,
            what,
            f"rabbitmqctl set_user_tags {quote(told.user)} management"
            if told.may_not_ask
            else "rabbitmq-plugins enable rabbitmq_management",
        )
    yield from _rights(told, deployment, where)
    if told.change_left_behind:
        what = "a change of a delay was cut off: until it is finished no run declares anything"
        yield Finding(Code.DELAY_CHANGE_UNFINISHED, where, what, "dlqbatch topology apply --change-ttl")
    for part in deployment.parts:
        yield from _part(told, part)
    yield from _ingest(told, deployment, where)


SYNCHRONISE: Final = "sudo timedatectl set-ntp true"


def ahead(skew: float) -> str:
    return f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'}"


def _rights(told: BrokerFacts, deployment: Deployment, where: str) -> Iterator[Finding]:
    for right in ("read", "write"):
        names = [f"{one.kind} '{one.name}'" for one in told.refused if one.right == right]
        if names:
            what = f"the user '{told.user}' may not {right} {', '.join(names)}"
            yield Finding(Code.PERMISSION_MISSING, where, what, _grant(told, deployment))
    has = told.permissions
    if has is None:
        return
    sample = f"{RETURN_PREFIX}q"
    lacking = [
        right
        for right, pattern in (("configure", has.configure), ("write", has.write), ("read", has.read))
        if not _allows(pattern, sample)
    ]
    if lacking:
        how = (
            "so messages go back through the default exchange, under the queue's name"
            if _allows(has.write, _DEFAULT_EXCHANGE)
            else "nor write to the default exchange, so no message can go back to its origin"
        )
        what = f"the user '{told.user}' may not {' or '.join(lacking)} the exchanges dlqbatch.return.*, {how}"
        yield Finding(Code.RETURN_PERMISSION_MISSING, where, what, _grant(told, deployment))


def _allows(pattern: str, name: str) -> bool:
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:
        return True  # the broker's expressions can do more than ours; better no finding than a wrong one


def _grant(told: BrokerFacts, deployment: Deployment) -> str:
    """As docs/drain.md has it, beside what the user may do now."""
    has, back = told.permissions, r"^dlqbatch\.return\..*$"
    configure, write, read = ("", "", "") if has is None else (has.configure, has.write, has.read)
    written = {exchange or _DEFAULT_EXCHANGE for exchange, _ in deployment.written}
    written |= {one.name or _DEFAULT_EXCHANGE for one in told.refused if one.right == "write"}
    reads = deployment.read | {one.name for one in told.refused if one.right == "read"}
    lacking = {name for name in written if not _allows(write, name)}
    unread = {name for name in reads if not _allows(read, name)}
    new_write = commands.wider(write, lacking) if lacking else write
    new_read = commands.wider(read, unread) if unread else read
    sample = f"{RETURN_PREFIX}q"
    return commands.set_permissions(
        told,
        configure if _allows(configure, sample) else _or(configure, back),
        new_write if _allows(new_write, sample) else _or(new_write, back),
        new_read if _allows(new_read, sample) else _or(new_read, back),
    )


def _or(pattern: str, other: str) -> str:
    return other if pattern in {"", "^$"} else f"{pattern}|{other}"


def _part(told: BrokerFacts, part: Part) -> Iterator[Finding]:
    where = f"topology '{part.name}'"
    wanted = {("exchange", name) for name in part.exchanges} | {("queue", name) for name in part.queues}
    missing = wanted & told.missing
    if missing == wanted:
        what = "nothing of it is on the broker; the first drain declares it, if it may"
        yield Finding(Code.TOPOLOGY_NOT_APPLIED, where, what, commands.APPLY)
        return
    unbound: list[BindingFacts] = []
    if told.map is not None:
        there = frozenset(told.map.bindings)
        unbound = [one for one in part.bindings if one not in there and not _relayed(told, one)]
    if missing:
        what = f"not on the broker: {listed(name for _, name in missing)}"
        yield Finding(Code.TOPOLOGY_INCOMPLETE, where, what, commands.APPLY)
    elif unbound:
        names = listed(f"{one.source} --{one.key}--> {one.destination}" for one in unbound)
        what = f"bindings are missing, so that what is published there goes nowhere: {names}"
        yield Finding(Code.TOPOLOGY_INCOMPLETE, where, what, commands.APPLY)
    if told.map is None:
        return
    for name, kind in part.exchanges.items():
        exchange = told.map.exchanges.get(name)
        if exchange is not None and exchange.type != kind:
            what = f"the exchange is {exchange.type}, the settings want {kind}: a run that declares it ends with 2"
            path = ["exchanges", told.vhost, name]
            fix = f"{commands.make(told, path, {}, 'DELETE')}?if-unused=true && {commands.APPLY}"
            yield Finding(Code.TOPOLOGY_DIFFERS, name, what, fix)
    for name, arguments in part.queues.items():
        queue = told.map.queues.get(name)
        if queue is not None:
            yield from _differences(told, part, queue, arguments)


def _relayed(told: BrokerFacts, binding: BindingFacts) -> bool:
    """While a delay is being changed its binding leads to another queue."""
    relay = BindingFacts(binding.source, binding.key, f"{binding.destination}.relay")
    return told.map is not None and relay in told.map.bindings


def _differences(
    told: BrokerFacts, part: Part, queue: QueueFacts, arguments: Mapping[str, object]
) -> Iterator[Finding]:
    found = {name: value for name, value in queue.arguments.items() if name != "x-queue-type"}
    wanted = {name: value for name, value in arguments.items() if name != "x-queue-type"}
    if _UNLIMITED[0] not in found and wanted.get(_UNLIMITED[0]) == _UNLIMITED[1]:
        # Declared by an older broker, which knew no such argument; the drain takes it as it is.
        del wanted[_UNLIMITED[0]]
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    words = [f"{name} is {found.get(name, 'none')}, the settings want {wanted.get(name, 'none')}" for name in differing]
    kind = arguments.get("x-queue-type")
    if kind is not None and kind != queue.type:
        words.append(f"it is {queue.type}, the settings want {kind}")
    if not queue.durable:
        words.append("it is not durable")
    if not words:
        return
    if differing == [_TTL] and len(words) == 1 and queue.name in part.delay_queues:
        fix = f"{commands.APPLY} --change-ttl"
    else:
        fix = f"{commands.delete_if_empty(told, queue)} && {commands.APPLY}"
    yield Finding(Code.TOPOLOGY_DIFFERS, queue.name, f"{'; '.join(words)}: a run that declares it ends with 2", fix)


def _ingest(told: BrokerFacts, deployment: Deployment, where: str) -> Iterator[Finding]:
    for name in deployment.ingest:
        if ("queue", name) in told.missing:
            what = "the settings have ingest take from it, but there is no such queue: the run ends with 2"
            fix = commands.APPLY if name in deployment.own_queues else commands.make_queue(told, name)
            yield Finding(Code.INGEST_QUEUE_MISSING, name, what, fix)
    for wildcard in deployment.ingest_unmatched:
        what = f"the settings have ingest take from '{wildcard}', which matches no queue"
        fix = commands.rabbitmqctl(told, "list_queues", "name")
        yield Finding(Code.INGEST_WILDCARD_UNMATCHED, where, what, fix)
