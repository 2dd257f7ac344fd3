"""`doctor`: look at the broker, the database and the settings, and name what is wrong.

Nothing is declared, taken or published. Whether the user has a right shows in how the broker refuses a method that it
must refuse in any case.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from pika import BasicProperties

from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection, NoAnswer, Scratch
from dlqbatch.broker.consume import CONSUMERS
from dlqbatch.broker.facts import (
    BindingFacts,
    BrokerFacts,
    Deprecated,
    Map,
    Permissions,
    Policies,
    QueueFacts,
    Refused,
    stuck_messages,
)
from dlqbatch.broker.management import Api, Client, NoReply, Unanswered, none_if_unanswered
from dlqbatch.broker.refusals import NO_PERMISSION
from dlqbatch.doctor import broker as broker_rules
from dlqbatch.doctor import database as database_rules
from dlqbatch.doctor import dead_lettering, native, own_queues, queues
from dlqbatch.doctor.database import DatabaseFacts
from dlqbatch.doctor.findings import Code, Finding, Severity
from dlqbatch.doctor.virtual_host import Deployment, VirtualHost, deployment_of
from dlqbatch.errors import ChannelRefused
from dlqbatch.retain.rows import keep_of
from dlqbatch.settings import Settings
from dlqbatch.topology.model import CHANGING

_MOST_LOOKED_AT: Final = 5000
"""The most queues whose depth is read by AMQP; for the others statistics count, which are some seconds old."""
_UNAUTHORISED: Final = 401
_UNHEALTHY: Final = 503
_COLUMNS: Final = (
    "name,type,durable,auto_delete,exclusive,arguments,consumers,messages,"
    "message_stats.publish,message_stats.deliver_get,message_stats.redeliver,delivery_limit,"
    "message_stats.deliver,message_stats.get,message_stats.ack,"
    "message_stats.deliver_get_details.rate,message_stats.redeliver_details.rate,"
    "messages_ready,messages_unacknowledged,messages_delayed"
)
_NEW_STATISTICS: Final = 11.0
"""Seconds until the statistics of a queue are new: it sends them every 5, and later if nobody has asked for them."""
_NEVER_ACCEPTED: Final = BasicProperties(expiration="not a number")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    """The worst first."""
    broker: BrokerFacts
    database: DatabaseFacts

    def count(self, severity: Severity) -> int:
        return sum(1 for finding in self.findings if finding.severity is severity)

    def looked_at(self) -> str:
        broker, version = self.broker, ".".join(map(str, self.broker.version))
        return (
            f"RabbitMQ {version} at {broker.where}, virtual host '{broker.vhost}', as '{broker.user}'; "
            f"database {self.database.where}"
        )

    def as_dict(self) -> dict[str, object]:
        return {
            "broker": {
                "where": self.broker.where,
                "version": ".".join(map(str, self.broker.version)),
                "virtual_host": self.broker.vhost,
                "management": self.broker.silent or self.broker.api,
            },
            "database": {"where": self.database.where, "version": self.database.version},
            "counts": {severity.value: self.count(severity) for severity in Severity},
            "findings": [finding.as_dict() for finding in self.findings],
        }


def examine(
    broker: BrokerFacts, database: DatabaseFacts, deployment: Deployment, unprotected: Iterable[Finding] = ()
) -> tuple[Finding, ...]:
    """Everything that is wrong, the worst first.

    What is not known gives no finding. Without the management API that is most of the broker.
    """
    vhost = None if broker.map is None else VirtualHost(broker, broker.map, deployment)
    found = [
        *unprotected,
        *broker_rules.examine(broker, deployment),
        *own_queues.examine_topologies(broker, deployment),
        *native.examine_broker(broker, deployment),
        *database_rules.examine(database),
        *database_rules.examine_policy(vhost, database, deployment),
    ]
    if vhost is not None:
        found += [
            *dead_lettering.examine(vhost),
            *queues.examine(vhost),
            *own_queues.examine(vhost),
            *native.examine(vhost),
        ]
    # One queue may have the same finding for two reasons; it is shown once.
    order = list(Code)
    return tuple(sorted(dict.fromkeys(found), key=lambda one: (order.index(one.code), one.where, one.what)))


def diagnose(settings: Settings) -> Diagnosis:
    """BrokerUnreachable if there is no broker; a database or a management API that does not answer is a finding."""
    connection = connect(access_to(settings, "dlqbatch doctor"))
    try:
        deployment = deployment_of(settings, connection)
        broker = survey(connection, Surveyor(management_api(settings), clock=_now), deployment)
    finally:
        connection.close()
    url = settings.database_url.get_secret_value()
    database = database_rules.survey(
        url,
        is_default=settings.database_url_is_default,
        connect_timeout=settings.connect_timeout_seconds,
        clock=_now,
        overdue_before=keep_of(settings).before(_now() - settings.alert_overdue),
    )
    unprotected = (*broker_rules.unprotected(settings), *database_rules.unprotected(url, os.environ))
    return Diagnosis(examine(broker, database, deployment, unprotected), broker, database)


def _now() -> datetime:
    return datetime.now(UTC)


class Surveyor(Client):
    """Reads a whole virtual host by the management API, and how far the clock of the broker is ahead."""

    def __init__(self, api: Api, *, clock: Callable[[], datetime]) -> None:
        super().__init__(api)
        self._clock = clock
        self.new_statistics_after = _NEW_STATISTICS
        self.may_not_ask = False
        self.skew: float | None = None
        """How many seconds the clock of the broker is ahead of ours."""

    @none_if_unanswered
    def map(self) -> Map | None:
        exchanges = self.get("exchanges", self.vhost, query="columns=name,type,arguments")
        bindings = self.get("bindings", self.vhost)
        policies = Policies(self.get("policies", self.vhost) or [], self.get("operator-policies", self.vhost) or [])
        queues = {queue["name"]: policies.on(queue) for queue in self.queues(_COLUMNS)}
        if not isinstance(exchanges, list) or not isinstance(bindings, list):
            return None
        return Map(
            queues,
            {one["name"]: policies.over(one) for one in exchanges if one["name"]},
            tuple(BindingFacts.of(one) for one in bindings if one["source"]),
            policies,
        )

    @none_if_unanswered
    def alarms(self) -> tuple[str, ...]:
        answer = self.get("health", "checks", "alarms")
        alarms = answer.get("alarms") if isinstance(answer, dict) else None
        if not isinstance(alarms, list):
            return ()
        found = (f"{one.get('resource', 'resource')} alarm on {one.get('node', 'a node')}" for one in alarms)
        return tuple(dict.fromkeys(found))

    def deprecated(self) -> tuple[Deprecated, ...]:
        """Features in use that the broker will drop; a broker before 3.12 names none."""
        answer = self._get_if_allowed("deprecated-features", "used")
        try:
            found = [Deprecated(str(one["name"]), str(one["deprecation_phase"]), str(one["doc_url"])) for one in answer]
        except (LookupError, TypeError):
            return ()
        return tuple(sorted(found, key=lambda one: one.name))

    def flags_off(self) -> tuple[str, ...]:
        """Stable feature flags that are not enabled; a broker before 3.8 has none."""
        answer = self._get_if_allowed("feature-flags")
        try:
            found = [str(one["name"]) for one in answer if (one["state"], one["stability"]) == ("disabled", "stable")]
        except (LookupError, TypeError):
            return ()
        return tuple(sorted(found))

    def default_queue_type(self) -> str | None:
        answer = self._get_if_allowed("vhosts", self.vhost)
        found = answer.get("default_queue_type") if isinstance(answer, dict) else None
        return found if isinstance(found, str) and found != "undefined" else None

    def foreign_consumers(self, queue: str) -> int:
        """Consumers of a queue that are not runs of ours; the tags of ours begin with our name."""
        answer = self._get_if_allowed("queues", self.vhost, queue)
        try:
            tags = [str(one.get("consumer_tag")) for one in answer["consumer_details"]]
        except (AttributeError, LookupError, TypeError):
            return 0
        return sum(not tag.startswith(CONSUMERS.decode()) for tag in tags)

    def stuck(self, queue: str) -> int:
        """Messages that are neither ready, unacknowledged nor delayed."""
        answer = self._get_if_allowed("queues", self.vhost, queue)
        return stuck_messages(answer) if isinstance(answer, dict) else 0

    def permissions(self) -> Permissions | None:
        """Only an administrator may ask for them."""
        answer = self._get_if_allowed("permissions", self.vhost, self.api.user)
        if not isinstance(answer, dict):
            return None
        return Permissions(*(str(answer.get(right, "")) for right in ("configure", "write", "read")))

    def _get_if_allowed(self, *path: str) -> Any:
        """The answer; None without the right to it, or from a broker that does not know it. Other questions follow."""
        if self.silent is not None:
            return None
        try:
            return self.get(*path)
        except Unanswered:
            self.silent = None
            return None

    def give_up(self, why: str) -> Unanswered:
        """Without a line in the log: a finding says it."""
        self.silent = why
        return Unanswered(why)

    def _ask(self, *path: str, query: str) -> Any:
        sent_at, start = self._clock(), time.monotonic()
        try:
            content, date = self.api.ask(*path, query=query)
        except NoReply as failure:
            self._keep_time(failure.date, sent_at, time.monotonic() - start)
            if failure.code == _UNHEALTHY:
                # The text says what is unhealthy.
                with suppress(ValueError):
                    return json.loads(failure.content)
                return None
            self.may_not_ask = failure.code == _UNAUTHORISED
            raise
        self._keep_time(date, sent_at, time.monotonic() - start)
        return content

    def _keep_time(self, date: str | None, sent_at: datetime, took: float) -> None:
        """Note the skew, allowing for a header of whole seconds and for the time that the answer took."""
        if date is None or self.skew is not None:
            return
        try:
            skew = (parsedate_to_datetime(date) - sent_at).total_seconds()
        except (TypeError, ValueError):
            return
        self.skew = min(skew + 1.0, 0.0) if skew < 0 else max(skew - took, 0.0)


def survey(connection: Connection, surveyor: Surveyor, deployment: Deployment) -> BrokerFacts:
    """Read the broker by the management API and by AMQP; without the API, what only it tells stays unknown."""
    there = surveyor.map()
    alarms = surveyor.alarms() or ()
    if there is not None:
        there = replace(there, queues=_still_stuck(surveyor, there.queues))
    deprecated, default_type = surveyor.deprecated(), surveyor.default_queue_type()
    permissions = surveyor.permissions()
    with connection.scratch() as scratch:
        wanted = {("exchange", name) for name in deployment.own_exchanges}
        wanted |= {("queue", name) for name in deployment.own_queues | set(deployment.ingest) | {CHANGING}}
        missing = frozenset(one for one in sorted(wanted) if not _is_there(scratch, *one))
        if there is not None:
            queues = _counted(scratch, there.queues)
            for name in sorted(deployment.inner_queues & queues.keys()):
                if queues[name].consumers:
                    queues[name] = replace(queues[name], strangers=surveyor.foreign_consumers(name))
            there = replace(there, queues=queues)
        refused = _refused(scratch, deployment, missing)
        mark = None if ("queue", CHANGING) in missing else _counts(scratch, CHANGING)
    return BrokerFacts(
        version=connection.version,
        vhost=surveyor.vhost,
        user=surveyor.api.user,
        api=surveyor.api.address,
        where=connection.address,
        silent=surveyor.silent,
        may_not_ask=surveyor.may_not_ask,
        map=there,
        missing=missing - {("queue", CHANGING)},
        alarms=alarms,
        deprecated=deprecated,
        flags_off=surveyor.flags_off(),
        default_queue_type=default_type,
        skew=surveyor.skew,
        refused=refused,
        permissions=permissions,
        change_left_behind=mark is not None and mark[0] == 0,
    )


def _still_stuck(surveyor: Surveyor, queues: Mapping[str, QueueFacts]) -> dict[str, QueueFacts]:
    """Count stuck messages again with new statistics: some were on their way when the first were made."""
    found = dict(queues)
    suspected = [queue for queue in queues.values() if queue.stuck]
    if suspected:
        time.sleep(surveyor.new_statistics_after)
    for queue in suspected:
        found[queue.name] = replace(queue, stuck=min(queue.stuck, surveyor.stuck(queue.name)))
    return found


def _is_there(scratch: Scratch, kind: str, name: str) -> bool:
    """Whether it exists; a refusal for any reason but its absence says that it does."""
    try:
        scratch.call(f"{kind}_declare", passive=True, **{kind: name})
    except ChannelRefused as refused:
        return not refused.is_gone
    return True


def _counted(scratch: Scratch, queues: Mapping[str, QueueFacts]) -> dict[str, QueueFacts]:
    """The queues with counts of this moment in place of those of the statistics."""
    found = dict(queues)
    shared = (queue for queue in queues.values() if not queue.exclusive and queue.type != "stream")
    for queue, _ in zip(shared, range(_MOST_LOOKED_AT), strict=False):
        counts = _counts(scratch, queue.name)
        if counts is not None:
            held = max(counts[1], queue.messages or 0) if queue.type == "quorum" else counts[1]
            found[queue.name] = replace(queue, consumers=counts[0], messages=held)
    return found


def _counts(scratch: Scratch, queue: str) -> tuple[int, int] | None:
    """The consumers and the ready messages of a queue; None if the broker does not say."""
    try:
        answer = scratch.call("queue_declare", queue=queue, passive=True)
    except (ChannelRefused, NoAnswer, UnicodeEncodeError):
        return None
    return int(answer.consumer_count), int(answer.message_count)


def _refused(scratch: Scratch, deployment: Deployment, missing: frozenset[tuple[str, str]]) -> tuple[Refused, ...]:
    there = (queue for queue in sorted(deployment.read) if ("queue", queue) not in missing)
    found = [Refused("read", "queue", queue) for queue in there if _may_not_read(scratch, queue)]
    for exchange, key in sorted(set(deployment.written)):
        if ("exchange", exchange) in missing:
            continue
        # The broker checks the right before it looks at the expiration, and that before it routes.
        refusal = scratch.provoke(
            "basic_publish", exchange=exchange, routing_key=key, body=b"", properties=_NEVER_ACCEPTED
        )
        if refusal.code == NO_PERMISSION:
            found.append(Refused("write", "exchange", exchange))
    return tuple(found)


def _may_not_read(scratch: Scratch, queue: str) -> bool:
    """Ask with a consumer that only a stream could serve: the broker checks the right first."""
    try:
        scratch.call("basic_qos", prefetch_count=1)
        scratch.call("basic_consume", queue=queue, on_message_callback=_ignore, arguments={"x-stream-offset": "next"})
    except ChannelRefused as refused:
        return refused.code == NO_PERMISSION
    scratch.close()
    return False


def _ignore(*_: object) -> None:
    """The callback of a consumer that only a stream would accept."""
