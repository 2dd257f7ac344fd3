"""The run is killed at each step of its work or at a random instant, or it is told to end."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from frame_link import FrameLink, Point

from matrix.jobs import PUBLISHING, QUICK, TAKING, reach_the_middle, work_of
from matrix.scenario import Count, fault
from matrix.work import DONE, PARTIAL, peer, start, wait

if TYPE_CHECKING:
    from matrix.ground import Ground
    from matrix.work import Run, Work

FEW, MANY = 200, 1_000
KILLS = 5
"""In one round at random instants."""

ARROWS = {
    "after-get": ("SIGKILL after a get", "delivery", 150, "after", TAKING),
    "mid-publish": ("SIGKILL in the middle of a publish", "publish", 80, "within", PUBLISHING),
    "unconfirmed": ("SIGKILL between publish and confirm", "confirm", 1, "before", PUBLISHING),
    "confirmed": ("SIGKILL when a confirm has arrived", "confirm", 1, "after", PUBLISHING),
    "unacked": ("SIGKILL between confirm or commit and ack", "ack", 1, "before", TAKING),
    "ack-unread": ("SIGKILL with acks sent, the connection reset before they are read", "ack", 1, "after", TAKING),
}


def killed(job: str, arrow: str, ground: Ground) -> Count:
    return killed_at(work_of(job, ground, FEW), arrow)


def killed_at(work: Work, arrow: str) -> Count:
    name, most, when = ARROWS[arrow][1:4]
    ground = work.ground
    link = FrameLink(ground.url, Point(name, ground.random.randint(1, most), when))
    runs: list[Run] = []

    def kill() -> None:
        runs[0].kill()
        if arrow == "ack-unread":
            link.reset()
        else:
            link.finish()

    link.act = kill
    with link:
        runs.append(start(work, link.url))
        wait(lambda: link.struck.is_set() or runs[0].is_over, "the run to get there")
        ended = runs[0].end()
    hits = int(link.struck.is_set())
    assert not hits or ended.code == -signal.SIGKILL, ended
    allowed = work.may_double(link)
    if arrow == "ack-unread" and allowed:
        allowed = min(link.passed["publish"], work.may_double(None))
    ground.note(f"{link.point}: {dict(link.passed)}, {link.acked} acknowledged, {link.held} held")
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed * hits, hits)


for _arrow, (_title, *_, _jobs) in ARROWS.items():
    for _job in _jobs:
        fault(_title, name=f"{_job}-killed-{_arrow}", job=_job, runs=25)(partial(killed, _job, _arrow))


def killed_at_any_instant(job: str, ground: Ground) -> Count:
    work = work_of(job, ground, MANY)
    hits = allowed = 0
    for number in range(KILLS):
        if number and job != "replay":  # a plan is frozen
            work.fill(MANY // KILLS)
        with FrameLink(ground.url) as link:  # it counts what is under way
            run = reach_the_middle(work, MANY // KILLS, link.url)
            run.kill()
            link.finish()
        if run.end().code == -signal.SIGKILL:
            hits += 1
            allowed += work.may_double(link)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed, hits)


def told_to_end(job: str, ground: Ground) -> Count:
    number = MANY * QUICK.get(job, 1)
    work = work_of(job, ground, number)
    run = reach_the_middle(work, number // 2)
    run.process.terminate()
    ended = run.end()
    assert ended.code in {DONE, PARTIAL}, ended
    assert ended.report is not None
    hits = int(ended.report.get("stopped_by") == "signal")
    if job == "drain":
        # Everything is settled by then: what is not moved is back, and nothing is there twice.
        counts = ended.report["counts"]
        with peer(ground) as one:
            assert work.finished(one) == counts["got"] - counts["left"], ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, hits)


for _job in ("drain", "check", "ingest", "lifecycle", "replay"):
    fault(
        "SIGKILL at a random instant",
        name=f"{_job}-killed-at-any-instant",
        job=_job,
        runs=100 if _job == "drain" else 10,
    )(partial(killed_at_any_instant, _job))
    fault("SIGTERM at a random instant", name=f"{_job}-told-to-end", job=_job, runs=20)(partial(told_to_end, _job))
