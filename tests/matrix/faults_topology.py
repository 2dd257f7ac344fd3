"""Queues, exchanges and bindings are deleted, declared again, purged or full while a run works on them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from frame_link import FrameLink, Point

from matrix.breaker import Breaker
from matrix.jobs import PUBLISHING, TAKING, work_of
from matrix.scenario import QUEUES, Count, fault
from matrix.work import DONE, PARTIAL, QUIET_WITHIN, UNDER_WAY, start, wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from matrix.ground import Ground
    from matrix.work import Ended, Work

FEW = 300
GIVEN_UP_AFTER = 3.0
"""Seconds in which what somebody has taken away is waited for in vain; the run has ended by then."""
TARGET = {"drain": "dlq-queue", "check": "permanent_failure_queue", "lifecycle": "work.orders", "replay": "work.orders"}
"""Where most of a job's messages go."""


def _while_at_it(
    work: Work, point: Point, act: Callable[[Breaker, FrameLink], None], codes: tuple[int, ...] = (DONE, PARTIAL)
) -> tuple[Ended, FrameLink]:
    """A run during which something is done at this point, and which goes on afterwards."""
    link = FrameLink(work.ground.url, point)

    def strike() -> bool:
        with Breaker(work.ground.url) as breaker:
            act(breaker, link)
        return True

    link.act = strike
    with link:
        run = start(work, link.url)
        wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
        ended = run.end(codes=codes)
    return ended, link


def _arguments(ground: Ground, queue: str) -> dict[str, str | int]:
    found: dict[str, str | int] = ground.management.queue(queue)["arguments"]
    return {"x-queue-type": ground.kind} | found


def _count(work: Work, link: FrameLink, gone_at_most: int, allowed: int) -> Count:
    missing, changed, doubled = work.settle(GIVEN_UP_AFTER if gone_at_most else QUIET_WITHIN)
    gone = min(missing, gone_at_most)
    return Count(work.messages, missing - gone, changed, doubled, allowed, int(link.struck.is_set()), gone)


def source_purged(job: str, ground: Ground) -> Count:
    work, gone = work_of(job, ground, FEW), [0]

    def purge(breaker: Breaker, _: FrameLink) -> None:
        gone[0] = breaker.purge(work.sources[0])

    _, link = _while_at_it(work, Point("delivery", ground.random.randint(1, 3), "after"), purge)
    return _count(work, link, gone[0], 0)


def source_deleted(job: str, ground: Ground) -> Count:
    """What the run held of it is gone too, unless it was published already, and then is there once."""
    work, gone = work_of(job, ground, FEW), [0]

    def delete(breaker: Breaker, link: FrameLink) -> None:
        gone[0] = breaker.delete(work.sources[0]) + link.held

    arguments = _arguments(ground, work.sources[0])
    _, link = _while_at_it(work, Point("delivery", ground.random.randint(1, 3), "after"), delete)
    with Breaker(ground.url) as breaker:
        breaker.queue(work.sources[0], arguments)
    return _count(work, link, max(gone[0], FEW), 0)


def source_declared_again(job: str, ground: Ground) -> Count:
    work, gone = work_of(job, ground, FEW), [0]
    arguments = _arguments(ground, work.sources[0])

    def delete(breaker: Breaker, link: FrameLink) -> None:
        gone[0] = breaker.delete(work.sources[0]) + link.held
        breaker.queue(work.sources[0], arguments)

    _, link = _while_at_it(work, Point("delivery", ground.random.randint(1, 3), "after"), delete)
    return _count(work, link, max(gone[0], FEW), 0)


def target_purged(job: str, ground: Ground) -> Count:
    work, gone = work_of(job, ground, FEW), [0]

    def purge(breaker: Breaker, _: FrameLink) -> None:
        gone[0] = breaker.purge(TARGET[job])

    _, link = _while_at_it(work, Point("confirm", 1, "after"), purge)
    return _count(work, link, gone[0], 0)


def _deleted_target(job: str, breaker: Breaker, link: FrameLink) -> int:
    """How many may have gone: all that was published. Counted first and deleted later, more may have come in between,
    and what comes to a queue that is being deleted the broker confirms."""
    breaker.delete(TARGET[job])
    return link.passed["publish"]


def target_declared_again(job: str, ground: Ground) -> Count:
    """Its bindings are not: whoever bound it has to do so again."""
    work, gone = work_of(job, ground, FEW), [0]
    arguments = _arguments(ground, TARGET[job])

    def delete(breaker: Breaker, link: FrameLink) -> None:
        gone[0] = _deleted_target(job, breaker, link)
        breaker.queue(TARGET[job], arguments)

    _, link = _while_at_it(work, Point("confirm", 1, "after"), delete)
    return _count(work, link, gone[0], 0)


