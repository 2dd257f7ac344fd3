"""The store's rows on their way to the broker: claimed, begun, offered, marked as sent, and none of them forgotten."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, Protocol

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, stop_any, wait_exponential

from dlqbatch.errors import DlqbatchError, so_far
from dlqbatch.message.delivery import Delivery, Hold, Instruction, Publish
from dlqbatch.policy.lifecycle import Back, Claimed, Status
from dlqbatch.runs.report import LEFT
from dlqbatch.runs.resend import MANUAL, NEEDS_A_PERSON, NOBODY_KNOWS, SENT, Resend, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from dlqbatch.message.delivery import Offer
    from dlqbatch.policy.strategy import Strategy
    from dlqbatch.runs.choice import Breakers, Choice

NOT_REACHED: Final = "not-reached"
TAKEN_OVER: Final = "taken-over"
NOT_NOTED: Final = "not-noted"
REFUSED: Final = "publish-refused"
UNSAID: Final = "not-sent"
HARMLESS: Final = frozenset({NOT_REACHED, TAKEN_OVER})
"""Reasons to leave a row that say nothing of the row, nor of the run."""

_AT_ONCE: Final = 256
_BYTES_AT_ONCE: Final = 8 * 1024 * 1024
_AGE: Final = 0.05
"""Seconds that a confirmed send waits to be marked together with others."""
_TRIES: Final = 4
_TRIES_FOR: Final = 10.0
"""Seconds; a database that does not answer would hold the end of the run for its whole patience, each time."""
_PREVIEWED: Final = 100
_LOOKED_AT: Final = 1000
"""Rows that a dry run looks at."""


class Retries(Protocol):
    """The rows of the store; every call commits."""

    def take_over(self, limit: int, now: datetime) -> Sequence[Claimed]: ...
    def claim(self, limit: int, now: datetime) -> Sequence[Claimed]: ...
    def begin(self, rows: Mapping[int, tuple[str, Strategy | None]], now: datetime) -> Sequence[Row]: ...
    def mark_sent(self, numbers: Mapping[int, int], now: datetime) -> None: ...
    def give_back(self, rows: Mapping[int, Back], now: datetime) -> set[int]: ...


class Preview(Protocol):
    """The same rows for a dry run, which takes none."""

    def due(self, limit: int, now: datetime) -> Sequence[Claimed]: ...
    def outgoing(self, row_ids: Sequence[int]) -> Sequence[Row]: ...


class Sending:
    """A source that takes rows over and claims them as there is room, and accounts for every one."""

    def __init__(
        self,
        retries: Retries,
        breakers: Breakers,
        choice: Choice,
        resend: Resend,
        clock: Callable[[], datetime],
        max_messages: int,
        max_attempts: int,
    ) -> None:
        self.got = 0
        self.results: Counter[tuple[str, str | None]] = Counter()
        self.preview: list[dict[str, str]] = []
        self.is_empty = False
        """The store had no more that was due."""
        self._retries = retries
        self._breakers = breakers
        self._choice = choice
        self._resend = resend
        self._clock = clock
        self._max_messages = max_messages
        self._max_attempts = max_attempts
        self._takes_over = True
        self._mine: dict[int, Claimed] = {}
        """Taken, and not accounted for yet."""
        self._ready: deque[tuple[Claimed, tuple[str, Strategy | None]]] = deque()
        self._confirmed: dict[int, int] = {}
        self._held: dict[int, tuple[Back, str, str]] = {}
        self._since = 0.0
        self._is_cut_off = False
        """The database failed; what has to be written waits for the end of the run."""

    def handle(self, delivery: Delivery) -> Instruction:
        return self._resend.handle(delivery)

    def more(self, room: int) -> Sequence[Offer] | None:
        now = self._clock()
        if not self._ready and not self.is_empty and self.got < self._max_messages:
            self._take(now)
        if self._ready:
            return self._begin_some(room, now)
        return None if self.is_empty or self.got >= self._max_messages else ()

    def _take(self, now: datetime) -> None:
        limit = min(self._max_messages - self.got, _AT_ONCE)
        rows: Sequence[Claimed] = ()
        if self._takes_over:
            rows = self._retries.take_over(limit, now)
            self._takes_over = bool(rows)
        if not rows:
            rows = self._retries.claim(limit, now)
            self.is_empty = not rows
        # Not answered within our own lease, and taken over from ourselves: it is on its way, and counted.
        known, self._mine = self._mine, self._mine | {row.row_id: row for row in rows}
        rows = [row for row in rows if row.row_id not in known]
        self.got += len(rows)
        send, back = self._choice.sort_out(rows, self._breakers, now)
        self._give_back(back, now)
        self._ready.extend((row, send[row.row_id]) for row in rows if row.row_id in send)

    def _begin_some(self, room: int, now: datetime) -> Sequence[Offer]:
        """Many at once or none yet, for each trip to the database costs the same."""
        if room < len(self._resend.unanswered):
            return ()
        if 2 * self._unmarked > room:
            self._note()
        # What a cut would send twice is no more than what may be under way.
        return self._begin(room - self._unmarked, now)

    def _begin(self, room: int, now: datetime) -> Sequence[Offer]:
        """Attempts are committed for those alone that are published at once: their leases start anew with it."""
        chunk: dict[int, tuple[str, Strategy | None]] = {}
        size = 0
        while self._ready and len(chunk) < min(room, _AT_ONCE):
            row, entry = self._ready[0]
            size += row.body_size
            if chunk and size > _BYTES_AT_ONCE:
                break
            chunk[row.row_id] = entry
            self._ready.popleft()
        begun = self._retries.begin(chunk, now)
        for row_id in chunk.keys() - {row.row_id for row in begun}:
            self._account(row_id, LEFT, TAKEN_OVER)
        return self._resend.offers(begun)

    def confirmed(self, tag: int) -> None:
        row = self._resend.answered(tag)
        if row is not None:
            self._wait_no_longer()
            self._confirmed[tag] = row.attempt

    def held(self, tag: int, reason: str | None) -> None:
        row = self._resend.answered(tag)
        if row is not None and reason in NOBODY_KNOWS:
            # The lease stays: whoever takes over sends again under the same number, so that the return of either copy
            # is known for what it is.
            self._account(tag, LEFT, reason)
        elif row is not None:
            self._wait_no_longer()
            self._held[tag] = self._kept(self._mine[tag], row.attempt, reason or UNSAID)

    def _kept(self, row: Claimed, attempt: int, reason: str) -> tuple[Back, str, str]:
        never_sent = attempt - row.failed_attempts
        if reason in NEEDS_A_PERSON or (reason == REFUSED and never_sent >= self._max_attempts):
            # A body that the broker does not take would cost a channel in every run there will ever be.
            return Back(row.token, Status.MANUAL, f"could not be sent: {reason}"), MANUAL, reason
        again = self._choice.again(self._clock())
        return Back(row.token, Status.PENDING, f"was not sent: {reason}", again), LEFT, reason

    def _wait_no_longer(self) -> None:
        if not self._confirmed and not self._held:
            self._since = time.monotonic()

    def flush(self) -> None:
        if self._unmarked >= _AT_ONCE or time.monotonic() - self._since >= _AGE:
            self._note()

    @property
    def _unmarked(self) -> int:
        return len(self._confirmed) + len(self._held)

    def _note(self) -> None:
        if self._unmarked and not self._is_cut_off:
            try:
                self._write_down()
            except DlqbatchError:
                self._is_cut_off = True
                raise

    def _write_down(self) -> None:
        """Safe to repeat: what was written is forgotten here only then."""
        now = self._clock()
        while self._confirmed:
            part = dict(list(self._confirmed.items())[:_AT_ONCE])
            self._retries.mark_sent(part, now)
            for row_id in part:
                del self._confirmed[row_id]
                self._account(row_id, SENT, None)
        while self._held:
            part_held = dict(list(self._held.items())[:_AT_ONCE])
            self._give_back(part_held, now)
            for row_id in part_held:
                del self._held[row_id]

    def _give_back(self, rows: Mapping[int, tuple[Back, str, str]], now: datetime) -> None:
        gone = self._retries.give_back({row_id: row[0] for row_id, row in rows.items()}, now) if rows else set()
        for row_id, (_, counts_as, reason) in rows.items():
            if row_id in gone:
                self._account(row_id, counts_as, reason)
            else:
                self._account(row_id, LEFT, TAKEN_OVER)

    def _account(self, row_id: int, counts_as: str, reason: str | None) -> None:
        del self._mine[row_id]
        self.results[counts_as, reason] += 1

    def finish(self) -> list[str]:
        """Write down what is still to be written, whatever it takes; what cannot be waits for its lease to end."""
        for row in self._resend.unanswered:
            self.held(row.row_id, "connection-lost")
        try:
            Retrying(
                stop=stop_any(stop_after_attempt(_TRIES), stop_after_delay(_TRIES_FOR)),
                wait=wait_exponential(multiplier=0.2, max=2),
                retry=retry_if_exception_type(DlqbatchError),
                reraise=True,
            )(self._write_down)
            self._let_go()
        except DlqbatchError as error:
            warnings = [f"the end of the run could not be written: {so_far(error)}"]
            if self._confirmed:
                warnings.append(
                    f"{len(self._confirmed)} sent message(s) could not be marked as sent: a later run sends them again "
                    "under the same attempt number when their lease has ended"
                )
            for row_id in list(self._confirmed):
                self._account(row_id, SENT, NOT_NOTED)
            for row_id in list(self._mine):
                self._account(row_id, LEFT, NOT_NOTED)
            return warnings
        return []

    def _let_go(self) -> None:
        """What was taken and never offered goes back as it was; an attempt of another worker's may be on its way."""
        untouched = {
            row.row_id: (
                Back(row.token, Status.PENDING, "not reached by this run", row.next_retry_at),
                LEFT,
                NOT_REACHED,
            )
            for row in self._mine.values()
            if not row.has_attempt
        }
        self._give_back(untouched, self._clock())
        for row_id in list(self._mine):
            self._account(row_id, LEFT, NOT_REACHED)


