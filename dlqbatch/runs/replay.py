"""A replay: a plan's messages leave the dead store, a few first, in batches, as fast as they may, and are marked."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from dlqbatch.errors import DatabaseLost, DatabaseUnreadable, DlqbatchError, so_far
from dlqbatch.policy.replay import Go, Pace, Stop, Wait, how_far
from dlqbatch.runs.batches import Batches
from dlqbatch.runs.report import LEFT, Report, count
from dlqbatch.runs.resend import SENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor, Future
    from contextlib import AbstractContextManager
    from datetime import datetime

    from dlqbatch.policy.replay import Outcomes
    from dlqbatch.runs.batches import Items
    from dlqbatch.runs.ports import Sender, Tally
    from dlqbatch.runs.resend import Resend

SKIPPED: Final = "skipped"
_COUNTS: Final = ("sent", SKIPPED, "manual", LEFT)
_LOOKS_EVERY: Final = 0.2
"""Seconds between two looks whether a signal has come, while an outcome is waited for."""
_ASKS_EVERY: Final = 1.0
"""Seconds between two looks at the outcomes."""


class Unhealthy(DlqbatchError):
    """Nothing was moved, and the plan stands as before."""

    exit_code = 1

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__(
            "\n".join((*problems, "nothing was moved; the plan stays, apply it again when that is put right"))
        )


class State(Protocol):
    """How far a plan is."""

    @property
    def state(self) -> str: ...
    @property
    def waiting(self) -> int: ...
    @property
    def sent(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def held_until(self) -> datetime | None: ...


class Standing(Protocol):
    """What an apply would find."""

    @property
    def ready(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def held_until(self) -> datetime | None: ...
    @property
    def skipped(self) -> Mapping[str, int]: ...
    @property
    def outcomes(self) -> Outcomes: ...


class Plan(Protocol):
    """The plan that is applied, already in the state `applying`."""

    def reserve(self) -> Mapping[str, int]:
        """Nobody else takes its rows from here on; says how many are skipped, by why."""

    def outcomes(self) -> Outcomes: ...
    def stop(self, why: str, now: datetime) -> None: ...
    def finish(self, now: datetime) -> State:
        """Done if nothing waits any more; the rows of a plan that is over are let go."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a plan is applied."""

    batch_size: int
    pause: float
    """Seconds between two batches."""
    per_second: float | None
    canary: bool
    max_failure_rate: float
    wait: float
    """Seconds that this run may wait for outcomes, and for what a cut apply still holds."""
    lease: float
    """Seconds that a row stays this apply's without being sent."""
    patience: float
    """Seconds without any confirm after which a run gives up."""
    clock: Callable[[], datetime]
    """The dead store's, by which leases count."""


@dataclass(slots=True)
class Replay:
    plan: Plan
    items: Items
    manner: Manner
    connect: Callable[[Callable[[], bool], Callable[[int, int], None]], AbstractContextManager[tuple[Sender, Resend]]]
    """A connection for each step: between two steps of a canary lies more than a connection survives.

    It takes who says that the end is asked for, and who is told how far it is.
    """
    aside: Executor
    """What the store does while messages are sent."""
    stopped: Callable[[], bool]
    progress: Callable[[int, int], None]
    size: int
    """Messages that wait in the plan as the run begins."""

    def run(self) -> tuple[Report, State]:
        told = _Told()
        try:
            return self._run(told)
        except DatabaseUnreadable as error:
            sent = told.results["sent", None]
            if not sent:
                raise
            raise DatabaseLost(error.where, error.why, sent) from error

    def _run(self, told: _Told) -> tuple[Report, State]:
        started = time.monotonic()
        told.reserving = self.aside.submit(self.plan.reserve)
        pace = Pace(self.manner.per_second)
        waits_until = started + self.manner.wait
        is_going = True
        while is_going:
            verdict = how_far(
                self.plan.outcomes(), canary=self.manner.canary, max_failure_rate=self.manner.max_failure_rate
            )
            if not isinstance(verdict, Go):
                told.reserved()
            match verdict:
                case Stop():
                    told.why_stopped = verdict.why
                    self.plan.stop(verdict.why, self.manner.clock())
                    is_going = False
                case Wait():
                    is_going = self._waits(waits_until)
                    if not is_going:
                        told.warnings.append(_waiting_for(verdict))
                case Go():
                    is_going = self._goes_on(verdict, pace, told, waits_until)
                case _:
                    assert_never(verdict)
        state = self.plan.finish(self.manner.clock())
        return _report(told, state, time.monotonic() - started, is_signal=self.stopped()), state

    def _goes_on(self, go: Go, pace: Pace, told: _Told, waits_until: float) -> bool:
        """Send what may go now; say whether there may be more to do in this run."""
        tally = self._send(go.limit, pace, told)
        told.reserved()
        if tally.lost is not None:
            told.warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            told.warnings.append(so_far(tally.failure))
        told.stopped_by = "time" if told.is_stuck and not self.stopped() else tally.stopped_by
        state = self.plan.finish(self.manner.clock())
        if state.state != "applying" or tally.stopped_by or tally.lost is not None or tally.failure is not None:
            return False
        if tally.results["sent", None]:
            return True
        return state.held > 0 and self._waits(waits_until)

    def _send(self, ceiling: int | None, pace: Pace, told: _Told) -> Tally:
        before = sum(told.results.values())
        running: list[Batches] = []
        told.is_stuck = False

        def is_over() -> bool:
            # It is to be said afterwards, when nothing is waited for any more.
            told.is_stuck = told.is_stuck or any(batches.is_stuck() for batches in running)
            return self.stopped() or told.is_stuck

        def progress(taken: int, _: int) -> None:
            self.progress(before + taken, self.size)

        with self.connect(is_over, progress) as (sender, resend):
            batches = Batches(self.items, resend, pace, self.manner, ceiling, self._is_too_much, self.aside)
            running.append(batches)
            try:
                tally = sender.send(batches, resend.handle)
                told.results.update(tally.results)
            finally:
                if told.is_stuck:
                    told.warnings.append(f"the broker confirmed nothing for {self.manner.patience:.0f} s")
                batches.close()
            for why, number in batches.skipped.items():
                told.results[SKIPPED, why] += number
            return tally

    def _is_too_much(self) -> bool:
        verdict = how_far(self.plan.outcomes(), canary=False, max_failure_rate=self.manner.max_failure_rate)
        return isinstance(verdict, Stop)

    def _waits(self, until: float) -> bool:
        """Whether there is still time to wait; if so, some of it is over."""
        looks = time.monotonic()
        while (now := time.monotonic()) < min(until, looks + _ASKS_EVERY):
            if self.stopped():
                return False
            time.sleep(min(_LOOKS_EVERY, until - now))
        return now < until


