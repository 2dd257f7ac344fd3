"""The lifecycle: one bounded pass over the dead store; what stayed away is resolved, what is due is sent again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from dlqbatch.errors import so_far
from dlqbatch.runs.choice import RESCHEDULED, Breakers
from dlqbatch.runs.report import LEFT, Report, count
from dlqbatch.runs.resend import MANUAL, SENT, Resend
from dlqbatch.runs.sending import HARMLESS, NOT_NOTED, Looking, Preview, Sending

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dlqbatch.policy.origin import Trust
    from dlqbatch.runs.choice import Choice
    from dlqbatch.runs.observation import Observation
    from dlqbatch.runs.ports import Origins, Sender
    from dlqbatch.runs.sending import Retries

COUNTS: Final = (SENT, RESCHEDULED, MANUAL, LEFT)
"""What adds up to `got`; `resolved` stands beside them."""


class Foreseen(Preview, Breakers, Protocol):
    """What a dry run asks."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    sender: Sender
    origins: Origins
    trust: Trust
    return_to_queue: bool
    retries: Retries
    breakers: Breakers
    preview: Foreseen
    observation: Observation
    choice: Choice
    max_attempts: int
    max_messages: int
    clock: Callable[[], datetime]
    notes: tuple[str, ...] = ()
    """What a reader of the report has to know beforehand."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        resolved, warnings = self.observation.resolve(self.clock(), dry_run=self.dry_run)
        resend = Resend(self.origins, self.trust, self.sender.login, self.sender.properties_limit, self.return_to_queue)
        source = self._source(resend)
        tally = self.sender.send(source, source.handle)
        warnings += source.finish()
        if tally.failure is not None and not resolved and not (source.results.keys() - {(LEFT, NOT_NOTED)}):
            raise tally.failure
        counts, reasons = count(source.results, source.got, COUNTS)
        if tally.lost is not None:
            warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            warnings.append(so_far(tally.failure))
        was_cut = tally.lost is not None or tally.failure is not None
        left = any(decision == LEFT and reason not in HARMLESS for decision, reason in source.results)
        was_cut = was_cut or (SENT, NOT_NOTED) in source.results
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

    def _source(self, resend: Resend) -> Sending | Looking:
        if self.dry_run:
            return Looking(self.preview, self.preview, self.choice, resend, self.max_messages, self.clock())
        return Sending(
            self.retries, self.breakers, self.choice, resend, self.clock, self.max_messages, self.max_attempts
        )
