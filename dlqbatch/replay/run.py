"""One run of an apply: it sends canary steps and batches of a plan until nothing more may be sent now."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, assert_never

from dlqbatch import logs
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Tally
from dlqbatch.drain.retry_decision import ORIGIN_UNKNOWN
from dlqbatch.errors import DatabaseLost, DatabaseUnreadable, DlqbatchError, so_far
from dlqbatch.jobs import LEFT, Report, count
from dlqbatch.lifecycle.resend import SENT, Resend
from dlqbatch.lifecycle.strategy import MANUAL
from dlqbatch.replay import plan as plans
from dlqbatch.replay.batches import ApplyOptions, Batches
from dlqbatch.replay.canary_and_rate import Go, Pace, Step, Stop, Wait, how_far
from dlqbatch.replay.executor import Inline
from dlqbatch.replay.items import PlanItems
from dlqbatch.replay.order import says
from dlqbatch.replay.plan_status import PlanStatus
from dlqbatch.replay.skip_or_send import Preview
from dlqbatch.store.reservation import OVER
from dlqbatch.store.text import time_text

log = logs.get(__name__)

SKIPPED: Final = "skipped"
COUNTS: Final = (SENT, SKIPPED, MANUAL, LEFT)
_LOOKS_FOR_SIGNALS_EVERY: Final = 0.2  # seconds, while an outcome is waited for
_COUNTS_OUTCOMES_EVERY: Final = 1.0  # as above
_OBSERVES_EVERY: Final = 3.0  # seconds between two looks at the queues that messages were sent to
_RESERVES_FOR: Final = 2.0  # seconds; see _Reservation
_LONGEST_LINE: Final = 300  # characters of what is missing


@dataclass(slots=True)
class Replay:
    """One run of a plan that is being applied."""

    items: PlanItems
    options: ApplyOptions
    clock: Callable[[], datetime]
    """The dead store's, by which leases count."""
    connect: Callable[[Callable[[], bool], Callable[[int, int], None]], AbstractContextManager[tuple[Session, Resend]]]
    """Connects for one step, since no connection survives the wait between two canary steps.

    Its arguments: whether the run has to end, and a callback for its progress.
    """
    executor: Executor
    stopped: Callable[[], bool]
    progress: Callable[[int, int], None]
    size: int
    """Messages that wait in the plan when the run begins."""
    observe: Callable[[], None]
    """Reads the queues that retries were sent to, and resolves what is proven."""
    harmed: Callable[[], str | None] = lambda: None
    """Why the guard has stopped the plan."""
    live: Callable[[str], None] = lambda _: None
    """Shows what the run waits for, and since when."""
    stop_at: float = math.inf
    """When the run ends, on the monotonic clock; the next run goes on, so that waiting is nothing to warn of."""
    idle: float | None = None
    """Seconds since an earlier run sent something."""
    _results: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    _warnings: list[str] = field(default_factory=list)
    _waits: list[str] = field(default_factory=list)  # what keeps the plan from being done though all is well
    _stopped_by: str | None = None
    _why_stopped: str = ""
    """Why the run failed: too much of the plan came back, or somebody or the guard stopped it."""
    _is_stuck: bool = False
    """The broker confirmed nothing for too long."""
    _observes_at: float = 0.0
    _waits_from: float | None = None
    """When the present wait began, on the monotonic clock."""
    _waits_since: datetime | None = None
    _waits_for: str = ""
    _waited: list[dict[str, object]] = field(default_factory=list)
    """For the report: each wait that is over."""
    _missing: str = ""
    """What keeps the sent messages from being proven, by the newest look."""

    def run(self) -> Report:
        try:
            return self._run()
        except DatabaseUnreadable as error:
            sent = self._results[SENT, None]
            if not sent:
                raise
            raise DatabaseLost(error.where, error.why, sent) from error

    def _run(self) -> Report:
        started = time.monotonic()
        reservation = _Reservation(self.items, self.executor, self.stopped)
        try:
            self._send_steps()
        except DlqbatchError:
            reservation.stop()
            raise
        for why, number in reservation.end().items():
            self._results[SKIPPED, why] += number
        status = self._finish_plan()
        if status.state == "applying" and (unreserved := self.items.unreserved()):
            self._waits.append(
                f"{unreserved:,} of those that wait are not reserved yet: the lifecycle may retry one of them before "
                "its turn comes, and it is skipped then"
            )
        if status.state == "done":
            if self.options.canary and self.options.settle:
                self._await_the_last()
                status = self._finish_plan()
            self._why_stopped = self._why_too_much() or ""
        self._end_wait()
        self._why_stopped = self._why_stopped or self.harmed() or ""
        return self._report(status, time.monotonic() - started)

    def _finish_plan(self) -> PlanStatus:
        return plans.finish(self.items.engine, self.items.plan_id, self.clock())

    def _send_steps(self) -> None:
        """Send what may go, step by step, until nothing more may go in this run."""
        pace = Pace(None, self.idle)
        is_going = True
        while is_going and time.monotonic() < self.stop_at:
            control = self.items.control()
            pace.per_second = control.per_second
            if control.is_paused:
                self.items.from_the_beginning()
                is_going = self._wait(f"{control.why}; `dlqbatch replay resume` lets it go on")
                if not is_going:
                    self._waits.append(f"the plan was {control.why}")
                continue
            if control.state != "applying" or self.harmed():
                self._why_stopped = (control.why or "") if control.state == "stopped" else ""
                break
            verdict = plans.go_on(
                self.items.engine,
                self.items.plan_id,
                canary=self.options.canary,
                max_failure_rate=self.options.max_failure_rate,
                now=self.clock(),
            )
            match verdict:
                case Stop():
                    self._why_stopped = verdict.why
                    is_going = False
                case Wait():
                    self._observe_in_time()
                    is_going = self._wait(self._unproven())
                    if not is_going:
                        self._waits.append(_waiting_for(verdict))
                case Go():
                    is_going = self._send_step(verdict.limit, pace)
                case _:
                    assert_never(verdict)

    def _send_step(self, ceiling: int | None, pace: Pace) -> bool:
        """Send what may go now; say whether there may be more to do in this run."""
        tally = self._send(ceiling, pace)
        if tally.lost is not None:
            self._warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            self._warnings.append(so_far(tally.failure))
        self._stopped_by = "time" if self._is_stuck and not self.stopped() else tally.stopped_by
        if self.harmed():
            self._stopped_by = None
            return True
        status = self._finish_plan()
        if tally.results[SENT, None]:
            self._end_wait()
        if status.state in OVER or tally.stopped_by or tally.lost is not None or tally.failure is not None:
            return False
        if tally.results[SENT, None] or status.state == "stopped":
            return True
        if self.items.is_in_order and status.waiting:
            return self._await_keys()
        return status.held > 0 and self._wait(f"{status.held} are held by another apply, or by one that was cut")

    def _await_keys(self) -> bool:
        """Wait until a message is acknowledged that others of its key wait for; say which keys are held."""
        held, under_way = self.items.held_keys()
        if under_way:
            self._observe_in_time()
            what = f"{under_way:,} have to be acknowledged before the next of their keys. {self._missing}".rstrip()
            if self._wait(what):
                return True
        if held:
            self._warnings.append(says(held))
        return False

    def _await_the_last(self) -> None:
        """Everything is sent: find out what becomes of it."""
        while self.items.outcomes().open:
            self._observe_in_time()
            if not self._wait(self._unproven()):
                break

    def _send(self, ceiling: int | None, pace: Pace) -> Tally:
        before = sum(self._results.values())
        running: list[Batches] = []
        self._is_stuck = False

        def is_over() -> bool:
            # Kept, because `is_stuck` is false again when nothing is under way any more.
            self._is_stuck = self._is_stuck or any(batches.is_stuck() for batches in running)
            return self.stopped() or self._is_stuck or self.harmed() is not None

        def progress(taken: int, _: int) -> None:
            self.progress(before + taken, self.size)

        with self.connect(is_over, progress) as (sender, resend):
            batches = Batches(
                self.items, resend, pace, self.options, self.clock, ceiling, self._is_too_much, self.executor, is_over
            )
            running.append(batches)
            try:
                tally = sender.send(batches, batches.handle)
                self._results.update(tally.results)
            finally:
                if self._is_stuck:
                    self._warnings.append(f"the broker confirmed nothing for {self.options.confirm_timeout:.0f} s")
                batches.close()
            for why, number in batches.skipped.items():
                self._results[SKIPPED, why] += number
            return tally

    def _is_too_much(self) -> bool:
        return self._why_too_much() is not None

    def _why_too_much(self) -> str | None:
        verdict = how_far(self.items.outcomes(), canary=False, max_failure_rate=self.options.max_failure_rate)
        return verdict.why if isinstance(verdict, Stop) else None

    def _observe_in_time(self) -> None:
        """Observe the sent messages from time to time, so that the wait needs no lifecycle run."""
        if self.options.wait and time.monotonic() >= self._observes_at:
            self._observes_at = time.monotonic() + _OBSERVES_EVERY
            try:
                self.observe()
            except DlqbatchError as error:
                log.warning("the outcome of what was sent cannot be looked at", why=so_far(error))
            unproven = self._finish_plan().unproven
            self._missing = "; ".join(f"'{each.place}': {each.missing}" for each in unproven)[:_LONGEST_LINE]

    def _unproven(self) -> str:
        outcomes = self.items.outcomes()
        return f"{outcomes.open:,} of {outcomes.sent:,} sent are not proven yet. {self._missing}".rstrip()

    def _end_wait(self) -> None:
        """What was waited for is there, or the run is over."""
        if self._waits_from is not None and self._waits_since is not None:
            waited = round(time.monotonic() - self._waits_from, 1)
            since = time_text(self._waits_since)
            self._waited.append({"for": self._waits_for, "since": since, "seconds": waited})
        self._waits_from = None

    def _wait(self, what: str) -> bool:
        """Wait a little for that, and show it; False when the time to wait is over, or at a signal."""
        began = time.monotonic()
        if self._waits_from is None:
            self._waits_from, self._waits_since, self._waits_for = began, self.clock(), what
        until = min(self._waits_from + self.options.wait, self.stop_at)
        if self.options.wait:
            self.live(f"waiting since {self._waits_since:%H:%M:%S} UTC ({began - self._waits_from:.0f} s): {what}")
        while (now := time.monotonic()) < min(until, began + _COUNTS_OUTCOMES_EVERY):
            if self.stopped() or self.harmed():
                return False
            time.sleep(min(_LOOKS_FOR_SIGNALS_EVERY, until - now))
        return now < until

    def _report(self, status: PlanStatus, seconds: float) -> Report:
        counts, reasons = count(self._results, sum(self._results.values()), COUNTS)
        is_last = math.isinf(self.stop_at)
        warnings = self._warnings + (self._waits if is_last else [])
        if self._why_stopped:
            warnings.append(self._why_stopped if status.state == "done" else f"stopped: {self._why_stopped}")
        if status.state == "done" and not status.sent:
            warnings.append("nothing was sent: every message of the plan was skipped, or is for a person")
        if status.state == "aborted":
            warnings.append("the plan was aborted while it was applied")
        is_well = status.state == "done" or not (is_last or warnings or counts[LEFT])
        late = "time" if time.monotonic() >= self.stop_at else "messages"
        ending = self._stopped_by or ("signal" if self.stopped() else late)
        return Report(
            "replay",
            outcome="failed" if self._why_stopped else "ok" if is_well else "partial",
            stopped_by="empty" if not status.waiting else ending,
            counts=counts,
            reasons=reasons,
            elapsed_seconds=seconds,
            warnings=(*warnings, *(_held_warning(status.held, status.held_until) if is_last else ())),
            details={"waited": self._waited} if self._waited else {},
        )


