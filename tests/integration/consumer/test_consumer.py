"""Workers on real queues: what fails is counted and tried again, what is given up tells why, and nothing is lost."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import rawamqp
from broker_client import Side
from program import HANGS_AFTER, ROOT, environment, eventually
from rawamqp import Message, Peer
from workers import DEAD, EVENT, KINDS, QUEUE, make_step, publish, working

from dlqbatch import consumer as consumers
from dlqbatch.amqp.delivery import Delivery
from dlqbatch.amqp.origin import Trust
from dlqbatch.consumer import Consumer, Context
from dlqbatch.errors import ChannelRefused, TopologyMissing
from dlqbatch.ingest.examine import examine
from scripts.servers.management import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from dlqbatch.broker.access import Access
    from dlqbatch.broker.connection import Connection
    from scripts.servers.management import Management

pytestmark = pytest.mark.usefixtures("on_every_broker")


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    opened = Side(broker_url)
    yield opened
    opened.close()


@pytest.fixture
def pipeline(side: Side) -> Callable[[str], None]:
    return lambda kind: make_step(side, kind)


@KINDS
def test_what_succeeds_is_acknowledged_and_the_handler_is_told_all(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE)
    seen: list[tuple[bytes, Context]] = []
    consumer.on(EVENT)(lambda body, context: seen.append((body, context)))
    publish(side, b"body", message_id="m", headers={"tenant": "eu"})
    with working(consumer):
        assert eventually(lambda: bool(seen))
    body, context = seen[0]
    assert (body, context.routing_key, context.retries, context.redelivered) == (b"body", EVENT, 0, False)
    assert (context.message_id, context.headers["tenant"]) == ("m", "eu")
    assert side.empty(QUEUE) == []
    assert side.empty(DEAD) == []


@KINDS
def test_what_fails_is_tried_again_and_counted_and_then_dead_lettered_with_the_reason(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE, max_retries=3)
    tries: list[int] = []

    @consumer.on("settlement.*")
    def settle(body: bytes, context: Context) -> None:
        assert (body, context.routing_key) == (b"\xff\0", EVENT)
        tries.append(context.retries)
        raise RuntimeError("bank says no: é")

    publish(side, b"\xff\0", headers={"tenant": "eu"}, priority=4)
    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 1)
    assert tries == [0, 1, 2, 3]
    assert side.empty(QUEUE) == []
    [dead] = side.empty(DEAD)
    assert (dead.body, dead.routing_key, dead.properties.priority) == (b"\xff\0", EVENT, 4)
    assert dead.properties.headers["tenant"] == "eu"
    assert "dlqbatch-worker-retries" not in dead.properties.headers
    assert dead.properties.headers["dlqbatch-reason"] == "worker-failed"


def test_ingest_understands_what_a_worker_gave_up(broker_url: str, side: Side, pipeline: Callable[[str], None]) -> None:
    pipeline("classic")
    consumer = Consumer(broker_url, queue=QUEUE, max_retries=2)

    @consumer.on("#")
    def settle(body: bytes, _: Context) -> None:
        raise LookupError("x" * 100_000)

    odd = rawamqp.properties([(b"half", b"d\x3f\xe8" + b"\0" * 6), (b"", rawamqp.binary(b"\xff"))], timestamp=2**63)
    with Peer(broker_url) as peer:
        peer.publish([Message("settlements", EVENT.encode(), odd, b"body")])
        with working(consumer):
            peer.wait_for(lambda: peer.depth(DEAD) == 1, "the dead letter")
        [seen] = peer.read(DEAD)

    class Receipt:
        queue = DEAD

    delivery = Delivery(Receipt(), 1, DEAD, EVENT, redelivered=False)  # type: ignore[arg-type]
    delivery.properties, delivery.chunks = seen.properties, [seen.body + b"\xce"]
    found = examine(delivery, Trust(), datetime.now(UTC))
    assert (found.failure.type, found.failure.message) == ("LookupError", "x" * 4_096)
    assert found.failure.stack is not None
    assert found.failure.stack.endswith("\n")
    assert found.origin == (QUEUE, "settlements", EVENT)
    assert (found.reason, found.retries) == ("worker-failed", 2)
    assert found.id
    headers = dict(rawamqp.entries_of(rawamqp.named_properties(seen.properties)["headers"]))
    assert headers[b"half"] == b"d\x3f\xe8" + b"\0" * 6
    assert rawamqp.named_properties(seen.properties)["timestamp"] == (2**63).to_bytes(8, "big")


def test_a_handler_that_would_only_be_made_ready_is_refused() -> None:
    async def settle(body: bytes, context: Context) -> None: ...

    def settle_some(body: bytes, context: Context) -> Iterator[None]:
        yield

    for handler in (settle, settle_some):
        with pytest.raises(TypeError, match="coroutine or a generator"):
            Consumer("amqp://localhost", queue=QUEUE).on(EVENT)(handler)


@pytest.mark.filterwarnings("ignore:coroutine")
def test_work_that_a_handler_returns_unfinished_has_failed(
    broker_url: str, side: Side, pipeline: Callable[[str], None]
) -> None:
    pipeline("classic")
    consumer = Consumer(broker_url, queue=QUEUE, max_retries=0)

    async def settle() -> None: ...

    consumer.on(EVENT)(lambda _body, _context: settle())
    publish(side)
    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 1)
    [dead] = side.empty(DEAD)
    assert dead.properties.headers["MT-Fault-ExceptionType"] == "TypeError"


@KINDS
def test_an_event_without_a_handler_is_dead_lettered_at_once(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE)
    consumer.on(EVENT)(lambda _body, _context: None)
    publish(side, key="settlement.unheard")
    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 1)
    [dead] = side.empty(DEAD)
    assert dead.properties.headers["dlqbatch-reason"] == "unknown-event"
    assert "settlement.unheard" in dead.properties.headers["MT-Fault-Message"]


@KINDS
def test_a_handler_that_takes_longer_than_three_heartbeats_is_not_cut_off(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE, heartbeat=1)
    took: list[bool] = []
    consumer.on(EVENT)(lambda _body, _context: took.append(threading.Event().wait(4.0)))
    publish(side)
    with working(consumer):
        assert eventually(lambda: bool(took))
    assert took == [False]
    assert side.empty(QUEUE) == []


@KINDS
def test_a_stop_finishes_the_handler_at_work_and_leaves_the_others(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE, prefetch=1)
    begun, go_on, done = threading.Event(), threading.Event(), []

    @consumer.on(EVENT)
    def settle(body: bytes, _: Context) -> None:
        begun.set()
        go_on.wait(HANGS_AFTER)
        done.append(body)

    for number in range(3):
        publish(side, b"%d" % number)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    assert begun.wait(HANGS_AFTER)
    consumer.stop()
    go_on.set()
    thread.join(HANGS_AFTER)
    assert not thread.is_alive()
    assert done == [b"0"]
    assert sorted(message.body for message in side.empty(QUEUE)) == [b"1", b"2"]


@KINDS
def test_a_connection_that_is_cut_is_made_again_and_nothing_is_lost(
    broker_url: str, side: Side, management: Management, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE)
    seen: list[bytes] = []
    consumer.on(EVENT)(lambda body, _context: seen.append(body))

    def connections() -> list[str]:
        found = management.get("connections")
        name = f"dlqbatch consumer of {QUEUE}"
        ours = [one for one in found if one.get("client_properties", {}).get("connection_name") == name]
        return [one["name"] for one in ours if one["vhost"] == management.vhost]

    with working(consumer):
        publish(side, b"before")
        assert eventually(lambda: seen == [b"before"])
        assert eventually(lambda: bool(connections()))
        for name in connections():
            management.delete(f"connections/{name.replace(' ', '%20').replace('>', '%3E')}")
        publish(side, b"after")
        assert eventually(lambda: seen[-1] == b"after")
    assert side.empty(QUEUE) == []


@KINDS
def test_a_worker_that_is_killed_in_a_handler_leaves_its_message_to_the_next(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    publish(side, b"1")
    script = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from dlqbatch.consumer import Consumer\n"
        f"consumer = Consumer({broker_url!r}, queue={QUEUE!r})\n"
        f"@consumer.on({EVENT!r})\n"
        "def settle(body, context):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(60)\n"
        "consumer.run()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.kill()
    consumer = Consumer(broker_url, queue=QUEUE)
    seen: list[Context] = []
    consumer.on(EVENT)(lambda _body, context: seen.append(context))
    with working(consumer):
        assert eventually(lambda: bool(seen))
    # Only a quorum queue knows that it was tried.
    assert (seen[0].redelivered, seen[0].retries) == (True, 1 if kind == "quorum" else 0)


def test_sigterm_ends_a_worker_in_order(broker_url: str, side: Side, pipeline: Callable[[str], None]) -> None:
    pipeline("classic")
    publish(side, b"1")
    script = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from dlqbatch.consumer import Consumer\n"
        f"consumer = Consumer({broker_url!r}, queue={QUEUE!r})\n"
        f"@consumer.on({EVENT!r})\n"
        "def settle(body, context):\n"
        "    print('begun', flush=True)\n"
        "    while not consumer.is_stopping: time.sleep(0.01)\n"
        "    print('done', flush=True)\n"
        "consumer.run()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "done\n"
        assert process.wait(HANGS_AFTER) == 0
    assert side.empty(QUEUE) == []


@pytest.mark.parametrize(("wish", "code"), [(60, 0), (-1, -signal.SIGTERM)])
def test_sigterm_twice_within_a_moment_is_one_and_later_it_is_meant(
    broker_url: str, side: Side, pipeline: Callable[[str], None], wish: int, code: int
) -> None:
    pipeline("classic")
    publish(side, b"1")
    script = (
        f"import os, signal, sys, threading, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "import dlqbatch.consumer\n"
        f"dlqbatch.consumer.ONE_REQUEST_SECONDS = {wish}\n"
        f"consumer = dlqbatch.consumer.Consumer({broker_url!r}, queue={QUEUE!r})\n"
        "passed = threading.Event()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: passed.set())\n"
        f"@consumer.on({EVENT!r})\n"
        "def settle(body, context):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not consumer.is_stopping: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    passed.wait()\n"
        "consumer.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), timeout=HANGS_AFTER, check=False)
    assert done.returncode == code
    left = 0 if code == 0 else 1
    assert eventually(lambda: side.depth(QUEUE) == left)
    assert len(side.empty(QUEUE)) == left


@KINDS
def test_an_exception_whose_own_text_fails_is_a_failure_like_any_other(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

        __repr__ = __str__

    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE, max_retries=1)
    tries: list[int] = []

    @consumer.on(EVENT)
    def settle(_body: bytes, context: Context) -> None:
        tries.append(context.retries)
        raise Mute

    publish(side)
    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 1)
    assert tries == [0, 1]
    [dead] = side.empty(DEAD)
    assert dead.properties.headers["MT-Fault-ExceptionType"].endswith("Mute")
    assert dead.properties.headers["MT-Fault-Message"].endswith("Mute>")


def test_what_another_worker_counted_counts_here_no_more(
    broker_url: str, side: Side, pipeline: Callable[[str], None]
) -> None:
    """As where it expired before its last try, and the broker dead-lettered it into the queue of this worker."""
    pipeline("classic")
    consumer = Consumer(broker_url, queue=QUEUE, max_retries=1)
    tries: list[int] = []

    @consumer.on(EVENT)
    def settle(_body: bytes, context: Context) -> None:
        tries.append(context.retries)
        raise RuntimeError

    before = {"queue": "elsewhere", "exchange": "e", "key": EVENT}
    recorded = {f"dlqbatch-origin-{part}": name for part, name in before.items()}
    publish(side, headers={"dlqbatch-id": "1", "dlqbatch-worker-retries": 7} | recorded)
    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 1)
    assert tries == [0, 1]


@KINDS
def test_a_retry_from_the_dead_store_that_came_through_its_exchange_is_known_when_it_fails_again(
    broker_url: str, side: Side, pipeline: Callable[[str], None], kind: str
) -> None:
    pipeline(kind)
    consumer = Consumer(broker_url, queue=QUEUE, max_retries=0)

    @consumer.on(EVENT)
    def settle(_body: bytes, _context: Context) -> None:
        raise RuntimeError

    recorded = {"dlqbatch-origin-exchange": "settlements", "dlqbatch-origin-key": EVENT}
    publish(side, headers={"dlqbatch-id": "1", "dlqbatch-attempt": 2} | recorded)
    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 1)
    [dead] = side.empty(DEAD)
    headers = dead.properties.headers
    assert (headers["dlqbatch-id"], headers["dlqbatch-attempt"]) == ("1", 2)
    assert headers["dlqbatch-origin-queue"] == QUEUE


def test_what_is_told_of_an_earlier_failure_is_there_at_every_try(
    broker_url: str, side: Side, pipeline: Callable[[str], None]
) -> None:
    pipeline("classic")
    consumer = Consumer(broker_url, queue=QUEUE, max_retries=1)
    told: list[object] = []

    @consumer.on(EVENT)
    def settle(_body: bytes, context: Context) -> None:
        told.append(context.headers.get("MT-Fault-Message"))
        raise RuntimeError("now")

    publish(side, headers={"MT-Fault-Message": "then"})
    with working(consumer):
        assert eventually(lambda: side.depth(DEAD) == 1)
    assert told == ["then", "then"]
    [dead] = side.empty(DEAD)
    assert dead.properties.headers["MT-Fault-Message"] == "now"


class Cuts:
    """Cuts the worker's connection, and knows what is handed to its handler's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handed: list[Future[Any]] = []
        connect, submit = consumers.connect, ThreadPoolExecutor.submit

        def connected(access: Access) -> Connection:
            self._connection = connect(access)
            return self._connection

        def submitted(executor: ThreadPoolExecutor, *work: Any) -> Future[Any]:
            self.handed.append(submit(executor, *work))
            return self.handed[-1]

        monkeypatch.setattr(consumers, "connect", connected)
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submitted)

    def cut(self) -> None:
        """And wait until the message has come again."""
        wire, before = self._connection.wire, len(self.handed)
        wire.ioloop.add_callback_threadsafe(wire.abort)
        assert eventually(lambda: len(self.handed) > before)


