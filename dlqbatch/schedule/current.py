"""The settings as they are now: a password may change while the scheduler lives, if a secret holds it."""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError
from dlqbatch.wiring.secrets import stale

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.settings import Settings

log = logs.get(__name__)

_SELDOM: Final = 60.0
"""Seconds between two questions for the secret, while something stays out of reach."""


class Current:
    """For what the scheduler itself connects to; each run reads the settings for itself."""

    def __init__(self, settings: Settings, read_again: Callable[[], Settings] | None) -> None:
        self.settings = settings
        self._read_again = read_again
        self._lock = Lock()
        self._not_before = 0.0

    def renew(self, used: Settings) -> bool:
        """After something could not be reached with those used: whether there are others to try now."""
        with self._lock:
            if self.settings is not used:
                return True  # somebody else has asked meanwhile
            if used.secret is None or self._read_again is None or time.monotonic() < self._not_before:
                return False
            self._not_before = time.monotonic() + _SELDOM
            stale(used.secret)
            try:
                again = self._read_again()
            except DlqbatchError as error:
                log.warning("the secret could not be asked for again", why=str(error))
                return False
            if (again.broker_url, again.database_url) == (used.broker_url, used.database_url):
                return False
            self.settings = again
            return True
