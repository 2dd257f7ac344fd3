"""What the database holds: the policy, the dead store, the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlqbatch.errors import PolicyMissing
from dlqbatch.policy.events import EventRow, Policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from types import ModuleType

    from sqlalchemy import Engine

    from dlqbatch.deadstore.clock import StoreClock
    from dlqbatch.deadstore.edit import Editing
    from dlqbatch.deadstore.engine import Kept
    from dlqbatch.deadstore.event_config import EventConfig
    from dlqbatch.deadstore.review import Review
    from dlqbatch.deadstore.rules import Rules
    from dlqbatch.settings import Settings

_SHORTEST_BOUND: Final = 5.0
"""Seconds; a disk may need some for a commit, however short a run is meant to be."""


def load_policy(settings: Settings) -> Policy:
    """The table and the properties as one policy; PolicyMissing rather than a policy that dead-letters everything."""
    rows: list[EventRow] = []
    try:
        rows = event_config(settings).read()
    except PolicyMissing:
        if not settings.allow_empty_policy:
            raise
    events = {
        name: settings.default_max_retries if retries is None else retries for name, retries in settings.events.items()
    }
    policy = Policy.build(rows, events, settings.default_max_retries)
    if not policy and not settings.allow_empty_policy:
        raise PolicyMissing(
            "not a single event is configured, in the table dlq_event_config or in application.properties, so every "
            "message would go to the dead letters. Nothing was moved. Add an event with `dlqbatch events set`, or "
            "pass --allow-empty-policy if that is what you want."
        )
    return policy


def event_config(settings: Settings) -> EventConfig:
    from dlqbatch.deadstore.event_config import EventConfig  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    return EventConfig(engine_for(settings))


def engine_for(settings: Settings) -> Engine:
    from dlqbatch.deadstore.engine import STATEMENT_SECONDS, create_engine_for  # noqa: PLC0415  (the same)

    # A statement without an answer does not hold a run much longer than the run may last.
    bound = max(settings.max_seconds + settings.settle_seconds, _SHORTEST_BOUND)
    return create_engine_for(
        settings.database_url.get_secret_value(),
        connect_timeout=settings.connect_timeout_seconds,
        statement_timeout=min(bound, STATEMENT_SECONDS),
    )


def clock_of(engine: Engine | Kept) -> StoreClock:
    """The time by which leases and delays count."""
    from dlqbatch.deadstore.clock import StoreClock  # noqa: PLC0415  (the same)

    return StoreClock(engine)


def aside_of(engine: Engine) -> Executor:
    """What else the store can do while messages are sent; SQLite has one lock for all that write."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (most jobs need no threads)

    from dlqbatch.runs.aside import AtOnce  # noqa: PLC0415  (the same)

    return AtOnce() if engine.dialect.name == "sqlite" else ThreadPoolExecutor(2)


def system_state() -> dict[str, float]:
    """How busy this machine is, as fractions."""
    import psutil  # noqa: PLC0415  (only the jobs of the dead store ask)

    return {"cpu": psutil.cpu_percent(interval=0.1) / 100, "memory": psutil.virtual_memory().percent / 100}


def system_watched() -> Callable[[], dict[str, float]]:
    """The same, from now to when it is asked for: nobody waits for it."""
    import psutil  # noqa: PLC0415  (the same)

    psutil.cpu_percent()
    return lambda: {"cpu": psutil.cpu_percent() / 100, "memory": psutil.virtual_memory().percent / 100}


def dead_store(settings: Settings) -> Review:
    """What people can do to dead messages."""
    from dlqbatch.deadstore.review import Review  # noqa: PLC0415  (the same)

    return Review(engine_for(settings))


def editing(settings: Settings) -> Editing:
    """How a person changes a dead message."""
    from dlqbatch.deadstore.edit import Editing  # noqa: PLC0415  (the same)

    return Editing(engine_for(settings))


def rules(settings: Settings) -> Rules:
    """Which strategy a failure gets."""
    from dlqbatch.deadstore.rules import Rules  # noqa: PLC0415  (the same)

    return Rules(engine_for(settings))


def migrations() -> ModuleType:
    """What changes the schema; it loads Alembic, which nothing else needs."""
    from dlqbatch.deadstore import migrate  # noqa: PLC0415

    return migrate
