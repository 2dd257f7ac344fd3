"""The secret that the settings name, asked for once by a process and again when it may have changed.

A warm function and `dlqbatch schedule` live through a rotation: whoever is not let in makes what is known `stale`, and
the next `fetch` asks again. What changes without anybody noticing, as a webhook does, is known after MOST_AGE.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlqbatch.settings import Settings

log = logs.get(__name__)

MOST_AGE: Final = 15 * 60.0
"""Seconds; a run a minute then asks 96 times a day, which costs about a cent a month."""
_SOON: Final = 60.0
"""Until AWS is asked again when it could not answer."""
_CONNECTED_TO: Final = ("broker_url", "database_url", "management_url")


class _Known(NamedTuple):
    values: Mapping[str, object]
    until: float


_known: dict[str, _Known] = {}
_one_asks = threading.Lock()


def fetch(name: str) -> Mapping[str, object]:
    """What the secret holds, as far as this process knows; it raises what `cloud.secrets.fetch` raises."""
    with _one_asks:
        known = _known.get(name)
        if known is not None and time.monotonic() < known.until:
            return known.values
        known = _known[name] = _asked(name, known)
        return known.values


def stale(name: str) -> None:
    """The next `fetch` asks."""
    with _one_asks:
        known = _known.get(name)
        if known is not None:
            _known[name] = _Known(known.values, time.monotonic())


def _asked(name: str, known: _Known | None) -> _Known:
    from dlqbatch.cloud import secrets  # noqa: PLC0415  (only for those who have one)

    try:
        return _Known(secrets.fetch(name), time.monotonic() + MOST_AGE)
    except secrets.SecretUnreadable as error:
        # What was right a quarter of an hour ago most likely still is: a bad minute of AWS stops no run.
        if known is None or not error.may_pass:
            raise
        log.warning("the secret could not be asked for again, so the run goes on with what is known", why=str(error))
        return _Known(known.values, time.monotonic() + _SOON)


def renewed(settings: Settings, read_again: Callable[[], Settings] | None, refused: DlqbatchError) -> Settings:
    """The settings with which a refused run is worth repeating; `refused` is raised if there are none."""
    if settings.secret is None or read_again is None:
        raise refused
    stale(settings.secret)
    try:
        again = read_again()
    except DlqbatchError as error:
        log.warning("the secret could not be read again, so it is not known whether it has changed", why=str(error))
        raise refused from None
    if all(getattr(again, option) == getattr(settings, option) for option in _CONNECTED_TO):
        raise refused
    log.warning("the secret has changed: the run is repeated", secret=settings.secret, why=str(refused))
    return again
