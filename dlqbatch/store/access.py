"""The database of these settings, and its clock. This loads SQLAlchemy only when it is used."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

log = logs.get(__name__)

# Seconds; a disk may need some for a commit, however short a run is meant to be.
_SHORTEST_BOUND: Final = 5.0


def engine_for(settings: Settings) -> Engine:
    from dlqbatch.store.engine import STATEMENT_SECONDS, create_engine_for  # noqa: PLC0415  (SQLAlchemy)

    # A statement without an answer does not hold a run much longer than the run may last.
    bound = max(settings.max_seconds + settings.settle_seconds, _SHORTEST_BOUND)
    return create_engine_for(
        settings.database_url.get_secret_value(),
        connect_timeout=settings.connect_timeout_seconds,
        statement_timeout=min(bound, STATEMENT_SECONDS),
        is_default=settings.database_url_is_default,
    )


def store_for(settings: Settings) -> Engine:
    """The dead store, whose tables are of this version; else TablesMissing."""
    engine = engine_for(settings)
    check_schema(engine)
    return engine


def check_schema(store: Engine) -> None:
    from dlqbatch.store.engine import check_version  # noqa: PLC0415  (as above)

    warning = check_version(store)
    if warning is not None:
        log.warning(warning)


class StoreClock:
    """The time by which leases and delays of all workers count: the database's.

    The clock of a machine that is hours ahead would take over what another one is sending at this moment. The database
    is asked once, then this goes on as the monotonic clock does; nothing sets it back. A SQLite file has no clock of
    its own: there it starts as this machine's, which all its users share.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at_zero: datetime | None = None

    def __call__(self) -> datetime:
        if self._at_zero is None:
            self._at_zero = self._time_at_zero()
        return self._at_zero + timedelta(seconds=time.monotonic())

    def _time_at_zero(self) -> datetime:
        """The database's time when the monotonic clock stood at zero."""
        if self._engine.url.get_backend_name() == "sqlite":
            return datetime.now(UTC) - timedelta(seconds=time.monotonic())
        from sqlalchemy import text  # noqa: PLC0415  (as above)

        from dlqbatch.store.engine import reading  # noqa: PLC0415  (as above)

        with reading(self._engine) as connection:
            there: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            return there.astimezone(UTC) - timedelta(seconds=time.monotonic())
