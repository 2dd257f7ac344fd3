"""Bindings of ours are deleted between two runs or during one, also where the login may not bind them again."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from frame_link import FrameLink, Point

from matrix.binding_work import TIERS, BindingWork
from matrix.breaker import Breaker
from matrix.scenario import Count, fault
from matrix.work import DONE, PARTIAL, peer, start, wait
from scripts.servers.management import quoted

if TYPE_CHECKING:
    from matrix.ground import Ground

FEW = 200
MENDED_IN_TIME = (
    "The next run makes the binding again. What leaves a delay queue in the meantime the broker drops: a run has to "
    "come before the delay is over."
)
DELAYING_ONLY = r"^(route-delay|dlq-exchange|dlqbatch\.return\..*|work\.orders|amq\.default)$"
"""All that a drain writes to; to bind one of our queues again it would need write on that queue."""


def _way_out(tier: int) -> tuple[str, str, bytes]:
    return f"retry-queue-{tier}", f"retry-exchange-{tier}", b"retry.#.%d" % tier


def _way_in(tier: int) -> tuple[str, str, bytes]:
    return f"queue.delay.{tier}", "route-delay", b"binding.#.%d" % tier


DEAD = ("dlq-queue", "dlq-exchange", b"dlq-routing-key")


def gone_between_two_runs(ground: Ground) -> Count:
    """In this process, whose second run declares nothing, or in two processes."""
    work = BindingWork(ground)
    is_warm = ground.random.random() < 0.5
    tier = ground.random.choice(TIERS)
    work.fill(FEW)
    assert work.settle() == (0, 0, 0)
    bindings = ground.random.sample((_way_out(tier), _way_in(tier), DEAD), ground.random.randint(1, 3))
    work.expected.clear()
    work.fill(FEW)
    with Breaker(ground.url) as breaker:
        for binding in bindings:
            breaker.unbind(*binding)
    ground.note("warm" if is_warm else "cold", bindings)
    if is_warm:
        report = work.stage.drain(work.stage.settings())
        assert set(report["reasons"]) <= {"unroutable", "not-configured"}, report
    else:
        ended = start(work, ground.url).end(codes=(DONE, PARTIAL))
        assert ended.code == DONE or "unroutable" in ended.out, ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, len(bindings))


def gone_during_a_run(ground: Ground) -> Count:
    """The way out of a delay queue, so that nothing comes back as unroutable, while messages go into it."""
    work = BindingWork(ground)
    work.fill(FEW)
    binding = _way_out(ground.random.choice(TIERS))
    link = FrameLink(ground.url, Point("publish", ground.random.randint(1, 100), "after"))

    def strike() -> bool:
        with Breaker(ground.url) as breaker:
            breaker.unbind(*binding)
        return True

    link.act = strike
    with link:
        run = start(work, link.url)
        wait(lambda: link.struck.is_set() or run.is_over, "the run to get there")
        ended = run.end()
    assert ended.code == DONE, ended
    # A run that has nothing to do looks after its bindings too; and one that has something.
    work.fill(1)
    ended = start(work, ground.url).end()
    assert ended.code == DONE, ended
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, int(link.struck.is_set()))


def gone_and_not_ours_to_make(ground: Ground) -> Count:
    """Nothing is delayed into the queue that leads nowhere, however many runs come, until somebody binds it again."""
    work = BindingWork(ground)
    address = urlsplit(work.stage.variables["DLQBATCH_BROKER_URL"])
    login, password = unquote(address.username or ""), unquote(address.password or "")
    ground.management.put(f"users/{login}", {"password": password, "tags": "management"})
    rights = {"configure": ".*", "write": DELAYING_ONLY, "read": ".*"}
    ground.management.put(f"permissions/{quoted(ground.management.vhost)}/{login}", rights)
    work.stage.variables["DLQBATCH_MANAGEMENT_URL"] = ground.management_url
    tier = ground.random.choice(TIERS)
    binding = _way_out(tier)
    with Breaker(ground.url) as breaker:
        breaker.unbind(*binding)
    work.fill(FEW)
    hits = 0
    for _ in range(3):
        ended = start(work, ground.url).end(codes=(PARTIAL,))
        assert ended.report is not None
        hits += int("binding-missing" in ended.report["reasons"])
        assert f"'retry-exchange-{tier}' is not bound" in " ".join(ended.report["warnings"]), ended
        with peer(ground) as one:
            assert one.depth(f"queue.delay.{tier}") == 0, ended
    with peer(ground) as one:
        one.bind(*binding)
    lost, changed, doubled = work.settle()
    return Count(work.messages, lost, changed, doubled, 0, hits)


fault("bindings gone between two runs", name="drain-binding-gone-before", job="drain", runs=10)(gone_between_two_runs)
fault(
    "a delay queue's way out unbound during the run",
    name="drain-binding-gone-during",
    job="drain",
    runs=10,
    remark=MENDED_IN_TIME,
)(gone_during_a_run)
fault(
    "a delay queue's way out gone, and the login may not bind it again",
    name="drain-binding-not-ours",
    job="drain",
    runs=5,
)(gone_and_not_ours_to_make)