class _Reservation:
    """Reserves the rows of the plan in steps, while messages are sent.

    A run that has sent its step waits at most `_RESERVES_FOR` for it, since a plan may hold a million rows and a canary
    step ten of them. With SQLite, which has one writer, sending waits at most as long too.
    """

    def __init__(self, items: PlanItems, executor: Executor, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._until = time.monotonic() + _RESERVES_FOR
        self._is_bounded = isinstance(executor, Inline)
        self._reserving: Future[Mapping[str, int]] = executor.submit(items.reserve, self._is_enough)

    def _is_enough(self) -> bool:
        return self._stopped() or (self._is_bounded and time.monotonic() >= self._until)

    def end(self) -> Mapping[str, int]:
        """The number of skipped messages by reason."""
        self._is_bounded = True
        return self._reserving.result()

    def stop(self) -> None:
        """The rest is not reserved in this run."""
        self._is_bounded, self._until = True, 0.0


def preview_report(preview: Preview, step: Step | None, options: ApplyOptions, seconds: float) -> Report:
    """What an apply would do at first, as its report; `step` is the canary step that is out, or under way."""
    out, goes, why_stopped = preview.outcomes, 0, ""
    warnings: list[str] = []
    match verdict := how_far(out, step, canary=options.canary, max_failure_rate=options.max_failure_rate):
        case Stop():
            why_stopped = verdict.why
            warnings.append(f"it would stop at once: {why_stopped}")
        case Wait():
            warnings.append(_waiting_for(verdict))
        case Go():
            limit = verdict.limit
            room = preview.ready if limit is None else max(limit - out.sent - preview.held, 0)
            goes = min(preview.ready, room)
            if goes < preview.ready:
                warnings.append(f"a canary: {preview.ready - goes} more wait until it is known what became of it")
        case _:
            assert_never(verdict)
    to_person = sum(place < goes for place in preview.refused)
    results: Counter[tuple[str, str | None]] = Counter({(SENT, None): goes - to_person})
    if to_person:
        results[MANUAL, ORIGIN_UNKNOWN] = to_person
    if preview.refused:
        warnings.append(
            f"{len(preview.refused):,} would be left to a person: nobody vouches for their origin. List it in "
            "dlqbatch.origins-allowed, or make a plan with --to-queue"
        )
    results.update({(SKIPPED, why): number for why, number in preview.skipped.items()})
    counts, reasons = count(results, sum(results.values()), COUNTS)
    is_all = goes == preview.ready and not preview.held
    return Report(
        "replay",
        outcome="failed" if why_stopped else "ok" if is_all else "partial",
        stopped_by="empty" if is_all else "messages",
        counts=counts,
        reasons=reasons,
        elapsed_seconds=seconds,
        dry_run=True,
        warnings=(*warnings, *_held_warning(preview.held, preview.held_until)),
    )


def _held_warning(held: int, until: datetime | None) -> list[str]:
    if not held or until is None:
        return []
    who = "another apply, or by one that was cut, until"
    return [f"{held} message(s) are held by {who} {until:%Y-%m-%d %H:%M:%S} UTC; apply again then"]


def _waiting_for(verdict: Wait) -> str:
    return (
        f"the first {verdict.step.to} are out and their outcome is not known yet: a failure shows when ingest takes it "
        "in, a success after the observation window. Apply again then, or with --no-canary to go on without knowing"
    )
