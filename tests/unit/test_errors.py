from __future__ import annotations

import pytest

from dlqbatch.errors import ChannelRefused


@pytest.mark.parametrize(
    ("code", "text", "is_gone"),
    [
        (404, "NOT_FOUND - no queue 'orders' in vhost '/'", True),
        (404, "NOT_FOUND - no exchange 'shop' in vhost '/'", True),
        # A name is anybody's choice: this queue is there, and comes back with its node.
        (404, "NOT_FOUND - home node 'rabbit@b' of durable queue 'casino queue' in vhost '/' is down", False),
        (404, "NOT_FOUND - queue 'no exchange 'x'' in vhost '/' process is stopped by supervisor", False),
        (404, "NOT_FOUND - queue 'NOT_FOUND - no queue 'x'' in vhost '/' is down", False),
        (403, "NOT_FOUND - no queue 'orders' in vhost '/'", False),
    ],
)
def test_only_what_the_broker_says_is_not_there_is_gone(code: int, text: str, *, is_gone: bool) -> None:
    assert ChannelRefused(code, text).is_gone is is_gone
