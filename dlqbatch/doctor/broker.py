"""The broker itself, the connections to it, and the rights of our user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from shlex import quote
from typing import Final
from urllib.parse import urlsplit

from dlqbatch.amqp.retry_headers import RETURN_PREFIX
from dlqbatch.broker.facts import BrokerFacts
from dlqbatch.broker.versions import LIMITS_DELIVERIES
from dlqbatch.doctor import commands
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.virtual_host import Deployment
from dlqbatch.settings import Settings

OLDEST: Final = (3, 13)
SKEW: Final = 30.0
"""The seconds by which two clocks may differ."""
_DEFAULT_EXCHANGE: Final = "amq.default"
"""The name by which the broker checks permissions on the default exchange."""


def examine(broker: BrokerFacts, deployment: Deployment) -> Iterator[Finding]:
    where = f"virtual host '{broker.vhost}'"
    for alarm in broker.alarms:
        what = f"{alarm}: until it is over the broker takes no message, so that no run can move one"
        yield Finding(
            Code.ALARM, "broker", what, "rabbitmq-diagnostics alarms && rabbitmq-diagnostics memory_breakdown"
        )
    if broker.version and broker.version < OLDEST:
        number = ".".join(map(str, broker.version))
        what = f"RabbitMQ {number} gets no more fixes; go to 3.13 with every feature flag enabled, then to 4"
        yield Finding(Code.OLD_BROKER, "broker", what, "rabbitmqctl enable_feature_flag all")
    if broker.skew is not None and abs(broker.skew) > SKEW:
        yield Finding(Code.CLOCK_SKEW_BROKER, "broker", f"its clock is {ahead(broker.skew)} ours", SYNCHRONISE)
    if broker.silent is not None:
        what = f"{broker.silent}. Without it queues, bindings and policies cannot be looked at, nor wildcards be used"
        yield Finding(
            Code.MANAGEMENT_SILENT,
            broker.api,
            what,
            f"rabbitmqctl set_user_tags {quote(broker.user)} management"
            if broker.may_not_ask
            else "rabbitmq-plugins enable rabbitmq_management",
        )
    yield from _rights(broker, deployment, where)
    if broker.change_left_behind:
        what = "a change of a delay was cut off: until it is finished no run declares anything"
        yield Finding(Code.DELAY_CHANGE_UNFINISHED, where, what, "dlqbatch topology apply --change-ttl")
    yield from _ingest(broker, deployment, where)
    yield from _deprecated(broker)


SYNCHRONISE: Final = "sudo timedatectl set-ntp true"


def ahead(skew: float) -> str:
    return f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'}"


def unprotected(settings: Settings) -> Iterator[Finding]:
    """A finding for each connection to another machine that is in clear, or whose server is not verified."""
    for url in settings.broker_urls:
        parts = urlsplit(url)
        host = parts.hostname or "localhost"
        if is_local(host):
            continue
        if parts.scheme != "amqps":
            fix = f"export DLQBATCH_BROKER_URL=amqps://USER:PASSWORD@{_shown(host)}:5671{parts.path or '/'}"
            yield _in_clear("broker", f"{host}:{parts.port or 5672}", fix)
        elif not settings.tls_verify:
            fix = "export DLQBATCH_TLS_VERIFY=true DLQBATCH_TLS_CA_FILE=/path/to/ca.pem"
            what = "certificate and host name are not checked: whoever answers under that name gets the password"
            yield Finding(Code.BROKER_UNVERIFIED, f"{host}:{parts.port or 5671}", what, fix)
    # A management address that is not in the settings follows from the broker's.
    if settings.management_url is None:
        return
    parts = urlsplit(settings.management_url.get_secret_value())
    host = parts.hostname or "localhost"
    if parts.scheme == "http" and not is_local(host):
        fix = f"export DLQBATCH_MANAGEMENT_URL=https://{_shown(host)}:15671"
        yield _in_clear("management API", f"{host}:{parts.port or 80}", fix)


def _in_clear(server: str, where: str, fix: str) -> Finding:
    what = f"the password and every message go to the {server} in clear"
    return Finding(Code.BROKER_IN_CLEAR, where, what, fix)


def is_local(host: str) -> bool:
    """Whether it is a socket or the loopback address of this machine; a name is not looked up."""
    if not host or host.startswith(("/", "@")) or f".{host.rstrip('.')}".endswith(".localhost"):
        return True
    with suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return False


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _rights(broker: BrokerFacts, deployment: Deployment, where: str) -> Iterator[Finding]:
    for right in ("read", "write"):
        names = [f"{one.kind} '{one.name}'" for one in broker.refused if one.right == right]
        if names:
            what = f"the user '{broker.user}' may not {right} {', '.join(names)}"
            yield Finding(Code.PERMISSION_MISSING, where, what, _grant(broker, deployment))
    has = broker.permissions
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
        what = f"the user '{broker.user}' may not {' or '.join(lacking)} the exchanges dlqbatch.return.*, {how}"
        yield Finding(Code.RETURN_PERMISSION_MISSING, where, what, _grant(broker, deployment))


def _allows(pattern: str, name: str) -> bool:
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:
        return True  # Erlang knows expressions that Python does not; no finding is better than a wrong one


def _grant(broker: BrokerFacts, deployment: Deployment) -> str:
    """The command that adds the rights of docs/permissions.md to those that the user has."""
    has, back = broker.permissions, r"^dlqbatch\.return\..*$"
    configure, write, read = ("", "", "") if has is None else (has.configure, has.write, has.read)
    written = {exchange or _DEFAULT_EXCHANGE for exchange, _ in deployment.written}
    written |= {one.name or _DEFAULT_EXCHANGE for one in broker.refused if one.right == "write"}
    reads = deployment.read | {one.name for one in broker.refused if one.right == "read"}
    lacking = {name for name in written if not _allows(write, name)}
    unread = {name for name in reads if not _allows(read, name)}
    new_write = commands.wider(write, lacking) if lacking else write
    new_read = commands.wider(read, unread) if unread else read
    sample = f"{RETURN_PREFIX}q"
    return commands.set_permissions(
        broker,
        configure if _allows(configure, sample) else _or(configure, back),
        new_write if _allows(new_write, sample) else _or(new_write, back),
        new_read if _allows(new_read, sample) else _or(new_read, back),
    )


def _or(pattern: str, other: str) -> str:
    return other if pattern in {"", "^$"} else f"{pattern}|{other}"


def _ingest(broker: BrokerFacts, deployment: Deployment, where: str) -> Iterator[Finding]:
    for name in deployment.ingest:
        if ("queue", name) in broker.missing:
            what = "the settings have ingest take from it, but there is no such queue: the run ends with 2"
            fix = commands.APPLY if name in deployment.own_queues else commands.make_queue(broker, name)
            yield Finding(Code.INGEST_QUEUE_MISSING, name, what, fix)
    for wildcard in deployment.ingest_unmatched:
        what = f"the settings have ingest take from '{wildcard}', which matches no queue"
        fix = commands.rabbitmqctl(broker, "list_queues", "name")
        yield Finding(Code.INGEST_WILDCARD_UNMATCHED, where, what, fix)


def _deprecated(broker: BrokerFacts) -> Iterator[Finding]:
    """Deprecated features in use, and a default queue type that limits deliveries."""
    for one in broker.deprecated:
        more = f": {one.url}" if one.url else ""
        what = f"somebody uses it, and the broker will drop it ({one.phase.replace('_', ' ')}){more}"
        fix = "rabbitmqctl list_deprecated_features --used name deprecation_phase doc_url"
        yield Finding(Code.DEPRECATED_IN_USE, one.name, what, fix)
    if broker.default_queue_type == "quorum" and broker.version >= LIMITS_DELIVERIES:
        what = (
            "a durable queue declared without x-queue-type becomes a quorum queue here, which after 20 deliveries "
            "deletes a message, or dead-letters it"
        )
        fix = f"rabbitmqctl update_vhost_metadata {quote(broker.vhost)} --default-queue-type classic"
        yield Finding(Code.DEFAULT_QUEUE_TYPE, f"virtual host '{broker.vhost}'", what, fix)
