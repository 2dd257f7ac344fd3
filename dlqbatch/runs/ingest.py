"""The ingest: dead-letter queues into the dead store, committed before they are acknowledged."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlqbatch.errors import DlqbatchError, TopologyMissing, so_far
from dlqbatch.message.delivery import Delivery, Gather, Hold, Instruction
from dlqbatch.policy.examine import examine
from dlqbatch.runs.budget import share
from dlqbatch.runs.report import DECISIONS, LEFT, Report, count, ending, unread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from dlqbatch.policy.examine import Examined
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
    clock: Callable[[], datetime]
    """The dead store's."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        depths, unknown, missing = self._depths()
        turn = os.urandom(1)[0]  # as the drain's
        takes = {queue: limit for queue, limit in share(self.max_messages, depths, turn).items() if limit}
        spare = self.max_messages - sum(takes.values())
        if not self.dry_run:
            # A store that is down is found out before anything is taken: being put back is a delivery too.
            self.store.store((), self.clock())
        tally = self.broker.transfer(takes, spare, self._handle, self._store)
        if tally.failure is not None and all(decision == LEFT for decision, _ in tally.results):
            raise tally.failure
        counts, reasons = count(tally.results, tally.got, _COUNTS)
        unfinished = {**unknown, **tally.refused}
        missed = {**missing, **unfinished}
        warnings = [*self.broker.warnings(), *unread(missed)]
        if tally.lost is None and tally.failure is None and not unfinished and not self.dry_run:
            try:
                # Only now nothing of this run can be delivered a second time.
                self.store.acknowledged()
            except DlqbatchError as error:
                warnings.append(f"that the acknowledgements arrived could not be noted: {so_far(error)}")
        if tally.lost is not None:
            warnings.append(f"the connection to the broker was lost: {tally.lost}")
        if tally.failure is not None:
            warnings.append(so_far(tally.failure))
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

    def _depths(self) -> tuple[Mapping[str, int], Mapping[str, str], Mapping[str, str]]:
        """As the broker's, with the queues that are not there; TopologyMissing if none is."""
        queues, missing = list(self.queues), dict[str, str]()
        while True:
            try:
                return *self.broker.depths(queues, ()), missing
            except TopologyMissing as error:
                if error.name not in queues or len(queues) == 1:
                    raise
                queues.remove(error.name)
                missing[error.name] = "it is not on the broker; make it, or take it out of the queues to ingest"

    def _handle(self, delivery: Delivery) -> Instruction:
        return Hold("recorded") if self.dry_run else Gather(examine(delivery, self.trust, self.clock()))

    def _store(self, batch: Sequence[Examined]) -> Sequence[tuple[str, str | None]]:
        return self.store.store(batch, self.clock())
