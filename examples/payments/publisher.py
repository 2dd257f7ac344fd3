"""Publishes JSON so that it arrives: returns when the broker has the message safe in a queue, else raises."""

import json
from typing import Any

import pika
from pika.exceptions import AMQPError, NackError, UnroutableError


class Publisher:
    def __init__(self, url: str) -> None:
        self._parameters = pika.URLParameters(url)
        self._connection: pika.BlockingConnection | None = None
        self._channel: Any = None

    def publish(self, exchange: str, event: str, payment: dict[str, Any]) -> None:
        try:
            self._publish(exchange, event, payment)
        except (NackError, UnroutableError):
            raise  # the broker has answered: no use in asking again at once
        except AMQPError:
            # The connection went. Perhaps the broker has the message, perhaps not: send it again. It may be there twice
            # then, so whoever works on it must be able to stand that.
            self._connection = None
            self._publish(exchange, event, payment)

    def _publish(self, exchange: str, event: str, payment: dict[str, Any]) -> None:
        if self._connection is None or not self._connection.is_open:
            self._connection = pika.BlockingConnection(self._parameters)
            self._channel = self._connection.channel()
            self._channel.confirm_delivery()  # from here on basic_publish waits for the broker's confirm
        properties = pika.BasicProperties(
            content_type="application/json",
            delivery_mode=2,  # persistent
            message_id=payment["payment_id"],  # so that people find it in the dead store
            app_id="payments",
        )
        # mandatory: a message that no queue takes comes back as an error instead of vanishing.
        self._channel.basic_publish(exchange, event, json.dumps(payment).encode(), properties, mandatory=True)

    def keep_alive(self) -> None:
        """Answer the broker's heartbeats; call it now and then."""
        if self._connection is not None and self._connection.is_open:
            try:
                self._connection.process_data_events(0)
            except AMQPError:
                self._connection = None  # made again with the next message
