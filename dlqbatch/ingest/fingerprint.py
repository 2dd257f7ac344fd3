"""Which failures are the same: a text of 16 hexadecimal digits that equal ones share.

With a stack it is the type and the first frame of the application, the one nearest to where it was raised. Without one
it is the type, the message with its variable parts masked, and the origin: where a message failed is then all that is
known of the place. Where nobody told an error, only the broker, it is the task, type or event, and the origin, so that
not all that a queue rejects is one group. Line numbers, hosts, ids and the folders of a deployment are not part of it.

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
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.stacks import Trace, application_frame, traces

# The version is raised when the same failure would get another fingerprint than before.
_VERSION: Final = "1"

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
"""The parts of a queue's name that are made anew for each process."""


def fingerprint(failure: Failure, origin: str = "", kind: str = "") -> str:
    """`origin` is the name of the queue where it failed; `kind` is what it asks for, where nobody told an error."""
    if kind:
        return _hash("kind", failure.type or "", masked(kind), _ANONYMOUS.sub("*", origin))
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


# Only a stack of at most so many characters is remembered; larger ones would fill the memory.
_ORDINARY_SIZE: Final = 16_384
# The remembered results: failures repeat, and to read a stack costs more than all else about a message.
_remembered: Final = lru_cache(maxsize=256)(_named)


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


# Only so many characters of a message are read.
_READ: Final = 8192
# The result is cut to so many characters: there a message says what failed.
_KEPT: Final = 512
# Every quantifier is bounded, or its class cannot match what follows it, so that the work grows with the text alone.
_STATUS: Final = (
    r"\b(?:http(?:/\d(?:\.\d)?)?|status(?:[ _-]?code)?|response(?:[ _-]code)?|code|success)[ :=]{1,3}[1-5]\d\d\b"
)
_KEEP: Final = (
    _STATUS,
    r"\b[1-5]\d\d (?:client|server) error|\bora-\d{5}\b|\berrno \d+|\bsqlstate[ :=\[(]{1,3}\w{5}\b",
)
"""What looks like a number and is a name: it tells two failures apart."""
_PARTS: Final = "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,6}"
_IPV6: Final = rf"(?:{_PARTS})?::(?:{_PARTS})?(?:\.\d{{1,3}}){{0,3}}|[0-9a-f]{{1,4}}(?::[0-9a-f]{{1,4}}){{7}}"
_DOMAIN: Final = "(?:com|net|org|io|internal|local|localdomain|lan|corp|svc|cloud|dev)"
_DAY: Final = "(?:mon|tue|wed|thu|fri|sat|sun)"
_MONTH: Final = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_CLOCK: Final = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?: ?[ap]m\b)?"
_ZONE: Final = r"(?: ?(?:z\b|utc\b|gmt\b|[+-]\d\d:?\d\d\b))?"
_MASK: Final = (
    # Addresses
    r"\b[a-z][a-z0-9+.-]{1,20}://[^\s\"'<>)\]},;]+",
    r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    # Times
    rf"\b\d{{4}}[-/]\d\d[-/]\d\d(?:[t ]{_CLOCK})?{_ZONE}",
    rf"\b\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{4}}(?: {_CLOCK})?",
    rf"\b(?:{_DAY},? )?(?:\d{{1,2}} )?{_MONTH} \d{{1,4}}\b(?:,? \d{{4}}\b)?(?: {_CLOCK})?{_ZONE}(?: \d{{4}}\b)?",
    rf"\b{_CLOCK}{_ZONE}",
    # Hosts
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b",
    rf"(?<![\w:])\[?(?:{_IPV6})\]?(?::\d{{1,5}})?(?![\w:])",
    r"\b[a-z][\w-]{0,62}(?:\.[\w-]{1,63}){0,6}:\d{2,5}\b",
    rf"\b[a-z0-9][\w-]{{0,62}}(?:\.[\w-]{{1,63}}){{0,6}}\.{_DOMAIN}\b",
    # What is quoted; an apostrophe within a word is no quote.
    r"\"(?:[^\"\\\n]|\\.){0,4000}\"|(?<!\w)'[^'\n]{0,500}'(?!\w)|`[^`\n]{0,500}`",
    r"\u201c[^\u201d]{0,500}\u201d|\u2018[^\u2019]{0,500}\u2019|\u00ab[^\u00bb]{0,500}\u00bb",
    # Paths, then ids and numbers in their many shapes.
    r"(?<![\w.])(?:[a-z]:)?(?:[\\/][\w.@~+%=-]{1,255}){2,40}[\\/]?",
    r"\b(?=[a-f]{0,60}\d)[0-9a-f]{8,128}\b",
    r"\b[a-z_][\w-]{0,200}?\d[\w-]{0,400}",
    r"[+-]?\b\d+(?:[.,:_]\d+)*%?(?:[\w-]*\w)?",
)
_VARIABLE: Final = re.compile(f"(?P<keep>{'|'.join(_KEEP)})|{'|'.join(_MASK)}")
_AGAIN: Final = re.compile(r"(<\*>)(?:[,;:|/ ]{1,3}(?:and )?<\*>)+")
_OPEN_DATA: Final = re.compile(r"\{|(?<!\w)\[(?=\s{0,3}[\[{\"'\d-]|[^\[\]]{1,200},)")


def masked(message: str) -> str:
    """The message in small letters, with `<*>` for whatever varies; it is the same in every process."""
    text = " ".join(message[:_READ].split())
    text = _VARIABLE.sub(_mask, _without_data(text).lower())
    return _AGAIN.sub(r"\1", text)[:_KEPT].rstrip()


def _mask(found: re.Match[str]) -> str:
    return found[0] if found.lastgroup == "keep" else "<*>"


def _without_data(text: str) -> str:
    """Objects and lists out of JSON, or out of what a language prints for them, become one mask each."""
    kept: list[str] = []
    at = 0
    while (opening := _OPEN_DATA.search(text, at)) is not None:
        kept.append(text[at : opening.start()])
        kept.append("<*>")
        at = _end_of_data(text, opening.start())
    kept.append(text[at:])
    return "".join(kept)


_BRACKETS: Final = re.compile(r"[\[\]{}]|\"(?:[^\"\\]|\\.)*\"")


def _end_of_data(text: str, start: int) -> int:
    """The end of what opens at `start`, behind its closing bracket; the end of the text if none closes it."""
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        if bracket[0] in {"[", "{"}:
            depth += 1
        elif bracket[0] in {"]", "}"}:
            depth -= 1
            if depth == 0:
                return bracket.end()
    return len(text)
