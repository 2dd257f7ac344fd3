"""A worker with the recipe of docs/failure-contract.md, which the test has written beside its `calls`."""

from __future__ import annotations

import os
import sys

import pika
from failing_work import FOLDER, work

sys.path.insert(0, str(FOLDER))
from recipe import hand_over  # type: ignore[import-not-found]

connection = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URL"]))
channel = connection.channel()
channel.confirm_delivery()
for method, properties, body in channel.consume("orders"):
    try:
        work(body.decode())
    except Exception as error:  # noqa: BLE001  (whatever a handler raises is handed over)
        hand_over(channel, "orders", method, properties, body, error)
    else:
        channel.basic_ack(method.delivery_tag)
