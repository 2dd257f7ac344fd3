"""`remoulade_worker.py send NAME...` sends messages; `remoulade_worker.py work` is a worker as remoulade sets it up."""

from __future__ import annotations

import os
import sys
import threading

import remoulade
from failing_work import work
from remoulade.brokers.rabbitmq import RabbitmqBroker

broker = RabbitmqBroker(url=os.environ["AMQP_URL"], confirm_delivery=True)
remoulade.set_broker(broker)


@remoulade.actor(queue_name="orders", max_retries=1, min_backoff=1, max_backoff=1)
def pay(name: str) -> None:
    work(name)


broker.declare_actor(pay)

if __name__ == "__main__":
    if sys.argv[1] == "send":
        for name in sys.argv[2:]:
            pay.send(name)
    else:
        remoulade.Worker(broker, worker_threads=1, worker_timeout=100).start()
        threading.Event().wait()
