"""Why a message failed, in the words of whatever handled it.

Spring AMQP     x-exception-message, x-exception-stacktrace; the type stands at the head of the trace, or behind its
                first `Caused by:` where Spring's own wrapper is the head, for that is whose message Spring writes
MassTransit     MT-Fault-ExceptionType, MT-Fault-Message, MT-Fault-StackTrace; MT-Reason alone for what no consumer took
NServiceBus     NServiceBus.ExceptionInfo.ExceptionType, .Message, .StackTrace
Dramatiq        no headers; its message is JSON, and `options.traceback` in it is the last retried failure
the broker      the newest death: rejected, expired, maxlen or delivery_limit, and the queue

The first of them that says anything is believed, whole. Headers come before the broker, which only knows that a
message was rejected and not why. Bytes that are not UTF-8 are shown with replacement characters: this is for people
to read and for grouping; the bytes themselves stay with the message.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch.message.table import first_texts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlqbatch.message.deaths import Death

_LARGEST_PARSED: Final = 1024 * 1024
"""Bytes of a body that is looked into for a traceback."""


class Failure(NamedTuple):
    """What is known of a failure; None where nobody said."""

    type: str | None = None
    message: str | None = None
    stack: str | None = None


def failure(foreign: bytes, deaths: Sequence[Death], body: bytes = b"") -> Failure:
    """Never raises, whatever a message holds.

    `foreign` is the encoded entries of a header table. `deaths` are the newest first, without those in queues of ours.
    """
    said = {name: value.decode("utf-8", "replace") for name, value in first_texts(foreign).items()}
    for dialect in (_spring, _masstransit, _nservicebus):
        told = dialect(said)
        if any(told):
            return told
    told = _dramatiq(body)
    return told if any(told) else _broker(deaths)


# --- Spring AMQP

_JAVA_HEAD: Final = re.compile(r'\s*(?:Exception in thread "[^"]*" )?([A-Za-z_$][\w.$]*)')
_CAUSE: Final = re.compile(r"^Caused by: ([A-Za-z_$][\w.$]*)", re.MULTILINE)
_WRAPPER: Final = "ListenerExecutionFailedException"


def _spring(said: Mapping[bytes, str]) -> Failure:
    stack = said.get(b"x-exception-stacktrace")
    return Failure(_java_type(stack or ""), said.get(b"x-exception-message"), stack)


def _java_type(stack: str) -> str | None:
    head = _JAVA_HEAD.match(stack)
    if head is None:
        return None
    if head[1].endswith(_WRAPPER):
        cause = _CAUSE.search(stack)
        if cause is not None:
            return cause[1]
    return head[1]


# --- .NET


def _masstransit(said: Mapping[bytes, str]) -> Failure:
    told = Failure(*(said.get(b"MT-Fault-" + part) for part in (b"ExceptionType", b"Message", b"StackTrace")))
    return told if any(told) else Failure(said.get(b"MT-Reason"))


def _nservicebus(said: Mapping[bytes, str]) -> Failure:
    parts = (b"ExceptionType", b"Message", b"StackTrace")
    return Failure(*(said.get(b"NServiceBus.ExceptionInfo." + part) for part in parts))


# --- Dramatiq

_PYTHON_END: Final = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL)


def _dramatiq(body: bytes) -> Failure:
    # Every message of Dramatiq names its actor; a look for that is cheaper than to parse each body there is.
    if len(body) > _LARGEST_PARSED or not body.startswith(b"{") or b'"actor_name"' not in body:
        return Failure()
    try:
        options = json.loads(body).get("options")
    except (ValueError, RecursionError):
        return Failure()
    traceback = options.get("traceback") if isinstance(options, dict) else None
    return _of_traceback(traceback) if isinstance(traceback, str) and traceback else Failure()


def _of_traceback(traceback: str) -> Failure:
    """The type and the message follow the last frame, whose lines are indented; the message may have lines too."""
    frame = traceback.rfind('\n  File "')
    lines = traceback[frame + 1 :].rstrip().split("\n")
    while frame >= 0 and lines and lines[0].startswith(" "):
        del lines[0]
    end = _PYTHON_END.match("\n".join(lines))
    return Failure(end[1] if end else None, end[2] if end else None, traceback)


# --- The broker

_REASONS: Final = {
    "rejected": "a consumer of '{}' rejected it",
    "expired": "it waited too long in '{}'",
    "maxlen": "'{}' was full",
    "delivery_limit": "it was delivered too often from '{}'",
}


def _broker(deaths: Sequence[Death]) -> Failure:
    for death in deaths:
        if death.reason:
            queue = death.queue.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            reason = death.reason.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return Failure(reason, _REASONS.get(reason, "it left '{}'").format(queue))
    return Failure()
