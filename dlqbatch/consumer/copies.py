"""The properties of what a worker publishes: its message with a count, or with the reason why it was given up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlqbatch.consumer.message import WORKER_RETRIES
from dlqbatch.message.headers import ID
from dlqbatch.message.properties import join
from dlqbatch.message.stamp import stamp
from dlqbatch.message.table import encode_field, encode_integer, encode_text, fields

if TYPE_CHECKING:
    from dlqbatch.consumer.message import Message
    from dlqbatch.message.dialects import Failure

# Headers that `ingest` understands; the words are MassTransit's, which has one for each part.
_TYPE, _MESSAGE, _STACK = b"MT-Fault-ExceptionType", b"MT-Fault-Message", b"MT-Fault-StackTrace"
_COUNT: Final = frozenset((WORKER_RETRIES,))
_FAILURE: Final = frozenset((WORKER_RETRIES, _TYPE, _MESSAGE, _STACK))
"""Of an earlier failure, where one is given up; a handler that tries again may want to read them."""
_LONGEST_TYPE, _LONGEST_MESSAGE, _LONGEST_STACK = 255, 4_096, 32_768


@dataclass(frozen=True, slots=True)
class Copies:
    login: bytes
    limit: int
    """Bytes of properties; a header table cannot be split over frames."""

    def counted(self, message: Message) -> bytes | None:
        """Tried once more; None if there is no room for the count."""
        return self._stamped(message, encode_integer(WORKER_RETRIES, message.context.retries + 1), _COUNT)

    def given_up(self, message: Message, reason: str, failure: Failure) -> tuple[str, bytes] | None:
        """Its id, and as much of why as there is room for; None if the message as it came has no room either.

        A worker that published nothing would meet the same message again and again, with all others behind it.
        """
        told = self._told(message, reason, failure)
        return (message.journey.id, told) if told is not None else self._as_it_came(message)

    def _told(self, message: Message, reason: str, failure: Failure) -> bytes | None:
        kind, text = (failure.type or "")[:_LONGEST_TYPE], (failure.message or "")[:_LONGEST_MESSAGE]
        told = encode_text(_TYPE, kind) + encode_text(_MESSAGE, text)
        dead_at = int(time.time())
        for added in (told, b""):
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
            envelope = envelope._replace(headers=headers._replace(foreign=_without(replaced, headers.foreign) + added))
        if reason is not None and journey.retries is not None:
            journey = journey._replace(retries=max(journey.retries, message.context.retries))
        return stamp(envelope, journey, login=self.login, limit=self.limit, reason=reason, dead_at=dead_at)

    def _as_it_came(self, message: Message) -> tuple[str, bytes] | None:
        headers = message.envelope.headers
        if headers is None:
            return None
        ours = b"".join(encode_field(name, field) for name, field in headers.ours.items())
        properties = join(message.envelope.properties, _without(_COUNT, headers.foreign) + ours, self.login)
        # Returned as unroutable it is known by the id in it, which need not be the one that it would have here.
        brought = headers.ours.get(ID)
        identity = brought.as_text() if brought is not None else None
        return (identity or message.journey.id, properties) if len(properties) <= self.limit else None


def _without(replaced: frozenset[bytes], foreign: bytes) -> bytes:
    return b"".join(encode_field(name, field) for name, field in fields(foreign) if name not in replaced)


def _end_of(stack: str, room: int) -> str:
    """A stack's end says most."""
    data = stack[-_LONGEST_STACK:].encode()
    return data[max(len(data) - room, 0) :].decode("utf-8", "ignore") if room > 0 else ""
