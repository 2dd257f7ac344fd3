"""The way back: a fanout exchange for each origin queue, so that a returned message keeps its routing key."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from dlqbatch.amqp.table import LONGEST_NAME, to_bytes

RETURN_PREFIX: Final = "dlqbatch.return."


_LONGEST_PLAIN: Final = LONGEST_NAME - 4
"""A name with a hash is longer even where up to three bytes of a cut character went, so that the two never meet."""


def return_exchange(queue: str) -> str:
    """The exchange bound to this queue alone; a name that would grow too long ends in a hash of the queue's."""
    name = to_bytes(RETURN_PREFIX + queue)
    if len(name) <= _LONGEST_PLAIN:
        return RETURN_PREFIX + queue
    digest = "~" + sha256(to_bytes(queue)).hexdigest()
    # Cutting bytes may cut a character in two; what is left of it must not make the name invalid UTF-8.
    return name[: LONGEST_NAME - len(digest)].decode("utf-8", "ignore") + digest
