"""One look into a live queue: what it costs, what is there, and the messages as a person may see them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from dlqbatch.amqp.delivery import Delivery, open_envelope
from dlqbatch.amqp.fields import Fields
from dlqbatch.amqp.headers import DELIVERY_COUNT
from dlqbatch.amqp.origin import Trust
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.look import look_at_head
from dlqbatch.broker.queue_types import quorum_queues_and_streams, types_by_api, why_looking_costs
from dlqbatch.broker.streams import offset_of
from dlqbatch.broker.versions import DELAYS_RETRIES
from dlqbatch.errors import BrokerUnreachable, ChannelRefused, DlqbatchError, SettingsError
from dlqbatch.ingest.examine import examine
from dlqbatch.logs import masking
from dlqbatch.messages.content import ShownContent, shown_content
from dlqbatch.messages.shown import unpacked_as_dict
from dlqbatch.peek.rules import Costs, Wanted, costs
from dlqbatch.settings import Settings
from dlqbatch.store.text import json_ready
from dlqbatch.topology.declare import trust_of

MOST: Final = 1_000
"""Messages that one look holds at most: what it holds is hidden from consumers."""
_KEPT: Final = 64 * 1024 * 1024
"""Bytes of bodies that are kept to be shown."""
_TOO_MUCH: Final = f"bodies after the first {_KEPT // 1024 // 1024} MiB are not shown: look at fewer, or filter"


class NoSuchQueue(DlqbatchError):
    """The queue that somebody wants to look into is not on the broker."""

    exit_code = 2

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"there is no queue '{queue}' in this virtual host. Nothing was looked at; check its name, and the virtual "
            "host of the broker's address"
        )


class LookEnded(DlqbatchError):
    """The broker refused to show the queue, or ended the look; what was held is back in the queue."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Seen:
    place: int
    """Counted from the head of the queue."""
    facts: Mapping[str, object]
    content: ShownContent
    body_size: int

    def as_dict(self) -> dict[str, object]:
        return {
            "place": self.place,
            **{name.replace(" ", "_"): json_ready(value) for name, value in self.facts.items()},
            "properties": dict(self.content.readable.properties),
            "headers": dict(self.content.readable.headers),
            "body_size": self.body_size,
            "body_form": self.content.form,
            "body_base64": b64encode(self.content.unpacked.body).decode(),
            **unpacked_as_dict(self.content.unpacked),
            "masked": self.content.is_masked,
        }


@dataclass(slots=True)
class Look:
    queue: str
    kind: str
    ready: int
    consumers: int
    notes: list[str]
    looked_at: int = 0
    messages: list[Seen] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        about = {"queue": self.queue, "type": self.kind, "ready": self.ready, "consumers": self.consumers}
        shown = [each.as_dict() for each in self.messages]
        return {**about, "looked_at": self.looked_at, "notes": list(self.notes), "messages": shown}


