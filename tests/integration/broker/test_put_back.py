"""What a run leaves costs its queue no delivery, where the broker lets a message go back for nothing."""

from __future__ import annotations

from broker_client import Side, connected, keep, transfer

from dlqbatch.broker.transfer import Take

SOURCE, HELD, RUNS = "source", 40, 3


def test_what_is_left_again_and_again_is_never_counted_as_delivered(broker43_url: str) -> None:
    """RabbitMQ 4.3: to put a message back by a nack is free; to close the channel over it counts."""
    side = Side(broker43_url)
    side.queue(SOURCE, "quorum", delivery_limit=-1)
    side.fill(SOURCE, [b"%d" % number for number in range(HELD)])
    for _ in range(RUNS):
        with connected(broker43_url) as connection:
            tally = transfer(connection, [Take(SOURCE, HELD, is_quorum=True)], keep)
        assert tally.got == HELD
        side.wait(lambda: side.depth(SOURCE) == HELD)
    left = side.empty(SOURCE)
    assert len(left) == HELD
    assert {(message.properties.headers or {}).get("x-delivery-count", 0) for message in left} == {0}
    side.close()
