"""Why a message failed, in the words of whatever handled it.

Spring AMQP     x-exception-message, x-exception-stacktrace; the type stands at the head of the trace, or behind its
                first `Caused by:` where Spring's own wrapper is the head, for that is whose message Spring writes
MassTransit     MT-Fault-ExceptionType, MT-Fault-Message, MT-Fault-StackTrace; MT-Reason alone for what no consumer took
NServiceBus     NServiceBus.ExceptionInfo.ExceptionType, .Message, .StackTrace
Symfony         its stamp ErrorDetailsStamp, in a header of that name: a list as JSON, whose last is the newest
rascal          a header `rascal`, a table with the table `error`: message and code
Dramatiq        no headers; its message is JSON, and `options.traceback` in it is the failure that it was retried for
                last; remoulade writes the same
the broker      the newest death: rejected, expired, maxlen or delivery_limit, and the queue

The first of them that says anything is believed, whole. `dlqbatch.consumer` speaks MassTransit's words. Where it gave
the message up, they are the newest. Headers that say when they were written, and are older than the newest death, tell
of an earlier failure and are passed over.

Headers come before the broker, which only knows that a
message was rejected and not why. Bytes that are not UTF-8 are shown with replacement characters: this is for people
to read and for grouping; the bytes themselves stay with the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from dlqbatch.amqp.rascal import rascal_table, table_of
from dlqbatch.amqp.table import Field, UnreadableTable, first_fields, first_texts
from dlqbatch.amqp.x_death import LATEST_TIME, Death

# A larger body, in bytes, is not parsed.
_LARGEST_PARSED: Final = 1024 * 1024
_LARGEST_COUNT: Final = 2**31 - 1
_LONGEST_ID: Final = 255


class Failure(NamedTuple):
    """What is known of a failure; None where nobody said."""

    type: str | None = None
    message: str | None = None
    stack: str | None = None


class Dramatiq(NamedTuple):
    """What Dramatiq or remoulade writes into the body of its messages.

    Each retry is a new message of the broker, without the headers of the one before; only this goes with it.
    """

    id: str
    """The same in every retry; empty if there is none."""
    retries: int = 0
    """How many times its framework published it anew."""
    failure: Failure = Failure()
    """Why it was published anew for the last time: what has killed it afterwards is written nowhere."""
    actor: str = ""


def failure(
    foreign: bytes,
    deaths: Sequence[Death],
    dramatiq: Dramatiq | None = None,
    *,
    is_given_up_by_worker: bool = False,
) -> Failure:
    """Never raises, whatever a message holds.

    `foreign` is the encoded entries of a header table. `deaths` are the newest first, without those in queues of ours.
    """
    said = {name: value.decode("utf-8", "replace") for name, value in first_texts(foreign).items()}
    if is_given_up_by_worker and any(told := _masstransit(said)):
        return told
    for dialect in (_spring, _masstransit, _nservicebus, _symfony):
        told = dialect(said)
        if any(told) and not _is_older(said.get(_TIMES.get(dialect, b"")), deaths):
            return told
    if any(told := _rascal(foreign)):
        return told
    return dramatiq.failure if dramatiq is not None and any(dramatiq.failure) else broker_failure(deaths)


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


_TIMES: Final = {_masstransit: b"MT-Fault-Timestamp", _nservicebus: b"NServiceBus.TimeOfFailure"}
"""The header that says when it failed, of the dialects that have one."""
# The broker has a clock of its own: two times that are less apart may belong to one failure.
_CLOCKS_DIFFER: Final = timedelta(seconds=30)


def _is_older(said: str | None, deaths: Sequence[Death]) -> bool:
    """Whether the message failed once more after this was written: its headers stay whoever fails with it next."""
    died = next((death.time for death in deaths if death.time is not None), None)
    if said is None or died is None or died > LATEST_TIME:
        return False
    try:
        written = datetime.fromisoformat(said)
    except ValueError:
        return False  # NServiceBus writes a form of its own
    return written.tzinfo is not None and datetime.fromtimestamp(died, UTC) - written > _CLOCKS_DIFFER


# --- Symfony Messenger

_STAMP: Final = b"X-Message-Stamp-Symfony\\Component\\Messenger\\Stamp\\ErrorDetailsStamp"


def _symfony(said: Mapping[bytes, str]) -> Failure:
    stamps = said.get(_STAMP)
    if stamps is None or len(stamps) > _LARGEST_PARSED:
        return Failure()
    try:
        newest = json.loads(stamps)[-1]
        names, flat = (newest["exceptionClass"], newest["exceptionMessage"]), newest.get("flattenException")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return Failure()
    trace = flat.get("traceAsString") if isinstance(flat, dict) else None
    kind, message, stack = (text if isinstance(text, str) and text else None for text in (*names, trace))
    return Failure(kind, message, stack)


# --- rascal


def _rascal(foreign: bytes) -> Failure:
    if b"\x06rascalF" not in foreign:
        return Failure()
    try:
        error = table_of(rascal_table(first_fields(foreign)).get(b"error", _NOTHING))
    except (UnreadableTable, IndexError):
        return Failure()
    code, message = error.get(b"code", _NOTHING), error.get(b"message", _NOTHING).as_text()
    number = code.as_integer()
    kind = str(number) if number is not None else code.as_text()
    return Failure(*(_shown(text) if text else None for text in (kind, message)))


_NOTHING: Final = Field(ord("V"), b"")


def _shown(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# --- Dramatiq

_PYTHON_END: Final = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL)


def read_dramatiq(body: bytes) -> Dramatiq | None:
    """None if it is no message of Dramatiq's, or cannot be read."""
    # Every message of Dramatiq names its actor; a look for that is cheaper than to parse each body there is.
    if len(body) > _LARGEST_PARSED or not body.startswith(b"{") or b'"actor_name"' not in body:
        return None
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if "actor_name" not in told:
        return None
    options = told.get("options")
    options = options if isinstance(options, dict) else {}
    name, retries, traceback = told.get("message_id"), options.get("retries"), options.get("traceback")
    return Dramatiq(
        name if isinstance(name, str) and len(name) <= _LONGEST_ID else "",
        min(max(retries, 0), _LARGEST_COUNT) if type(retries) is int else 0,
        _of_traceback(traceback) if isinstance(traceback, str) and traceback else Failure(),
        told["actor_name"] if isinstance(told["actor_name"], str) else "",
    )


