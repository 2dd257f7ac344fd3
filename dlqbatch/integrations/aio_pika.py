"""For aio-pika: hand a failed message over with its error, and acknowledge it. FastStream's middleware calls it too."""

from __future__ import annotations

import copy
from typing import Any

from pamqp.commands import Basic

from dlqbatch.integrations.failure_contract import RETRY, failure_headers


async def hand_over(message: Any, queue: str, error: BaseException) -> None:
    """`message` is aio-pika's, from this queue, and not settled yet.

    A message that the broker does not take raises, and goes back into its queue: that may have no dead-letter exchange.
    """
    try:
        await _publish(message, queue, error)
    except BaseException:
        await message.reject(requeue=True)
        raise
    await message.ack()


async def _publish(message: Any, queue: str, error: BaseException) -> None:
    exchange, key = RETRY
    properties = copy.copy(message.properties)
    properties.headers = failure_headers(message.headers, (queue, message.exchange, message.routing_key), error)
    properties.expiration = properties.user_id = None
    properties.delivery_mode = 2
    confirmed = await message.channel.basic_publish(
        message.body, exchange=exchange, routing_key=key, properties=properties, mandatory=True
    )
    if not isinstance(confirmed, Basic.Ack):
        raise ConnectionError(f"the broker did not take the message at exchange '{exchange}': {confirmed}")
