"""Whether a consumer has acknowledged a message: proven from readings of its queue, or not claimed.

The management API follows some seconds after the fact, and each figure of one reading may be of another instant. So a
reading speaks of what was sent `LAG` before it was asked for, and a count begins one `LAG` after the depth that it is
compared with.

*Emptied*: the queue held nothing, neither ready nor unacknowledged nor delayed nor on its way to a dead-letter queue.
What stood in it has left it. If nothing leaves it but by a consumer, a consumer has settled it.

*Counted*, for a queue that never empties and delivers in order: more was acknowledged than stood in it, so something
that was published later has been delivered and acknowledged; every channel that could hold one of those before has
settled as many as it held; and after that, once more, more was acknowledged than stood in it, without a redelivery
since the beginning.

What this cannot see, and docs/lifecycle.md says so: a worker that hangs on one message and acknowledges later ones
on the same channel; a program that takes by `basic.get` from a queue that never empties; a purge of a queue while
other messages of it are acknowledged; a queue that was declared anew, or whose node was started again, and that has
counted as much by the next reading as before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from dlqbatch.broker.facts import ChannelReading, QueueReading

LAG: Final = timedelta(seconds=12)
"""How old a figure of the management API may be: 5 s on 4.3 and for quorum queues, 10 s for classic ones of 3.10."""
_ALL_KEPT: Final = timedelta(minutes=2)  # younger readings are all kept; of older ones, fewer the older they are
_SPACING: Final = 10  # two old readings lie at least a tenth of their age apart
_STILL: Final = timedelta(seconds=30)


class Sighting(NamedTuple):
    """A reading of a queue, and since when its counters count."""

    reading: QueueReading
    counted_from: datetime
    """The reading at which the present count began: a queue that was declared anew, or a node that was started."""

    @property
    def at(self) -> datetime:
        return self.reading.at


class Proof(NamedTuple):
    """What was sent to the queue at `until` or before had been acknowledged at `at`."""

    until: datetime
    at: datetime
    queue: str
    how: str
    """emptied, counted, or window."""
    why: str


class Unproven(NamedTuple):
    """Why nothing is claimed, for a person to read."""

    queue: str
    why: str
    by_window: bool = False
    """The counts cannot be had: the observation window decides instead."""
    is_of_its_own: bool = False
    """The reason holds for this retry, and not for what was sent to the queue later."""


def counted_from(earlier: Sequence[Sighting], reading: QueueReading) -> datetime:
    """When the count began that the reading goes on with, its own time if it begins one; the sightings are in order."""
    if not earlier or not reading.is_there or not earlier[-1].reading.is_there:
        return reading.at
    if not reading.by_management:
        return earlier[-1].counted_from
    before = next((each.reading.counters for each in reversed(earlier) if each.reading.counters is not None), None)
    now = reading.counters
    if before is None or (now is not None and all(new >= old for new, old in zip(now, before, strict=True))):
        return earlier[-1].counted_from
    return reading.at


def worth_keeping(times: Sequence[datetime], oldest_sent: datetime | None, now: datetime) -> set[datetime]:
    """Of the times of a queue's readings in order, those that a later proof can need.

    The last one before the oldest open attempt was sent, and then the fewer the longer ago.
    """
    first = 0 if oldest_sent is None else max(bisect_left(times, oldest_sent) - 1, 0)
    needed = list(times[first:]) if oldest_sent is not None else list(times[-1:])
    # `_adds_up` begins with two equal readings: the one long before the first needed reading is kept too.
    still = [at for at in times[:first] if times[first] - at >= _STILL]
    kept = set(needed[:1]) | set(still[-1:])
    last = needed[0] if needed else now
    for at in needed[1:]:
        if now - at < _ALL_KEPT or at - last >= (now - at) / _SPACING:
            kept.add(at)
            last = at
    return kept


class Sent(NamedTuple):
    """When a retry was written down, before its publish, and when its confirm was."""

    begun_at: datetime
    sent_at: datetime


class History:
    """The sightings of one queue, and the retries of ours that went to it and have neither come back nor a proof."""

    def __init__(
        self, queue: str, sightings: Sequence[Sighting], retries: Sequence[Sent] = (), lag: timedelta = LAG
    ) -> None:
        self.queue = queue
        self._sightings = sorted(sightings, key=lambda each: each.at)
        self._times = [each.at for each in self._sightings]
        self._retries = sorted(retries)
        self._lag = lag
        self._counted: dict[int, Proof | None] = {}
        self._answers: dict[tuple[int, int], Proof | Unproven] = {}

    @property
    def last(self) -> QueueReading | None:
        return self._sightings[-1].reading if self._sightings else None

    def empty_since(self, at: datetime) -> datetime | None:
        """When it was first seen empty since that time."""
        return next((each.at for each in self._sightings if each.at >= at and is_empty(each.reading)), None)

    def acknowledged(self, retry: Sent) -> Proof | Unproven:
        """What is proven of a retry that was sent to the queue."""
        before = bisect_left(self._times, retry.begun_at)
        after = bisect_left(self._times, retry.sent_at + self._lag)
        if (before, after) not in self._answers:
            self._answers[before, after] = self._answer(before, after)
        return self._answers[before, after]

    def _answer(self, before: int, after: int) -> Proof | Unproven:
        """For a retry that was begun after the first `before` sightings, and confirmed before those from `after` on."""
        refused = ""
        for index in range(after, len(self._sightings)):
            reading = self._sightings[index].reading
            if is_empty(reading):
                refused = self._objection(index, before)
                if not refused:
                    why = f"queue '{self.queue}' was empty at {reading.at:%H:%M:%S} UTC"
                    return Proof(reading.at - self._lag, reading.at, self.queue, "emptied", why)
        for index in range(after, len(self._sightings)):
            if index not in self._counted:
                self._counted[index] = self._count_from(index)
            proof = self._counted[index]
            if proof is not None and not self._began_again(index, before) and not self._may_be_dropped(index, before):
                return proof
        return self._unproven(before, after, refused)

    def _objection(self, index: int, before: int) -> str:
        """Why the empty queue proves nothing; empty if it proves that a consumer has settled what stood in it."""
        seen = self._sightings[index]
        if self._began_again(index, before):
            return "its counters began again after the send: it was declared anew, or its node was started"
        if seen.reading.may_drop and not self._adds_up(index, before):
            return (
                f"it is empty, but {seen.reading.may_drop}, and its counters do not show that everything that left it "
                "was acknowledged"
            )
        return self._may_be_dropped(index, before) or self._too_few(index, before)

    def _may_be_dropped(self, index: int, before: int) -> str:
        """As many redeliveries since the send as a delivery limit allows, in a queue that drops what exceeds it.

        What was redelivered before the queue was seen is known one `LAG` later.
        """
        seen = self._sightings[index]
        limit = seen.reading.drops_after
        if limit is None:
            return ""
        later = (each.reading.counters for each in self._same_count(index) if each.at >= seen.at + self._lag)
        counters = next(later, None)
        if counters is None:
            return f"the broker drops a message after {limit} deliveries, and its redeliveries are not counted yet"
        start = self._sightings[before - 1].reading.counters if before else None
        redelivered = counters.redelivered - (start.redelivered if start is not None else 0)
        if redelivered < limit:
            return ""
        return f"{redelivered} messages were redelivered since the send, and after {limit} deliveries one is dropped"

    def _too_few(self, index: int, before: int) -> str:
        """A purge of a queue that was quiet otherwise: fewer acknowledgements than retries of ours."""
        # The management API may not have answered every time.
        last = _newest_counted(self._same_count(index))
        if last is None or last.counters is None or (last.consumers and not last.channels):
            # Consumers that have no channel of AMQP 0-9-1 are not counted by every release.
            return ""
        acknowledged, since, begin = last.counters.acknowledged, "its counters began", 0
        start = _newest_counted(self._sightings[:before])
        if start is not None and start.counters is not None:
            acknowledged -= start.counters.acknowledged
            since, begin = "they were sent", bisect_right(self._retries, start.at, key=lambda each: each.begun_at)
        until = self._times[index] - self._lag
        ours = sum(1 for each in self._retries[begin:] if each.sent_at <= until)
        if acknowledged >= ours:
            return ""
        return (
            f"it is empty, but only {acknowledged} message(s) of it were acknowledged since {since}, and {ours} "
            "retries that have not come back went to it: it was purged, or they were rejected and dead-lettered "
            "elsewhere or nowhere"
        )

    def _adds_up(self, index: int, sent_before: int) -> bool:
        """Whether all that stood in it or was published was acknowledged, since its count began or stood still."""
        end = self._sightings[index]
        is_still_now = any(
            later.at >= end.at + self._lag and later.reading.counters == end.reading.counters
            for later in self._same_count(index)
            if is_empty(later.reading)
        )
        if not is_still_now or end.reading.counters is None:
            return False
        if sent_before and end.reading.counters.acknowledged == end.reading.counters.published:
            # The count goes back to before the send: of all that was ever published nothing left in another way.
            return True
        before = [each for each in self._sightings[:sent_before] if each.counted_from == end.counted_from]
        for number, start in enumerate(before):
            was = start.reading
            if was.counters is None or not any(
                later.at >= start.at + self._lag
                and later.reading.counters == was.counters
                and _depth(later.reading) == _depth(was)
                for later in before[number + 1 :]
            ):
                continue
            acknowledged = end.reading.counters.acknowledged - was.counters.acknowledged
            came = _depth(was) + end.reading.counters.published - was.counters.published
            return acknowledged == came
        return False

    def _count_from(self, index: int) -> Proof | None:
        """What stood in the queue at this reading, proven as the module's docstring says."""
        rows = [each.reading for each in self._same_count(index) if each.at >= self._sightings[index].at]
        start = rows[0]
        checked = self._later(rows, self._overtaken(rows, 0))
        settled = None if checked is None else self._settled(rows, checked)
        again = self._later(rows, settled)
        last = None if again is None else self._later(rows, self._overtaken(rows, again))
        if last is None or not all(_can_be_counted(each) for each in rows[: last + 1]):
            return None
        begin, end = start.counters, rows[last].counters
        if begin is None or end is None or end.redelivered != begin.redelivered:
            return None
        acknowledged = end.acknowledged - begin.acknowledged
        why = (
            f"queue '{self.queue}' held {_depth(start)} when it was in it, and {acknowledged} have been acknowledged "
            "since, in order, none redelivered, and no channel held back"
        )
        return Proof(start.at - self._lag, rows[last].at, self.queue, "counted", why)

    def _overtaken(self, rows: Sequence[QueueReading], start: int) -> int | None:
        """The first reading by which more was acknowledged than stood in the queue at the start."""
        base = self._later(rows, start)
        counters = None if base is None else rows[base].counters
        if base is None or counters is None:
            return None
        wanted = counters.acknowledged + _depth(rows[start])
        counted = ((index, rows[index].counters) for index in range(base + 1, len(rows)))
        return next((index for index, later in counted if later is not None and later.acknowledged > wanted), None)

    def _settled(self, rows: Sequence[QueueReading], checked: int) -> int | None:
        """The first reading by which every channel has let go of what it held at the checked one."""
        if rows[checked].consumers and not rows[checked].channels:
            return None
        settled = [self._settled_by(channel, rows, checked) for channel in rows[checked].channels]
        known = [index for index in settled if index is not None]
        return max([checked, *known]) if len(known) == len(settled) else None

    def _settled_by(self, channel: ChannelReading, rows: Sequence[QueueReading], checked: int) -> int | None:
        if not channel.unacknowledged:
            return checked
        base: int | None = None
        for index in range(checked + 1, len(rows)):
            now = next((each for each in rows[index].channels if each.name == channel.name), None)
            if now is None or not now.unacknowledged:
                # A channel that is gone has returned its messages: they stand in the queue, and are counted once more.
                return index
            if base is None and rows[index].at >= rows[checked].at + self._lag:
                base = now.acknowledged
            elif base is not None and now.acknowledged - base > max(channel.unacknowledged, channel.prefetch):
                return index
        return None

    def _same_count(self, index: int) -> list[Sighting]:
        began = self._sightings[index].counted_from
        return [each for each in self._sightings if each.counted_from == began]

    def _began_again(self, index: int, before: int) -> bool:
        began = self._sightings[index].counted_from
        first = next(number for number, each in enumerate(self._sightings) if each.counted_from == began)
        return first >= max(before, 1)

    def _later(self, rows: Sequence[QueueReading], index: int | None) -> int | None:
        """The first reading at least one `LAG` after this one."""
        if index is None:
            return None
        return next((later for later, each in enumerate(rows) if each.at >= rows[index].at + self._lag), None)

    def _unproven(self, before: int, after: int, refused: str) -> Unproven:
        """What a person has to know: the newest figures, and what is missing."""
        last = self.last
        if last is None:
            return Unproven(self.queue, f"queue '{self.queue}': nobody has looked at it yet")
        if not last.is_there:
            return Unproven(self.queue, f"queue '{self.queue}' is not there any more", by_window=True)
        figures = f"queue '{self.queue}': {figures_of(last)}"
        if not last.by_management:
            return self._uncounted(last, before)
        if refused:
            is_lost = self._began_again(len(self._sightings) - 1, before) and not last.may_drop
            return Unproven(self.queue, f"{figures}; {refused}", is_lost and is_empty(last), is_of_its_own=True)
        if after == len(self._sightings):
            return Unproven(self.queue, f"{figures}; the broker's figures may be from before the send")
        return Unproven(self.queue, f"{figures}; {_why_it_stands(last)}")

    def _uncounted(self, last: QueueReading, before: int) -> Unproven:
        """The management API did not answer the newest look; if it has not since before the send, the window decides.

        Where it has, and is silent for a while, a consumer may still hold what it had shown.
        """
        figures = f"queue '{self.queue}': {figures_of(last)}"
        counted = [each.reading for each in self._sightings[max(before - 1, 0) :] if each.reading.by_management]
        if counted:
            shown = f"the newest counts are of {counted[-1].at:%H:%M:%S} UTC: {figures_of(counted[-1])}"
            return Unproven(self.queue, f"{figures}; {shown}; {last.missing}")
        is_over = not last.may_hide_delayed and bool(last.consumers or not last.ready)
        return Unproven(self.queue, f"{figures}; {last.missing}", by_window=is_over)


