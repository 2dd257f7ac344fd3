"""The run is killed over messages that Dramatiq has republished, so that only the id in the body identifies them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from matrix.faults_killed import ARROWS, FEW, killed_at
from matrix.jobs import TAKING
from matrix.republished_work import RepublishedWork
from matrix.scenario import fault

if TYPE_CHECKING:
    from matrix.ground import Ground
    from matrix.scenario import Count


def killed(arrow: str, ground: Ground) -> Count:
    work = RepublishedWork(ground)
    work.fill(FEW)
    return killed_at(work, arrow)


for _arrow, (_title, *_, _jobs) in ARROWS.items():
    if _jobs is TAKING:
        fault(
            f"{_title}: messages that Dramatiq has republished",
            name=f"ingest-republished-killed-{_arrow}",
            job="ingest",
            runs=10,
        )(partial(killed, _arrow))
