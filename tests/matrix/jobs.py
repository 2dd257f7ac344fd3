"""The jobs that are broken, by name; and the ways that every one of them is set to work."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from matrix.check_work import CheckWork
from matrix.drain_work import DrainWork
from matrix.ingest_work import IngestWork
from matrix.sending_work import LifecycleWork, ReplayWork
from matrix.work import peer, start, wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from matrix.ground import Ground
    from matrix.work import Run, Work

JOBS: dict[str, Callable[[Ground], Work]] = {
    work.job: work for work in (DrainWork, CheckWork, IngestWork, LifecycleWork, ReplayWork)
}
TAKING = ("drain", "check", "ingest")
"""Jobs that take messages from queues, and acknowledge them."""
QUICK = {"check": 4, "ingest": 5, "replay": 10}
"""They are done with so many times as many messages before anybody could do something to them."""
PUBLISHING = ("drain", "check", "lifecycle", "replay")
"""Jobs that publish messages, and wait for confirms."""
A_MOMENT = 0.03


def work_of(job: str, ground: Ground, messages: int) -> Work:
    work = JOBS[job](ground)
    work.fill(messages)
    return work


def reach_the_middle(work: Work, most: int, broker_url: str = "", **settings: str) -> Run:
    """A run that has finished some, by chance none or up to `most`; and then a moment more."""
    with peer(work.ground) as one:
        wanted = work.finished(one) + work.ground.random.randint(0, most)
        run = start(work, broker_url or work.ground.url, **settings)
        wait(lambda: work.finished(one) >= wanted or run.is_over, "a run to be at it")
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(timeout=work.ground.random.uniform(0, A_MOMENT))
    return run
