"""For FastStream: what a subscriber raises is handed over with its message, which is then acknowledged.

    broker = RabbitBroker(url, middlewares=[HandOverFailures])

It also handles messages that cannot be decoded or validated. The exceptions with which a handler itself settles a
message (`RejectMessage` and its kin) go their own way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from faststream import BaseMiddleware
from faststream.exceptions import HandlerException

from dlqbatch.integrations.aio_pika import hand_over

if TYPE_CHECKING:
    from types import TracebackType


class HandOverFailures(BaseMiddleware):
    """A failure is published with its error, confirmed, and acknowledged; then the exception goes on."""

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,  # noqa: ARG002  (FastStream's signature)
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,  # noqa: ARG002  (FastStream's signature)
    ) -> bool | None:
        message: Any = self.msg
        if isinstance(exc_val, Exception) and not isinstance(exc_val, HandlerException) and not message.processed:
            queue = self.context.get_local("handler_").queue.name
            await hand_over(message, queue, exc_val)
        return False
