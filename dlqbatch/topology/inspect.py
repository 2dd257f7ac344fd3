"""Reads how a topology is on the broker: by AMQP whether each part is as wanted, by the management API the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dlqbatch.broker.connection import Connection, Scratch
from dlqbatch.broker.facts import Policies
from dlqbatch.broker.management import Client, NoReply, none_if_unanswered
from dlqbatch.broker.refusals import NO_PERMISSION, NOT_FOUND, mismatch
from dlqbatch.errors import ChannelRefused
from dlqbatch.topology.model import DEAD_LETTER_EXCHANGE, QUEUE_TYPE, Binding, Policy, Topology
from dlqbatch.topology.plan import Difference, Reading, Standing, differing
from dlqbatch.topology.policies import PolicyRefused, examine, too_old

_Parts = dict[tuple[str, str], tuple[Difference, ...] | None]
"""The differences of each part that exists, by kind and name; None where this login may not declare it."""

_UNAUTHORISED: Final = 401
_COUNTS: Final = ("messages", "messages_ready", "messages_unacknowledged", "messages_delayed", "messages_dlx")


class Reader(Client):
    """Questions about topologies to the management API; each returns None where it does not answer."""

    @none_if_unanswered
    def messages(self, queue: str) -> int | None:
        """How many messages a queue holds, with those that it could not dead-letter yet."""
        found = self.get("queues", self.vhost, queue) or {}
        total, *parts = (found.get(name) for name in _COUNTS)
        # The total and the count of messages to dead-letter are collected apart, so that either may be the newer one.
        return max(total, sum(part for part in parts if isinstance(part, int))) if isinstance(total, int) else None

    @none_if_unanswered
    def arguments(self, queue: str) -> dict[str, object] | None:
        arguments = (self.get("queues", self.vhost, queue) or {}).get("arguments")
        return arguments if isinstance(arguments, dict) else None

    @none_if_unanswered
    def exchanges(self) -> tuple[str, ...] | None:
        found = self.get("exchanges", self.vhost, query="columns=name")
        return tuple(str(one["name"]) for one in found) if isinstance(found, list) else None

    @none_if_unanswered
    def dead_lettering(self) -> dict[str, str] | None:
        """The dead-letter exchange of each queue in the virtual host that has one, by its declaration or a policy."""
        found: dict[str, str] = {}
        for queue in self.queues("name,arguments,effective_policy_definition"):
            arguments, policy = queue.get("arguments"), queue.get("effective_policy_definition")
            exchange = (arguments.get(DEAD_LETTER_EXCHANGE) if isinstance(arguments, dict) else None) or (
                policy.get("dead-letter-exchange") if isinstance(policy, dict) else None
            )
            if exchange:
                found[queue["name"]] = str(exchange)
        return found

    @none_if_unanswered
    def policies(self) -> Policies | None:
        """The policies of users and of operators in the virtual host."""
        lists = self.get("policies", self.vhost), self.get("operator-policies", self.vhost)
        return Policies(*lists) if all(isinstance(each, list) for each in lists) else None

    def set_policy(self, policy: Policy) -> None:
        self._change("PUT", policy.name, policy.body)

    def delete_policy(self, name: str) -> None:
        self._change("DELETE", name)

    def _change(self, method: str, name: str, body: Mapping[str, object] | None = None) -> None:
        try:
            self.api.change(method, "policies", self.vhost, name, body=body)
        except NoReply as failure:
            if failure.code is None or failure.code == NOT_FOUND:
                raise
            if failure.code == _UNAUTHORISED:
                user = "this user may not: give it the tag policymaker (rabbitmqctl set_user_tags USER policymaker)"
                raise PolicyRefused(name, user) from failure
            raise PolicyRefused(name, failure.content.decode(errors="replace").strip() or failure.why) from failure

    @none_if_unanswered
    def standing(self, policy: Policy, version: tuple[int, ...], policies: Policies) -> Standing | None:
        """How a policy of ours stands beside the others, and beside the arguments of its queue."""
        found = self.get("queues", self.vhost, policy.queue)
        return examine(policy, version, policies, None if found is None else policies.on(found))

    @none_if_unanswered
    def bindings_from(self, exchange: str) -> tuple[Binding, ...] | None:
        found = self.get("exchanges", self.vhost, exchange, "bindings", "source")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            return None
        return tuple(
            Binding(exchange, str(one.get("routing_key")), str(one.get("destination")))
            for one in found
            if one.get("destination_type") == "queue"
        )


def read(connection: Connection, topology: Topology, reader: Reader) -> Reading:
    """Compare each part that exists with the topology. Nothing is declared that does not exist."""
    parts: _Parts = {}
    with connection.scratch() as scratch:
        for exchange in topology.exchanges:
            _compare(scratch, parts, "exchange", exchange.name, exchange_type=exchange.type)
        for queue in topology.queues:
            _compare(scratch, parts, "queue", queue.name, arguments=dict(queue.arguments))
    for queue in topology.queues:
        # The broker refuses at the first argument that differs; the API shows every argument.
        if parts.get(("queue", queue.name), ()) != () and (arguments := reader.arguments(queue.name)) is not None:
            every = differing(queue.arguments, arguments)
            parts["queue", queue.name] = _joined(parts["queue", queue.name] or (), every)
    standings = _standings(topology, connection.version, reader)
    bindings = [reader.bindings_from(one.name) for one in topology.exchanges if ("exchange", one.name) in parts]
    known = [binding for some in bindings if some is not None for binding in some]
    return Reading(parts, None if None in bindings else frozenset(known), standings)


def _standings(topology: Topology, version: tuple[int, ...], reader: Reader) -> dict[str, Standing] | None:
    """How each policy of ours stands; None where the management API does not answer."""
    if not topology.policies:
        return None
    if too_old(version):
        nothing = Policies([], [])
        return {policy.name: examine(policy, version, nothing, None) for policy in topology.policies}
    policies = reader.policies()
    found = policies and {each.name: reader.standing(each, version, policies) for each in topology.policies}
    if not found or None in found.values():
        return None
    return {name: standing for name, standing in found.items() if standing is not None}


def _compare(scratch: Scratch, parts: _Parts, kind: str, name: str, **wanted: Any) -> None:
    """Note how this part differs, if it exists."""
    try:
        if not scratch.is_there(kind, name):
            return
    except ChannelRefused as refused:
        if refused.code != NO_PERMISSION:
            raise
    try:
        scratch.call(f"{kind}_declare", durable=True, **{kind: name}, **wanted)
        parts[kind, name] = ()
    except ChannelRefused as refused:
        differs = mismatch(refused)
        if differs is None and refused.code != NO_PERMISSION:
            raise
        one = differs and Difference(differs.argument, differs.found, differs.wanted)
        parts[kind, name] = (one,) if one else None


def _joined(by_broker: tuple[Difference, ...], by_api: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """Every difference; that of the queue type only if the broker names it, because the type may be a default."""
    named = {difference.argument for difference in by_broker}
    every = {one.argument: one for one in by_api if one.argument != QUEUE_TYPE or one.argument in named}
    return (*(one for one in by_broker if one.argument not in every), *every.values())
