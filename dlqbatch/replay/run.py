"""One run of an apply: it sends canary steps and batches of a plan until nothing more may be sent now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, ParamSpec, TypeVar, assert_never

from sqlalchemy import Engine

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
from dlqbatch.replay.canary_and_rate import Go, Pace, Stop, Wait, how_far
from dlqbatch.replay.items import PlanItems
from dlqbatch.replay.plan import PlanStatus
from dlqbatch.replay.skip_or_send import Preview

log = logs.get(__name__)

SKIPPED: Final = "skipped"
_COUNTS: Final = (SENT, SKIPPED, MANUAL, LEFT)
_LOOKS_FOR_SIGNALS_EVERY: Final = 0.2  # seconds, while an outcome is waited for
_COUNTS_OUTCOMES_EVERY: Final = 1.0  # seconds, while an outcome is waited for
_OBSERVES_EVERY: Final = 3.0  # seconds between two looks at the queues that messages were sent to
_RESERVES_FOR: Final = 2.0  # seconds; see _Reservation
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Inline(Executor):
    """An executor that does at once what is submitted, for a store that lets only one write at a time."""

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (it is raised to whoever asks for the result, as a thread's is)
            future.set_exception(error)
        return future


def executor_for(engine: Engine) -> Executor:
    """Where the database work runs while messages are sent; SQLite has one lock for all writers."""
    return Inline() if engine.dialect.name == "sqlite" else ThreadPoolExecutor(2)


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
    _results: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    _warnings: list[str] = field(default_factory=list)
    _stopped_by: str | None = None
    _why_stopped: str = ""
    """Why the plan was stopped: too much of it came back."""
    _is_stuck: bool = False
    """The broker confirmed nothing for too long."""
    _observes_at: float = 0.0

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
            self._send_steps(started + self.options.wait)
        except DlqbatchError:
            reservation.stop()
            raise
        for why, number in reservation.end().items():
            self._results[SKIPPED, why] += number
        status = self._finish_plan()
        if status.state == "applying" and (unreserved := self.items.unreserved()):
            self._warnings.append(
                f"{unreserved:,} of those that wait are not reserved yet: the lifecycle may retry one of them before "
                "its turn comes, and it is skipped then"
            )
        return self._report(status, time.monotonic() - started)

    def _finish_plan(self) -> PlanStatus:
        return plans.finish(self.items.engine, self.items.plan_id, self.clock())

    def _send_steps(self, waits_until: float) -> None:
        """Send what may go, step by step, until nothing more may go in this run."""
        pace = Pace(self.options.per_second)
        is_going = True
        while is_going and self.items.is_applied():
            verdict = how_far(
                self.items.outcomes(), canary=self.options.canary, max_failure_rate=self.options.max_failure_rate
            )
            match verdict:
                case Stop():
                    self._why_stopped = verdict.why
                    plans.stop(self.items.engine, self.items.plan_id, verdict.why, self.clock())
                    is_going = False
                case Wait():
                    self._observe_in_time()
                    is_going = self._wait(waits_until)
                    if not is_going:
                        self._warnings.append(_waiting_for(verdict))
                case Go():
                    is_going = self._send_step(verdict.limit, pace, waits_until)
                case _:
                    assert_never(verdict)

    def _send_step(self, ceiling: int | None, pace: Pace, waits_until: float) -> bool:
        """Send what may go now; say whether there may be more to do in this run."""
        tally = self._send(ceiling, pace)
        if tally.lost is not None:
            self._warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            self._warnings.append(so_far(tally.failure))
        self._stopped_by = "time" if self._is_stuck and not self.stopped() else tally.stopped_by
        status = self._finish_plan()
        if status.state != "applying" or tally.stopped_by or tally.lost is not None or tally.failure is not None:
            return False
        if tally.results[SENT, None]:
            return True
        return status.held > 0 and self._wait(waits_until)

    def _send(self, ceiling: int | None, pace: Pace) -> Tally:
        before = sum(self._results.values())
        running: list[Batches] = []
        self._is_stuck = False

        def is_over() -> bool:
            # Kept, because `is_stuck` is false again when nothing is under way any more.
            self._is_stuck = self._is_stuck or any(batches.is_stuck() for batches in running)
            return self.stopped() or self._is_stuck

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
        verdict = how_far(self.items.outcomes(), canary=False, max_failure_rate=self.options.max_failure_rate)
        return isinstance(verdict, Stop)

    def _observe_in_time(self) -> None:
        """Observe the sent messages from time to time, so that the wait needs no lifecycle run."""
        if self.options.wait and time.monotonic() >= self._observes_at:
            self._observes_at = time.monotonic() + _OBSERVES_EVERY
            try:
                self.observe()
            except DlqbatchError as error:
                log.warning("the outcome of what was sent cannot be looked at", why=so_far(error))

    def _wait(self, until: float) -> bool:
        """Wait a little; False when the time to wait is over, or at a signal."""
        began = time.monotonic()
        while (now := time.monotonic()) < min(until, began + _COUNTS_OUTCOMES_EVERY):
            if self.stopped():
                return False
            time.sleep(min(_LOOKS_FOR_SIGNALS_EVERY, until - now))
        return now < until

    def _report(self, status: PlanStatus, seconds: float) -> Report:
        counts, reasons = count(self._results, sum(self._results.values()), _COUNTS)
        warnings = self._warnings
        if self._why_stopped:
            warnings.append(f"stopped: {self._why_stopped}")
        if status.state == "done" and not status.sent:
            warnings.append("nothing was sent: every message of the plan was skipped, or is for a person")
        if status.state == "aborted":
            warnings.append("the plan was aborted while it was applied")
        ending = self._stopped_by or ("signal" if self.stopped() else "messages")
        return Report(
            "replay",
            outcome="failed" if self._why_stopped else "ok" if status.state == "done" else "partial",
            stopped_by="empty" if not status.waiting else ending,
            counts=counts,
            reasons=reasons,
            elapsed_seconds=seconds,
            warnings=(*warnings, *_held_warning(status.held, status.held_until)),
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


def preview_report(preview: Preview, options: ApplyOptions, seconds: float) -> Report:
    """What the first step of an apply would do, as its report."""
    out, goes, why_stopped = preview.outcomes, 0, ""
    warnings: list[str] = []
    match verdict := how_far(out, canary=options.canary, max_failure_rate=options.max_failure_rate):
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
    counts, reasons = count(results, sum(results.values()), _COUNTS)
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
        f"the first {verdict.step} are out and their outcome is not known yet: a failure shows when ingest takes it "
        "in, a success after the observation window. Apply again then, or with --no-canary to go on without knowing"
    )
