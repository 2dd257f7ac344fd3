"""For taskiq with taskiq-aio-pika: a task that failed is handed over with its error.

    broker = AioPikaBroker(url).with_middlewares(HandOverFailures("taskiq"), SmartRetryMiddleware())

taskiq acknowledges a task whatever happens to it, and hides the headers of its delivery: nobody could count retries of
a ladder. So it goes to the dead letters of dlqbatch. If it cannot be published, it is not acknowledged either.
"""

from __future__ import annotations

from typing import Any

import aio_pika
from pamqp.commands import Basic
from taskiq import TaskiqMiddleware
from taskiq.exceptions import NoResultError

from dlqbatch.integrations.failure_contract import DEAD, failure_headers


class HandOverFailures(TaskiqMiddleware):
    """It stands before the middleware that retries, which then has decided whether the task failed for good."""

    def __init__(self, queue: str) -> None:
        """`queue` is the one that this worker consumes."""
        super().__init__()
        self._queue = queue

    async def on_error(self, message: Any, result: Any, exception: BaseException) -> None:
        if isinstance(result.error, NoResultError):
            return  # it was published once more
        broker: Any = self.broker
        exchange, key = DEAD
        headers = failure_headers(None, (self._queue, "", self._queue), exception)
        sent = aio_pika.Message(broker.formatter.dumps(message).message, headers=headers, delivery_mode=2)
        target = await broker.write_channel.get_exchange(exchange, ensure=False)
        confirmed = await target.publish(sent, key, mandatory=True)
        if not isinstance(confirmed, Basic.Ack):
            raise ConnectionError(f"the broker did not take the task at exchange '{exchange}': {confirmed}")
