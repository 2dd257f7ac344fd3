"""What this company knows of its payments. Any SQL database will do; the primary keys are what matters."""

import sqlite3
from pathlib import Path

_TABLES = """
CREATE TABLE IF NOT EXISTS transactions (
    payment_id TEXT PRIMARY KEY, cents INTEGER NOT NULL, forwarded INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS settlements (
    payment_id TEXT PRIMARY KEY, cents INTEGER NOT NULL, reference TEXT NOT NULL
);
"""


class UnknownCurrency(ValueError):
    """A mistake of the client, which no retry puts right."""


class Ledger:
    def __init__(self, folder: Path) -> None:
        # The consumer calls its handlers from one thread of its own, which is not the one that is here now.
        self._db = sqlite3.connect(folder / "ledger.sqlite3", timeout=30, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_TABLES)

    def record(self, payment_id: str, currency: str, cents: int) -> bool:
        """Write the transaction down; True if its settlement has still to be asked for."""
        if currency != "EUR":
            raise UnknownCurrency(f"payment {payment_id} is in {currency}, and this ledger is in EUR")
        # A message may come twice. The second time the row is there, and nothing changes.
        self._db.execute(
            "INSERT INTO transactions (payment_id, cents) VALUES (?, ?) ON CONFLICT DO NOTHING", (payment_id, cents)
        )
        query = "SELECT forwarded FROM transactions WHERE payment_id = ?"
        (forwarded,) = self._db.execute(query, (payment_id,)).fetchone()
        return not forwarded

    def forwarded(self, payment_id: str) -> None:
        self._db.execute("UPDATE transactions SET forwarded = 1 WHERE payment_id = ?", (payment_id,))

    def settle(self, payment_id: str, cents: int, reference: str) -> None:
        """Once for each payment, however often it is called."""
        self._db.execute(
            "INSERT INTO settlements (payment_id, cents, reference) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            (payment_id, cents, reference),
        )

    def settled(self) -> set[str]:
        return {payment_id for (payment_id,) in self._db.execute("SELECT payment_id FROM settlements")}
