"""A FastStream application with the middleware of dlqbatch; it publishes the names that it is started with."""

from __future__ import annotations

import asyncio
import os
import sys

from failing_work import work
from faststream import AckPolicy, FastStream
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange, RabbitQueue

from dlqbatch.integrations.faststream import HandOverFailures

url = os.environ["AMQP_URL"]
broker = RabbitBroker(url, middlewares=[HandOverFailures])
shop = RabbitExchange("shop", type=ExchangeType.TOPIC, durable=True)
app = FastStream(broker)


@broker.subscriber(
    RabbitQueue("orders", durable=True, routing_key="order.#"), shop, ack_policy=AckPolicy.REJECT_ON_ERROR
)
async def pay(name: str) -> None:
    work(name)


@app.after_startup
async def send() -> None:
    for name in sys.argv[1:]:
        await broker.publish(name, "order.pay", shop)


asyncio.run(app.run())
