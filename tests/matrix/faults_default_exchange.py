"""A return through the default exchange is cut, and the digest has to tell later that the message is the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from frame_link import FrameLink, Point

from matrix.default_exchange_work import DefaultExchangeWork
from matrix.faults_killed import ARROWS, FEW, killed_at
from matrix.scenario import Count, fault
from matrix.work import DONE, start, tells_why, wait

if TYPE_CHECKING:
    from matrix.ground import Ground

POINTS = {"publish": 80, "confirm": 2, "ack": 1}
"""Frames, and the number of the last that may be chosen.

The first message of a quorum queue is confirmed alone. A classic queue's are sometimes all confirmed at once, so that a
second confirm never comes, and the run ends before the fault strikes.
"""


def killed(arrow: str, ground: Ground) -> Count:
    work = DefaultExchangeWork(ground)
    work.fill(FEW)
    return killed_at(work, arrow)


def cut(name: str, ground: Ground) -> Count:
    """The connection alone: the run says so, and ends by itself."""
    work = DefaultExchangeWork(ground)
    work.fill(FEW)
    point = Point(name, ground.random.randint(1, POINTS[name]), ground.random.choice(("before", "after")))
    with FrameLink(ground.url, point) as link:
        run = start(work, link.url)
        wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
        ended = run.end()
        hits, allowed = int(link.struck.is_set()), work.may_double(link)
    assert tells_why(ended) if hits else ended.code == DONE, ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed * hits, hits)


for _arrow in ("mid-publish", "unconfirmed", "confirmed", "unacked", "ack-unread"):
    fault(
        f"{ARROWS[_arrow][0]}, on the way back through the default exchange",
        name=f"drain-default-exchange-killed-{_arrow}",
        job="drain",
        runs=10,
    )(partial(killed, _arrow))
for _name in POINTS:
    fault(
        f"TCP connection cut at a frame ({_name}), on the way back through the default exchange",
        name=f"drain-default-exchange-cut-at-{_name}",
        job="drain",
        runs=10,
    )(partial(cut, _name))
