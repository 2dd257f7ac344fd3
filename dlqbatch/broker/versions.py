"""What depends on the version of RabbitMQ."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

LIMITS_DELIVERIES: Final = (4, 0)
"""The version from which the broker limits deliveries of a quorum queue by itself, and names the newest death itself;
only from here on may a queue be declared with the limit -1."""
DELAYS_RETRIES: Final = (4, 3)
"""The version from which a quorum queue knows delayed retries, and a message that is put back keeps its deliveries."""
KEEPS_IN_STREAMS: Final = (3, 13)
"""The version from which a stream is known to keep what the broker dead-letters to it: 3.10 was seen to lose it."""
DELAYS_BY_POLICY: Final = (4, 3, 1)
"""The version from which a policy can set delayed retries."""
_DEFAULT_DELIVERY_LIMIT: Final = 20
_UNLIMITED: Final = -1


def delivery_limit(configured: Collection[int], version: tuple[int, ...], reported: int | None = None) -> int | None:
    """How many deliveries a quorum queue allows, by its argument and its policies; None if there is no limit.

    Of several limits the smallest counts; where one of them is -1, the largest does. `reported` is the limit that the
    management API reports, for a queue where none is configured.
    """
    if configured:
        limit = max(configured) if min(configured) <= _UNLIMITED else min(configured)
    elif version < LIMITS_DELIVERIES:
        return None
    else:
        limit = _DEFAULT_DELIVERY_LIMIT if reported is None else reported
    return None if limit <= _UNLIMITED else limit
