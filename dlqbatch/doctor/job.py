"""`doctor`: look at the broker, the database and the settings, and name what is wrong.

Nothing is declared, taken or published. A right is asked for with a method that the broker must refuse: how it does
says whether it would have been allowed.
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
from dlqbatch.doctor import dead_lettering, own_queues, queues
from dlqbatch.doctor.database import DatabaseFacts
from dlqbatch.doctor.findings import Code, Finding, Severity
from dlqbatch.doctor.virtual_host import Deployment, VirtualHost, deployment_of
from dlqbatch.errors import ChannelRefused
from dlqbatch.retain.rows import keep_of
from dlqbatch.settings import Settings
from dlqbatch.topology.model import CHANGING

_MOST_LOOKED_AT: Final = 5000
"""Queues whose depth is asked for; of the others the statistics have to do, which are some seconds old."""
_UNAUTHORISED: Final = 401
_UNHEALTHY: Final = 503
_COLUMNS: Final = (
    "name,type,durable,auto_delete,exclusive,arguments,effective_policy_definition,policy,consumers,messages,"
    "message_stats.publish,message_stats.deliver_get,message_stats.redeliver,delivery_limit,"
    "message_stats.deliver_get_details.rate,message_stats.redeliver_details.rate,"
    "messages_ready,messages_unacknowledged,messages_delayed"
)
_NEW_STATISTICS: Final = 11.0
"""Seconds: a queue tells its numbers every 5, and those that nobody asked for a while are told late."""
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

    Nothing is said about what is not known, as most of the broker is not without its management API.
    """
    vhost = None if broker.map is None else VirtualHost(broker, broker.map, deployment)
    found = [
        *unprotected,
        *broker_rules.examine(broker, deployment),
        *own_queues.examine_topologies(broker, deployment),
        *database_rules.examine(database),
        *database_rules.examine_policy(vhost, database, deployment),
    ]
    if vhost is not None:
        found += [*dead_lettering.examine(vhost), *queues.examine(vhost), *own_queues.examine(vhost)]
    # One queue may be wrong in one way for two reasons; the same sentence twice helps nobody.
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
    """Asks for all there is, and what time it is there."""

    def __init__(self, api: Api, *, clock: Callable[[], datetime]) -> None:
        super().__init__(api)
        self._clock = clock
        self.new_statistics_after = _NEW_STATISTICS
        self.may_not_ask = False
        self.skew: float | None = None
        """Seconds that the clock of the broker's machine is ahead of ours."""

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
            tuple(
                BindingFacts(
                    one["source"],
                    one["routing_key"],
                    one["destination"],
                    one["destination_type"] == "queue",
                    str(one.get("properties_key", "")),
                )
                for one in bindings
                if one["source"]
            ),
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
        """What somebody uses and the broker will drop; a broker before 3.12 knows of none."""
        answer = self._get_if_allowed("deprecated-features", "used")
        try:
            found = [Deprecated(str(one["name"]), str(one["deprecation_phase"]), str(one["doc_url"])) for one in answer]
        except (LookupError, TypeError):
            return ()
        return tuple(sorted(found, key=lambda one: one.name))

    def default_queue_type(self) -> str | None:
        answer = self._get_if_allowed("vhosts", self.vhost)
        found = answer.get("default_queue_type") if isinstance(answer, dict) else None
        return str(found) if found not in {None, "undefined"} else None

    def foreign_consumers(self, queue: str) -> int:
        """Consumers of a queue that are not runs of ours; the tags of ours begin with our name."""
        answer = self._get_if_allowed("queues", self.vhost, queue)
        details = answer.get("consumer_details") if isinstance(answer, dict) else None
        if not isinstance(details, list):
            return 0
        return sum(not str(one.get("consumer_tag")).startswith(CONSUMERS.decode()) for one in details)

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
        """The answer; None if this user may not ask for it, or the broker does not know it: the rest is still asked."""
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
        began, asked = self._clock(), time.monotonic()
        try:
            content, date = self.api.ask(*path, query=query)
        except NoReply as failure:
            self._keep_time(failure.date, began, time.monotonic() - asked)
            if failure.code == _UNHEALTHY:
                # The text says what is unhealthy.
                with suppress(ValueError):
                    return json.loads(failure.content)
                return None
            self.may_not_ask = failure.code == _UNAUTHORISED
            raise
        self._keep_time(date, began, time.monotonic() - asked)
        return content

    def _keep_time(self, date: str | None, began: datetime, took: float) -> None:
        """The header knows whole seconds only, and the answer took a while; both in the broker's favour."""
        if date is None or self.skew is not None:
            return
        try:
            skew = (parsedate_to_datetime(date) - began).total_seconds()
        except (TypeError, ValueError):
            return
        self.skew = min(skew + 1.0, 0.0) if skew < 0 else max(skew - took, 0.0)


