"""The health endpoint over real sockets, with clients that are slow, broken or hostile."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from program import HANGS_AFTER, eventually

from dlqbatch.schedule import health
from dlqbatch.schedule.health import Health, HealthAddressRefused, HealthAddressTaken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATE: dict[str, object] = {"jobs": {"drain": {"running": 1, "last": datetime(2031, 1, 2, 3, 4, 5, tzinfo=UTC)}}}
METRICS = '# TYPE dlqbatch_runs counter\ndlqbatch_runs{job="drain"} 3\ndlqbatch_text{of="ö"} 1\n'


def well() -> bool:
    return True


@contextmanager
def serving(
    address: str = "127.0.0.1:0",
    *,
    state: Callable[[], dict[str, object]] = lambda: STATE,
    is_well: Callable[[], bool] = well,
    metrics: Callable[[], str] = lambda: METRICS,
    is_alive: Callable[[], bool] = well,
) -> Iterator[str]:
    endpoint = Health(address, state, is_well, metrics, is_alive)
    try:
        yield endpoint.start()
    finally:
        endpoint.close()


@pytest.fixture(scope="module")
def shared_address() -> Iterator[str]:
    with serving() as bound:
        yield bound


@pytest.fixture
def address(shared_address: str) -> str:
    """Of an endpoint that has nobody left from the test before."""
    assert eventually(lambda: connections() == 0)
    return shared_address


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> float:
    """Slow clients are cut off sooner than in earnest."""
    monkeypatch.setattr(health, "SECONDS", 1.0)
    return 1.0


def ask(address: str, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address, timeout=HANGS_AFTER)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), HANGS_AFTER)


def say(address: str, *parts: bytes) -> bytes:
    """All that is answered until the other side closes; a reset ends it too."""
    answered = b""
    with connect(address) as client:
        try:
            for part in parts:
                client.sendall(part)
            while part := client.recv(65_536):
                answered += part
        except ConnectionError:
            pass
    return answered


def connections() -> int:
    """Those that have a thread of an endpoint."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def is_up(address: str) -> bool:
    return ask(address, "/healthz")[0] == 200


def test_its_state_is_told_as_json(address: str) -> None:
    status, headers, body = ask(address, "/healthz")
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert headers["cache-control"] == "no-store"
    assert json.loads(body) == {"jobs": {"drain": {"running": 1, "last": "2031-01-02 03:04:05+00:00"}}}
    assert ask(address, "/healthz?from=a-probe")[0] == 200


def test_a_scheduler_that_is_not_well_answers_503_and_says_why() -> None:
    is_well = [True, False, True]
    with serving(is_well=lambda: is_well.pop(0)) as address:
        answers = [ask(address, "/healthz") for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 503, 200]
    assert json.loads(answers[1][2])["jobs"]["drain"]["running"] == 1


def test_life_is_not_health(address: str) -> None:
    """A job that keeps failing is no reason to start the scheduler anew, and a main loop that stands still is one."""
    with serving(is_well=lambda: False) as unwell:
        assert (ask(unwell, "/livez")[0], ask(unwell, "/healthz")[0]) == (200, 503)
    with serving(is_alive=lambda: False) as still:
        assert (ask(still, "/livez")[0], ask(still, "/healthz")[0]) == (503, 200)
    assert ask(address, "/livez")[2] == b"It goes on.\n"


def test_metrics_are_prometheus_text(address: str) -> None:
    status, headers, body = ask(address, "/metrics")
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert body.decode() == METRICS


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/nowhere"])
def test_head_is_get_without_the_body(address: str, path: str) -> None:
    status, headers, body = ask(address, path)
    told = ask(address, path, "HEAD")
    assert (told[0], told[2]) == (status, b"")
    assert told[1] | {"date": ""} == headers | {"date": ""}
    assert int(headers["content-length"]) == len(body)