class Looking:
    """The source of a dry run: the same rows by the same decisions, and nothing claimed, sent or written."""

    def __init__(
        self, preview: Preview, breakers: Breakers, choice: Choice, resend: Resend, max_messages: int, now: datetime
    ) -> None:
        self.results: Counter[tuple[str, str | None]] = Counter()
        self.preview: list[dict[str, str]] = []
        self._resend = resend
        self._preview = preview
        limit = min(max_messages, _LOOKED_AT)
        rows = preview.due(limit, now)
        self.got = len(rows)
        self.is_empty = len(rows) < limit
        self._rows = {row.row_id: row for row in rows}
        send, back = choice.sort_out(rows, breakers, now)
        self._waiting = deque(row.row_id for row in rows if row.row_id in send)
        for row_id, (given, counts_as, reason) in back.items():
            self.results[counts_as, reason] += 1
            self._show(row_id, counts_as, given.reason)

    def handle(self, delivery: Delivery) -> Instruction:
        instruction = self._resend.handle(delivery)
        if not isinstance(instruction, Publish):
            return instruction
        origin = instruction.origin.name if instruction.origin is not None else ""
        self._show(delivery.tag, SENT, "", origin, instruction.route.exchange, instruction.route.key)
        return Hold(SENT)

    def more(self, room: int) -> Sequence[Offer] | None:
        if not self._waiting:
            return None
        page = [self._waiting.popleft() for _ in range(min(room, _AT_ONCE, len(self._waiting)))]
        return self._resend.offers(self._preview.outgoing(page))

    def confirmed(self, tag: int) -> None:
        raise AssertionError(f"a dry run has sent {tag}")

    def held(self, tag: int, reason: str | None) -> None:
        if self._resend.answered(tag) is None:
            return
        counts_as = SENT if reason is None else MANUAL if reason in NEEDS_A_PERSON else LEFT
        self.results[counts_as, reason] += 1
        if reason is not None:
            self._show(tag, counts_as, reason)

    def flush(self) -> None:
        """There is nothing to write."""

    def finish(self) -> list[str]:
        # Deleted while this run looked, or not looked at before its end.
        if missing := self.got - self.results.total():
            self.results[LEFT, NOT_REACHED] += missing
        return []

    def _show(
        self, row_id: int, decision: str, reason: str, origin: str = "", exchange: str = "", key: str = ""
    ) -> None:
        if len(self.preview) < _PREVIEWED:
            row = self._rows[row_id]
            shown = {"queue": f"message {row_id}", "id": row.identity, "event": row.event or ""}
            shown |= {"origin": origin or row.origin or "", "decision": decision}
            self.preview.append(shown | {"exchange": exchange, "key": key, "reason": reason})
