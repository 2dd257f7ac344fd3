"""The program on a machine where something is strange: `python tests/support/strange_machine.py COMMAND...`.

STRANGE_CLOCK=SECONDS        the machine's clock is so far ahead, or behind if negative
STRANGE_CLOCK_AFTER=SECONDS  it jumps there so long after the start; until then it is right
STRANGE_COMMIT=NUMBER:WHEN   it dies of SIGKILL `before` or `after` its commit of this number to a SQLite file
STRANGE_COUNT=FILE           its number of commits to SQLite files is written there at the end

What is patched is Python's, before the program is loaded; the program knows nothing of it.
"""

from __future__ import annotations

import atexit
import datetime as dt
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any, Self

AHEAD, AFTER = float(os.environ.get("STRANGE_CLOCK", "0")), float(os.environ.get("STRANGE_CLOCK_AFTER", "0"))
NUMBER, _, WHEN = os.environ.get("STRANGE_COMMIT", "0").partition(":")
_began = time.monotonic()
_time = time.time
_commits = 0


def _ahead() -> float:
    return AHEAD if time.monotonic() - _began >= AFTER else 0.0


class StrangeDatetime(dt.datetime):
    __slots__ = ()  # of the same size: extension modules look at that

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(_time() + _ahead(), tz)


class DyingConnection(sqlite3.Connection):
    def commit(self) -> None:
        global _commits  # noqa: PLW0603  (one program, one count)
        _commits += 1
        is_now = _commits == int(NUMBER)
        if is_now and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit()
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)


def _set_up() -> None:
    if AHEAD:
        dt.datetime = StrangeDatetime  # type: ignore[misc]
        time.time = lambda: _time() + _ahead()
    connect = sqlite3.connect

    def connect_to_die(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return connect(*arguments, **options, factory=DyingConnection)

    if "STRANGE_COMMIT" in os.environ or "STRANGE_COUNT" in os.environ:
        sqlite3.connect = sqlite3.dbapi2.connect = connect_to_die  # type: ignore[assignment]
    if where := os.environ.get("STRANGE_COUNT"):
        atexit.register(lambda: Path(where).write_text(str(_commits)))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    _set_up()
    from dlqbatch.cli import main

    sys.exit(main())
