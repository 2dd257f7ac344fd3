"""What every connection to PostgreSQL is told, whichever library opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container


def connect_options(given: Container[str], connect_timeout: float) -> dict[str, str]:
    """The options that the URL has not `given` itself. Seconds."""
    defaults: dict[str, str] = {
        "application_name": "dlqbatch",
        "client_encoding": "utf8",
        "connect_timeout": str(max(2, round(connect_timeout))),  # libpq knows whole seconds, two at least
        # A network that swallows packets ends a wait after half a minute instead of never.
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "4",
    }
    return {name: value for name, value in defaults.items() if name not in given}


def session(statement_timeout: float) -> str:
    """The SQL that comes first. Seconds."""
    # Not by the `options` of the connection: some connection poolers refuse those.
    milliseconds = int(statement_timeout * 1000)
    return (
        f"SET statement_timeout = {milliseconds}; SET lock_timeout = {milliseconds}; "
        "SET idle_in_transaction_session_timeout = 60000; SET synchronous_commit = on"
    )
