"""Connecting, being refused, waiting, losing the connection and letting it go."""

from __future__ import annotations

import inspect
import logging
import socket
import threading
import time
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pika.exceptions
import pytest
from broker_client import SINK, Side, connected, move, transfer
from pika.adapters.utils import connection_workflow
from slow_link import SlowLink

from dlqbatch.broker.access import Access, connect
from dlqbatch.broker.connection import Connection, NoAnswer, describe
from dlqbatch.broker.transfer import Take
from dlqbatch.errors import BrokerLost, BrokerUnreachable, LoginRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlqbatch.amqp.delivery import Delivery, Instruction
    from scripts.servers.management import Management

SOURCE = "source"


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    side.queue(SOURCE)
    side.queue(SINK)
    yield side
    side.close()


@pytest.fixture(autouse=True)
def pika_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "pika")


@contextmanager
def listener(answer: Callable[[socket.socket], None] = lambda _: None) -> Iterator[str]:
    """A server that takes every connection, lets `answer` do what it will with it, and says nothing else."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        # So that what a slow reader has not read waits at the sender.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                taken.append(client)
                answer(client)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"amqp://guest:secret-word@127.0.0.1:{server.getsockname()[1]}/%2F"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for client in taken:
        client.close()


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"amqp://guest:secret-word@127.0.0.1:{server.getsockname()[1]}/%2F"


def refused(*urls: str, within: float = 1.0, at_least: float = 0.0) -> str:
    """What a connection that cannot be made says; the time it took is checked, and that it holds no secret."""
    started = time.monotonic()
    with pytest.raises(BrokerUnreachable) as error:
        connect(Access(urls, connect_timeout=within))
    assert at_least <= time.monotonic() - started < within + 20
    assert "secret-word" not in str(error.value)
    return str(error.value)


def test_a_closed_port_is_given_up_within_the_time() -> None:
    assert "refused" in refused(closed_port()).lower()


def test_a_server_that_accepts_and_says_nothing_is_given_up_within_the_time() -> None:
    with listener() as url:
        refused(url, at_least=0.9)


def test_a_server_that_hangs_up_is_tried_again_and_is_no_refused_login() -> None:
    tries = []

    def hang_up(client: socket.socket) -> None:
        tries.append(client)
        client.close()

    with listener(hang_up) as url:
        assert "login" not in refused(url)
    assert len(tries) > 1


def test_a_server_that_speaks_another_protocol_is_given_up() -> None:
    def answer(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        client.close()

    with listener(answer) as url:
        refused(url)


def test_a_host_without_an_address_is_given_up() -> None:
    refused("amqp://guest:secret-word@nowhere.invalid/%2F")


def test_a_wrong_password_is_told_at_once(broker_url: str) -> None:
    started = time.monotonic()
    text = refused(broker_url.replace("guest:guest", "guest:secret-word"), within=60.0)
    assert "user or password is wrong" in text
    assert time.monotonic() - started < 40  # no use in trying again


@pytest.mark.parametrize("refused_first", [True, False])
def test_of_several_hosts_one_that_is_down_does_not_hide_that_the_login_is_refused(
    broker_url: str, *, refused_first: bool
) -> None:
    started = time.monotonic()
    wrong, down = broker_url.replace("guest:guest", "guest:secret-word"), closed_port()
    urls = (wrong, down) if refused_first else (down, wrong)
    with pytest.raises(LoginRefused) as error:
        connect(Access(urls, connect_timeout=60.0))
    assert time.monotonic() - started < 40  # no use in trying again
    text = str(error.value)
    assert "user or password is wrong" in text
    assert "Connection refused" in text
    for url in urls:
        assert urlsplit(url).netloc.rpartition("@")[2] in text
    assert "secret-word" not in text


def test_neither_a_wait_nor_the_close_goes_beyond_the_end_of_a_run(broker_url: str) -> None:
    with SlowLink(broker_url, 2_000) as link:
        connection = connect(Access((link.url,), end_at=time.monotonic() + 4))
        with pytest.raises(NoAnswer, match="before the time of the run was over"):
            connection.wait(lambda: connection.open_channel() is None, "nothing")
        assert link.paused.is_set()
        connection.close()
        assert time.monotonic() < connection_end(connection) + 4  # closing may take five seconds otherwise


def test_the_end_of_a_run_only_comes_nearer(broker_url: str) -> None:
    now = time.monotonic()
    connection = connect(Access((broker_url,), end_at=now + 60))
    connection.end_by(now + 90)
    assert connection_end(connection) == now + 60
    connection.end_by(now)
    with pytest.raises(NoAnswer):
        connection.open_channel()
    connection.close()


def connection_end(connection: Connection) -> float:
    return connection._end_at


def test_a_virtual_host_that_is_not_there_is_told_at_once(broker_url: str) -> None:
    started = time.monotonic()
    text = refused(broker_url + "-not-there", within=60.0)
    assert "not found" in text
    assert time.monotonic() - started < 40  # no use in trying again


def test_of_several_hosts_the_first_that_answers_serves(broker_url: str) -> None:
    with listener() as silent, connected(closed_port(), silent, broker_url, connect_timeout=8.0) as connection:
        assert connection.open_channel().is_open


def test_the_version_and_the_frame_size_are_known(broker_url: str) -> None:
    with connected(broker_url) as connection:
        assert connection.version >= (3, 8)
        assert connection.frame_max == 131_072
        assert connection.login == b"guest"


def test_heartbeats_keep_a_quiet_connection_alive(broker_url: str) -> None:
    with connected(broker_url, heartbeat=1) as connection:
        with pytest.raises(NoAnswer):
            connection.wait(lambda: False, "nothing", 4.0)
        assert connection.open_channel().is_open


def test_closing_twice_is_closing_once(broker_url: str) -> None:
    connection = connect(Access([broker_url]))
    connection.close()
    connection.close()
    assert connection.is_lost


def test_a_failing_handler_ends_the_run_with_its_own_error_and_loses_nothing(side: Side, broker_url: str) -> None:
    side.fill(SOURCE, [b"x"] * 100)
    seen = 0

    def handle(delivery: Delivery) -> Instruction:
        nonlocal seen
        seen += 1
        if seen == 50:
            raise ZeroDivisionError
        return move(delivery)

    with pytest.raises(ZeroDivisionError), connected(broker_url) as connection:
        transfer(connection, [Take(SOURCE, 100)], handle)
    side.wait(lambda: side.depth(SOURCE) + side.depth(SINK) >= 100)


def close_from_outside(management: Management, side: Side) -> None:
    """End the connection called dlqbatch, as an operator would; statistics know of it a moment later."""
    name = ""

    def is_known() -> bool:
        nonlocal name
        for one in management.get("connections"):
            ours = one.get("client_properties", {}).get("connection_name") == "dlqbatch"
            if ours and one.get("vhost") == management.vhost:
                name = one["name"]
        return bool(name)

    side.wait(is_known)
    management.delete(f"connections/{name.replace(' ', '%20').replace('>', '%3E')}")


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_connection_closed_during_the_run_is_told_and_leaves_every_message_somewhere(
    side: Side, broker_url: str, management: Management, kind: str
) -> None:
    source = side.queue(f"{kind}-source", kind)
    side.fill(source, [b"%d" % number for number in range(3000)])
    seen = 0

    def handle(delivery: Delivery) -> Instruction:
        nonlocal seen
        seen += 1
        if seen == 1000:
            close_from_outside(management, side)
        return move(delivery)

    with connected(broker_url) as connection:
        tally = transfer(connection, [Take(source, 3000, kind == "quorum")], handle)
        assert connection.is_lost
    assert tally.lost is not None
    assert "CONNECTION_FORCED" in tally.lost
    assert tally.results["left", "connection-lost"] > 0
    left = {message.body for message in side.empty(source)}
    arrived = [message.body for message in side.empty(SINK)]
    assert left | set(arrived) == {b"%d" % number for number in range(3000)}
    # Doubled is at most what was under way.
    assert len(left) + len(arrived) - 3000 <= 1024
    assert len(arrived) >= tally.results["moved", None]


def test_after_a_loss_every_call_says_so(side: Side, broker_url: str, management: Management) -> None:
    with connected(broker_url) as connection:
        close_from_outside(management, side)
        with pytest.raises(BrokerLost):
            connection.wait(lambda: False, "the loss", 10.0)
        assert connection.is_lost
        with pytest.raises(BrokerLost):
            connection.open_channel()
        with pytest.raises(BrokerLost):
            connection.step()
        with pytest.raises(BrokerLost), connection.scratch() as scratch:
            scratch.call("queue_declare", queue="any", passive=True)
        tally = None
        with pytest.raises(BrokerLost):
            tally = transfer(connection, [Take(SOURCE, 1)], move)
        assert tally is None


@contextmanager
def slow_link(url: str, bytes_per_second: int) -> Iterator[str]:
    """The broker behind a link that is fast towards us and slow away from us."""
    place = urlsplit(url)
    broker = socket.create_connection((place.hostname, place.port))
    threads: list[threading.Thread] = []

    def pass_on(source: socket.socket, target: socket.socket, pause: float) -> None:
        with suppress(OSError):
            while data := source.recv(64 * 1024):
                target.sendall(data)
                time.sleep(pause * len(data))
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def answer(client: socket.socket) -> None:
        for source, target, pause in ((client, broker, 1 / bytes_per_second), (broker, client, 0.0)):
            threads.append(threading.Thread(target=pass_on, args=(source, target, pause)))
            threads[-1].start()

    with broker, listener(answer) as proxy:
        yield url.replace(f"{place.hostname}:{place.port}", urlsplit(proxy).netloc.rpartition("@")[2])
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_a_slow_link_is_not_taken_for_a_dead_one(side: Side, broker_url: str) -> None:
    """While much is unsent nothing is read, and for pika what is not read is a missed heartbeat."""
    side.fill(SOURCE, [bytes(16 * 1024 * 1024)])
    with slow_link(broker_url, 800 * 1024) as url, connected(url, heartbeat=1) as connection:
        started = time.monotonic()
        assert transfer(connection, [Take(SOURCE, 1)], move).results == {("moved", None): 1}
        assert time.monotonic() - started > 13  # two of the checks that pika makes every six seconds


def test_an_answer_that_does_not_come_is_not_a_lost_connection(side: Side, broker_url: str) -> None:
    side.fill(SOURCE, [b"x"] * 10)
    with connected(broker_url) as connection:
        with pytest.raises(NoAnswer):
            connection.wait(lambda: False, "an answer", 0.1)
        assert transfer(connection, [Take(SOURCE, 10)], move).results == {("moved", None): 10}


def test_a_password_with_every_reserved_character_logs_in(broker_url: str, management: Management) -> None:
    management.put("users/odd", {"password": "p@ss/w:rd?#% ü", "tags": ""})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.put(f"permissions/{management.vhost}/odd", everything)
    place = urlsplit(broker_url)
    url = f"amqp://odd:p%40ss%2Fw%3Ard%3F%23%25%20%C3%BC@{place.hostname}:{place.port}{place.path}"
    with connected(url) as connection:
        assert connection.login == b"odd"
    management.delete("users/odd")


def errors_of(module: object) -> list[type[BaseException]]:
    return [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, BaseException) and member.__module__ == module.__name__  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize(
    "kind",
    errors_of(pika.exceptions) + errors_of(connection_workflow),
    ids=lambda kind: kind.__name__,
)
def test_every_error_of_pika_has_words(kind: type[BaseException]) -> None:
    own = next((one.__init__ for one in kind.__mro__ if isinstance(vars(one).get("__init__"), FunctionType)), None)
    if own is None:
        made = [kind(), kind("why"), kind(320, "why")]
    else:
        samples = {"self": None, "reply_code": 320, "reply_text": "why", "messages": [], "exceptions": [OSError("why")]}
        names = [one.name for one in inspect.signature(own).parameters.values() if one.kind is not one.VAR_POSITIONAL]
        made = [kind(*(samples.get(name, OSError("why")) for name in names[1:]))]
    for error in made:
        text = describe(error)
        assert text.strip()
        assert "object at 0x" not in text


def test_the_innermost_cause_is_what_is_told() -> None:
    cause = connection_workflow.AMQPConnectorSocketConnectError(ConnectionRefusedError(111, "Connection refused"))
    failed = connection_workflow.AMQPConnectionWorkflowFailed([cause])
    assert "Connection refused" in describe(pika.exceptions.AMQPConnectionError(failed))
