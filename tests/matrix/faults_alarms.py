"""A memory or disk alarm stands before the run, or is raised while the run finds out whether it may publish."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from frame_link import FrameLink, Point

from matrix.faults_broker import ALARMS, FEW, await_publishing, raised
from matrix.jobs import work_of
from matrix.scenario import Count, fault
from matrix.work import DONE, PARTIAL, UNREACHABLE, peer, start, wait

if TYPE_CHECKING:
    from matrix.ground import Ground
    from matrix.work import Ended, Work

JOBS = ("drain", "check", "lifecycle")
RUNS = 3
"""Runs in a row, as cron starts them."""
BLOCKED = "the broker has blocked publishing (memory or disk alarm)"
PROBES = 3
"""Publishes that a run only tries whether it may, before those that count."""


def stands(job: str, what: str, ground: Ground) -> Count:
    """Nothing is taken and nothing moved, whatever number of runs comes; and nothing is twice when it is over."""
    node = ground.node
    work = work_of(job, ground, FEW)
    raising, clearing = ALARMS[what]
    raising(node)
    try:
        for _ in range(RUNS):
            ended = start(work, ground.url).end(codes=(PARTIAL,))
            _is_blocked(ended, job)
            with peer(ground) as one:
                assert not work.finished(one), ended
    finally:
        clearing(node)
    await_publishing(ground)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, RUNS)


def _is_blocked(ended: Ended, job: str) -> None:
    assert ended.report is not None
    counts = ended.report["counts"]
    moved = {name: number for name, number in counts.items() if number and name not in {"got", "left"}}
    assert not moved, ended
    assert job == "lifecycle" or not counts["got"], ended
    assert any(BLOCKED in warning for warning in ended.report["warnings"]), ended


def is_raised(job: str, what: str, ground: Ground) -> Count:
    """With the first publishes of a run: those that are only tries, or the one that comes after them."""
    node = ground.node
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url, Point("publish", ground.random.randint(1, PROBES), "before"))
    raising, clearing = ALARMS[what]
    link.act = lambda: raised(raising, node)
    try:
        with link:
            run = start(work, link.url, blocked_timeout_seconds="2", settle_seconds="2")
            wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
            ended = run.end()
            allowed = _under_way(work, link)
    finally:
        clearing(node)
    hits = int(link.struck.is_set())
    assert not hits or ended.code in {PARTIAL, UNREACHABLE}, ended
    assert hits or ended.code == DONE, ended
    await_publishing(ground)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed, hits)


def _under_way(work: Work, link: FrameLink) -> int:
    """No more than was published; a broker in alarm reads it when the alarm is over."""
    return min(work.may_double(None), link.passed["publish"])


for _job in JOBS:
    for _what in ALARMS:
        fault(
            f"{_what} alarm that stands before the run; three runs in a row",
            name=f"{_job}-alarm-stands-{_what}",
            job=_job,
            runs=3,
            breaks_node=True,
        )(partial(stands, _job, _what))
        fault(
            f"{_what} alarm raised with a run's first publishes",
            name=f"{_job}-alarm-at-first-{_what}",
            job=_job,
            runs=3,
            breaks_node=True,
        )(partial(is_raised, _job, _what))
