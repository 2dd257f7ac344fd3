"""What RabbitMQ refuses, by the reply code and the words of its answer."""

from __future__ import annotations

import re
from typing import Final

from dlqbatch.errors import ChannelRefused, TopologyMismatch, TopologyMissing

NO_PERMISSION, NOT_FOUND, LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
"""Reply codes of a channel that the broker closes. 403 also refuses an exclusive consumer while the queue has another
consumer; 405 concerns the exclusive queue of another connection."""

is_of_one_key: Final = re.compile(r"ACCESS_REFUSED - (?:\w+ )?access to topic '").match
"""Whether a refusal to publish holds for a single routing key; only 4.3 says which access is meant."""

_MISSING: Final = re.compile(r"NOT_FOUND - no (?P<kind>queue|exchange) '(?P<name>.*)' in vhost ", re.DOTALL)
_MISMATCH: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for (?P<kind>\w+) '(?P<name>.*)' in vhost '.*': "
    r"received (?P<wanted>.*) but current is (?P<found>.*)"
)
# A refusal has at most 255 bytes: beside a long name there is no room for the values.
_MISMATCH_CUT: Final = re.compile(r"inequivalent arg '(?P<argument>[^']+)' for (?P<kind>\w+) '(?P<name>.*)")
_VALUE: Final = re.compile(r"\A(?:the value )?'(?P<value>.*?)'(?: of type '\w+')?\Z")


def missing(refused: ChannelRefused) -> TopologyMissing | None:
    """The queue or exchange that the refusal says is not there; None if it says something else."""
    found = _MISSING.match(refused.text)
    return TopologyMissing(found["kind"], found["name"]) if refused.is_gone and found is not None else None


def mismatch(refused: ChannelRefused) -> TopologyMismatch | None:
    """The queue or exchange that the refusal says was declared otherwise; None if it says something else."""
    if refused.code != PRECONDITION_FAILED:
        return None
    if found := _MISMATCH.search(refused.text):
        there, wanted = (_VALUE.sub(r"\g<value>", found[side].strip()) for side in ("found", "wanted"))
        return TopologyMismatch(found["kind"], found["name"], found["argument"], there, wanted)
    cut = _MISMATCH_CUT.search(refused.text)
    return cut and TopologyMismatch(cut["kind"], cut["name"], cut["argument"], "another value", "what they say")


def explained(text: str) -> str:
    """The broker's words, and what to do where they do not say it."""
    if "single active consumer" in text:
        return f"{text}. Nobody can get from such a queue: declare it without x-single-active-consumer"
    return text
