"""The fixes, as commands for a shell: of rabbitmqctl, curl, psql, sqlite3 or dlqbatch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from shlex import quote
from urllib.parse import quote as in_path

from dlqbatch.broker.facts import BindingFacts, BrokerFacts, QueueFacts, QueuePolicy

APPLY = "dlqbatch topology apply"


def exactly(names: Iterable[str]) -> str:
    """A regular expression that matches these names and no others."""
    every = sorted(names)
    return f"^({'|'.join(re.escape(name) for name in every)})$" if every else "^$"


def set_policy(broker: BrokerFacts, queue: QueueFacts, wanted: Mapping[str, object]) -> str:
    """A policy for one queue. Only one policy applies to a queue, so this one repeats what the present one says."""
    now = {} if queue.policy is None else dict(queue.policy.definition)
    return _policy(broker, queue, queue.policy, now | dict(wanted))


def without_option(broker: BrokerFacts, queue: QueueFacts, bindings: Iterable[BindingFacts], *options: str) -> str:
    """Remove options from the first of operator policy, policy and declaration that sets one of them."""
    operator = queue.operator
    if operator is not None and not operator.definition.keys().isdisjoint(options):
        left = {name: value for name, value in operator.definition.items() if name not in options}
        if not left:
            return rabbitmqctl(broker, "clear_operator_policy", operator.name)
        return _policy(broker, queue, operator, left, command="set_operator_policy")
    if queue.policy is not None and not queue.policy.definition.keys().isdisjoint(options):
        left = {name: value for name, value in queue.policy.definition.items() if name not in options}
        # A policy cannot be empty; drop-head is the default.
        return _policy(broker, queue, queue.policy, left or {"overflow": "drop-head"})
    return declare_anew(broker, queue, bindings, {}, *options)


def dead_letter_to(
    broker: BrokerFacts, queue: QueueFacts, bindings: Iterable[BindingFacts], exchange: str, key: str | None
) -> str:
    """Make a queue dead-letter to this exchange; key None: with the key that it has now.

    What the declaration says counts before a policy.
    """
    wanted: dict[str, object] = {"dead-letter-exchange": exchange}
    if key is not None:
        wanted["dead-letter-routing-key"] = key
    declared = {f"x-{name}": value for name, value in wanted.items() if f"x-{name}" in queue.arguments}
    if any(queue.arguments[name] != value for name, value in declared.items()):
        return declare_anew(broker, queue, bindings, {f"x-{name}": value for name, value in wanted.items()})
    return set_policy(broker, queue, {name: value for name, value in wanted.items() if f"x-{name}" not in declared})


def declare_anew(
    broker: BrokerFacts,
    queue: QueueFacts,
    bindings: Iterable[BindingFacts],
    wanted: Mapping[str, object],
    *dropped: str,
) -> str:
    """Delete the queue if it is empty and declare it again: nobody can change the arguments of a queue."""
    kept = queue.arguments.keys() - {f"x-{name}" for name in dropped}
    arguments = {name: value for name, value in queue.arguments.items() if name in kept} | dict(wanted)
    steps = [delete_if_empty(broker, queue)]
    body = {"durable": queue.durable, "auto_delete": queue.auto_delete, "arguments": arguments}
    steps.append(call_api(broker, ["queues", broker.vhost, queue.name], body))
    steps += [bind(broker, binding.source, binding.key, queue.name) for binding in bindings]
    return " && ".join(steps)


def delete_if_empty(broker: BrokerFacts, queue: QueueFacts) -> str:
    if queue.type == "classic":
        return rabbitmqctl(broker, "delete_queue", "--if-empty", queue.name)
    # A quorum queue cannot be deleted with --if-empty.
    count = rabbitmqctl(broker, "list_queues", "-q", "name", "messages")
    # ENVIRON and not -v, which would read a backslash in the name as an escape.
    is_empty = """awk -F '\\t' '$1 == ENVIRON["queue"] && $2 == 0 { empty = 1 } END { exit !empty }'"""
    return f"{count} | queue={quote(queue.name)} {is_empty} && {rabbitmqctl(broker, 'delete_queue', queue.name)}"


def _policy(
    broker: BrokerFacts,
    queue: QueueFacts,
    now: QueuePolicy | None,
    definition: Mapping[str, object],
    command: str = "set_policy",
) -> str:
    name = f"dlqbatch-{queue.name}"
    priority = 0 if now is None else now.priority + (now.name != name)
    words = ["--priority", str(priority), "--apply-to", "queues"]
    return rabbitmqctl(broker, command, *words, name, exactly([queue.name]), json.dumps(dict(definition)))


def set_permissions(broker: BrokerFacts, configure: str, write: str, read: str) -> str:
    return rabbitmqctl(broker, "set_permissions", broker.user, configure, write, read)


def wider(pattern: str, names: Iterable[str]) -> str:
    """A permission that allows these names as well."""
    added = exactly(names)
    return f"{pattern}|{added}" if pattern not in {"", "^$"} else added


def call_api(broker: BrokerFacts, path: Iterable[str], body: Mapping[str, object], method: str = "PUT") -> str:
    """A call of the management API; curl asks for the password."""
    place = "/".join(in_path(part, safe="") for part in path)
    # -g: curl would read brackets and braces in a name as a range.
    words = ["curl", "-fsSg", "-u", broker.user, "-X", method, "-H", "content-type: application/json"]
    words += ["-d", json.dumps(body), f"{broker.api}/api/{place}"]
    return " ".join(quote(word) for word in words)


def make_exchange(broker: BrokerFacts, name: str) -> str:
    return call_api(broker, ["exchanges", broker.vhost, name], {"type": "fanout", "durable": True})


def make_queue(broker: BrokerFacts, name: str) -> str:
    # Without a type the default of the virtual host would decide.
    body = {"durable": True, "arguments": {"x-queue-type": "classic"}}
    return call_api(broker, ["queues", broker.vhost, name], body)


def bind(broker: BrokerFacts, exchange: str, key: str, queue: str) -> str:
    return call_api(broker, ["bindings", broker.vhost, "e", exchange, "q", queue], {"routing_key": key}, "POST")


def unbind(broker: BrokerFacts, binding: BindingFacts) -> str:
    kind = "q" if binding.to_queue else "e"
    path = ["bindings", broker.vhost, "e", binding.source, kind, binding.destination, binding.properties_key]
    return call_api(broker, path, {}, "DELETE")


def delete_unused_exchanges(broker: BrokerFacts, names: Iterable[str]) -> str:
    """One call for all exchanges; an exchange that has a binding by then stays."""
    words = ["curl", "-fsSg", "-u", broker.user, "-X", "DELETE"]
    words += [f"{broker.api}/api/exchanges/{in_path(broker.vhost, safe='')}/{in_path(name, safe='')}" for name in names]
    return " ".join(quote(word if "/api/" not in word else f"{word}?if-unused=true") for word in words)


def rabbitmqctl(broker: BrokerFacts, command: str, *words: str) -> str:
    return " ".join(quote(word) for word in ["rabbitmqctl", command, "-p", broker.vhost, *words])


def list_consumers(broker: BrokerFacts) -> str:
    return rabbitmqctl(broker, "list_consumers", "queue_name", "channel_pid", "consumer_tag")


def set_event(name: str, retries: int | None) -> str:
    number = "" if retries is None else f" {retries}"
    return f"dlqbatch events set{'' if not name.startswith('-') else ' --'} {quote(name)}{number}"


def remove_event(name: str) -> str:
    return f"dlqbatch events remove{'' if not name.startswith('-') else ' --'} {quote(name)}"


def sql(client: str, statement: str) -> str:
    return f"{client} {quote(statement)}"
