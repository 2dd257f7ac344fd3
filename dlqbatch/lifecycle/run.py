"""One lifecycle run: retries that were handled are resolved, then each message that is due is sent again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Engine

from dlqbatch.amqp.origin import Trust
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.errors import so_far
from dlqbatch.jobs import LEFT, Report, count
from dlqbatch.lifecycle import breaker
from dlqbatch.lifecycle.outbox import HARMLESS, NOT_NOTED, DryRun, Sending
from dlqbatch.lifecycle.outcome import Observation
from dlqbatch.lifecycle.resend import SENT, Resend
from dlqbatch.lifecycle.strategy import MANUAL, RESCHEDULED, Choice

# Each message that the run got counts once here; `resolved` counts earlier retries.
COUNTS: Final = (SENT, RESCHEDULED, MANUAL, LEFT)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    sender: Session
    origins: Origins
    trust: Trust
    return_to_queue: bool
    engine: Engine
    worker: str
    lease: timedelta
    limits: breaker.Limits
    observation: Observation
    choice: Choice
    max_attempts: int
    max_messages: int
    clock: Callable[[], datetime]
    stopped: Callable[[], bool] = lambda: False
    """Whether a signal has asked for the end."""
    notes: tuple[str, ...] = ()
    """Warnings from before the run."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        resolved, warnings = self.observation.resolve(self.clock(), dry_run=self.dry_run)
        if not self.dry_run:
            self.observation.look_ahead(self.clock())
        resend = Resend(self.origins, self.trust, self.sender.login, self.sender.properties_limit, self.return_to_queue)
        source: Sending | DryRun
        if self.dry_run:
            now = self.clock()
            source = DryRun(self.engine, self.choice, resend, now, limits=self.limits, max_messages=self.max_messages)
        else:
            source = Sending(
                self.engine,
                self.choice,
                resend,
                self.clock,
                worker=self.worker,
                lease=self.lease,
                limits=self.limits,
                max_messages=self.max_messages,
                max_attempts=self.max_attempts,
                stopped=self.stopped,
            )
        tally = self.sender.send(source, source.handle)
        warnings += source.finish()
        if tally.failure is not None and not resolved and not (source.results.keys() - {(LEFT, NOT_NOTED)}):
            raise tally.failure
        counts, reasons = count(source.results, source.got, COUNTS)
        if tally.lost is not None:
            warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            warnings.append(so_far(tally.failure))
        was_cut = tally.lost is not None or tally.failure is not None or (SENT, NOT_NOTED) in source.results
        left = any(decision == LEFT and reason not in HARMLESS for decision, reason in source.results)
        return Report(
            "lifecycle",
            outcome="partial" if left or was_cut else "ok",
            stopped_by=tally.stopped_by or ("empty" if source.is_empty else "messages"),
            counts={**counts, "resolved": resolved},
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=(*self.notes, *self.sender.warnings(), *warnings),
            preview=tuple(source.preview),
        )