@dataclass(slots=True)
class _Told:
    """What the report will say."""

    results: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    stopped_by: str | None = None
    is_stuck: bool = False
    """The broker confirmed nothing for too long."""
    why_stopped: str = ""
    reserving: Future[Mapping[str, int]] | None = None

    def reserved(self) -> None:
        """Before this run pauses or ends, whatever waits in the plan is nobody else's."""
        if self.reserving is not None:
            for why, number in self.reserving.result().items():
                self.results[SKIPPED, why] += number
            self.reserving = None


def foresee(standing: Standing, *, canary: bool, max_failure_rate: float) -> Report:
    """What the first step of an apply would do, as its report."""
    told = _Told()
    out, goes = standing.outcomes, 0
    match verdict := how_far(out, canary=canary, max_failure_rate=max_failure_rate):
        case Stop():
            told.why_stopped = verdict.why
            told.warnings.append(f"it would stop at once: {verdict.why}")
        case Wait():
            told.warnings.append(_waiting_for(verdict))
        case Go():
            limit = verdict.limit
            room = standing.ready if limit is None else max(limit - out.sent - standing.held, 0)
            goes = min(standing.ready, room)
            if goes < standing.ready:
                told.warnings.append(f"a canary: {standing.ready - goes} more wait until it is known what became of it")
        case _:
            assert_never(verdict)
    told.results[SENT, None] = goes
    for why, number in standing.skipped.items():
        told.results[SKIPPED, why] = number
    _tell_held(told, standing)
    counts, reasons = count(told.results, sum(told.results.values()), _COUNTS)
    is_all = goes == standing.ready and not standing.held
    return Report(
        "replay",
        outcome="failed" if told.why_stopped else "ok" if is_all else "partial",
        stopped_by="empty" if is_all else "messages",
        counts=counts,
        reasons=reasons,
        dry_run=True,
        warnings=tuple(told.warnings),
    )


def _report(told: _Told, state: State, seconds: float, *, is_signal: bool) -> Report:
    counts, reasons = count(told.results, sum(told.results.values()), _COUNTS)
    warnings = told.warnings
    if told.why_stopped:
        warnings.append(f"stopped: {told.why_stopped}")
    if state.state == "done" and not state.sent:
        warnings.append("nothing was sent: every message of the plan was skipped, or is for a person")
    if state.state == "aborted":
        warnings.append("the plan was aborted while it was applied")
    _tell_held(told, state)
    ending = told.stopped_by or ("signal" if is_signal else "messages")
    return Report(
        "replay",
        outcome="failed" if told.why_stopped else "ok" if state.state == "done" else "partial",
        stopped_by="empty" if not state.waiting else ending,
        counts=counts,
        reasons=reasons,
        elapsed_seconds=seconds,
        warnings=tuple(warnings),
    )


def _tell_held(told: _Told, state: State | Standing) -> None:
    if state.held and state.held_until is not None:
        told.warnings.append(
            f"{state.held} message(s) are held by another apply, or by one that was cut, until "
            f"{state.held_until:%Y-%m-%d %H:%M:%S} UTC; apply again then"
        )


def _waiting_for(verdict: Wait) -> str:
    return (
        f"the first {verdict.step} are out and their outcome is not known yet: a failure shows when ingest takes it "
        "in, a success after the observation window. Apply again then, or with --no-canary to go on without knowing"
    )
