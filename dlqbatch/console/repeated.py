"""Requests with an Idempotency-Key are done once: a repeated one gets the first one's answer, and waits for it.

This process keeps answers for an hour. What another process has done stands in the actions with its key; if nothing
stands there and the caller says that another process was asked first, nobody knows, and nothing is done.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Final

from dlqbatch.errors import ActionCut, CommitUnanswered, DlqbatchError
from dlqbatch.store.action_log import DECIDED_BY_KEY, taken_by_key
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import NotUnderstood

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

KEY: Final = "idempotency-key"
INSTANCE: Final = "idempotency-instance"
"""The header of a repeated request with the process that was asked first, as /api/v1/me names it."""
_KEPT_SECONDS: Final = 3_600.0
_KEPT: Final = 1_000
Answer = dict[str, object]


class DoneBefore(DlqbatchError):
    """Another process of the console has done it already; its answer is gone with it."""

    exit_code = 4

    def __init__(self, action: str) -> None:
        self.action = action
        super().__init__(
            f"it was DONE before the connection broke, as {action}, and nothing was done again: "
            f"`dlqbatch actions show {action}` says what became of each message"
        )


class NotKnownHere(DlqbatchError):
    """Another process was asked, and nothing says whether it has done it."""

    exit_code = 4

    def __init__(self) -> None:
        super().__init__(
            "the console that was deciding has ended or was not this one, and no action stands for it. Whether it was "
            "done is NOT known, and nothing was done again. Look before you repeat it: `dlqbatch actions list`, "
            "`dlqbatch replay status`"
        )


@dataclass(slots=True)
class _Once:
    content: str
    """A digest of what was asked, so that a key stands for one request."""
    began: float
    lock: Lock = field(default_factory=Lock)
    answer: Answer | None = None
    failed: DlqbatchError | None = None
    """How it has failed when a part of it was done, or may be: it is not begun again."""


class Repeated:
    def __init__(self) -> None:
        self.instance: Final = secrets.token_hex(8)
        """Names this process."""
        self.waiting = 0
        """Requests that wait for the first one with their key."""
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str, str], _Once] = OrderedDict()

    def once(self, call: Call, do: Callable[[], Answer]) -> Answer:
        """The answer of the first request with this key, which is awaited if it is still being done."""
        key = call.request.headers[KEY]
        content = sha256(json.dumps(call.content, sort_keys=True).encode()).hexdigest()
        kept, is_new = self._entry((call.actor, call.request.url.path, key), content)
        self.waiting += not is_new
        with kept.lock:
            self.waiting -= not is_new
            if kept.failed is not None:
                raise kept.failed
            if kept.answer is None:
                self._refuse_what_another_has_done(call, key, is_new=is_new)
                token = DECIDED_BY_KEY.set(key)
                try:
                    kept.answer = do()
                except (ActionCut, CommitUnanswered) as error:
                    kept.failed = error
                    raise
                finally:
                    DECIDED_BY_KEY.reset(token)
            return kept.answer

    def _entry(self, name: tuple[str, str, str], content: str) -> tuple[_Once, bool]:
        now = time.monotonic()
        with self._lock:
            found = self._kept.get(name)
            if found is not None and now - found.began < _KEPT_SECONDS:
                if found.content != content:
                    raise NotUnderstood("this Idempotency-Key stands for another request. Nothing was done.")
                return found, False
            made = self._kept[name] = _Once(content, now)
            self._kept.move_to_end(name)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return made, True

    def _refuse_what_another_has_done(self, call: Call, key: str, *, is_new: bool) -> None:
        if not is_new:
            return  # it has failed here, and nothing was done
        with reading(call.console.engine) as connection:
            action = taken_by_key(connection, call.actor, key)
        if action is not None:
            raise DoneBefore(action)
        if call.request.headers.get(INSTANCE, self.instance) != self.instance:
            raise NotKnownHere
