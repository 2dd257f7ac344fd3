"""For Celery: a task that fails is handed over with its error, its name and its id, and then acknowledged.

    app = Celery("shop", task_cls="dlqbatch.integrations.celery:DlqbatchTask")

A task's own retries go before: what `retry()` or `autoretry_for` publishes anew is no failure yet. A task that Celery
does not know is rejected by Celery itself.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from amqp.basic_message import Message
from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import TimeLimitExceeded
from celery import Task
from celery.worker.request import Request

from dlqbatch.amqp.patterns import matches
from dlqbatch.amqp.retry_headers import Origin, return_exchange
from dlqbatch.integrations.failure_contract import RETRY, failure_headers

_log: Final = logging.getLogger(__name__)
_publishing = threading.local()
_NATIVE_DELAY: Final = "celery_delayed_delivery"
_TRIES: Final = 2
"""Publishes are tried on the connection that is there, and then on a new one."""


class DlqbatchRequest(Request):
    """Where Celery would reject a failed task, it is published with its error, confirmed, and acknowledged."""

    _failure: Any = None

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        self._failure = exc_info
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def reject(self, requeue: bool = False) -> Any:
        """A hard time limit is handed over as well: Celery would put the task back into its queue, for ever."""
        error = getattr(self._failure, "exception", None)
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        is_final = not requeue or isinstance(error, TimeLimitExceeded)
        if self.acknowledged or not is_final or not isinstance(error, BaseException):
            return super().reject(requeue)
        try:
            self._hand_over(error)
        except Exception:  # noqa: BLE001  (whatever kept it from being published, the task must not be lost)
            # Its queue may have no dead-letter exchange: only there is it certain not to be lost.
            _log.exception("task %s[%s] was not handed over, and goes back into its queue", self.name, self.id)
            return super().reject(requeue=True)
        self.acknowledge()
        return self.send_event("task-rejected", requeue=False)

    def _hand_over(self, error: BaseException) -> None:
        message = self.message
        received, body = dict(message.properties), message.body
        headers = received.pop("application_headers", None)
        for name in ("expiration", "user_id"):
            received.pop(name, None)
        delivery = (self._queue(), self.delivery_info["exchange"], self.delivery_info["routing_key"])
        received["delivery_mode"] = 2
        received["application_headers"] = failure_headers(headers, delivery, error, str(self._failure.traceback))
        if isinstance(body, str):
            body = body.encode(message.content_encoding or "utf-8")
        _publish(self.task.app, Message(body, **received))

    def _queue(self) -> str:
        """The queue that the task came from: a delivery names only its exchange and its routing key."""
        exchange, key = self.delivery_info["exchange"], self.delivery_info["routing_key"]
        if not exchange:
            return str(key)
        # Behind a native delay only the key tells, without the bits of the delay.
        event, is_delayed = Origin(None, exchange, key).event, exchange == _NATIVE_DELAY
        queues = self.task.app.amqp.queues.consume_from.values()
        returned = [queue.name for queue in queues if return_exchange(queue.name) == exchange]
        near = [queue for queue in queues if is_delayed or queue.exchange.name == exchange]
        bound = [queue.name for queue in near if matches(queue.routing_key, event)]
        found = returned or bound or [queue.name for queue in queues]
        if len(found) != 1:
            names = ", ".join(sorted(found))
            raise LookupError(f"exchange '{exchange}' and key '{key}' lead to several queues: {names}")
        return str(found[0])


class DlqbatchTask(Task):
    """Acknowledged late, and rejected on a failure; without that Celery acknowledges a task whatever happens to it."""

    Request = "dlqbatch.integrations.celery:DlqbatchRequest"
    acks_late = True
    acks_on_failure_or_timeout = False


def _publish(app: Any, message: Message) -> None:
    """Waits for the broker's confirm; what comes back as unroutable raises."""
    exchange, key = RETRY
    for tries_left in reversed(range(_TRIES)):
        connection = getattr(_publishing, "connection", None)
        try:
            if connection is None:
                # Without heartbeats: nobody would send them between two failures.
                options = {"confirm_publish": True}
                connection = _publishing.connection = app.connection_for_write(transport_options=options, heartbeat=0)
            connection.default_channel.basic_publish(message, exchange=exchange, routing_key=key, mandatory=True)
        except Exception:
            _publishing.connection = None
            if connection is not None:
                connection.release()
            if not tries_left:
                raise
        else:
            return
