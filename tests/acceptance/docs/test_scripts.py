from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pika
import psutil
import psycopg
import pytest
from program import HANGS_AFTER

from scripts import services
from scripts.load import want_to_run
from scripts.servers import rabbitmq43
from scripts.servers.amqp import accepts
from scripts.servers.management import Management
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import RabbitNode, installed_sbin
from scripts.servers.server import ServiceError, descendants, free_port, free_ports, is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SERVICES = Path(__file__).parents[3] / "scripts" / "services.py"
LOAD = SERVICES.with_name("load.py")


def eventually(condition: Callable[[], bool], seconds: float = HANGS_AFTER) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def mentions(folder: Path) -> list[int]:
    """Processes that run in this folder or name it in their command or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and is_alive(int(entry.name)):
            try:
                about = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                about += bytes((entry / "cwd").readlink())
            except OSError:
                continue
            if str(folder).encode() in about:
                found.append(int(entry.name))
    return found


def test_a_node_keeps_its_durable_queue_over_a_kill_and_leaves_no_process_behind(work_folder: Path) -> None:
    node = RabbitNode(work_folder / "rabbitmq").start()
    try:
        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("kept", durable=True)
            node.write_down()
            channel.basic_publish("", "kept", b"still here", pika.BasicProperties(delivery_mode=2), mandatory=True)
        first = [node.pid, *descendants(node.pid)]

        node.kill()

        assert not any(is_alive(pid) for pid in first)
        assert not accepts(node.url)
        assert mentions(work_folder) == []

        node.restart()

        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            _, _, body = connection.channel().basic_get("kept", auto_ack=True)
        assert body == b"still here"
        assert Management(node.management_url).queue("kept")["durable"] is True
    finally:
        node.abandon()
    assert mentions(work_folder) == []


def test_a_cluster_keeps_what_was_committed_over_a_kill_and_leaves_no_process_behind(work_folder: Path) -> None:
    cluster = PostgresCluster(work_folder / "postgres").start()
    address = cluster.url.replace("+psycopg", "")
    try:
        with psycopg.connect(address) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 'still here' AS text")
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
        cluster.kill()
        assert mentions(work_folder) == []
        cluster.restart()
        with psycopg.connect(address) as connection:
            assert connection.execute("SELECT text FROM kept").fetchone() == ("still here",)
        cluster.stop()
        assert mentions(work_folder) == []
        cluster.restart()
    finally:
        cluster.abandon()
    assert mentions(work_folder) == []


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`services.py run` with a command that waits, and the folder of its servers."""
    told = tmp_path / "told"
    script = f"import os, sys; open({str(told)!r}, 'w').write(os.environ['X_DATABASE_URL']); sys.stdin.read()"
    command = [str(SERVICES), "run", "--postgres", "--prefix", "X_", "--", sys.executable, "-c", script]
    with subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert eventually(lambda: told.exists() and told.read_text() != "")
            with psycopg.connect(told.read_text().replace("+psycopg", "")) as connection:
                row = connection.execute("SHOW data_directory").fetchone()
            assert row is not None
            yield process, Path(row[0]).parents[1]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_signalled_leaves_neither_process_nor_folder(
    running: tuple[subprocess.Popen[bytes], Path], number: signal.Signals
) -> None:
    process, folder = running
    assert folder.exists()
    assert mentions(folder) != []
    process.send_signal(number)
    code = process.wait(HANGS_AFTER)
    # Told to end, it ends as its command did; killed, it leaves that to the guard.
    assert code == {signal.SIGTERM: 128 + 15, signal.SIGINT: 128 + 2, signal.SIGKILL: -9}[number]
    assert eventually(lambda: mentions(folder) == [] and not folder.exists())


def test_a_node_of_4_3_runs_beside_the_installed_one_as_any_other_does(work_folder: Path) -> None:
    node = services.node_of_43(work_folder / "rabbitmq43").start()
    try:
        assert version(Management(node.management_url)) >= (4, 3)
        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("kept", durable=True)
            channel.basic_publish("", "kept", b"still here", pika.BasicProperties(delivery_mode=2), mandatory=True)
        listing = [str(node.sbin / "rabbitmqctl"), "--quiet", "list_queues", "--no-table-headers", "name"]
        listed = subprocess.run(listing, env=node.environment, capture_output=True, text=True, check=False)
        assert (listed.returncode, listed.stdout.split()) == (0, ["kept"]), listed.stderr
        node.kill()
        assert mentions(work_folder) == []
        node.restart()
        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            assert connection.channel().basic_get("kept", auto_ack=True)[2] == b"still here"
    finally:
        node.abandon()
    assert mentions(work_folder) == []


def test_a_test_on_every_broker_has_the_one_it_is_named_after(on_every_broker: str, management: Management) -> None:
    assert (version(management) >= (4, 3)) == (on_every_broker == "4.3")


def version(management: Management) -> tuple[int, ...]:
    return tuple(int(number) for number in management.get("overview")["rabbitmq_version"].split(".")[:2])


def test_without_4_3_a_test_that_needs_it_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DLQBATCH_TEST_CACHE", str(tmp_path))
    with pytest.raises(ServiceError, match="scripts/rabbitmq43 --prepare"):
        rabbitmq43.unpacked()