def _newest_counted(sightings: Sequence[Sighting]) -> QueueReading | None:
    return next((each.reading for each in reversed(sightings) if each.reading.counters is not None), None)


def proof_of(histories: Mapping[str, History], queues: Sequence[str], retry: Sent) -> tuple[Proof, ...] | Unproven:
    """A proof for each queue that the message can have gone to, or the first thing that is missing."""
    answers = [histories[queue].acknowledged(retry) for queue in queues]
    missing = [answer for answer in answers if isinstance(answer, Unproven)]
    # The window may decide only if nothing else is missing.
    missing.sort(key=lambda each: each.by_window)
    return missing[0] if missing else tuple(answer for answer in answers if isinstance(answer, Proof))


def figures_of(reading: QueueReading) -> str:
    """For a person to read."""
    if not reading.by_management:
        return f"{reading.ready} ready, {reading.consumers} consumer(s)"
    return (
        f"{reading.ready} ready, {reading.unacknowledged} unacknowledged, {reading.delayed} delayed, "
        f"{reading.consumers} consumer(s)"
    )


def _why_it_stands(reading: QueueReading) -> str:
    reasons = (
        (not reading.consumers, "it has no consumer"),
        (reading.delayed, "delayed retry holds messages back"),
        (_depth(reading) > _held(reading), "dead letters of it have not been handed on"),
        (not reading.in_order, "it has not been seen empty since the send, and it does not deliver in order"),
        (not reading.ready, "its consumers have not acknowledged what they hold"),
        (reading.counters is None, "it has not been seen empty since the send, and the broker does not count for it"),
    )
    return next(
        (why for is_so, why in reasons if is_so),
        "it has not been seen empty since the send, and its acknowledgements do not account for what stood in it",
    )


def is_empty(reading: QueueReading) -> bool:
    return reading.by_management and reading.is_there and not _depth(reading)


def _can_be_counted(reading: QueueReading) -> bool:
    is_known = reading.by_management and reading.is_there and reading.counters is not None
    return is_known and reading.in_order and not reading.may_drop


def _held(reading: QueueReading) -> int:
    return reading.ready + reading.unacknowledged + reading.delayed


def _depth(reading: QueueReading) -> int:
    return max(reading.total, _held(reading))
