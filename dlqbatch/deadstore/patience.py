"""A connection to PostgreSQL that is given up when no answer comes.

statement_timeout ends what takes the server too long, and TCP's keepalives end a connection whose other end is gone.
Neither helps when something on the way, a proxy or a firewall, keeps the connection open and forwards nothing.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import psycopg
from psycopg.waiting import Wait

if TYPE_CHECKING:
    from psycopg.abc import PQGen

_MARGIN: Final = 2.0
"""Seconds in which the server's own word, that a statement took too long, still arrives; it says more than ours."""
_LOOK_EVERY: Final = 0.1
_AT_ONCE: Final = 0.001
_Result = TypeVar("_Result")


def connect(statement_timeout: float, *arguments: Any, **options: Any) -> PatientConnection:
    """As psycopg connects, which has a time-out of its own; each wait on the connection is bounded afterwards."""
    connection = PatientConnection.connect(*arguments, **options)
    connection.patience = statement_timeout + _MARGIN
    return connection


class Beside(Protocol):
    """Another connection, on which something can happen while a server works for us."""

    def fileno(self) -> int | None:
        """Of what to look at; None if nothing may happen now."""

    def go_on(self) -> None:
        """There is something to read. It does not wait, and does not raise."""


class PatientConnection(psycopg.Connection[Any]):
    """Every statement, commit and rollback waits here; `patience` is how long without a byte. Seconds."""

    patience = 30.0
    beside: Beside | None = None

    def wait(self, gen: PQGen[_Result], interval: float = _LOOK_EVERY, timeout: float | None = None) -> _Result:
        work = gen if self.beside is None else _beside(self.beside, self.pgconn.socket, gen)
        try:
            return super().wait(_heard_within(self.patience, work), interval, timeout)
        except _Silent:
            # Nobody waits on it again: rolling back or closing a connection that is closed asks the server nothing.
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer from the database within {self.patience:g} s") from None


class _Silent(Exception):
    pass


def _heard_within(patience: float, work: PQGen[_Result]) -> PQGen[_Result]:
    """The same work; it is sent what is ready, or after each interval that nothing is."""
    try:
        wanted = next(work)
        give_up_at = time.monotonic() + patience
        while True:
            ready = yield wanted
            if ready:
                give_up_at = time.monotonic() + patience
            elif time.monotonic() >= give_up_at:
                raise _Silent
            wanted = work.send(ready)
    except StopIteration as done:
        result: _Result = done.value
        return result


def _beside(other: Beside, socket: int, work: PQGen[_Result]) -> PQGen[_Result]:
    """The same work; before it waits, the other goes on until the server has answered, or for an interval."""
    try:
        wanted = next(work)
        while True:
            _go_on(other, socket, wanted)
            wanted = work.send((yield wanted))
    except StopIteration as done:
        result: _Result = done.value
        return result


def _go_on(other: Beside, socket: int, wanted: Wait) -> None:
    looking = select.poll()
    looking.register(socket, (wanted & Wait.R and select.POLLIN) | (wanted & Wait.W and select.POLLOUT))
    # What the server answers at once does not wait for the other.
    if looking.poll(_AT_ONCE * 1000):
        return
    deadline = time.monotonic() + _LOOK_EVERY
    while (file := other.fileno()) is not None and (left := deadline - time.monotonic()) > 0:
        looking.register(file, select.POLLIN)
        if [each for each, _ in looking.poll(left * 1000)] != [file]:
            return
        other.go_on()
