"""What became of retries that were sent: their queues are read, and a retry that was handled is resolved.

A retry was handled when a consumer acknowledged it (proof.py) or, where the broker's counts cannot be had, when its
observation window is over. In both cases somebody has to look afterwards wherever it would come back
(return_checks.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from dlqbatch import logs
from dlqbatch.broker.access import Access, connect
from dlqbatch.broker.facts import QueueReading, Target
from dlqbatch.broker.queue_types import quorum_queues
from dlqbatch.broker.readings import Readings
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Bounds
from dlqbatch.errors import DlqbatchError, so_far
from dlqbatch.lifecycle.outcome_rows import SentAttempt, SentAttempts, Way
from dlqbatch.lifecycle.proof import (
    LAG,
    History,
    Sent,
    Sighting,
    Unproven,
    counted_from,
    figures_of,
    proof_of,
)
from dlqbatch.lifecycle.return_checks import LoggedRun, UnprovenRetries, emptied_since, left_both, unseen

log = logs.get(__name__)

_PAGE: Final = 500
_PAGES: Final = 20
"""At most so many pages of retries, those sent longest ago, are looked at in one run."""
_MOST_QUEUES: Final = 100
"""How many queues are read in one run; those that were read longest ago come first."""
_MOST_COUNTED: Final = 20_000
_MOST_DUE: Final = 1_000
_MOST_READ_AHEAD: Final = 20
"""How many queues are read in one run before the first retry to them is sent."""
_MOST_NAMED: Final = 3
_FRESH: Final = timedelta(minutes=5)
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)

_Figures = tuple[str | None, int | None, int | None, int | None, int | None]


class QueueReader(NamedTuple):
    """Reads queues, and checks with a `basic.get` where a passive declaration may be wrong.

    A quorum queue without a leader is declared as empty, whatever it holds.
    """

    readings: Readings
    access: Access
    bounds: Bounds

    def read(self, queues: Collection[str], at: datetime) -> Mapping[str, QueueReading]:
        """A reading at that time for each queue, without the queues that could not be read."""
        found = self.readings.read(queues, at)
        doubtful = [
            name
            for name, seen in found.items()
            if seen.is_there and not seen.by_management and not seen.ready and not seen.consumers
        ]
        depths = self._depths(doubtful) if doubtful else {}
        for name in doubtful:
            if name in depths:
                found[name] = found[name]._replace(ready=depths[name], total=depths[name])
            else:
                # A login that may not read from a queue learns neither its depth nor its type: that is no reading.
                del found[name]
        return found

    def _depths(self, queues: Collection[str]) -> Mapping[str, int]:
        try:
            # Not on the run's own connection: a broker that finds no leader closes it.
            connection = connect(self.access)
            try:
                quorum = quorum_queues(connection, list(queues), otherwise=True)
                session = Session(connection, Origins(connection, touch=False), self.bounds, quorum)
                depths, unknown = session.depths(queues, ())
            finally:
                connection.close()
        except DlqbatchError as error:
            log.info("queues cannot be looked at", queues=sorted(queues), why=so_far(error))
            return {}
        return {queue: depth for queue, depth in depths.items() if queue not in unknown}


class Resolution(NamedTuple):
    """The result of an observation."""

    resolved: int
    warnings: list[str]


class Missing(NamedTuple):
    """Why the retries that went one way are not resolved."""

    why: str
    is_acknowledged: bool = False
    reading: QueueReading | None = None


@dataclass(slots=True)
class _Judged:
    """A page of retries by what becomes of them; attempts are numbers by row id."""

    acknowledged: defaultdict[tuple[datetime, str], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Attempts by when they were acknowledged, and by the proof of it."""
    resolved: dict[int, tuple[int, str]] = field(default_factory=dict)
    gone: dict[int, tuple[int, str]] = field(default_factory=dict)
    stuck: set[Way] = field(default_factory=set)
    """Ways whose later retries wait for the same thing, and need no look in this run."""


