"""A worker in plain pika that fails at a message's first try and handles it at the next one (see README.md)."""

import os
import sys

import pika

broker = os.environ.get("DLQBATCH_BROKER_URL", "amqp://guest:guest@127.0.0.1:5672/%2F")
connection = pika.BlockingConnection(pika.URLParameters(broker))
channel = connection.channel()
to_dlqbatch = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
channel.queue_declare("orders", durable=True, arguments=to_dlqbatch)
channel.queue_bind("orders", "amq.topic", "orders.created")
for text in sys.argv[1:]:
    channel.basic_publish("amq.topic", "orders.created", text.encode())

for method, properties, body in channel.consume("orders", inactivity_timeout=2):
    if method is None:  # two seconds without a message
        break
    retries = (properties.headers or {}).get("dlqbatch-retries", 0)
    if retries == 0:
        print(f"{body.decode()} failed", flush=True)
        channel.basic_reject(method.delivery_tag, requeue=False)
    else:
        print(f"{body.decode()} handled, retries: {retries}", flush=True)
        channel.basic_ack(method.delivery_tag)
connection.close()
