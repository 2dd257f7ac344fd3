"""A worker with aio-pika alone, as docs/clients/faststream.md has it."""

from __future__ import annotations

import asyncio
import os

import aio_pika
from failing_work import work

from dlqbatch.integrations.aio_pika import hand_over


async def main() -> None:
    connection = await aio_pika.connect(os.environ["AMQP_URL"])
    channel = await connection.channel()
    shop = await channel.declare_exchange("shop", aio_pika.ExchangeType.TOPIC, durable=True)
    queue = await channel.declare_queue("orders", durable=True)
    await queue.bind(shop, "#")
    async with queue.iterator() as messages:
        async for message in messages:
            try:
                work(message.body.decode())
            except Exception as error:  # noqa: BLE001  (whatever a handler raises is handed over)
                await hand_over(message, queue.name, error)
            else:
                await message.ack()


asyncio.run(main())
