"""What every connection to PostgreSQL is told, whichever library opens it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

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
        # Keepalives rest while something sent waits to be acknowledged. Milliseconds.
        "tcp_user_timeout": "30000",
    }
    return {name: value for name, value in defaults.items() if name not in given}


_UNKNOWN_OPTION: Final = re.compile(r"(invalid \S+ option ).*", re.DOTALL)


def without_option(text: str) -> str:
    """Libpq repeats an option that it does not know; behind a ? in a password that was not encoded, it is the rest."""
    return _UNKNOWN_OPTION.sub(r"\1(not shown: write a ? in a password as %3F)", text)


def refuses_login(error: BaseException | None) -> bool:
    """Whether a connection failed over its password; the server's words count for nothing, being in any language."""
    connection = getattr(error, "pgconn", None)  # only errors of connecting have one
    return connection is not None and bool(connection.used_password or connection.needs_password)


def session(statement_timeout: float) -> str:
    """The SQL that comes first. Seconds."""
    # Not by the `options` of the connection: some connection poolers refuse those.
    milliseconds = int(statement_timeout * 1000)
    # Whatever isolation the role or the database has by default: what is written here locks its rows, and under a
    # stricter one every row that two workers look at would be an error.
    return (
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; "
        f"SET statement_timeout = {milliseconds}; SET lock_timeout = {milliseconds}; "
        "SET idle_in_transaction_session_timeout = 60000; SET synchronous_commit = on"
    )