def peek(
    settings: Settings,
    queue: str,
    number: int,
    wanted: Wanted,
    *,
    allows_cost: bool = False,
    is_revealed: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Look:
    """Look at so many messages at the head of the queue; SettingsError if it would harm them.

    They are masked, unless `is_revealed`; then who sees them has been written down before.
    """
    connection = connect(access_to(settings, "dlqbatch peek"))
    try:
        with connection.scratch_for(queue) as scratch:
            try:
                there = scratch.look("queue", queue)
            except ChannelRefused as refused:
                raise (NoSuchQueue(queue) if refused.is_gone else refused) from refused
        kind = _kind(settings, connection, queue)
        found = _costs(settings, connection, queue, kind)
        if found.refused is not None and not allows_cost:
            raise SettingsError(
                f"'{queue}' is not looked at: {found.refused}",
                "nothing was taken; --allow-delivery-cost looks all the same",
            )
        look = Look(queue, kind, int(there.message_count), int(there.consumer_count), list(found.notes))
        if look.consumers and kind != "stream":
            look.notes.append(
                f"{look.consumers} consumer(s) are connected: what they hold is not shown, and while these were held "
                "they may have been given later messages first"
            )
        # More than is ready would be waited for in vain.
        limit = number if kind == "stream" else min(number, look.ready)
        show = _Show(look, wanted, trust_of(settings, connection), Fields(settings.fields), is_revealed)
        if (why := look_at_head(connection, queue, kind, limit, show.see, stopped)) is not None:
            raise LookEnded(f"'{queue}': {why}")
        if look.looked_at < limit and kind != "stream":
            look.notes.append(
                f"{limit} message(s) were ready, and {look.looked_at} came: consumers have taken the others, they have "
                "expired, or another consumer is the single active one"
            )
        return look
    finally:
        connection.close()


def _kind(settings: Settings, connection: Connection, queue: str) -> str:
    known = types_by_api(management_api(settings, quickly=True), [queue])
    # A quorum queue that is taken for a classic one would lose its order.
    quorum, streams = quorum_queues_and_streams(connection, [queue], otherwise=False, cut_off=True, known=known)
    return "stream" if queue in streams else "quorum" if queue in quorum else "classic"


def _costs(settings: Settings, connection: Connection, queue: str, kind: str) -> Costs:
    api = management_api(settings)
    limit = why_looking_costs(connection, queue, api) if kind == "quorum" else None
    hides = None
    if kind == "quorum" and connection.version >= DELAYS_RETRIES:
        try:
            answer = api.ask("queues", api.vhost, queue, query="columns=arguments,effective_policy_definition").content
        except BrokerUnreachable as failure:
            hides = f"whether delayed retry would hide what is put back is not known: {failure.why}"
        else:
            answer = answer if isinstance(answer, dict) else {}
            policy, declared = answer.get("effective_policy_definition") or {}, answer.get("arguments") or {}
            retry = policy.get("delayed-retry-type", declared.get("x-delayed-retry-type", "disabled"))
            if retry not in {"disabled", "failed"}:
                hides = f"delayed retry ('{retry}') would hide what is put back, and change the order"
    return costs(kind, connection.version, limit, hides=hides)


@dataclass(slots=True)
class _Show:
    look: Look
    wanted: Wanted
    trust: Trust
    fields: Fields
    is_revealed: bool
    kept: int = 0

    def see(self, delivery: Delivery) -> None:
        look, rules = self.look, masking()
        look.looked_at += 1
        each = examine(delivery, self.trust, datetime.now(UTC), self.fields)
        content = shown_content(delivery.properties, each.body, is_revealed=self.is_revealed)
        app_id = (each.app_id or b"").decode(errors="backslashreplace")
        event = each.origin.event if each.origin is not None else delivery.routing_key
        is_wanted = self.wanted.holds(
            event=event,
            error_type=each.failure.type or "",
            source=app_id,
            headers=content.readable.headers,
            fields=each.fields,
            body=content.unpacked.body.decode(errors="replace") if self.wanted.texts else "",
        )
        if not is_wanted:
            return
        self.kept += len(content.unpacked.body)
        if self.kept > _KEPT:
            # To raise here would cost the connection, and every message a delivery.
            content = shown_content(delivery.properties, b"", is_revealed=self.is_revealed)
            if _TOO_MUCH not in look.notes:
                look.notes.append(_TOO_MUCH)
        headers = open_envelope("", "", redelivered=False, body_size=0, properties=delivery.properties).headers
        count = headers.brokers.get(DELIVERY_COUNT) if headers is not None else None
        numbers = {"delivery count": count.as_integer()} if count is not None else {}
        if look.kind == "stream":
            numbers["offset"] = offset_of(delivery)
        facts = {
            "exchange": delivery.exchange,
            "routing key": delivery.routing_key,
            "redelivered": delivery.redelivered,
            **numbers,
            "id": each.id,
            "event": event,
            "origin": each.origin.name if each.origin is not None else "",
            "error type": each.failure.type,
            "error": each.failure.message,
            "source": app_id,
        }
        if not self.is_revealed:
            facts = {name: rules.value(value) for name, value in facts.items()}
        look.messages.append(Seen(look.looked_at, facts, content, delivery.body_size))
