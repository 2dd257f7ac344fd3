"""The ingest: dead-letter queues into the dead store, committed before they are acknowledged."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from dlqbatch.errors import DlqbatchError
from dlqbatch.message.delivery import Delivery, Gather, Hold, Instruction
from dlqbatch.policy.examine import examine
from dlqbatch.runs.budget import share
from dlqbatch.runs.report import DECISIONS, LEFT, Report, count, ending, unread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlqbatch.policy.origin import Trust
    from dlqbatch.runs.ports import Broker, DeadStore

_COUNTS: Final = (*DECISIONS, "duplicate")


@dataclass(frozen=True, slots=True)
class Ingest:
    broker: Broker
    store: DeadStore
    queues: tuple[str, ...]
    trust: Trust
    max_messages: int
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        depths, unknown = self.broker.depths(self.queues, ())
        takes = {queue: limit for queue, limit in share(self.max_messages, depths).items() if limit}
        spare = self.max_messages - sum(takes.values())
        if takes and not self.dry_run:
            # A store that is down is found out before anything is taken: being put back is a delivery too.
            self.store.store((), datetime.now(UTC))
        tally = self.broker.transfer(takes, spare, self._handle, self._store)
        if tally.failure is not None and all(decision == LEFT for decision, _ in tally.results):
            raise tally.failure
        counts, reasons = count(tally.results, tally.got, _COUNTS)
        missed = {**unknown, **tally.refused}
        warnings = [*self.broker.warnings(), *unread(missed)]
        if tally.lost is None and tally.failure is None and not missed and not self.dry_run:
            try:
                # Only now nothing of this run can be delivered a second time.
                self.store.acknowledged()
            except DlqbatchError as error:
                warnings.append(f"that the acknowledgements arrived could not be noted: {error}")
        if tally.lost is not None:
            warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            warnings.append(str(tally.failure))
        is_complete = not counts["left"] and not missed and tally.lost is None and tally.failure is None
        stopped_by, emptied = ending(depths, takes, tally, spare, missed)
        return Report(
            "ingest",
            outcome="ok" if is_complete else "partial",
            stopped_by=stopped_by,
            counts=counts,
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=tuple(warnings),
            emptied=emptied,
        )

    def _handle(self, _: Delivery) -> Instruction:
        return Hold("recorded") if self.dry_run else Gather()

    def _store(self, batch: Sequence[Delivery]) -> Sequence[tuple[str, str | None]]:
        now = datetime.now(UTC)
        return self.store.store([examine(delivery, self.trust, now) for delivery in batch], now)
