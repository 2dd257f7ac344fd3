"""For Dramatiq: a message that its retries could not save is handed over with its last error, and acknowledged.

    broker.add_middleware(HandOverFailures(), before=Retries)

It goes to the dead letters of dlqbatch, since Dramatiq has retried it already. If it cannot be published, Dramatiq
rejects it into its own queue `NAME.XQ`, as without this middleware.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

import pika
from dramatiq import Middleware
from pika.exceptions import AMQPError

from dlqbatch.integrations.failure_contract import DEAD, failure_headers

_log: Final = logging.getLogger(__name__)


class HandOverFailures(Middleware):
    """It stands before the middleware `Retries`, which then has decided whether the message failed for good."""

    def after_process_message(
        self, broker: Any, message: Any, *, exception: BaseException | None = None, **_: Any
    ) -> None:
        if exception is None or not message.failed:
            return
        try:
            _publish(broker, message, exception)
        except AMQPError:
            _log.exception("message %s was not handed over; it is rejected into %s.XQ", message, message.queue_name)
        else:
            # Dramatiq acknowledges what has not failed.
            message.failed = False


def _publish(broker: Any, message: Any, error: BaseException) -> None:
    """A connection for each failure: those of Dramatiq have no confirms, and belong to its threads."""
    exchange, key = DEAD
    queue = message.queue_name
    properties = pika.BasicProperties(delivery_mode=2, headers=failure_headers(None, (queue, "", queue), error))
    with contextlib.closing(pika.BlockingConnection(parameters=broker.parameters)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish(exchange, key, message.encode(), properties, mandatory=True)
