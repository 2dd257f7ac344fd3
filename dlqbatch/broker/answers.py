"""What RabbitMQ's answers mean: reply codes, the words of its refusals, and what depends on its version."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from dlqbatch.errors import ChannelRefused, TopologyMismatch, TopologyMissing

NO_PERMISSION, NOT_FOUND, LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
"""Reply codes of a channel that the broker closes. 403 is also the answer to a consumer that wants a queue for itself
while another one consumes from it; 405 concerns the exclusive queue of another connection."""

LIMITS_DELIVERIES: Final = (4, 0)
"""The version from which the broker limits deliveries of a quorum queue by itself, and names the newest death itself;
only from here on may a queue be declared with the limit -1."""
DELAYS_RETRIES: Final = (4, 3)
"""The version from which a quorum queue knows delayed retries, and a message that is put back keeps its deliveries."""
DEFAULT_DELIVERY_LIMIT: Final = 20
UNLIMITED: Final = -1

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


def delivery_limit(configured: Collection[int], version: tuple[int, ...], reported: int | None = None) -> int | None:
    """How many deliveries a quorum queue allows, by its argument and its policies; None if there is no limit.

    Of several limits the smallest counts; where one of them is -1, the largest does. `reported` is the limit that the
    management API reports, for a queue where none is configured.
    """
    if configured:
        limit = max(configured) if min(configured) <= UNLIMITED else min(configured)
    elif version < LIMITS_DELIVERIES:
        return None
    else:
        limit = DEFAULT_DELIVERY_LIMIT if reported is None else reported
    return None if limit <= UNLIMITED else limit


def explained(text: str) -> str:
    """The broker's words, and what to do where they do not say it."""
    if "single active consumer" in text:
        return f"{text}. Nobody can get from such a queue: declare it without x-single-active-consumer"
    return text
