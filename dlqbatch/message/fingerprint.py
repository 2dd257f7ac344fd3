"""Which failures are the same: a text of 16 hexadecimal digits that equal ones share.

With a stack it is the type and the first frame of the application, the one nearest to where it was raised. Without one
it is the type, the message with its variable parts masked, and the origin: where a message failed is then all that is
known of the place. Line numbers, hosts, ids and the folders of a deployment are not part of it.

Masks and not templates learnt from the messages (Drain and its kin): a learnt template depends on which messages came
before, so that two runs would name one failure differently, and a name would change once more is learnt. A mask needs
no memory: every process, on every day, gives the same answer, and a group may be stored, linked to and alerted on. What
it costs: a variable part that looks like any other word (a person's name without quotes) splits a group.

What counts as the failure, where one is wrapped in another:

.NET    the innermost: MassTransit writes down nothing else, and NServiceBus all of them
Java    the outermost that is not a known wrapper: Spring's translations tell more than the driver's one exception
Python  the same, of those that are joined by `raise … from …`

However long a text is, only so much of it is read: the work is bounded.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from dlqbatch.message.mask import masked
from dlqbatch.message.stacks import Trace, application_frame, traces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlqbatch.message.dialects import Failure

_VERSION: Final = "1"
"""To be raised when the same failure would get another fingerprint than before."""

_WRAPPERS: Final = frozenset(
    {
        "ListenerExecutionFailedException",
        "ReplyFailureException",
        "AmqpRejectAndDontRequeueException",
        "MessagingException",
        "MessageHandlingException",
        "ExecutionException",
        "CompletionException",
        "InvocationTargetException",
        "UndeclaredThrowableException",
        "UncheckedIOException",
        "RuntimeException",
        "Exception",
        "AggregateException",
        "TargetInvocationException",
        "ExceptionGroup",
        "RetryError",
    }
)
"""They say that something failed inside, and nothing of their own."""

_ANONYMOUS: Final = re.compile(
    r"^amq\..*|[0-9a-f]{8}-[0-9a-f-]{27,}|[0-9a-f]{12,}|(?<=\.gen-)[\w-]{22}$", re.IGNORECASE
)
"""In a queue's name: what is made anew for each process."""


def fingerprint(failure: Failure, origin: str = "") -> str:
    """`origin` is the name of the queue where it failed."""
    stack, told_type = failure.stack or "", failure.type or ""
    named, frame = (_remembered if len(stack) <= _ORDINARY_SIZE else _named)(stack, told_type)
    if frame is not None:
        return _hash("frame", named, frame)
    return _hash("message", named, masked(failure.message or ""), _ANONYMOUS.sub("*", origin))


def _named(stack: str, told_type: str) -> tuple[str, str | None]:
    """The type that counts, and the frame of the application, if there is one."""
    chain = traces(stack) if stack else ()
    chosen = _chosen(chain, told_type)
    named = simple_type(chosen.type if chosen is not None and chosen.type else told_type)
    return named, _frame(chain, chosen) if chosen is not None else None


_ORDINARY_SIZE: Final = 16_384
"""Characters of a stack that is worth remembering; more of them would fill the memory."""
_remembered: Final = lru_cache(maxsize=256)(_named)
"""What failed once fails in the same place again, and to read a stack costs more than all else about a message."""


def _chosen(chain: Sequence[Trace], told_type: str | None) -> Trace | None:
    """The failure that counts; `chain` begins with the outermost."""
    if not chain:
        return None
    if chain[-1].is_dotnet:
        return chain[-1]
    # What a dialect already found beneath a wrapper is believed if the trace has it too.
    for trace in chain:
        if simple_type(trace.type or told_type or "") not in _WRAPPERS:
            return trace
    return chain[-1]


def _frame(chain: Sequence[Trace], chosen: Trace) -> str | None:
    """Java leaves out of a cause the frames that it shares with what encloses it, so that those are asked next."""
    if chosen.is_dotnet:
        # MassTransit writes down no other frames.
        return application_frame(chosen)
    at = chain.index(chosen)
    for trace in (*reversed(chain[: at + 1]), *chain[at + 1 :]):
        frame = application_frame(trace)
        if frame is not None:
            return frame
    return None


_GENERIC: Final = re.compile(r"`\d+(?:\[.*)?$|\[\[.*$|<.*$|\[.*$")


def simple_type(name: str) -> str:
    """The name of the class without its namespace, generic arguments or pointer: nested ones with their outer class."""
    simple = _GENERIC.sub("", name.strip()[:512]).lstrip("*").rstrip(".:")
    return simple.rpartition(".")[2].replace("+", "$")


def _hash(*parts: str) -> str:
    text = "\0".join((_VERSION, *parts))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
