"""Queues that messages are moved to: looked for when a first message wants to go there, declared if missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlqbatch.broker.origins import Origins
from dlqbatch.errors import ChannelRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlqbatch.broker.connection import Connection, Scratch
    from dlqbatch.broker.origins import _Way
    from dlqbatch.message.envelope import Origin


class Targets(Origins):
    """Reached through the default exchange; one that was deleted during the run is declared once more."""

    def __init__(self, connection: Connection, arguments: Mapping[str, Mapping[str, str | int]]) -> None:
        super().__init__(connection)
        self._arguments = arguments
        """What each is declared with if it is missing."""

    def _find(self, origin: Origin, scratch: Scratch) -> _Way:
        queue = origin.name
        try:
            return self._directly(queue, scratch)
        except ChannelRefused as refused:
            if not refused.is_gone:
                raise
        scratch.call("queue_declare", queue=queue, durable=True, arguments=dict(self._arguments.get(queue, {})))
        self.warnings[f"'{queue}' was not there and has been declared"] = None
        return self._directly(queue, scratch)