def target_deleted(job: str, ground: Ground) -> Count:
    work, gone = work_of(job, ground, FEW), [0]
    arguments = _arguments(ground, TARGET[job])

    def delete(breaker: Breaker, link: FrameLink) -> None:
        gone[0] = _deleted_target(job, breaker, link)

    _, link = _while_at_it(work, Point("confirm", 1, "after"), delete)
    with Breaker(ground.url) as breaker:
        # Where all was under way by then, nobody had a reason to declare it again.
        breaker.queue(TARGET[job], arguments)
    return _count(work, link, gone[0], 0)


def exchange_deleted(ground: Ground) -> Count:
    """A publish to it closes the channel; what was under way there may have arrived without a confirm."""
    work = work_of("drain", ground, FEW)
    name = ground.random.choice(("route-delay", "dlq-exchange"))
    point = Point("publish", ground.random.randint(1, 100), "before")
    _, link = _while_at_it(work, point, lambda breaker, _: breaker.delete_exchange(name))
    return _count(work, link, 0, UNDER_WAY)


def binding_deleted(ground: Ground) -> Count:
    work = work_of("drain", ground, FEW)
    point = Point("publish", ground.random.randint(1, 100), "before")
    queue, exchange, key = ground.random.choice(
        (("dlq-queue", "dlq-exchange", b"dlq-routing-key"), ("queue.delay.1", "route-delay", b"binding.#.1"))
    )
    ended, link = _while_at_it(work, point, lambda breaker, _: breaker.unbind(queue, exchange, key))
    assert not link.struck.is_set() or '"unroutable"' in ended.out, ended
    return _count(work, link, 0, 0)


def target_full(job: str, ground: Ground) -> Count:
    """It refuses what it has no room for; that stays where it was.

    A quorum queue tells its publishers so when it is full already, and may have taken all of a small pipeline by then.
    """
    work = work_of(job, ground, FEW)
    policy = f"policies/{ground.management.vhost}/full"
    room = ground.random.randint(1, 40)
    ground.management.put(
        policy,
        {
            "pattern": f"^{TARGET[job]}$",
            "definition": {"max-length": room, "overflow": "reject-publish"},
            "apply-to": "queues",
        },
    )
    wait(lambda: _is_in_force(ground, TARGET[job]), "the policy to be in force")
    ended = start(work, ground.url).end()
    hits = int(ended.code == PARTIAL)
    assert ended.code == DONE if not hits else "not-confirmed" in ended.out, ended
    assert hits or ground.kind == "quorum", ended
    ground.management.delete(policy)
    wait(lambda: not _is_in_force(ground, TARGET[job]), "the policy to be gone")
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, hits)


def _is_in_force(ground: Ground, queue: str) -> bool:
    return "max-length" in (ground.management.queue(queue).get("effective_policy_definition") or {})


for _job in TAKING:
    fault("queue purged while it is read", name=f"{_job}-source-purged", job=_job, runs=10)(
        partial(source_purged, _job)
    )
    fault("queue deleted while it is read", name=f"{_job}-source-deleted", job=_job, runs=10)(
        partial(source_deleted, _job)
    )
    fault("queue deleted and declared again while it is read", name=f"{_job}-source-declared-again", job=_job, runs=10)(
        partial(source_declared_again, _job)
    )
for _job in PUBLISHING:
    fault("target purged during the run", name=f"{_job}-target-purged", job=_job, runs=10)(partial(target_purged, _job))
    fault("target deleted and declared again during the run", name=f"{_job}-target-declared-again", job=_job, runs=10)(
        partial(target_declared_again, _job)
    )
    # A plan, or what is due, is small enough to be on its way whole before a quorum queue is full.
    _kinds = QUEUES if _job in TAKING else ("classic",)
    fault("target full: it refuses publishes", name=f"{_job}-target-full", job=_job, kinds=_kinds, runs=5)(
        partial(target_full, _job)
    )
for _job in ("drain", "check"):
    fault("target deleted during the run", name=f"{_job}-target-deleted", job=_job, runs=10)(
        partial(target_deleted, _job)
    )
fault("exchange deleted during the run", name="drain-exchange-deleted", job="drain", runs=10)(exchange_deleted)
fault("binding deleted during the run", name="drain-binding-deleted", job="drain", runs=10)(binding_deleted)
