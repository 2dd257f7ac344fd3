"""A connection to PostgreSQL that is given up when no answer comes.

statement_timeout ends what takes the server too long, and TCP's keepalives end a connection whose other end is gone.
Neither helps when something on the way, a proxy or a firewall, keeps the connection open and forwards nothing.
"""

from __future__ import annotations

import time
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen

# The server gets so many seconds more to say itself that a statement took too long, which tells more.
_MARGIN: Final = 2.0
_Result = TypeVar("_Result")


def connect(statement_timeout: float, *arguments: Any, **options: Any) -> BoundedConnection:
    """Connect as psycopg does, with its own time-out; afterwards each wait on the connection is bounded."""
    connection = BoundedConnection.connect(*arguments, **options)
    connection.silence_limit = statement_timeout + _MARGIN
    return connection


class BoundedConnection(psycopg.Connection[Any]):
    """Every statement, commit and rollback waits here; at most `silence_limit` seconds without a byte."""

    silence_limit = 30.0

    def wait(self, gen: PQGen[_Result], interval: float = 0.1, timeout: float | None = None) -> _Result:
        try:
            return super().wait(_heard_within(self.silence_limit, gen), interval, timeout)
        except _Silent:
            # Nobody waits on it again: rolling back or closing a connection that is closed asks the server nothing.
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer from the database within {self.silence_limit:g} s") from None


class _Silent(Exception):
    pass


def _heard_within(seconds: float, work: PQGen[_Result]) -> PQGen[_Result]:
    """The same work; it is sent what is ready, or after each interval that nothing is."""
    try:
        wanted = next(work)
        give_up_at = time.monotonic() + seconds
        while True:
            ready = yield wanted
            if ready:
                give_up_at = time.monotonic() + seconds
            elif time.monotonic() >= give_up_at:
                raise _Silent
            wanted = work.send(ready)
    except StopIteration as done:
        result: _Result = done.value
        return result