@pytest.mark.parametrize("path", ["/", "/healthz/", "/HEALTHZ", "/metrics/../healthz", "/%2e", "//healthz/x"])
def test_there_is_nothing_else(address: str, path: str) -> None:
    status, _, body = ask(address, path)
    assert status == 404
    assert body == b"There are /livez, /healthz and /metrics.\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW", "get"])
@pytest.mark.parametrize("path", ["/healthz", "/nowhere"])
def test_other_methods_are_refused(address: str, method: str, path: str) -> None:
    status, headers, _ = ask(address, path, method, b"x" * 10_000 if method == "POST" else None)
    assert status == 405
    assert headers["allow"] == "GET, HEAD"


def test_versions_are_nobodys_business(address: str) -> None:
    for path in ("/healthz", "/nowhere"):
        assert ask(address, path)[1]["server"] == "dlqbatch"


SENT = b"s3nt-by-a-client"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"%b\r\n\r\n", b"400"),
        (b"GET /%b HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /%b HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /%b HTTP/x\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1 %b\r\n\r\n", b"400"),
        (b"%b /healthz HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /healthz HTTP/1.1\r\n%b\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\nExpect: 100-continue\r\nX: %b\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\n" + b"X: %b\r\n" * 150 + b"\r\n", b"431"),
        (b"GET /%b\r\n\r\n", b"404"),
        (b"GET /healthz\n\n", b"200"),
        (b"GET /healthz?<script>%b HTTP/1.0\n\n", b"200"),
        (b"\x16\x03\x01\x02\x00\x01%b\r\n\r\n", b"400"),  # somebody speaks TLS
    ],
)
def test_nothing_of_a_request_is_repeated(
    address: str, request_: bytes, status: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    answer = say(address, request_.replace(b"%b", SENT))
    assert answer.split(b" ")[0].startswith(b"HTTP/1.")
    assert answer.split(b" ")[1] == status
    assert SENT not in answer
    assert is_up(address)
    assert capfd.readouterr() == ("", "")
    assert not caplog.messages


def test_a_header_of_a_megabyte_is_refused(address: str) -> None:
    answer = say(address, b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n")
    assert answer == b"" or b" 431 " in answer  # a reset may overtake it
    assert b" 431 " in say(address, b"GET /" + b"x" * 20_000)
    assert is_up(address)


@pytest.mark.parametrize("said", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"])
def test_half_a_request_is_cut_off(hasty: float, address: str, said: bytes) -> None:
    began = time.monotonic()
    assert say(address, said) == b""
    assert time.monotonic() - began > hasty * 0.9


def test_a_client_that_speaks_a_byte_at_a_time_is_cut_off(hasty: float, address: str) -> None:
    with connect(address) as client:
        client.settimeout(0.05)

        def is_over() -> bool:
            try:
                client.sendall(b"X")
                return client.recv(10) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        assert eventually(is_over)
    assert is_up(address)


def test_a_client_that_is_still_talking_gets_its_answer_whole(address: str) -> None:
    with connect(address) as client:
        client.sendall(b"POST /healthz HTTP/1.1\r\nContent-Length: 30000\r\n\r\n" + b"x" * 20_000)
        answer = client.recv(1)
        client.sendall(b"x" * 10_000)
        client.shutdown(socket.SHUT_WR)
        while part := client.recv(65_536):  # a connection that is reset has an error here
            answer += part
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert answer.endswith(b"\r\n\r\nMethod Not Allowed.\n")


def test_a_client_that_never_hangs_up_is_cut_off(hasty: float, address: str) -> None:
    with connect(address) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        answer = b""
        while part := client.recv(65_536):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200 ")

        def is_reset() -> bool:
            try:
                client.sendall(b"x")
            except ConnectionError:
                return True
            return False

        assert eventually(is_reset)


def test_a_client_that_reads_nothing_is_cut_off(hasty: float) -> None:
    page = "x" * 50_000_000
    with serving(metrics=lambda: page) as address, connect(address) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert eventually(lambda: connections() == 1)
        assert eventually(lambda: connections() == 0)
        assert is_up(address)


def test_fifty_connections_that_stay_open_cost_a_few_threads_and_keep_nobody_out_for_long(
    hasty: float, address: str
) -> None:
    with ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(connect(address)).sendall(b"GET /healthz HTTP/1.1\r\n")
            assert connections() <= health.MOST
        assert is_up(address)
    assert is_up(address)


def failing() -> Any:
    raise RuntimeError("postgresql://dlqbatch:s3cret@db/payments is away")


@pytest.mark.parametrize(
    ("page", "broken"),
    [("/metrics", {"metrics": failing}), ("/healthz", {"state": failing}), ("/healthz", {"is_well": failing})],
)
def test_a_page_that_fails_is_500_and_one_line_in_the_log(
    page: str, broken: dict[str, Any], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with serving(**broken) as address:
        answers = [ask(address, page) for _ in range(3)]
        other = "/healthz" if page == "/metrics" else "/metrics"
        assert ask(address, other)[0] == 200
    for status, _, body in answers:
        assert status == 500
        assert body == b"This could not be told; the scheduler's log says why.\n"
    assert caplog.messages == ["a page of the health endpoint failed"]
    assert capfd.readouterr() == ("", "")


def test_what_is_no_json_is_a_failure_of_ours_and_not_of_the_next(caplog: pytest.LogCaptureFixture) -> None:
    states: list[dict[Any, object]] = [{("a", "tuple"): 1}, {"a": 1}, {("a", "tuple"): 1}]
    with serving(state=lambda: states.pop(0)) as address:
        assert [ask(address, "/healthz")[0] for _ in range(3)] == [500, 200, 500]
    assert len(caplog.messages) == 2


def test_the_system_chooses_a_port_for_0(address: str) -> None:
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_ipv6_and_names() -> None:
    with serving("[::1]:0") as address:
        assert address.startswith("[::1]:")
        assert is_up(address)
    with serving("localhost:0") as address:
        assert is_up(address)


def test_an_address_that_is_taken_says_what_to_do(address: str) -> None:
    with pytest.raises(HealthAddressTaken, match=r"is taken.*dlqbatch\.health_address") as taken, serving(address):
        pass
    assert address in str(taken.value)
    assert taken.value.exit_code == 1
    assert is_up(address)


@pytest.mark.parametrize("wrong", ["192.0.2.1:8421", "nowhere.invalid:8421"])
def test_an_address_that_is_not_ours_says_what_to_do(wrong: str) -> None:
    with pytest.raises(HealthAddressRefused, match=r"nothing can listen at .*dlqbatch\.health_address") as refused:
        Health(wrong, lambda: STATE, well, lambda: METRICS).start()
    assert wrong in str(refused.value)
    assert refused.value.exit_code == 2


def test_the_address_is_free_again_as_soon_as_it_is_closed() -> None:
    with serving() as address:
        assert is_up(address)
    with pytest.raises(ConnectionRefusedError):
        connect(address)
    with serving(address) as again:
        assert again == address
        assert is_up(again)


def test_closing_twice_or_before_the_start_does_nothing() -> None:
    endpoint = Health("127.0.0.1:0", lambda: STATE, well, lambda: METRICS)
    endpoint.close()
    endpoint.start()
    endpoint.close()
    endpoint.close()


def test_it_keeps_no_process_alive() -> None:
    """A scheduler that ends with an error ends, although somebody is connected."""
    program = (
        "import socket\n"
        "from dlqbatch.schedule.health import Health\n"
        "bound = Health('127.0.0.1:0', dict, lambda: True, str).start().rpartition(':')\n"
        "client = socket.create_connection((bound[0], int(bound[2])))\n"
        "print('up', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=HANGS_AFTER, check=True)
    assert done.stdout == b"up\n"
