"""What time it is for the dead store: leases and delays of all workers count by one clock, the database's.

The clock of a machine that is hours ahead would take over what another one is sending at this moment.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import text

from dlqbatch.deadstore.engine import reading

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dlqbatch.deadstore.engine import Kept


class StoreClock:
    """Asks the database when it is first asked itself, and goes on as the monotonic clock does; nothing sets it back.

    A SQLite file has no clock of its own: there it starts as this machine's, which all its users share.
    """

    def __init__(self, engine: Engine | Kept) -> None:
        self._engine = engine
        self._at_zero: datetime | None = None

    def __call__(self) -> datetime:
        if self._at_zero is None:
            self._at_zero = self._ask()
        return self._at_zero + timedelta(seconds=time.monotonic())

    def _ask(self) -> datetime:
        """The database's time when the monotonic clock stood at zero."""
        if self._engine.url.get_backend_name() == "sqlite":
            return datetime.now(UTC) - timedelta(seconds=time.monotonic())
        with reading(self._engine) as connection:
            there: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            return there.astimezone(UTC) - timedelta(seconds=time.monotonic())