@dataclass(slots=True)
class Observation:
    """Observes the retries that were sent, during one run."""

    attempts: SentAttempts
    reader: QueueReader
    sources: Collection[str]
    """The queues that drains take from."""
    dead_letter_queues: Collection[str]
    """The queues that drains dead-letter to."""
    window: timedelta
    is_over: Callable[[], bool]
    """Whether the time of the run is over, or a signal has asked for its end."""
    clock: Callable[[], datetime]
    lag: timedelta = LAG
    _targets: dict[Way, Target] = field(default_factory=dict)
    _sightings: dict[str, list[Sighting]] = field(default_factory=dict)
    _retries: defaultdict[str, list[Sent]] = field(default_factory=lambda: defaultdict(list))
    _histories: dict[str, History] = field(default_factory=dict)
    _ingests: dict[str, LoggedRun | None] = field(default_factory=dict)
    _drains: dict[tuple[frozenset[str], datetime], LoggedRun | None] = field(default_factory=dict)
    _oldest: datetime | None = None
    """When the first retry was sent; runs that began before cannot have seen what became of any."""
    _missing: dict[Way, Missing] = field(default_factory=dict)

    def resolve(self, now: datetime, *, dry_run: bool = False) -> Resolution:
        """Read the queues that hold retries, keep what is proven of them, and resolve what stayed away."""
        resolved = left = 0
        after: tuple[datetime, int] | None = None
        stuck: set[Way] = set()
        for _ in range(_PAGES):
            page = self.attempts.sent_before(now, _PAGE, after, stuck)
            if not page or self.is_over():
                break
            self._oldest = self._oldest or page[0].sent_at
            after = (page[-1].sent_at, page[-1].attempt_id)
            self._read_queues_of(page, now, dry_run=dry_run)
            judged = self._judge(page, now)
            stuck |= judged.stuck
            if dry_run:
                resolved, left = resolved + len(judged.resolved), left + len(judged.gone)
                continue
            for (at, proof), attempts in judged.acknowledged.items():
                self.attempts.mark_acknowledged(attempts, at, proof)
            resolved += len(self.attempts.resolve(judged.resolved, now))
            left += len(self.attempts.leave_to_person(judged.gone, now))
        unproven = self._unproven(now)
        if not dry_run:
            self.attempts.save_unproven(unproven)
        return Resolution(resolved, _warnings(left, unproven, now - self.window))

    def look_ahead(self, now: datetime) -> None:
        """Read the queues that the next retries go to, unless they were read of late: a proof begins with a reading."""
        queues: dict[str, None] = {}
        for origin in self.attempts.due(now, _MOST_DUE):
            if len(queues) >= _MOST_READ_AHEAD or self.is_over():
                break
            target = self.reader.readings.target(origin)
            queues.update(dict.fromkeys((*target.queues, *_framework_delays(target))))
        new = queues.keys() - self._sightings.keys()
        known = self.attempts.sightings(new)
        wanted = [queue for queue in new if not known.get(queue) or known[queue][-1].at < now - _FRESH]
        if wanted:
            found = self.reader.read(wanted[:_MOST_READ_AHEAD], self.clock())
            self.attempts.save_readings(found.values(), dict.fromkeys(new, now), now)

    def _read_queues_of(self, page: Sequence[SentAttempt], now: datetime, *, dry_run: bool) -> None:
        """Find out where these went, and read the queues that were not read in this run."""
        begun: dict[str, datetime] = {}
        for each in page:
            if each.way not in self._targets:
                to = each.sent_to
                self._targets[each.way] = Target() if to is None else self.reader.readings.target(to)
            target = self._targets[each.way]
            hiding = self._hiding(*self._ways_back(each), is_acknowledged=True)
            for queue in (*target.queues, *target.delays, *_framework_delays(target), *hiding):
                begun[queue] = min(begun.get(queue, each.begun_at), each.begun_at)
                if each.acknowledged_at is None:
                    self._retries[queue].append(Sent(each.begun_at, each.sent_at))
        new = begun.keys() - self._sightings.keys()
        if new:
            known = self.attempts.sightings(new)
            by_age = sorted(new, key=lambda queue: (known[queue][-1].at if known.get(queue) else _LONG_AGO, queue))
            found = self.reader.read(by_age[: max(_MOST_QUEUES - len(self._sightings), 0)], self.clock())
            for queue in new:
                self._sightings[queue] = earlier = list(known.get(queue, ()))
                if queue in found:
                    earlier.append(Sighting(found[queue], counted_from(earlier, found[queue])))
            if not dry_run:
                self.attempts.save_readings(found.values(), begun, now)
        for queue in begun:
            self._histories[queue] = History(queue, self._sightings[queue], self._retries[queue], self.lag)

    def _judge(self, page: Iterable[SentAttempt], now: datetime) -> _Judged:
        judged = _Judged()
        for each in page:
            at, proof = each.acknowledged_at, each.proof or ""
            if at is None:
                answer = self._proof_of(each)
                if isinstance(answer, Unproven):
                    self._judge_unproven(each, answer, now, judged)
                    continue
                at, proof = answer
                judged.acknowledged[at, proof][each.row_id] = each.attempt
            why = self._unseen(each, at, is_acknowledged=True)
            if why:
                self._missing[each.way] = Missing(f"it was acknowledged; {why}", is_acknowledged=True)
                judged.stuck.add(each.way)
            else:
                judged.resolved[each.row_id] = each.attempt, f"attempt {each.attempt} did not come back; {proof}"
        return judged

    def _proof_of(self, each: SentAttempt) -> tuple[datetime, str] | Unproven:
        """When a consumer had acknowledged it, and by which proof."""
        target = self._targets[each.way]
        if target.is_gone:
            return Unproven("", "the queue or exchange that it was sent to is gone", by_window=True)
        if target.unknown or not target.queues:
            return Unproven("", target.unknown or "nobody knows which queue it went to")
        proofs = proof_of(self._histories, target.queues, Sent(each.begun_at, each.sent_at))
        if isinstance(proofs, Unproven):
            return proofs
        return max(proof.at for proof in proofs), "; ".join(proof.why for proof in proofs)

    def _judge_unproven(self, each: SentAttempt, answer: Unproven, now: datetime, judged: _Judged) -> None:
        """The observation window decides where the broker's counts cannot be had, and nothing speaks against it."""
        target, over, why = self._targets[each.way], each.sent_at + self.window, answer.why
        if answer.by_window:
            missing = self._unseen(each, over) if now >= over else "it is not over yet"
            if not missing:
                stayed_away = f"attempt {each.attempt} stayed away"
                last = [self._histories[queue].last for queue in target.queues]
                if target.is_gone or not all(reading is not None and reading.is_there for reading in last):
                    name = each.sent_to.name if each.sent_to is not None else ""
                    why = f"{stayed_away}, and '{name}' is gone: nobody can tell whether it was handled there"
                    judged.gone[each.row_id] = each.attempt, why
                else:
                    why = f"{stayed_away} for the observation window; that a consumer took it is not proven ({why})"
                    judged.resolved[each.row_id] = each.attempt, why
                return
            why += f"; so the observation window decides, and {missing}"
        reading = self._histories[answer.queue].last if answer.queue else None
        self._missing.setdefault(each.way, Missing(why, reading=reading))
        if not answer.is_of_its_own:
            judged.stuck.add(each.way)

    def _unseen(self, each: SentAttempt, since: datetime, *, is_acknowledged: bool = False) -> str:
        """What has to be looked into yet; empty if a return since that time would have been seen."""
        target = self._targets[each.way]
        if target.held_back_in is None and each.has_framework_id:
            return "its framework may hold it back to try it again, which only the management API can tell"
        for queue, delay in target.held_back_in or ():
            left = left_both(self._sightings[queue], self._sightings[delay], each.begun_at, since, self.lag)
            if left is None:
                last = self._histories[delay].last
                shown = "nobody has looked into it" if last is None else figures_of(last)
                return (
                    f"queue '{delay}', where its framework lets what it tries again wait, may hold it ({shown}): it "
                    f"takes half a minute in which nothing is published there and both it and '{queue}' are seen empty"
                )
            since = left
        for queue in target.delays:
            emptied = self._histories[queue].empty_since(since + self.lag)
            if emptied is None:
                return f"queue '{queue}', where its dead letters wait on their way, has not been seen empty since"
            since = emptied
        sources, back = self._ways_back(each)
        for queue in self._hiding(sources, back, is_acknowledged=is_acknowledged):
            emptied = self._histories[queue].empty_since(since + self.lag)
            if emptied is None:
                return f"delayed retry may hide it in queue '{queue}', which has not been seen empty since (see doctor)"
            since = emptied
        ingests = self._newest_ingests(back, since)
        edge = emptied_since(ingests, back)
        drain = self._newest_drain(frozenset(sources), since, edge) if edge is not None and sources else None
        missing = unseen([drain] if drain is not None else [], ingests, sources, back, since)
        return missing or self._held_elsewhere((*sorted(sources), *sorted(back)), is_acknowledged=is_acknowledged)

    def _held_elsewhere(self, queues: Iterable[str], *, is_acknowledged: bool) -> str:
        """Which of these queues holds messages that another run or program has taken: no look has seen them."""
        for queue in queues:
            held = self.reader.readings.held(queue)
            if held or (held is None and is_acknowledged):
                what = (
                    f"holds {held} unacknowledged message(s)"
                    if held
                    else "may hold unacknowledged message(s) that only the management API can tell"
                )
                return f"queue '{queue}' {what}: a run or a program that has taken it may have it yet"
        return ""

    def _ways_back(self, each: SentAttempt) -> tuple[Collection[str], AbstractSet[str]]:
        """The queues through which it would come back: those that drains take from, and those of ingests."""
        target = self._targets[each.way]
        ends, is_known = set(target.comes_back_through or ()), bool(target.comes_back_through)
        back = ends - set(self.sources)
        if not (is_known and each.is_elsewhere):
            back |= {each.source_queue} - set(target.queues)
        if not is_known or ends & set(self.sources) or back & set(self.dead_letter_queues):
            return self.sources, back | set(self.dead_letter_queues)
        return (), back

    def _hiding(self, sources: Collection[str], back: Collection[str], *, is_acknowledged: bool) -> list[str]:
        """Those of these queues in which the broker may hide a message from a run, in the order of its way.

        The management API has shown that it was acknowledged; so where it is silent now, that may be for a moment.
        """
        by_way = {queue: self.reader.readings.may_hide(queue) for queue in (*sorted(sources), *sorted(back))}
        return [queue for queue, hides in by_way.items() if hides or (hides is None and is_acknowledged)]

    def _newest_ingests(self, queues: AbstractSet[str], since: datetime) -> list[LoggedRun]:
        """Of each queue the newest ingest that saw it empty, looked for once."""
        if new := queues - self._ingests.keys():
            self._ingests |= self.attempts.newest_ingests(new, self._oldest or since)
        return [run for queue in queues if (run := self._ingests[queue]) is not None]

    def _newest_drain(self, sources: frozenset[str], since: datetime, before: datetime) -> LoggedRun | None:
        if (sources, before) not in self._drains:
            self._drains[sources, before] = self.attempts.newest_drain(sources, self._oldest or since, before)
        return self._drains[sources, before]

    def _unproven(self, now: datetime) -> list[UnprovenRetries]:
        """What is missing, once for each origin, by the first retry that was sent there."""
        found: dict[str, UnprovenRetries] = {}
        for each in self.attempts.by_way(_MOST_COUNTED):
            known = found.get(each.place)
            if known is not None:
                found[each.place] = known._replace(retries=known.retries + each.retries)
                continue
            why, is_acknowledged, seen = self._missing.get(each.way) or Missing("nobody has looked at it in this run")
            figures: _Figures = (None, None, None, None, None)
            if seen is not None:
                figures = seen.queue, seen.ready, seen.unacknowledged, seen.delayed, seen.consumers
            found[each.place] = UnprovenRetries(
                each.place, each.retries, each.sent_at, is_acknowledged, why, *figures, now
            )
        return sorted(found.values(), key=lambda each: (each.sent_at, each.place))


def _framework_delays(target: Target) -> list[str]:
    return [delay for _, delay in target.held_back_in or ()]


def _warnings(left: int, unproven: Sequence[UnprovenRetries], before: datetime) -> list[str]:
    """For the report; that something was sent a moment ago is no warning."""
    found = []
    if left:
        found.append(
            f"{left} sent message(s) are left to a person: nobody has seen them come back, and the queue or "
            "exchange that they were sent to is gone"
        )
    late = [each for each in unproven if each.sent_at < before]
    found += [
        f"{each.retries} sent message(s) to '{each.place}' are not resolved: {each.missing}"
        for each in late[:_MOST_NAMED]
    ]
    if len(late) > _MOST_NAMED:
        found.append(f"nor are sent messages to {len(late) - _MOST_NAMED} more place(s): dlqbatch status --json")
    return found