def survey(connection: Connection, surveyor: Surveyor, deployment: Deployment) -> BrokerFacts:
    """What the management API does not tell stays unknown; what AMQP tells is told all the same."""
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
            there = replace(there, queues={name: _asked_closer(surveyor, deployment, queues[name]) for name in queues})
        refused = _refused(scratch, deployment, missing)
        mark = None if ("queue", CHANGING) in missing else _counts(scratch, CHANGING)
    return BrokerFacts(
        version=connection.version,
        vhost=surveyor.api.vhost,
        user=surveyor.api.user,
        api=surveyor.api.address,
        where=connection.address,
        silent=surveyor.silent,
        may_not_ask=surveyor.may_not_ask,
        map=there,
        missing=missing - {("queue", CHANGING)},
        alarms=alarms,
        deprecated=deprecated,
        default_queue_type=default_type,
        skew=surveyor.skew,
        refused=refused,
        permissions=permissions,
        change_left_behind=mark is not None and mark[0] == 0,
    )


def _asked_closer(surveyor: Surveyor, deployment: Deployment, queue: QueueFacts) -> QueueFacts:
    if queue.name in deployment.inner_queues and queue.consumers:
        return replace(queue, strangers=surveyor.foreign_consumers(queue.name))
    return queue


def _still_stuck(surveyor: Surveyor, queues: Mapping[str, QueueFacts]) -> dict[str, QueueFacts]:
    """What was on its way when the statistics were made is looked at once more, when there are new ones."""
    found = dict(queues)
    suspected = [queue for queue in queues.values() if queue.stuck]
    if suspected:
        time.sleep(surveyor.new_statistics_after)
    for queue in suspected:
        found[queue.name] = replace(queue, stuck=min(queue.stuck, surveyor.stuck(queue.name)))
    return found


def _is_there(scratch: Scratch, kind: str, name: str) -> bool:
    """A refusal of another kind is an answer too: somebody has it."""
    try:
        scratch.call(f"{kind}_declare", passive=True, **{kind: name})
    except ChannelRefused as refused:
        return not refused.is_gone
    return True


def _counted(scratch: Scratch, queues: Mapping[str, QueueFacts]) -> dict[str, QueueFacts]:
    """The counts of just now for those of the statistics, which lag."""
    found = dict(queues)
    asked = (queue for queue in queues.values() if not queue.exclusive and queue.type != "stream")
    for queue, _ in zip(asked, range(_MOST_LOOKED_AT), strict=False):
        counts = _counts(scratch, queue.name)
        if counts is not None:
            held = max(counts[1], queue.messages or 0) if queue.type == "quorum" else counts[1]
            found[queue.name] = replace(queue, consumers=counts[0], messages=held)
    return found


def _counts(scratch: Scratch, queue: str) -> tuple[int, int] | None:
    """Consumers and messages ready."""
    try:
        told = scratch.call("queue_declare", queue=queue, passive=True)
    except (ChannelRefused, NoAnswer, UnicodeEncodeError):
        return None
    return int(told.consumer_count), int(told.message_count)


def _refused(scratch: Scratch, deployment: Deployment, missing: frozenset[tuple[str, str]]) -> tuple[Refused, ...]:
    asked = (queue for queue in sorted(deployment.read) if ("queue", queue) not in missing)
    found = [Refused("read", "queue", queue) for queue in asked if _may_not_read(scratch, queue)]
    for exchange, key in sorted(set(deployment.written)):
        if ("exchange", exchange) in missing:
            continue
        # The broker checks the right before it looks at the expiration, and that before it routes.
        told = scratch.provoke(
            "basic_publish", exchange=exchange, routing_key=key, body=b"", properties=_NEVER_ACCEPTED
        )
        if told.code == NO_PERMISSION:
            found.append(Refused("write", "exchange", exchange))
    return tuple(found)


def _may_not_read(scratch: Scratch, queue: str) -> bool:
    """Asked with a consumer that only a stream could serve."""
    try:
        scratch.call("basic_qos", prefetch_count=1)
        scratch.call("basic_consume", queue=queue, on_message_callback=_ignore, arguments={"x-stream-offset": "next"})
    except ChannelRefused as refused:
        return refused.code == NO_PERMISSION
    scratch.close()
    return False


def _ignore(*_: object) -> None:
    """Of a consumer that no queue but a stream is known to accept."""
