"""One lifecycle run: retries that were handled are resolved, then each message that is due is sent again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dlqbatch.broker.session import Session
from dlqbatch.errors import so_far
from dlqbatch.jobs import LEFT, Report, count
from dlqbatch.lifecycle.outbox import HARMLESS, NOT_NOTED, DryRun, Sending
from dlqbatch.lifecycle.outcome import Observation
from dlqbatch.lifecycle.resend import SENT
from dlqbatch.lifecycle.strategy import MANUAL, RESCHEDULED

# Each message that the run got counts once here; `resolved` counts earlier retries.
COUNTS: Final = (SENT, RESCHEDULED, MANUAL, LEFT)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    sender: Session
    observation: Observation
    source: Callable[[], Sending | DryRun]
    clock: Callable[[], datetime]
    notes: tuple[str, ...] = ()
    """Warnings from before the run."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        resolved, warnings = self.observation.resolve(self.clock(), dry_run=self.dry_run)
        if not self.dry_run:
            self.observation.look_ahead(self.clock())
        source = self.source()
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
