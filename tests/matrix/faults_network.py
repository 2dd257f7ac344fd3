"""The network between a run and its broker is cut, silent, slow, or reset in the middle of a frame."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from frame_link import FrameLink, Point

from matrix.jobs import JOBS, PUBLISHING, QUICK, TAKING, reach_the_middle, work_of
from matrix.scenario import Count, fault
from matrix.work import DONE, PARTIAL, UNREACHABLE, start, tells_why, wait
from scripts.servers.management import ManagementError, quoted

if TYPE_CHECKING:
    from matrix.ground import Ground
    from matrix.work import Work

FEW, MANY = 200, 3_000
BOUNDS = {"max_seconds": "3", "settle_seconds": "1", "connect_timeout_seconds": "2"}
"""Of runs that wait for somebody who will not answer."""
ENDS_WITHIN = 100.0
NAMES = {"publish": 80, "confirm": 1, "delivery": 150, "ack": 1}
"""Frames, and the number of the last that is sure to come."""


def _some_point(work: Work, when: str, names: tuple[str, ...] = tuple(NAMES)) -> Point:
    chance = work.ground.random
    chosen = [name for name in names if work.job in (TAKING if name in {"delivery", "ack"} else PUBLISHING)]
    name = chance.choice(chosen)
    return Point(name, chance.randint(1, NAMES[name]), chance.choice(("before", "after")) if when == "any" else when)


def _broken(work: Work, link: FrameLink, **settings: str) -> Count:
    """A run that ends by itself, and says why."""
    with link:
        run = start(work, link.url, **settings)
        wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
        ended = run.end(ENDS_WITHIN)
        hits = int(link.struck.is_set())
        allowed = work.may_double(link)
    work.ground.note(f"{link.point}: {dict(link.passed)}, {link.acked} acknowledged, {link.held} held")
    if hits:
        assert ended.report is None or ended.report.get("stopped_by") != "signal", ended
        assert ended.code in {PARTIAL, UNREACHABLE, DONE}, ended
        assert ended.code == DONE or tells_why(ended), ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed, hits)


def cut(job: str, ground: Ground) -> Count:
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url, _some_point(work, "any"))
    return _broken(work, link)


def reset(job: str, ground: Ground) -> Count:
    """What has arrived and was not read is thrown away with the connection: acknowledgements too."""
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url, _some_point(work, "within"))
    link.act = link.reset
    count = _broken(work, link)
    allowed = min(link.passed["publish"], work.may_double(None)) if count.allowed and job in TAKING else count.allowed
    return Count(count.messages, count.lost, count.changed, count.doubled, allowed, count.hits)


def silent(job: str, ground: Ground) -> Count:
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url, _some_point(work, "any"))
    link.act = link.silence
    return _broken(work, link, **BOUNDS)


def silent_from_the_start(job: str, ground: Ground) -> Count:
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url)
    link.silence()
    with link:
        ended = start(work, link.url, **BOUNDS).end(ENDS_WITHIN)
    assert ended.code == UNREACHABLE, ended
    assert "no connection to the broker" in ended.out + ended.err, ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0)


def closed(job: str, ground: Ground) -> Count:
    """By an administrator: the broker says so, and why."""
    number = MANY * QUICK.get(job, 1)
    work = work_of(job, ground, number)
    run = reach_the_middle(work, number // 2)
    management = ground.management
    name = f"dlqbatch {job}"
    closed: list[str] = []
    while not closed and not run.is_over:
        # The broker lists a connection some time after it was made.
        for one in management.get(f"vhosts/{management.vhost}/connections"):
            if _name_of(one) == name:
                with contextlib.suppress(ManagementError):  # it has gone in the meantime
                    management.delete(f"connections/{quoted(one['name'])}")
                    closed.append(one["name"])
    ended = run.end(ENDS_WITHIN)
    hits = int(ended.code != DONE)
    assert not hits or "CONNECTION_FORCED" in ended.out + ended.err, ended
    allowed = work.may_double(None)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed, hits)


def _name_of(connection: dict[str, Any]) -> str:
    return str(connection.get("client_properties", {}).get("connection_name", ""))


def slow(job: str, ground: Ground) -> Count:
    """Frames come in pieces, and late; nobody has a reason to give up."""
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url)
    link.seconds_per_read, link.read_size = 0.002, ground.random.randint(200, 2_000)
    with link:
        ended = start(work, link.url).end()
    assert ended.code == DONE, ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0)


for _job in JOBS:
    for _make, _title, _runs in (
        (cut, "TCP connection cut at any frame", 20),
        (reset, "TCP connection reset in the middle of a frame", 20),
        (silent, "network silent (half-open) from any frame on", 3),
        (silent_from_the_start, "broker that accepts and says nothing", 1),
        (closed, "connection closed by an administrator", 10),
        (slow, "network slow: pieces of at most 2,000 bytes, 2 ms apart", 3),
    ):
        fault(_title, name=f"{_job}-network-{_make.__name__.replace('_', '-')}", job=_job, runs=_runs)(
            partial(_make, _job)
        )
