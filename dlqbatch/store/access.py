"""The database of these settings, and its clock. This loads SQLAlchemy only when it is used."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.errors import BrokerUnreachable, SettingsError
from dlqbatch.settings import Settings
from dlqbatch.store.scope_name import EVERY, of_virtual_host
from dlqbatch.store.text import key

if TYPE_CHECKING:
    from sqlalchemy import Engine

log = logs.get(__name__)

# Seconds; a disk may need some for a commit, however short a run is meant to be.
_SHORTEST_BOUND: Final = 5.0
_SEVERAL: Final = 2


def engine_for(settings: Settings, statement_seconds: float | None = None) -> Engine:
    """`statement_seconds` bounds a statement; by default it is bounded as the run is, by 30 s at most."""
    from dlqbatch.store.engine import STATEMENT_SECONDS, create_engine_for  # noqa: PLC0415  (SQLAlchemy)

    # A statement without an answer does not hold a run much longer than the run may last.
    bound = max(settings.max_seconds + settings.settle_seconds, _SHORTEST_BOUND)
    return create_engine_for(
        settings.database_url.get_secret_value(),
        connect_timeout=settings.connect_timeout_seconds,
        statement_timeout=statement_seconds or min(bound, STATEMENT_SECONDS),
        is_default=settings.database_url_is_default,
    )


def store_of(
    settings: Settings, scope: str, statement_seconds: float | None = None, *, dry_run: bool = False
) -> Engine:
    """The dead store for a run of this scope, whose tables are of this version; else TablesMissing.

    From its first run on a scope is known; a dry run writes nothing, and has no rows where nobody knows its scope.
    """
    from dlqbatch.store.scopes import FIRST, NOBODY, known_scopes, register, scoped  # noqa: PLC0415  (as above)

    engine = engine_for(settings, statement_seconds)
    check_schema(engine)
    if not dry_run:
        return scoped(engine, register(engine, scope))
    known = known_scopes(engine)
    return scoped(engine, known.get(key(scope), NOBODY if known else FIRST))


def store_for(settings: Settings) -> Engine:
    """The dead store for a command that has no connection to the broker.

    Its scope is `dlqbatch.scope`; else the only one that there is; else the only one with the virtual host of the
    settings. Where that says nothing, the command may look at all of them, and change none.
    """
    from dlqbatch.store.scopes import FIRST, known_scopes, of_every_scope, scoped  # noqa: PLC0415  (as above)

    engine = engine_for(settings)
    check_schema(engine)
    known = known_scopes(engine)
    if settings.scope is not None:
        if settings.scope == EVERY:
            return of_every_scope(engine)
        if known and settings.scope not in known:
            raise SettingsError(
                f"no run has worked in the scope '{settings.scope}' yet; there is {', '.join(known)}. "
                "--scope, or dlqbatch.scope, names one of them"
            )
        return scoped(engine, known.get(settings.scope, FIRST))
    if len(known) < _SEVERAL:
        return scoped(engine, next(iter(known.values()), FIRST))
    here = of_virtual_host(known, settings.virtual_host)
    return scoped(engine, known[here[0]]) if len(here) == 1 else of_every_scope(engine)


def store_of_only_scope(
    settings: Settings, unreachable: BrokerUnreachable | None, *, may_be_any: bool = False
) -> Engine:
    """The dead store for a job whose broker did not say who it is; refused where several deployments may be meant."""
    from dlqbatch.store.scopes import FIRST, known_scopes, scoped  # noqa: PLC0415  (as above)

    engine = engine_for(settings)
    check_schema(engine)
    known = known_scopes(engine)
    # Without an address the virtual host says nothing.
    here = list(known) if unreachable is None else of_virtual_host(known, settings.virtual_host)
    if may_be_any and len(known) == 1:
        here = list(known)
    if known and len(here) != 1:
        if unreachable is not None:
            raise unreachable
        raise SettingsError(
            f"several deployments share this database ({', '.join(known)}), and no broker is named: set dlqbatch.scope "
            "(DLQBATCH_SCOPE) to the one whose job this is. Nothing was changed"
        )
    return scoped(engine, known[here[0]] if here else FIRST)


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
