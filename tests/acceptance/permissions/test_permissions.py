"""The commands of docs/permissions.md: each job works with just these rights, and misses each that is taken away."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import pika
import pytest
from dead_rows import NOW, add
from lifecycle_rows import due, properties
from limited_users import EVERYTHING, ORIGIN, Grant, World, documented, load
from pika.exceptions import ChannelClosedByBroker
from program import DLQ, RETRY_QUEUE, Client

from dlqbatch import jobs
from dlqbatch.doctor.job import diagnose
from dlqbatch.errors import DlqbatchError
from dlqbatch.ingest.head import take_head
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.job import Planned, apply_replay, plan_replay
from dlqbatch.store.engine import create_engine_for
from dlqbatch.topology import job as topologies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripts.servers.management import Management

pytestmark = pytest.mark.usefixtures("on_every_broker")


def attempt(act: Callable[[], object]) -> object:
    try:
        return act()
    except DlqbatchError as error:
        return type(error).__name__


def run(job: str, given: dict[str, str]) -> object:
    """What a reader of the report sees."""

    def act() -> object:
        report = jobs.run(job, load(given), jobs.RunOptions())
        counts = {name: number for name, number in report.counts.items() if number}
        return report.outcome, counts, dict(report.reasons), len(report.warnings)

    return attempt(act)


def fail(world: World, queue: str, key: str, origin: str = ORIGIN) -> None:
    death = {"queue": origin, "exchange": "orders", "routing-keys": [key], "reason": "rejected", "count": 1}
    world.team.publish("", queue, b"failed", {"x-death": [death]})


def waits(world: World, tier: int) -> None:
    headers = {"dlqbatch-id": f"id-{tier}", "dlqbatch-retries": 1, "dlqbatch-trips": 1}
    headers |= {"dlqbatch-origin-queue": ORIGIN, "dlqbatch-origin-exchange": "orders"}
    world.team.publish("", f"{RETRY_QUEUE}-{tier}", b"back", headers | {"dlqbatch-origin-key": "orders.created"})


def fill(world: World) -> None:
    """A failure to delay, one to give up, and one to bring back from each tier."""
    fail(world, RETRY_QUEUE, "orders.created")
    fail(world, RETRY_QUEUE, "nobody.knows")
    for tier in (1, 2, 3):
        waits(world, tier)


def drain(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    fill(world)
    yield run("drain", given), world.holds()
    # What it has to see: an exchange that a delay queue leads to is not there.
    for damage in (
        lambda: world.team.channel.exchange_delete("retry-exchange-2"),
        lambda: world.team.channel.exchange_delete("retry-exchange"),
    ):
        world.furnish()
        damage()
        yield run("drain", given)


def drain_that_declares(world: World, given: dict[str, str]) -> Iterator[object]:
    world.clear()
    yield run("drain", given), world.topology()
    world.furnish()
    fill(world)
    yield run("drain", given), world.holds()
    world.furnish()
    world.team.channel.queue_declare("dlqbatch.changing", durable=True)
    world.team.channel.queue_delete("queue.delay.1")
    yield run("drain", given), world.topology()


def drain_per_queue(world: World, given: dict[str, str]) -> Iterator[object]:
    chosen = {"ladder": "false", "topology.shop.kind": "per-queue", "topology.shop.ttl": "1h"}
    chosen |= {"topology.shop.queue": "checkout", "topology.shop.exchange": "shop"}
    channel = world.team.channel
    world.furnish(**chosen)
    fail(world, "checkout.retry", "orders.created", "checkout")
    fail(world, "checkout.retry", "nobody.knows", "checkout")
    yield run("drain", given | chosen), world.holds()

    def change() -> None:
        channel.queue_declare("dlqbatch.changing", durable=True)
        channel.queue_declare("checkout.delay.relay", durable=True)
        fail(world, "checkout.retry", "orders.created", "checkout")

    for damage in (
        change,
        lambda: channel.queue_delete("checkout"),
        lambda: channel.exchange_delete("shop"),
        lambda: channel.exchange_delete("shop.retry"),
    ):
        world.furnish(**chosen)
        damage()
        yield run("drain", given | chosen)


def ingest(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    fail(world, DLQ, "orders.created")
    yield run("ingest", given | {"ingest_queues": "dlq-*"}), world.holds()


def head(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    world.team.publish("", ORIGIN, b"poison")

    def act() -> object:
        return take_head(load(given), jobs.RunOptions(), ORIGIN, actor="test", reason="test", takes_any=True).status

    yield attempt(act), world.holds()


def check(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    for count in (1, 5):
        world.team.publish("", DLQ, b"", {"x-death": [{"queue": ORIGIN, "reason": "rejected", "count": count}]})
    yield run("check", given | {"check_queues": "dlq-*"}), world.holds()


def lifecycle(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    due_rows(given)
    yield run("lifecycle", given), world.holds(), len(world.management.bindings())


def replay_plan(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    due_rows(given)
    yield attempt(lambda: [risk.name for risk in plan(given).risks])


def replay_apply(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    due_rows(given)
    frozen = plan(given | {"broker_url": world.url}).frozen

    def act() -> object:
        asked = ApplyOptions(canary=False)
        return apply_replay(load(given), jobs.RunOptions(), frozen.hash, asked, actor="test").report.counts["sent"]

    yield attempt(act), world.holds()


def due_rows(given: dict[str, str]) -> None:
    engine = create_engine_for(given["database_url"], connect_timeout=30)
    rows = (due(n) | {"origin_queue": ORIGIN, "properties": properties(f"due-{n}", ORIGIN)} for n in range(2))
    add(engine, *rows, at=NOW.replace(year=2020))


def plan(given: dict[str, str]) -> Planned:
    return plan_replay(load(given), Selection(everything=True), actor="test", reason="test")


def watch(world: World, given: dict[str, str]) -> Iterator[object]:
    """As whatever starts a run by depth looks: a passive declaration."""
    world.furnish()
    fill(world)
    with pika.BlockingConnection(pika.URLParameters(given["broker_url"])) as connection:
        for queue in (RETRY_QUEUE, f"{RETRY_QUEUE}-1"):
            try:
                yield connection.channel().queue_declare(queue, passive=True).method.message_count
            except ChannelClosedByBroker as refused:
                yield refused.reply_code


def topology(world: World, given: dict[str, str]) -> Iterator[object]:
    world.clear()
    chosen = load(given)
    kinds = topologies.choose(chosen, ())
    yield attempt(lambda: topologies.apply(chosen, kinds).is_done), world.topology()
    world.team.channel.queue_declare("dlqbatch.changing", durable=True)
    yield attempt(lambda: topologies.apply(chosen, kinds).is_done)
    world.furnish()
    world.team.channel.queue_unbind("retry-queue", "retry-exchange", "retry-routing-key")
    yield attempt(lambda: topologies.plan(chosen, kinds).is_done)
    world.furnish()
    world.team.channel.exchange_declare("dlqbatch.return.was-here", "fanout", durable=True)
    world.team.channel.queue_delete(ORIGIN)  # as long as it dead-letters into the topology, nothing is deleted
    # With messages: the management API takes seconds to count what a new queue holds. The plan has asked it already.
    done = attempt(lambda: [one.is_gone for one in topologies.delete(chosen, kinds, with_messages=True)])
    yield done, world.topology()


def change_of_a_delay(world: World, given: dict[str, str]) -> Iterator[object]:
    world.clear()
    world.furnish()
    chosen = load(given | {"tier_ttls": "1h,2h,1h"})
    kinds = topologies.choose(chosen, ())
    yield attempt(lambda: topologies.apply(chosen, kinds, change_ttl=True).is_done), world.topology()


def doctor(world: World, given: dict[str, str]) -> Iterator[object]:
    world.furnish()
    yield sorted((one.code, one.where) for one in diagnose(load(given)).findings)


class Job(NamedTuple):
    act: Callable[[World, dict[str, str]], Iterator[object]]
    as_administrator: int = 1
    """So many of its observations are those that an administrator makes."""
    looked_at: tuple[str, ...] = ()
    """Rights that only RabbitMQ 4.3 asks for, where somebody looks whether a name is there."""


_LADDER = ("read retry-exchange",)
_SET = (r"read shop\.retry", r"read checkout\.delay\.relay", r"read dlqbatch\.changing")
JOBS = {
    "drain": Job(drain, 1, _LADDER),
    "drain-plain": Job(drain, 0, (*_LADDER, "write orders-queue")),
    "drain-declares": Job(drain_that_declares, 3, (r"read dlqbatch\.changing",)),
    "drain-per-queue": Job(drain_per_queue, 1, _SET),
    "ingest": Job(ingest),
    "poison": Job(head),
    "check": Job(check),
    "lifecycle": Job(lifecycle),
    "replay": Job(replay_apply),
    "planner": Job(replay_plan, 1, ("write orders-queue",)),
    "watch": Job(watch, 2, ("write retry-queue", r"write retry-queue-\d+")),
    "topology": Job(topology, 4, (r"read dlqbatch\.changing",)),
    "delays": Job(change_of_a_delay),
}


@pytest.fixture
def world(broker_url: str, management: Management, team: Client, policy_file: Path, tmp_path: Path) -> World:
    return World(broker_url, management, team, policy_file, tmp_path)


def granted(job: str) -> Grant:
    return documented()["lifecycle" if job == "replay" else job]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_job_works_with_the_rights_of_the_docs_and_misses_each_that_is_taken_away(
    world: World, name: str, broker_release: str
) -> None:
    job, grant = JOBS[name], granted(name)
    with world.user(EVERYTHING) as given:
        wanted = list(itertools.islice(job.act(world, given), job.as_administrator))
    with world.user(grant) as given:
        found = list(job.act(world, given))
    assert found[: job.as_administrator] == wanted
    # A change of delays takes its time: what it has in common with the topology itself is seen there.
    known = dict(granted("topology").lessened()) if name == "delays" else {}
    for taken, less in grant.lessened():
        if taken in known:
            continue
        with world.user(less) as given:
            is_missed = any(told != before for told, before in zip(job.act(world, given), found, strict=True))
        assert is_missed != (taken in job.looked_at and broker_release == "installed"), taken


def test_a_drain_sees_what_it_must_not_work_on(world: World) -> None:
    with world.user(granted("drain")) as given:
        _, *missing = drain(world, given)
    assert missing == ["TopologyMissing"] * 2
    with world.user(granted("drain-per-queue")) as given:
        _, changing, *missing = drain_per_queue(world, given)
    assert (changing[:2], missing) == (("ok", {}), ["TopologyMissing"] * 3)
    assert changing[3] > 0, "no warning tells of the change"


def test_a_right_that_is_missing_doubles_no_message(world: World) -> None:
    world.furnish()
    for number in range(300):
        fail(world, RETRY_QUEUE, "nobody.knows" if number == 150 else "orders.created")
    with world.user(granted("drain")._replace(write=r"^(route-delay|retry-queue-\d+)$")) as given:
        run("drain", given)
    assert world.holds() == {"queue.delay.1": 299, RETRY_QUEUE: 1}


def test_the_user_for_all_jobs_has_the_rights_of_each_and_the_doctor_misses_none(world: World) -> None:
    everybody = documented()["dlqbatch"]
    each = [granted(name) for name in ("drain", "ingest", "check", "lifecycle", "planner", "watch")]
    for right in ("configure", "write", "read"):
        names = {name for grant in each for name in grant.names(right)}
        # Who may read a queue may look at it as well; a drain also binds some of them.
        looks = set(documented()["watch"].names("write")) - set(granted("drain").names("write"))
        looks = looks if right == "write" else set()
        assert names - looks == set(everybody.names(right)), right
    with world.user(EVERYTHING) as given:
        wanted = list(doctor(world, given))
    with world.user(everybody) as given:
        assert list(doctor(world, given)) == wanted
    with world.user(everybody._replace(tags="")) as given:
        assert list(doctor(world, given)) != wanted
    for taken, less in everybody.lessened():
        is_asked = taken in ASKED_BY_THE_DOCTOR
        with world.user(less) as given:
            assert (list(doctor(world, given)) != wanted) == is_asked, taken


ASKED_BY_THE_DOCTOR = (
    *("write route-delay", "write dlq-exchange"),
    *("read retry-queue", r"read retry-queue-\d+", "read dlq-queue", "tag management"),
)
