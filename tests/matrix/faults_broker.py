"""The broker is killed, restarted, or in alarm, while a run is at work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from frame_link import FrameLink, Point
from rawamqp import Message, properties

from matrix.breaker import await_leaders, await_registration
from matrix.jobs import JOBS, PUBLISHING, reach_the_middle, work_of
from matrix.scenario import Count, fault
from matrix.work import DONE, PARTIAL, UNREACHABLE, peer, start, tells_why, wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from matrix.ground import Ground
    from matrix.work import Ended
    from scripts.servers.rabbitmq import RabbitNode

FEW, MANY, DEEP = 300, 1_500, 4_000
AGAIN = (
    "A classic queue writes acknowledgements to disk later than it takes them: a broker that is killed gives back "
    "messages whose acknowledgement it had read, so that our side bounds nothing there. A quorum queue keeps them."
)
STOPPED_AFTER = 2.0
"""Seconds that the broker may keep publishes in these runs."""


def killed(job: str, ground: Ground) -> Count:
    node = ground.node
    work = work_of(job, ground, MANY)
    await_registration(work, ground)
    run = reach_the_middle(work, MANY // 2)
    node.kill()
    ended = run.end()
    _check_end(ended)
    hits = int(ended.code != DONE)
    allowed: int | None = work.may_double(None)
    node.restart()
    await_leaders(work, ground)
    lost, changed, doubled = work.settle()
    if job in {"drain", "check"} and ground.kind == "classic":
        allowed = None
    return Count(work.messages, lost, changed, doubled, allowed, hits)


def restarted(job: str, ground: Ground) -> Count:
    """In good order: it closes every connection, and has written everything."""
    node = ground.node
    work = work_of(job, ground, MANY)
    await_registration(work, ground)
    run = reach_the_middle(work, MANY // 2)
    node.restart()
    ended = run.end()
    _check_end(ended)
    hits = int(ended.code != DONE)
    allowed = work.may_double(None)
    await_leaders(work, ground)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed, hits)


def restarted_deep(job: str, ground: Ground) -> Count:
    """With everything still to be done; the first run comes as soon as the broker lets one in."""
    node = ground.node
    work = work_of(job, ground, DEEP)
    await_registration(work, ground)
    node.kill()
    node.restart()
    ended = start(work, ground.url).end()
    _check_end(ended)
    if job == "drain" and ended.code == DONE:
        # A quorum queue that has no leader yet must not be taken for an empty one.
        assert ended.report is not None
        assert ended.report["stopped_by"] != "empty" or ended.report["counts"]["got"] == work.messages, ended
    await_leaders(work, ground)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0)


def _check_end(ended: Ended) -> None:
    assert ended.code in {DONE, PARTIAL, UNREACHABLE}, ended
    assert ended.code == DONE or tells_why(ended), ended


ALARMS: dict[str, tuple[Callable[[RabbitNode], None], Callable[[RabbitNode], None]]] = {
    "memory": (lambda node: node.set_memory_limit(0.000001), lambda node: node.set_memory_limit(0.4)),
    "disk": (lambda node: node.set_disk_limit("1000GiB"), lambda node: node.set_disk_limit("50MB")),
}
"""How each is raised and cleared."""


def raised(raising: Callable[[RabbitNode], None], node: RabbitNode) -> bool:
    """True, which lets a link go on."""
    raising(node)
    return True


def alarm(job: str, what: str, ground: Ground) -> Count:
    """Raised when some are published: the broker reads nothing from such a connection, whatever stands behind it.

    What was sent may be read when the alarm is over, and nobody is there any more whom it could be confirmed to.
    """
    node = ground.node
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url, Point("publish", ground.random.randint(1, 100), "after"))
    raising, clearing = ALARMS[what]
    link.act = lambda: raised(raising, node)
    with link:
        run = start(work, link.url, blocked_timeout_seconds=f"{STOPPED_AFTER}", settle_seconds="2")
        wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
        ended = run.end()
        allowed = work.may_double(None)
        clearing(node)
    _check_end(ended)
    await_publishing(ground)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, allowed, int(link.struck.is_set()))


def alarm_that_ends(job: str, ground: Ground) -> Count:
    """Sooner than the run gives up: it goes on as if nothing had been."""
    node = ground.node
    work = work_of(job, ground, FEW)
    link = FrameLink(ground.url, Point("publish", ground.random.randint(1, 100), "after"))
    raising, clearing = ALARMS["memory"]
    link.act = lambda: raised(raising, node)
    with link:
        run = start(work, link.url, blocked_timeout_seconds="120", max_seconds="100", settle_seconds="100")
        wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
        clearing(node)
        ended = run.end()
    # Whether an origin is there is waited for not as long as a confirm: what needed to know it may be left. Met before
    # anything was taken, an alarm ends the run at once.
    assert ended.code == DONE or "origin-check-failed" in ended.out or "memory or disk alarm" in ended.out, ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, int(link.struck.is_set()))


def await_publishing(ground: Ground) -> None:
    """The broker takes publishes again: one is confirmed, to a queue of nobody's."""
    with peer(ground) as one:
        one.queue("breathing")
        one.publish([Message("", b"breathing", properties(), b"")])
        one.read("breathing")


for _job in JOBS:
    for _make, _title, _runs, _remark in (
        (killed, "broker killed during the run, and started again", 5, AGAIN if _job in {"drain", "check"} else ""),
        (restarted, "broker stopped in good order during the run, and started again", 5, ""),
        (restarted_deep, "broker killed with 4,000 messages waiting; the run comes at once", 2, ""),
    ):
        fault(
            _title,
            name=f"{_job}-broker-{_make.__name__.replace('_', '-')}",
            job=_job,
            runs=_runs,
            breaks_node=True,
            remark=_remark,
        )(partial(_make, _job))
for _job in PUBLISHING:
    for _what in ALARMS:
        fault(
            f"{_what} alarm during the run: publishing blocked",
            name=f"{_job}-alarm-{_what}",
            job=_job,
            runs=3,
            breaks_node=True,
        )(partial(alarm, _job, _what))
    fault(
        "memory alarm that ends sooner than the run gives up",
        name=f"{_job}-alarm-ends",
        job=_job,
        runs=2,
        breaks_node=True,
    )(partial(alarm_that_ends, _job))
