"""A delivery as its worker sees it, the failure of its handler, and the copies that the worker publishes of it."""

from __future__ import annotations

import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dlqbatch.amqp import headers as names
from dlqbatch.amqp.delivery import Delivery, Envelope, open_envelope
from dlqbatch.amqp.headers import ID, WORKER_RETRIES
from dlqbatch.amqp.origin import at_its_consumer
from dlqbatch.amqp.properties import join
from dlqbatch.amqp.readable import readable
from dlqbatch.amqp.retry_headers import Journey, Origin
from dlqbatch.amqp.stamp import stamp, without
from dlqbatch.amqp.table import encode_field, encode_integer, encode_text, fields, to_bytes
from dlqbatch.ingest.dialects import Failure


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler gets beside the body."""

    routing_key: str
    """The routing key as it was published, also after retries."""
    retries: int
    """How often this message was tried before."""
    redelivered: bool
    message_id: str | None
    headers: Mapping[str, object]
    """The publisher's: without ours and those of the broker, so that they may be passed on."""


def failure_of(handler: Callable[[bytes, Context], object], body: bytes, context: Context) -> Failure | None:
    """Why the handler failed, None if it did not; called in its thread, and never raises, whatever the handler does."""
    try:
        made = handler(body, context)
        if isinstance(made, (Awaitable, Generator, AsyncGenerator)):
            # The handler was wrapped in a plain function: nothing of the coroutine has run.
            raise TypeError(f"the handler returned {type(made).__name__}, which nobody waits for")  # noqa: TRY301  (recorded as any other failure)
    except BaseException as error:  # noqa: BLE001  (a handler that calls sys.exit() has failed like any other)
        return failure_from(error)
    return None


