"""The monitor: measures the dead store, writes down which alerts fire and end, and tells of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError
from dlqbatch.policy.alerts import Thresholds, of_group, standing
from dlqbatch.runs.report import Report, count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from dlqbatch.policy.alerts import Alert, NewGroup, Notice, Settled, Turn
    from dlqbatch.policy.metrics import Metrics

log = logs.get(__name__)

SHOWN: Final = 20
"""So many alerts are in a log or a report one by one; of the rest, the number."""
_TELLING: Final = 5.0
"""Seconds in which another call may begin."""


class Book(Protocol):
    """Where alerts are written down; whatever several workers write there at once is written once."""

    def new_groups(self) -> tuple[NewGroup, ...]: ...
    def settle(
        self, standing: Sequence[Alert], groups: Sequence[Alert], now: datetime, *, to_tell: bool, dry_run: bool
    ) -> Settled: ...
    def active(self) -> tuple[Notice, ...]: ...
    def take_turn(self, now: datetime) -> Turn | None:
        """What is to be told, and by nobody else until the turn ends; None: nothing, or another one is telling."""

    def end_turn(self, turn: Turn, now: datetime, *, told: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Monitor:
    measure: Callable[[datetime], Metrics]
    book: Book
    thresholds: Thresholds
    clock: Callable[[], datetime]
    tell: Callable[[Sequence[Notice]], str | None] | None = None
    """Says why nobody was told; None: they were. It may take seconds, and raises nothing."""
    export: Callable[[Metrics, Sequence[Notice]], None] | None = None
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        now = self.clock()
        metrics = self.measure(now)
        groups = tuple(map(of_group, self.book.new_groups())) if self.thresholds.new_groups else ()
        settled = self.book.settle(
            standing(metrics, self.thresholds), groups, now, to_tell=self.tell is not None, dry_run=self.dry_run
        )
        if not self.dry_run:
            _log(settled)
        active = self.book.active()
        # Before anybody is told: a webhook that hangs must not make the figures old.
        warnings = [] if self.dry_run else [*self._export(metrics, active), *self._tell()]
        return Report(
            "monitor",
            outcome="partial" if warnings else "ok",
            stopped_by="empty",
            counts=count({}, 0)[0],
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=tuple(warnings),
            details={
                "metrics": metrics.as_dict(),
                "alerts": {
                    "fired": _shown(settled.fired),
                    "resolved": _shown(settled.resolved),
                    "active": _shown(active),
                    "numbers": {
                        "fired": len(settled.fired),
                        "resolved": len(settled.resolved),
                        "active": len(active),
                    },
                },
            },
        )

    def _export(self, metrics: Metrics, active: Sequence[Notice]) -> list[str]:
        if self.export is None:
            return []
        try:
            self.export(metrics, active)
        except DlqbatchError as error:
            return [str(error)]
        return []

    def _tell(self) -> list[str]:
        """No transaction is open while the webhook is called; what it does not take is told by the next run.

        Until then nobody knows of the alert, so that this run is partial: what watches its exit code still can tell.
        """
        if self.tell is None:
            return []
        ends = time.monotonic() + _TELLING
        # Again after a success: others may have written something down, and left it to who was telling.
        while time.monotonic() < ends and (turn := self.book.take_turn(self.clock())) is not None:
            why = self.tell(turn.notices)
            self.book.end_turn(turn, self.clock(), told=why is None)
            if why is not None:
                return [f"{why}; the next run tells them again"]
        return []


def _log(settled: Settled) -> None:
    for notices, event, write in (
        (settled.fired, "alert fired", log.warning),
        (settled.resolved, "alert resolved", log.info),
    ):
        for notice in notices[:SHOWN]:
            write(
                event,
                alert=notice.name,
                severity=notice.severity.value,
                subject=notice.subject or None,
                summary=notice.summary,
                value=notice.value,
                threshold=notice.threshold,
            )
        if len(notices) > SHOWN:
            write(f"{event}: and more", number=len(notices) - SHOWN, look="dlqbatch status")


def _shown(notices: Sequence[Notice]) -> list[dict[str, object]]:
    return [notice.as_dict() for notice in notices[:SHOWN]]