def test_a_fetch_that_fails_says_why_and_leaves_nothing_that_looks_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DLQBATCH_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("DLQBATCH_TEST_DEBIAN_MIRROR", f"http://127.0.0.1:{free_port()}/debian")
    with pytest.raises(ServiceError, match=r"(?s)could not be fetched:.*127\.0\.0\.1"):
        rabbitmq43.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


LINES = """\
# deb http://commented.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://security.example/debian-security bookworm-security main
deb   [arch=amd64]  https://lines.example/debian/ bookworm main
"""
FIELDS = """\
Types: deb
# URIs: http://commented.example/debian
URIs: http://security.example/debian-security
 https://fields.example/debian
Suites: bookworm
"""


def test_the_mirror_is_that_of_the_machines_own_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(rabbitmq43.MIRROR_VARIABLE, raising=False)
    monkeypatch.setattr(rabbitmq43, "_fetched", list)  # what this machine fetches from is another matter
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    with pytest.raises(ServiceError, match=f"export {rabbitmq43.MIRROR_VARIABLE}="):
        rabbitmq43._mirror(tmp_path)
    (parts / "one.sources").write_text(FIELDS)
    (parts / "two.sources.disabled").write_text("URIs: http://disabled.example/debian\n")
    assert rabbitmq43._mirror(tmp_path) == "https://fields.example/debian"
    (tmp_path / "sources.list").write_text(LINES)
    assert rabbitmq43._mirror(tmp_path) == "https://lines.example/debian/"
    monkeypatch.setenv(rabbitmq43.MIRROR_VARIABLE, "http://chosen.example/debian")
    assert rabbitmq43._mirror(tmp_path) == "http://chosen.example/debian"


def test_a_run_without_a_command_prints_the_addresses_and_waits_for_ctrl_c() -> None:
    command = [sys.executable, str(SERVICES), "run", "--postgres", "--prefix", "X_"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            name, _, url = process.stdout.readline().strip().partition("=")
            assert name == "X_DATABASE_URL"
            with psycopg.connect(url.replace("+psycopg", "")) as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)
            process.send_signal(signal.SIGINT)
            assert process.wait(HANGS_AFTER) == 128 + signal.SIGINT
        finally:
            process.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url.replace("+psycopg", ""))


def test_no_port_is_given_twice_before_its_server_listens() -> None:
    ports = [port for _ in range(100) for port in free_ports(4)]
    assert len(set(ports)) == len(ports)


def test_a_run_ends_with_the_exit_code_of_its_command() -> None:
    command = [sys.executable, str(SERVICES), "run", "--", sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, check=False).returncode == 7


def test_a_node_that_cannot_start_says_so_with_the_end_of_its_log(work_folder: Path) -> None:
    node = RabbitNode(work_folder / "rabbitmq", config="no.such.setting = 1\n")
    with pytest.raises(ServiceError, match=r"(?s)RabbitMQ ended with code .*no\.such\.setting"):
        node.start()
    assert mentions(work_folder) == []


def test_a_taken_port_is_an_error_that_names_the_server(work_folder: Path) -> None:
    with PostgresCluster(work_folder / "one").start() as first:
        second = PostgresCluster(work_folder / "two", port=first.port)
        with pytest.raises(ServiceError, match=r"(?s)PostgreSQL ended with code .*Address already in use"):
            second.start()


def test_a_broker_accepts_only_a_login_and_a_virtual_host_that_it_knows(broker_url: str) -> None:
    server, _, vhost = broker_url.rpartition("/")
    assert accepts(broker_url)
    assert not accepts(f"{server}/no-such-vhost")
    assert not accepts(f"{server.replace('guest:guest', 'guest:wrong')}/{vhost}")
    assert not accepts(f"amqp://guest:guest@127.0.0.1:{free_port()}/{vhost}")


def test_the_scripts_of_the_package_itself_are_used_because_the_others_change_the_user() -> None:
    wrapper = "rabbitmq-script-wrapper"
    assert wrapper not in (installed_sbin() / "rabbitmq-server").resolve().name


def test_a_load_keeps_as_many_processes_busy_as_are_missing_and_ends_with_the_process_it_is_for() -> None:
    with subprocess.Popen(["sleep", "600"]) as watched:
        load = want_to_run() + 4
        command = [sys.executable, str(LOAD), str(load), "--while", str(watched.pid)]

        def counting() -> list[float]:
            """The CPU seconds of each; the first has started the others, and only looks."""
            alike = (one for one in psutil.process_iter(["cmdline", "cpu_times"]) if one.info["cmdline"] == command)
            return [one.info["cpu_times"].user for one in alike]

        try:
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as keeping:
                assert eventually(lambda: sum(used > 1 for used in counting()) > 0), counting()
                assert len(counting()) <= load + 1
                watched.terminate()
                watched.wait()
                _, said = keeping.communicate(timeout=HANGS_AFTER)
                assert eventually(lambda: not counting()), counting()
            assert keeping.returncode == 0
            assert said.startswith("the load of the machine: ")
        finally:
            watched.kill()


@pytest.mark.parametrize("arguments", [("--load",), ("--load", "many"), ("--load", "0"), ("--load", "-k", "unit")])
def test_a_load_that_is_no_number_is_refused_before_anything_starts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([SERVICES.parent / "test", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: scripts/test [--quick] [--load N]" in done.stderr