def failure_from(error: BaseException) -> Failure:
    kind = _text_of(lambda: _name(type(error)), "?")
    stack = _text_of(lambda: "".join(traceback.format_exception(error)), "")
    return Failure(kind, _text_of(lambda: str(error), f"<{kind}>"), stack)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text_of(write: Callable[[], str], otherwise: str) -> str:
    try:
        # Half a character could not be written as UTF-8.
        return write().encode("utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001  (an exception whose own text fails must not end the worker)
        return otherwise


@dataclass(frozen=True, slots=True)
class Message:
    envelope: Envelope
    journey: Journey
    """Our headers as they would be published again."""
    origin: Origin
    context: Context
    digest: Callable[[], str]

    @property
    def key(self) -> str:
        return self.origin.key

    @classmethod
    def of(cls, delivery: Delivery, queue: str, *, counts_itself: bool) -> Message:
        """`counts_itself`: the queue is a quorum queue, which counts deliveries."""
        envelope = open_envelope(
            delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
        )
        headers = envelope.headers or names.NONE
        journey, origin = at_its_consumer(queue, envelope, delivery.digest)
        if journey.invalid_count:
            journey = Journey(id=journey.id, retries=None)
        first = journey.first_failed_at if journey.first_failed_at is not None else int(time.time())
        journey = journey._replace(id=journey.id or uuid.uuid4().hex, origin=origin, first_failed_at=first)
        shown = readable(delivery.properties)
        message_id = shown.properties.get("message_id")
        counts = [0]
        if counts_itself and names.DELIVERY_COUNT in headers.brokers:
            counts.append(headers.brokers[names.DELIVERY_COUNT].as_integer() or 0)
        if not journey.is_new:
            counts += [field.as_integer() or 0 for name, field in fields(headers.foreign) if name == WORKER_RETRIES]
        context = Context(
            routing_key=origin.key,
            retries=max(counts),
            redelivered=delivery.redelivered,
            message_id=message_id if isinstance(message_id, str) else None,
            headers={name: value for name, value in shown.headers.items() if _is_the_publishers(name)},
        )
        return cls(envelope, journey, origin, context, delivery.digest)


def _is_the_publishers(name: str) -> bool:
    encoded = to_bytes(name)
    return not encoded.startswith(names.PREFIX) and encoded not in names.BROKERS


# Headers that `ingest` reads; MassTransit has a header for each part of an error.
_TYPE, _MESSAGE, _STACK = b"MT-Fault-ExceptionType", b"MT-Fault-Message", b"MT-Fault-StackTrace"
_AT: Final = b"MT-Fault-Timestamp"
"""The time of the failure: if the message fails again later without a reason, this reason is not its last."""
_COUNT: Final = frozenset((WORKER_RETRIES,))
_FAILURE: Final = frozenset((WORKER_RETRIES, _TYPE, _MESSAGE, _STACK, _AT))
"""The headers that a dead letter gets anew; before that they stay, so that a handler may read them."""
_LONGEST_TYPE, _LONGEST_MESSAGE, _LONGEST_STACK = 255, 4_096, 32_768


@dataclass(frozen=True, slots=True)
class Copies:
    login: bytes | None
    limit: int
    """Bytes of properties; a header table cannot be split over frames."""

    def counted(self, message: Message) -> bytes | None:
        """The properties for another try, with its count; None if there is no room for the count."""
        return self._stamped(message, encode_integer(WORKER_RETRIES, message.context.retries + 1), _COUNT)

    def given_up(self, message: Message, reason: str, failure: Failure) -> tuple[str, bytes] | None:
        """The id and the properties of a dead letter, with as much of the failure as there is room for.

        Without room for our headers it is published as it came: else the same message would come again and again. None
        if that is too large as well.
        """
        properties = self._with_reason(message, reason, failure)
        return (message.journey.id, properties) if properties is not None else self._as_it_came(message)

    def _with_reason(self, message: Message, reason: str, failure: Failure) -> bytes | None:
        kind, text = (failure.type or "")[:_LONGEST_TYPE], (failure.message or "")[:_LONGEST_MESSAGE]
        dead_at = int(time.time())
        at = datetime.fromtimestamp(dead_at, UTC).isoformat()
        reasons = encode_text(_TYPE, kind) + encode_text(_MESSAGE, text) + encode_text(_AT, at)
        for added in (reasons, b""):
            properties = self._stamped(message, added, _FAILURE, reason, dead_at)
            if properties is not None:
                room = self.limit - len(properties) - len(encode_text(_STACK, ""))
                stack = _end_of(failure.stack or "", room)
                if not stack:
                    return properties
                return self._stamped(message, added + encode_text(_STACK, stack), _FAILURE, reason, dead_at)
        return None

    def _stamped(
        self,
        message: Message,
        added: bytes,
        replaced: frozenset[bytes],
        reason: str | None = None,
        dead_at: int | None = None,
    ) -> bytes | None:
        envelope, journey, headers = message.envelope, message.journey, message.envelope.headers
        if headers is not None:
            ours = {} if journey.is_new else headers.ours
            foreign = without(headers.foreign, *replaced) + added
            envelope = envelope._replace(headers=headers._replace(ours=ours, foreign=foreign))
            # `stamp` would take the added count out of a new message.
            journey = journey._replace(is_new=False)
        if reason is not None and journey.retries is not None:
            journey = journey._replace(retries=max(journey.retries, message.context.retries))
        # The route of a copy is decided later, and may change while it waits.
        digest, login = message.digest(), self.login
        return stamp(envelope, journey, login=login, limit=self.limit, digest=digest, reason=reason, dead_at=dead_at)

    def _as_it_came(self, message: Message) -> tuple[str, bytes] | None:
        headers = message.envelope.headers
        if headers is None:
            return None
        ours = b"".join(encode_field(name, field) for name, field in headers.ours.items())
        properties = join(message.envelope.properties, without(headers.foreign, *_COUNT) + ours, self.login)
        # A basic.return is matched by the id in the message, which may differ from the id of its journey.
        brought = headers.ours.get(ID)
        identity = brought.as_text() if brought is not None else None
        return (identity or message.journey.id, properties) if len(properties) <= self.limit else None


def _end_of(stack: str, room: int) -> str:
    """A stack's end says most."""
    data = stack[-_LONGEST_STACK:].encode()
    return data[max(len(data) - room, 0) :].decode("utf-8", "ignore") if room > 0 else ""
