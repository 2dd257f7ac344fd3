"""A worker with the code of docs/clients/kombu.md, which the test has written beside its `calls`.

It publishes the names that it is started with.
"""

from __future__ import annotations

import os
import sys

import failing_work
from failing_work import FOLDER

sys.path.insert(0, str(FOLDER))
import page  # type: ignore[import-not-found]

page.work = failing_work.work
worker = page.Worker(os.environ["AMQP_URL"])
with worker.connection.clone() as connection:
    producer = connection.Producer()
    for name in sys.argv[1:]:
        producer.publish(name, exchange=page.orders.exchange, routing_key="order.pay", declare=[page.orders])
worker.run()
