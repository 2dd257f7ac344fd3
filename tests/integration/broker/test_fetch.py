"""One suite for both ways to take messages: pipelined gets (classic queues) and a bounded consumer (quorum queues)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from broker_client import SINK, Side, body_of, connected, keep, move, publish, transfer
from program import HANGS_AFTER

from dlqbatch.amqp.delivery import Hold, Route
from dlqbatch.broker.consume import PREFETCH, Consume
from dlqbatch.broker.fetch import Spare
from dlqbatch.broker.transfer import Take

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.amqp.delivery import Delivery, Instruction
    from dlqbatch.broker.transfer import Tally
    from scripts.servers.management import Management

SOURCE = "source"
FRAME = 131_072 - 8
"""The largest body of one frame with the broker's default frame_max."""


@pytest.fixture(params=["classic", "quorum"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def side(broker_url: str, kind: str) -> Iterator[Side]:
    side = Side(broker_url)
    side.queue(SOURCE, kind)
    side.queue(SINK)
    yield side
    side.close()


def take(kind: str, limit: int, queue: str = SOURCE) -> Take:
    return Take(queue, limit, is_quorum=kind == "quorum")


def numbered(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def run(url: str, kind: str, limit: int, handle: object = move, **bounds: object) -> Tally:
    with connected(url) as connection:
        return transfer(connection, [take(kind, limit)], handle, **bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1000, 3000])
def test_all_that_is_acknowledged_is_gone_once_the_connection_is_closed(
    side: Side, broker_url: str, kind: str, count: int
) -> None:
    side.fill(SOURCE, numbered(count))
    tally = run(broker_url, kind, count)
    assert (tally.got, tally.results, tally.stopped_by, tally.lost) == (count, {("moved", None): count}, None, None)
    assert side.empty(SOURCE) == []
    assert [message.body for message in side.empty(SINK)] == numbered(count)


def test_the_broker_counts_nothing_as_unacknowledged_afterwards(
    side: Side, broker_url: str, management: Management, kind: str
) -> None:
    side.fill(SOURCE, numbered(1000))
    run(broker_url, kind, 900)
    side.wait(lambda: management.queue(SOURCE).get("messages") == 100)
    assert management.queue(SOURCE)["messages_ready"] == 100


@pytest.mark.parametrize(("depth", "limit"), [(5, 1), (5, 2), (5, 3), (100, 99), (700, 513), (3000, 2000)])
def test_the_limit_is_kept_and_the_rest_was_never_delivered(
    side: Side, broker_url: str, kind: str, depth: int, limit: int
) -> None:
    side.fill(SOURCE, numbered(depth))
    tally = run(broker_url, kind, limit)
    assert tally.got == limit
    left = side.empty(SOURCE)
    assert [message.body for message in left] == numbered(depth)[limit:]
    assert not any(message.redelivered for message in left)
    # If the broker pauses, it is asked whether the queue is empty; the answer may overtake what was assigned before.
    assert sorted(message.body for message in side.empty(SINK)) == numbered(depth)[:limit]


@pytest.mark.parametrize(("limit", "spare", "taken"), [(3, 100, 50), (3, 10, 13), (50, 100, 50), (3, 0, 3)])
@pytest.mark.parametrize("kind", ["quorum"])
def test_what_the_first_get_counts_is_taken_although_the_declare_has_counted_less(
    side: Side, broker_url: str, limit: int, spare: int, taken: int
) -> None:
    """After a restart RabbitMQ counts what a quorum queue has read of its log so far."""
    side.fill(SOURCE, numbered(50))
    with connected(broker_url) as connection:
        tally = transfer(connection, [take("quorum", limit)], move, spare=spare)
    assert (tally.got, tally.taken[SOURCE]) == (taken, taken)
    assert len(side.empty(SOURCE)) == 50 - taken


def test_a_limit_beyond_the_depth_ends_when_the_queue_is_empty(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, numbered(600))
    assert run(broker_url, kind, 5000).got == 600
    assert side.empty(SOURCE) == []


@pytest.mark.parametrize("limit", [0, 1, 100])
def test_an_empty_queue_yields_nothing(side: Side, broker_url: str, kind: str, limit: int) -> None:
    tally = run(broker_url, kind, limit)
    assert (tally.got, tally.stopped_by, tally.lost) == (0, None, None)


@pytest.mark.parametrize("depth", [20, 1500])
@pytest.mark.parametrize("held", ["every second", "every seventh", "the first", "the last", "all", "all but the last"])
def test_what_is_held_stays_and_nothing_else_does(
    side: Side, broker_url: str, kind: str, held: str, depth: int
) -> None:
    stays = {
        "every second": lambda number: number % 2 == 0,
        "every seventh": lambda number: number % 7 == 0,
        "the first": lambda number: number == 0,
        "the last": lambda number: number == depth - 1,
        "all": lambda _: True,
        "all but the last": lambda number: number != depth - 1,
    }[held]

    def handle(delivery: Delivery) -> Instruction:
        return keep(delivery) if stays(int(body_of(delivery))) else move(delivery)

    side.fill(SOURCE, numbered(depth))
    tally = run(broker_url, kind, depth, handle)
    expected = [body for body in numbered(depth) if stays(int(body))]
    assert tally.got == depth
    assert tally.results["left", "kept"] == len(expected)
    left = side.empty(SOURCE)
    assert sorted(message.body for message in left) == expected
    assert all(message.redelivered for message in left)
    if kind == "classic":
        assert [message.body for message in left] == expected
    assert len(side.empty(SINK)) == depth - len(expected)


def test_on_a_classic_queue_what_is_held_comes_before_what_was_not_taken(broker_url: str) -> None:
    side = Side(broker_url)
    side.queue(SOURCE)
    side.fill(SOURCE, numbered(50))
    run(broker_url, "classic", 20, keep)
    left = side.empty(SOURCE)
    assert [message.body for message in left] == numbered(50)
    assert [message.redelivered for message in left] == [True] * 20 + [False] * 30
    side.close()


def test_the_redelivered_flag_is_passed_on(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, numbered(10))
    run(broker_url, kind, 4, keep)
    seen: Counter[bool] = Counter()

    def handle(delivery: Delivery) -> Instruction:
        seen[delivery.redelivered] += 1
        return move(delivery)

    run(broker_url, kind, 10, handle)
    assert seen == {True: 4, False: 6}


def test_messages_that_arrive_during_the_run_do_not_keep_it_alive(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, numbered(300))

    def back_to_where_it_came_from(delivery: Delivery) -> Instruction:
        return publish(delivery, Route("", SOURCE))

    assert run(broker_url, kind, 300, back_to_where_it_came_from).got == 300
    assert sorted(message.body for message in side.empty(SOURCE)) == numbered(300)


@pytest.mark.parametrize("others", [1, 3])
def test_several_queues_are_drained_side_by_side(side: Side, broker_url: str, kind: str, others: int) -> None:
    names = [SOURCE, *(side.queue(f"source-{number}", kind) for number in range(others))]
    for name in names:
        side.fill(name, numbered(400))
    with connected(broker_url) as connection:
        assert transfer(connection, [take(kind, 300, name) for name in names], move).got == 300 * len(names)
    for name in names:
        left = side.empty(name)
        assert [message.body for message in left] == numbered(400)[300:]
        assert not any(message.redelivered for message in left)


def test_a_consumer_may_drain_a_classic_queue_and_gets_a_quorum_queue(side: Side, broker_url: str, kind: str) -> None:
    other = {"classic": "quorum", "quorum": "classic"}[kind]
    side.fill(SOURCE, numbered(700))
    assert run(broker_url, other, 600).got == 600
    assert len(side.empty(SINK)) == 600


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize(("depth", "limit"), [(3000, 3000), (3000, 2000), (700, 513)])
def test_a_round_whose_probe_found_a_message_ends_at_once(
    broker_url: str, monkeypatch: pytest.MonkeyPatch, depth: int, limit: int
) -> None:
    """The queue was empty when it was looked at, and is not when it is asked for a message: one less by consuming."""
    monkeypatch.setattr(Consume, "probes_after", -1.0)
    monkeypatch.setattr(Consume, "probes_at", depth)
    monkeypatch.setattr(Consume, "gives_up_after", 2 * HANGS_AFTER)
    side = Side(broker_url)
    side.queue(SOURCE, "quorum")
    side.queue(SINK)
    side.fill(SOURCE, numbered(depth))
    tally = run(broker_url, "quorum", limit)
    assert (tally.got, tally.stopped_by, tally.results) == (limit, None, {("moved", None): limit})
    left = side.empty(SOURCE)
    assert [message.body for message in left] == numbered(depth)[limit:]
    assert not any(message.redelivered for message in left)
    side.close()


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("count", [1000, 3000])
def test_a_broker_that_pauses_is_not_asked_for_a_message_out_of_turn(
    broker_url: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Asked for one while 500 are on their way, it would answer with the one behind them all."""
    monkeypatch.setattr(Consume, "probes_after", -1.0)
    monkeypatch.setattr(Consume, "gives_up_after", 2 * HANGS_AFTER)
    side = Side(broker_url)
    side.queue(SOURCE, "quorum")
    side.queue(SINK)
    side.fill(SOURCE, numbered(count))
    run(broker_url, "quorum", count)
    assert [message.body for message in side.empty(SINK)] == numbered(count)
    side.close()


def test_a_queue_deleted_during_the_run_ends_it(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, numbered(2000))
    other = side.queue("other", kind)
    side.fill(other, numbered(50))
    seen = 0

    def handle(delivery: Delivery) -> Instruction:
        nonlocal seen
        seen += 1
        if seen == 700:
            side.channel.queue_delete(SOURCE)
        return move(delivery)

    with connected(broker_url) as connection:
        tally = transfer(connection, [take(kind, 2000), take(kind, 50, other)], handle)
        assert tally.lost is None
        assert 700 <= tally.got < 2050
        # The connection is as good as before.
        assert connection.open_channel().is_open
    assert side.empty(other) == []
    assert len(side.empty(SINK)) == tally.results["moved", None] == tally.got


@pytest.mark.parametrize("why", ["signal", "time", "bytes"])
def test_a_run_that_is_stopped_settles_what_it_took(
    side: Side, broker_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    side.fill(SOURCE, [body * 100 for body in numbered(3000)])
    taken, gone_by = 0, 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + gone_by)
    monkeypatch.setattr("dlqbatch.broker.transfer.time", clock)

    def handle(delivery: Delivery) -> Instruction:
        nonlocal taken, gone_by
        taken += 1
        if why == "time" and taken == 1000:
            gone_by = HANGS_AFTER  # the time is over in the middle, however fast the machine is
        return move(delivery)

    bounds: dict[str, dict[str, object]] = {
        "signal": {"stopped": lambda: taken >= 1000},
        "time": {"seconds": HANGS_AFTER, "give_up_after": 2 * HANGS_AFTER},
        "bytes": {"max_bytes": 600 * 1000},
    }
    tally = run(broker_url, kind, 3000, handle, **bounds[why])
    assert tally.stopped_by == why
    assert 1000 <= tally.got <= 1000 + 2 * PREFETCH
    left = side.empty(SOURCE)
    assert len(left) == 3000 - tally.got
    assert not any(message.redelivered for message in left)
    assert len(side.empty(SINK)) == tally.results["moved", None] == tally.got


def test_the_bound_on_bytes_is_passed_by_no_more_than_one_message(side: Side, broker_url: str, kind: str) -> None:
    side.fill(SOURCE, [bytes(100_000)] * 30)
    tally = run(broker_url, kind, 30, max_bytes=450_000)
    assert tally.stopped_by == "bytes"
    assert tally.bytes <= 1_000_000


def test_of_bodies_as_large_as_the_bound_one_is_taken_and_the_others_go_back(broker_url: str, kind: str) -> None:
    side = Side(broker_url)
    queues = [side.queue(f"large-{number}", kind) for number in range(3)]
    side.queue(SINK)
    for queue in queues:
        side.fill(queue, [bytes(100_000)] * 4)
    with connected(broker_url) as connection:
        tally = transfer(connection, [Take(queue, 4, kind == "quorum") for queue in queues], move, max_bytes=90_000)
    assert (tally.stopped_by, tally.lost, tally.results) == ("bytes", None, {("moved", None): 1})
    assert sum(len(side.empty(queue)) for queue in queues) == 11
    side.close()


def test_a_body_as_large_as_the_bound_that_is_refused_ends_no_run(broker_url: str) -> None:
    side = Side(broker_url)
    side.queue(SOURCE)
    side.queue(SINK)
    side.fill(SOURCE, [bytes(100_000), *numbered(20)])

    def handle(delivery: Delivery) -> Instruction:
        return Hold("left", "refused") if delivery.body_size == 100_000 else move(delivery)

    tally = run(broker_url, "classic", 21, handle, max_bytes=90_000)
    assert tally.stopped_by is None
    assert tally.results == {("moved", None): 20, ("left", "refused"): 1}
    side.close()


def test_large_bodies_behind_many_small_ones_do_not_pass_the_bound_on_bytes(broker_url: str) -> None:
    """As many were asked for as would have been allowed of the small ones."""
    side = Side(broker_url)
    side.queue(SOURCE)
    side.queue(SINK)
    bodies = [*numbered(600), *[b"%06d" % number + bytes(20_000) for number in range(600, 900)]]
    side.fill(SOURCE, bodies)
    tally = run(broker_url, "classic", 900, max_bytes=100_000)
    assert (tally.stopped_by, tally.lost) == ("bytes", None)
    assert tally.results == {("moved", None): tally.got}
    assert tally.got > 600
    assert 100_000 <= tally.bytes < 100_000 + 20_006
    assert [message.body for message in side.empty(SINK)] == bodies[: tally.got]
    assert [message.body for message in side.empty(SOURCE)] == bodies[tally.got :]
    side.close()


SIZES = [0, 1, 1000, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 1024 * 1024, 16 * 1024 * 1024]


def test_bodies_of_any_size_arrive_as_they_were(side: Side, broker_url: str, kind: str) -> None:
    bodies = [bytes([number + 1]) * size for number, size in enumerate(SIZES)]
    side.fill(SOURCE, bodies)
    tally = run(broker_url, kind, len(bodies))
    assert tally.results == {("moved", None): len(bodies)}
    assert tally.bytes == sum(SIZES)
    arrived = [message.body for message in side.empty(SINK)]
    assert [len(body) for body in arrived] == SIZES
    assert arrived == bodies
    assert side.empty(SOURCE) == []


PEAK = """
import resource, sys
from broker_client import connected, move, transfer
from dlqbatch.broker.transfer import Take
url, kind, limit = sys.argv[1:]
with connected(url) as connection:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tally = transfer(connection, [Take("source", int(limit), kind == "quorum")], move)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(tally.results["moved", None], grown * 1024)
"""


@pytest.mark.parametrize("small_first", [False, True])
def test_large_bodies_are_few_in_memory_at_once(
    side: Side, broker_url: str, kind: str, *, small_first: bool, pytestconfig: pytest.Config
) -> None:
    size = 16 * 1024 * 1024
    small = [b"x" * 1000] * 300 if small_first else []
    side.fill(SOURCE, [*small, *[bytes(size)] * 8])
    done = subprocess.run(
        [sys.executable, "-c", PEAK, broker_url, kind, str(len(small) + 8)],
        check=True,
        capture_output=True,
        text=True,
        cwd=pytestconfig.rootpath,
        env={"PYTHONPATH": ".:tests:tests/support"},
    )
    moved, grown = map(int, done.stdout.split())
    assert side.depth(SOURCE) == len(small) + 8 - moved
    assert moved == len(small) + 8
    assert grown <= 5 * size + 32 * 1024 * 1024


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("depth", [400, 500])
def test_what_is_settled_late_is_gone_all_the_same(broker_url: str, depth: int) -> None:
    """As confirms on a busy broker come late: each acknowledgement is one by itself then, and the channel closes."""
    side = Side(broker_url)
    side.queue(SOURCE, "quorum")
    side.fill(SOURCE, numbered(depth))
    with connected(broker_url) as connection:
        taken: list[Delivery] = []
        fetch = Consume(connection, SOURCE, 400, taken.append, Spare())
        deadline = time.monotonic() + HANGS_AFTER
        while not fetch.is_finished:
            assert time.monotonic() < deadline
            fetch.flush()
            fetch.ask(512)
            connection.wire.flush()
            connection.step()
        assert len(taken) == 400
        for delivery in reversed(taken):
            fetch.settle(delivery.tag)
        fetch.release()
        connection.wait(lambda: fetch.is_closed, "channel.close")
    # The one that the last get may have brought went back, and need not be in its place.
    assert sorted(message.body for message in side.empty(SOURCE)) == numbered(depth)[400:]
    side.close()