@KINDS
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_handler_that_outlives_its_connections_is_called_once_more_or_not_at_all(
    broker_url: str,
    side: Side,
    pipeline: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_stopped: bool,
) -> None:
    pipeline(kind)
    cuts = Cuts(monkeypatch)
    consumer = Consumer(broker_url, queue=QUEUE)
    calls: list[bytes] = []
    go_on = threading.Event()

    @consumer.on(EVENT)
    def settle(body: bytes, _context: Context) -> None:
        calls.append(body)
        go_on.wait(HANGS_AFTER)

    publish(side)
    with working(consumer):
        assert eventually(lambda: bool(calls))
        for _ in range(2):
            cuts.cut()
        if is_stopped:
            consumer.stop()
            assert eventually(cuts.handed[-1].cancelled)
        go_on.set()
        assert is_stopped or eventually(lambda: len(calls) == 2)
    assert len(calls) == (1 if is_stopped else 2)
    assert len(side.empty(QUEUE)) == (1 if is_stopped else 0)


def test_what_is_missing_from_the_start_is_said(broker_url: str, side: Side) -> None:
    side.queue(QUEUE)
    with pytest.raises(TopologyMissing, match=DEAD):
        Consumer(broker_url, queue=QUEUE).run()
    with pytest.raises(TopologyMissing, match="nowhere"):
        Consumer(broker_url, queue="nowhere", dead_letters="amq.fanout").run()


def test_a_login_that_may_not_read_is_told_so_and_does_not_try_for_ever(
    broker_url: str, side: Side, pipeline: Callable[[str], None], management: Management
) -> None:
    pipeline("classic")
    name = f"user-{secrets.token_hex(5)}"
    management.put(f"users/{name}", {"password": "p", "tags": ""})
    rights = {"configure": ".*", "write": ".*", "read": "^$"}
    management.put(f"permissions/{quoted(management.vhost)}/{name}", rights)
    try:
        with pytest.raises(ChannelRefused, match=f"access to queue '{QUEUE}'"):
            Consumer(broker_url.replace("guest:guest@", f"{name}:p@"), queue=QUEUE).run()
    finally:
        management.delete(f"users/{name}")


def test_two_handlers_of_one_event_are_refused() -> None:
    consumer = Consumer("amqp://127.0.0.1", queue="q")
    consumer.on("a")(print)
    with pytest.raises(ValueError, match="'a' has a handler already"):
        consumer.on("a")(print)
