"""The fixes, as commands for a shell on a machine that has the program in question."""

from __future__ import annotations

import json
import re
from shlex import quote
from typing import TYPE_CHECKING
from urllib.parse import quote as in_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlqbatch.policy.doctor.facts import BindingFacts, BrokerFacts, QueueFacts, QueuePolicy

APPLY = "dlqbatch topology apply"


def exactly(names: Iterable[str]) -> str:
    """A pattern that the broker matches with these names and no other."""
    every = sorted(names)
    return f"^({'|'.join(re.escape(name) for name in every)})$" if every else "^$"


def set_policy(broker: BrokerFacts, queue: QueueFacts, wanted: Mapping[str, object]) -> str:
    """A policy for one queue. A queue has one policy only, so what its policy says now is taken over."""
    now = {} if queue.policy is None else dict(queue.policy.definition)
    return _policy(broker, queue, queue.policy, now | dict(wanted))


def without_option(broker: BrokerFacts, queue: QueueFacts, bindings: Iterable[BindingFacts], option: str) -> str:
    """Takes an option away, wherever it comes from; several places need several rounds."""
    operator = queue.operator
    if operator is not None and option in operator.definition:
        left = {name: value for name, value in operator.definition.items() if name != option}
        if not left:
            return rabbitmqctl(broker, "clear_operator_policy", operator.name)
        return _policy(broker, queue, operator, left, command="set_operator_policy")
    if queue.policy is not None and option in queue.policy.definition:
        left = {name: value for name, value in queue.policy.definition.items() if name != option}
        # A policy has to say something: this is what a queue does anyway.
        return _policy(broker, queue, queue.policy, left or {"overflow": "drop-head"})
    return declare_anew(broker, queue, bindings, {}, option)


def declare_anew(
    broker: BrokerFacts,
    queue: QueueFacts,
    bindings: Iterable[BindingFacts],
    wanted: Mapping[str, object],
    dropped: str | None = None,
) -> str:
    """What a declaration says nobody can change: the queue is deleted if it is empty, and made again as it was."""
    arguments = {name: value for name, value in queue.arguments.items() if name != f"x-{dropped}"} | dict(wanted)
    steps = [delete_if_empty(broker, queue)]
    body = {"durable": queue.durable, "auto_delete": queue.auto_delete, "arguments": arguments}
    steps.append(make(broker, ["queues", broker.vhost, queue.name], body))
    steps += [bind(broker, binding.source, binding.key, queue.name) for binding in bindings]
    return " && ".join(steps)


def delete_if_empty(broker: BrokerFacts, queue: QueueFacts) -> str:
    if queue.type == "classic":
        return rabbitmqctl(broker, "delete_queue", "--if-empty", queue.name)
    # A quorum queue knows no "if empty".
    count = rabbitmqctl(broker, "list_queues", "-q", "name", "messages")
    # ENVIRON, and not -v, for what it is given is taken as it stands.
    found = """awk -F '\\t' '$1 == ENVIRON["queue"] && $2 == 0 { empty = 1 } END { exit !empty }'"""
    return f"{count} | queue={quote(queue.name)} {found} && {rabbitmqctl(broker, 'delete_queue', queue.name)}"


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


def make(broker: BrokerFacts, path: Iterable[str], body: Mapping[str, object], method: str = "PUT") -> str:
    """A call of the management API; curl asks for the password."""
    place = "/".join(in_path(part, safe="") for part in path)
    # -g: a name may hold what curl would take for a range.
    words = ["curl", "-fsSg", "-u", broker.user, "-X", method, "-H", "content-type: application/json"]
    words += ["-d", json.dumps(body), f"{broker.api}/api/{place}"]
    return " ".join(quote(word) for word in words)


def make_exchange(broker: BrokerFacts, name: str) -> str:
    return make(broker, ["exchanges", broker.vhost, name], {"type": "fanout", "durable": True})


def make_queue(broker: BrokerFacts, name: str) -> str:
    return make(broker, ["queues", broker.vhost, name], {"durable": True})


def bind(broker: BrokerFacts, exchange: str, key: str, queue: str) -> str:
    return make(broker, ["bindings", broker.vhost, "e", exchange, "q", queue], {"routing_key": key}, "POST")


def rabbitmqctl(broker: BrokerFacts, command: str, *words: str) -> str:
    return " ".join(quote(word) for word in ["rabbitmqctl", command, "-p", broker.vhost, *words])


def set_event(name: str, retries: int | None) -> str:
    number = "" if retries is None else f" {retries}"
    return f"dlqbatch events set{'' if not name.startswith('-') else ' --'} {quote(name)}{number}"


def remove_event(name: str) -> str:
    return f"dlqbatch events remove{'' if not name.startswith('-') else ' --'} {quote(name)}"


def sql(client: str, statement: str) -> str:
    return f"{client} {quote(statement)}"
