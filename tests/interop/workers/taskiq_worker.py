"""`taskiq_worker.py send NAME...` sends tasks; `taskiq_worker.py work` is a worker with the middleware of dlqbatch."""

from __future__ import annotations

import asyncio
import os
import sys

from failing_work import work
from taskiq import SimpleRetryMiddleware
from taskiq.api import run_receiver_task
from taskiq_aio_pika import AioPikaBroker, Queue

from dlqbatch.integrations.taskiq import HandOverFailures

url = os.environ["AMQP_URL"]
broker = AioPikaBroker(url, task_queues=[Queue(name="orders")])
broker.add_middlewares(HandOverFailures("orders"), SimpleRetryMiddleware(default_retry_count=2))


@broker.task(task_name="shop.pay", retry_on_error=True)
async def pay(name: str) -> None:
    work(name)


async def main() -> None:
    broker.is_worker_process = sys.argv[1] == "work"
    await broker.startup()
    if sys.argv[1] == "send":
        for name in sys.argv[2:]:
            await pay.kiq(name)
        await broker.shutdown()
    else:
        await run_receiver_task(broker)


asyncio.run(main())
