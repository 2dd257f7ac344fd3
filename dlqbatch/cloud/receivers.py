"""Everybody who is to be told of alerts, each of whom may fail alone.

An alert counts as told when every receiver took it; until then each run tells it again to those who did not. Who took
what is remembered by the process: a process that starts anew tells all of them, for two alerts are better than none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlqbatch.policy.alerts import Notice

_Taken = tuple[str, str, int, str]
"""Where it is written down, the receiver, the alert, and whether it was told as fired or as resolved."""

_MOST: Final = 20_000
_taken: dict[_Taken, None] = {}
"""The oldest first."""


class Receiver(Protocol):
    def tell(self, notices: Sequence[Notice]) -> str | None: ...


class Receivers:
    """By name; `store` is where their alerts are written down, since each numbers its own."""

    def __init__(self, store: str, receivers: Mapping[str, Receiver]) -> None:
        self._store, self._receivers = store, receivers

    def tell(self, notices: Sequence[Notice]) -> str | None:
        """None if every one has been told of every alert; else who has not, and why."""
        why = [self._tell(name, receiver, notices) for name, receiver in self._receivers.items()]
        if any(why):
            return "; ".join(filter(None, why))
        for name in self._receivers:
            for notice in notices:
                _taken.pop(self._key(name, notice), None)
        return None

    def _tell(self, name: str, receiver: Receiver, notices: Sequence[Notice]) -> str | None:
        open_ones = [notice for notice in notices if self._key(name, notice) not in _taken]
        why = receiver.tell(open_ones) if open_ones else None
        if why is None:
            _taken.update(dict.fromkeys(self._key(name, notice) for notice in open_ones))
            while len(_taken) > _MOST:
                del _taken[next(iter(_taken))]
        return why

    def _key(self, name: str, notice: Notice) -> _Taken:
        return self._store, name, notice.id, notice.state
