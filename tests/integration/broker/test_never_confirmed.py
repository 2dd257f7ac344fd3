"""One message that is never confirmed holds up no other, wherever it stands, however large it is and beside whom."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest
from broker_client import SINK, Side, connected, move, publish

from dlqbatch.amqp.delivery import Route
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.transfer import Bounds, Take, Transfer
from dlqbatch.check.run import in_parts
from scripts import services
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.amqp.delivery import Delivery, Instruction

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
STUCK = "stuck"
SOURCES = ("source-1", "source-2", "source-3", "source-4")
BEYOND = [b"beyond 1", b"beyond 2", b"beyond 3"]
"""More than may be taken: not delivered, but for the get that a quorum queue may need before its channel closes."""
_SUSPEND = (
    f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{STUCK}">>)), '
    "sys:suspend(amqqueue:get_pid(Q))."
)


class Case(NamedTuple):
    queues: int
    count: int
    """Messages in each queue, beside the one."""
    stuck: int
    """In how many of the queues there is one that is never confirmed."""
    place: int = 5
    size: int = 5
    stuck_size: int = 5


CASES = {
    "one queue": Case(1, 700, 1),
    "one of two": Case(2, 600, 1),
    "each of two": Case(2, 600, 2),
    "one of four": Case(4, 400, 1),
    "two of four": Case(4, 400, 2),
    "each of four": Case(4, 400, 4),
    "bodies of 100 kB": Case(1, 200, 1, size=100_000, stuck_size=100_000),
    "bodies of 100 kB in two": Case(2, 120, 1, size=100_000, stuck_size=100_000),
    "bodies of 5 MiB in four": Case(4, 2, 1, place=1, size=5 * MIB),
    "a large one": Case(1, 700, 1, stuck_size=12 * MIB),
    "a large one first": Case(1, 300, 1, place=0, stuck_size=16 * MIB),
    "a large one in one of four": Case(4, 300, 1, stuck_size=12 * MIB),
    "larger than the memory": Case(1, 700, 1, stuck_size=17 * MIB),
    "larger than the memory in one of two": Case(2, 400, 1, stuck_size=17 * MIB),
}


@pytest.fixture(scope="module")
def node() -> Iterator[RabbitNode]:
    """Its queue `stuck` takes messages, and never says so."""
    with services.work_folder(volatile=True) as folder, RabbitNode(folder / "rabbitmq").start() as node:
        side = Side(node.url)
        side.queue(STUCK)
        side.close()
        node.evaluate(_SUSPEND)
        yield node


@pytest.fixture
def side(node: RabbitNode) -> Iterator[Side]:
    side = Side(node.url)
    for queue in (SINK, *SOURCES):
        side.channel.queue_delete(queue)
    side.queue(SINK)
    yield side
    side.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_all_the_others_move(node: RabbitNode, side: Side, kind: str, case: Case) -> None:
    names = [side.queue(name, kind) for name in SOURCES[: case.queues]]
    for number, name in enumerate(names):
        bodies = [b"%05d".ljust(case.size, b".") % place for place in range(case.count)]
        if number < case.stuck:
            bodies.insert(case.place, STUCK.encode().ljust(case.stuck_size, b"."))
        side.fill(name, [*bodies, *BEYOND])
    takes = [Take(name, case.count + (number < case.stuck), kind == "quorum") for number, name in enumerate(names)]
    is_over = threading.Event()

    def handle(delivery: Delivery) -> Instruction:
        is_stuck = (delivery.chunks or [b""])[0].startswith(STUCK.encode())
        return publish(delivery, Route("", STUCK)) if is_stuck else move(delivery)

    others = case.queues * case.count
    with connected(node.url) as connection, ThreadPoolExecutor() as pool:
        bounds = Bounds(time.monotonic() + 60, 0.2, 1 << 40, is_over.is_set)
        engine = Transfer(connection, Origins(connection), handle, bounds)
        run = pool.submit(engine.run, takes)
        try:
            side.wait(lambda: run.done() or engine.tally.results["moved", None] == others, 30)
        finally:
            is_over.set()
        tally = run.result()
    assert tally.results == {("moved", None): others, ("left", "not-confirmed"): case.stuck}
    for number, name in enumerate(names):
        stayed = [STUCK.encode()] * (number < case.stuck)
        side.wait(partial(_holds, side, name, len(stayed) + len(BEYOND)))
        left = side.empty(name)
        assert sorted(message.body[:8].rstrip(b".") for message in left) == sorted([*stayed, *BEYOND])
        untouched = [message.body for message in left if not message.redelivered]
        # Where the others were confirmed so late that their last round was over, that get brings the next message.
        assert untouched == BEYOND or (kind == "quorum" and untouched == BEYOND[1:])


@pytest.mark.parametrize("places", [(0, 256), (0, 256, 512, 768)], ids=["two", "four"])
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_look_goes_on_past_those_in_parts_beside_each_other(
    node: RabbitNode, side: Side, kind: str, places: tuple[int, ...]
) -> None:
    queue, number = side.queue(SOURCES[0], kind), 1500
    bodies = [STUCK.encode() if place in places else b"%05d" % place for place in range(number)]
    side.fill(queue, bodies)
    is_over = threading.Event()

    def handle(delivery: Delivery) -> Instruction:
        is_stuck = (delivery.chunks or [b""])[0].startswith(STUCK.encode())
        return publish(delivery, Route("", STUCK)) if is_stuck else move(delivery)

    others = number - len(places)
    with connected(node.url) as connection, ThreadPoolExecutor() as pool:
        bounds = Bounds(time.monotonic() + 60, 0.2, 1 << 40, is_over.is_set)
        look = Transfer(connection, Origins(connection), handle, bounds)
        look.fetches.append(in_parts(look, connection, queue, number, is_quorum=kind == "quorum"))
        run = pool.submit(look.run)
        try:
            side.wait(lambda: run.done() or look.tally.results["moved", None] == others, 30)
        finally:
            is_over.set()
        tally = run.result()
    assert tally.results == {("moved", None): others, ("left", "not-confirmed"): len(places)}
    side.wait(partial(_holds, side, queue, len(places)))


def _holds(side: Side, queue: str, number: int) -> bool:
    return side.depth(queue) == number
