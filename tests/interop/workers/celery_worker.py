"""`celery_worker.py send NAME...` sends tasks; `celery_worker.py work` is a worker with the helper of dlqbatch."""

from __future__ import annotations

import os
import sys

from celery import Celery
from failing_work import work
from kombu import Exchange, Queue

url = os.environ["AMQP_URL"]
app = Celery("shop", broker=url, task_cls="dlqbatch.integrations.celery:DlqbatchTask")
DELAY = {"countdown": 1} if os.environ.get("QUEUE_TYPE") == "quorum" else {}
arguments = {"x-queue-type": "quorum"} if DELAY else {}
shop = Exchange("shop", type="topic")
app.conf.task_queues = [
    Queue("orders", shop, routing_key="order.#", queue_arguments=arguments),
    Queue("mail", shop, routing_key="mail.#", queue_arguments=arguments),
]
app.conf.worker_enable_remote_control = False


@app.task(name="shop.pay")
def pay(name: str) -> None:
    work(name)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        for name in sys.argv[2:]:
            pay.apply_async((name,), exchange="shop", routing_key="order.pay", priority=3, **DELAY)
    else:
        app.worker_main(["worker", "--concurrency=1", "--without-gossip", "--without-mingle", "--without-heartbeat"])
