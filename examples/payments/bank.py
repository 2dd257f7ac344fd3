"""Stands for the bank, another company's service. As with real ones, test accounts say how it answers."""

import sqlite3
from pathlib import Path

GOOD, BUSY_ONCE, BUSY_TWICE, DECLINED, CLOSED = "good", "busy-1", "busy-2", "declined", "closed"
_BUSY_TIMES = {BUSY_ONCE: 1, BUSY_TWICE: 2}

_TABLE = """
CREATE TABLE IF NOT EXISTS transfers (
    key TEXT PRIMARY KEY, cents INTEGER NOT NULL, reference TEXT NOT NULL, asked INTEGER NOT NULL DEFAULT 1
)
"""


class BankBusy(Exception):
    """It passes: the same transfer succeeds a little later."""


class TransferDeclined(Exception):
    """It does not pass."""


class AccountClosed(Exception):
    """Nor does this."""


class Bank:
    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / "bank.sqlite3", timeout=30, isolation_level=None, check_same_thread=False)
        self._db.execute(_TABLE)

    def transfer(self, key: str, account: str, cents: int, *, tries_before: int) -> str:
        """Move the money, and answer with a reference. The same key never moves it twice."""
        # This is the idempotency key of payment services: asked again, they give the answer they gave before.
        asked = "UPDATE transfers SET asked = asked + 1 WHERE key = ? RETURNING reference"
        known = self._db.execute(asked, (key,)).fetchone()
        if known:
            return str(known[0])
        if account == DECLINED:
            raise TransferDeclined(f"the transfer of payment {key} was declined")
        if account == CLOSED:
            raise AccountClosed(f"the account of payment {key} was closed")
        if tries_before < _BUSY_TIMES.get(account, 0):
            raise BankBusy("try again later")
        reference = f"ref-{key}"
        self._db.execute("INSERT INTO transfers (key, cents, reference) VALUES (?, ?, ?)", (key, cents, reference))
        return reference

    def asked_again(self) -> int:
        """How often a transfer was asked for that was made already."""
        (times,) = self._db.execute("SELECT coalesce(sum(asked - 1), 0) FROM transfers").fetchone()
        return int(times)