def framework_id(body: bytes, dramatiq: Dramatiq | None) -> str | None:
    """What stays in a body that Dramatiq, remoulade or taskiq publishes anew, without our headers."""
    if dramatiq is not None:
        return dramatiq.id or None
    if len(body) > _LARGEST_PARSED or not body.startswith(b"{") or b'"task_name"' not in body:
        return None
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = told.get("task_id") if "task_name" in told else None
    return name if isinstance(name, str) and 0 < len(name) <= _LONGEST_ID else None


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


def broker_failure(deaths: Sequence[Death]) -> Failure:
    """All that is known where nobody wrote down an error."""
    for death in deaths:
        if death.reason:
            queue, reason = _shown(death.queue), _shown(death.reason)
            return Failure(reason, _REASONS.get(reason, "it left '{}'").format(queue))
    return Failure()


# --- What a message asks for, where nobody wrote down an error

_TASK: Final = b"task"
"""Celery's header with the name of the task."""
_SPRING_TYPE: Final = b"__TypeId__"


def kind_of_work(
    foreign: bytes, message_type: bytes | None, dramatiq: Dramatiq | None, body: bytes, event: str | None
) -> str:
    """The task, the actor, the message's type or pattern, or else its event; it never raises."""
    said = first_texts(foreign)
    if task := said.get(_TASK):
        return f"task {_name(task)}"
    if dramatiq is not None and dramatiq.actor:
        return f"actor {dramatiq.actor[:_LONGEST_KIND]}"
    if message_type := said.get(_SPRING_TYPE) or message_type:
        return f"type {_name(message_type)}"
    if pattern := _pattern(body):
        return f"pattern {pattern[:_LONGEST_KIND]}"
    return f"event {event}" if event else ""


_LONGEST_KIND: Final = 255


def _name(text: bytes) -> str:
    return text[:_LONGEST_KIND].decode("utf-8", "replace")


def _pattern(body: bytes) -> str:
    """NestJS names what a message asks for in its body."""
    if len(body) > _LARGEST_PARSED or not body.startswith(b"{") or b'"pattern"' not in body:
        return ""
    try:
        told = json.loads(body).get("pattern")
    except (ValueError, RecursionError):
        return ""
    return told if isinstance(told, str) else ""
