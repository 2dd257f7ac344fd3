"""A run finds an origin gone and deletes its return exchange, while another run returns messages to it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import drain_setup
import rawamqp
from frame_link import FrameLink, Point

from matrix.breaker import Breaker
from matrix.drain_work import DrainWork
from matrix.scenario import Count, fault
from matrix.witness import judge
from matrix.work import DONE, PARTIAL, QUIET_WITHIN, UNDER_WAY, peer, retried, start, wait

if TYPE_CHECKING:
    from rawamqp import Peer, Seen

    from matrix.ground import Ground
    from matrix.work import Run

MANY, FEW = 1_500, 200
FIRST_TIER, GIVEN_UP = "retry-queue-1", "dlq-queue"
WAY_BACK = f"dlqbatch.return.{drain_setup.ORIGIN}"
GIVEN_UP_AFTER = 5.0
"""Seconds in which what somebody has deleted with the queue is waited for in vain."""
RETURNED = 3
"""The case of the ordinary ones that goes back to its origin, of so many."""
CASES = 8


class ReturningWork(DrainWork):
    """All go back to one queue, or to the dead letters where a run has found that it is gone."""

    sources = (FIRST_TIER,)

    def fill(self, number: int) -> None:
        begin = len(self.expected)
        numbers = range(begin, begin + number)
        with peer(self.ground) as one:
            self.expected |= drain_setup.put(
                one, [drain_setup._ordinary(CASES * each + RETURNED, 200) for each in numbers]
            )

    def finished(self, one: Peer) -> int:
        return sum(one.depth(queue) for queue in (drain_setup.ORIGIN, GIVEN_UP))

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        found: list[Seen] = []

        def all_there() -> bool:
            self.run_until_empty()
            with peer(self.ground) as one:
                found.extend(one.read(drain_setup.ORIGIN, GIVEN_UP))
            return len({seen.body for seen in found}) >= len(self.expected)

        retried(all_there, within)
        return judge(self.ground, self.expected, found, self._problems)

    def _problems(self, before: Seen, after: Seen) -> list[str]:
        reason = dict(rawamqp.headers_of(after.properties)).get(b"dlqbatch-reason", b"")
        wrong = [] if (after.queue == GIVEN_UP) == reason[5:].startswith(b"origin-gone") else [f"{reason!r}"]
        return wrong + self.stage.changes(before, after)

    def warm_up(self) -> dict[str, str | int]:
        """The way back is there, and what the queue is declared with."""
        self.fill(1)
        assert self.settle() == (0, 0, 0)
        self.expected.clear()
        assert self.has_way_back()
        return dict(self.ground.management.queue(drain_setup.ORIGIN)["arguments"])

    def await_connections_closed(self) -> None:
        """RabbitMQ 3.10 may stop reading a connection whose channel it has just closed, and keeps what that had taken.

        Its reader is in flow control then, and waits for the channel that is gone. The run gives up after its time-out;
        the broker notices half a minute later, and only then puts the messages back.
        """
        api, vhost = self.ground.management, self.ground.management.vhost
        wait(lambda: not any(one["vhost"] == vhost for one in api.get("connections")), "the connections to be closed")

    def has_way_back(self) -> bool:
        return any(one["name"] == WAY_BACK for one in self.ground.management.exchanges())


def deleted_while_another_returns(ground: Ground) -> Count:
    """Between two frames of one run the queue goes, another run deletes the way to it, and the queue is back."""
    work = ReturningWork(ground)
    arguments = work.warm_up()
    work.fill(MANY)
    point = ground.random.choice((Point("bind", 1), Point("publish", ground.random.randint(3, 150))))
    link = FrameLink(ground.url, point)
    gone = hits = 0

    def strike() -> bool:
        nonlocal gone, hits
        with Breaker(ground.url) as breaker:
            breaker.delete(drain_setup.ORIGIN)
            gone = link.passed["publish"]
            ended = start(work, ground.url).end()
            assert ended.code == DONE, ended
            hits = int("origin-gone" in ended.out and not work.has_way_back())
            breaker.queue(drain_setup.ORIGIN, arguments)
        return True

    link.act = strike
    with link:
        run = start(work, link.url)
        wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
        run.end(codes=(DONE, PARTIAL))
    work.await_connections_closed()
    missing, changed, doubled = work.settle(GIVEN_UP_AFTER if gone else QUIET_WITHIN)
    taken = min(missing, gone)
    return Count(work.messages, missing - taken, changed, doubled, UNDER_WAY, hits, taken)


def deleting_meets_another(ground: Ground) -> Count:
    """A run about to delete the way waits; the queue is back, and another run makes the way anew, whole or in part."""
    work = ReturningWork(ground)
    arguments = work.warm_up()
    with Breaker(ground.url) as breaker:
        breaker.delete(drain_setup.ORIGIN)
    work.fill(MANY)
    is_in_part = ground.random.random() < 0.5
    deleting = FrameLink(ground.url, Point("exchange-delete"))
    returning = FrameLink(ground.url, Point("bind"))
    others: list[Run] = []
    is_deleted = threading.Event()

    def another_comes() -> bool:
        with Breaker(ground.url) as breaker:
            breaker.queue(drain_setup.ORIGIN, arguments)
        others.append(start(work, returning.url if is_in_part else ground.url))
        if is_in_part:
            wait(lambda: returning.struck.is_set() or others[0].is_over, "the other run to get there")
        else:
            others[0].process.wait(60)
        return True

    def the_way_goes() -> bool:
        returning.struck.set()
        is_deleted.wait(60)
        return True

    deleting.act, returning.act = another_comes, the_way_goes
    with deleting, returning:
        run = start(work, deleting.url, max_messages=str(FEW))
        wait(lambda: deleting.struck.is_set() or run.is_over, "the run to get there")
        ended = run.end(codes=(DONE,))
        is_deleted.set()
        for other in others:
            other.end(codes=(DONE, PARTIAL))
    hits = int(deleting.struck.is_set() and "origin-gone" in ended.out)
    ground.note("in part" if is_in_part else "whole", "there" if work.has_way_back() else "deleted")
    assert is_in_part or not hits or work.has_way_back(), "the way of another run was deleted"
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, hits)


fault(
    "return exchange deleted by another run, which found the queue gone, during the run",
    name="drain-way-back-deleted",
    job="drain",
    runs=10,
)(deleted_while_another_returns)
fault(
    "queue back, and its return exchange made anew, as another run deletes it",
    name="drain-way-back-made-anew",
    job="drain",
    runs=10,
)(deleting_meets_another)
