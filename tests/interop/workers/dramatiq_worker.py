"""`dramatiq_worker.py send NAME...` sends messages; `dramatiq_worker.py work` is a worker with the middleware."""

from __future__ import annotations

import os
import sys
import threading

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.middleware import Retries
from failing_work import work

from dlqbatch.integrations.dramatiq import HandOverFailures

broker = RabbitmqBroker(url=os.environ["AMQP_URL"])
broker.add_middleware(HandOverFailures(), before=Retries)
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="orders", max_retries=1, min_backoff=1, max_backoff=1)
def pay(name: str) -> None:
    work(name)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        for name in sys.argv[2:]:
            pay.send(name)
    else:
        dramatiq.Worker(broker, worker_threads=1, worker_timeout=100).start()
        threading.Event().wait()
