"""Real servers for the tests: those that `scripts/test` started, else private ones of this session's own.

What is asked for decides what starts. A server that is not installed fails the tests that need it; none is skipped.

broker_url    an AMQP address of a new, empty virtual host (user guest), deleted afterwards
management    the HTTP API of that virtual host: read topology back, make users and policies
database_url  a new, empty PostgreSQL database, dropped afterwards
sqlite_url    an SQLite file that does not exist yet
work_folder   a short path that every user can walk to, for servers that a test starts itself
broker43_url, management43
              the same as broker_url and management on RabbitMQ 4.3
on_every_broker
              run the test twice, on the installed broker and on 4.3: broker_url and management are of the one, then
              of the other. `@pytest.mark.usefixtures("on_every_broker")` at a test, `pytestmark` of it in a file.
aws_variables an empty AWS account on a private server, as environment variables for a process; `aws` sets them here
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import hypothesis
import psycopg
import pytest
from example_counts import examples
from worker_shares import spread

from scripts import services
from scripts.servers.management import Management
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import RabbitNode
from scripts.servers.server import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator

# A machine that is busy makes examples slowly: that is no defect.
hypothesis.settings.register_profile(
    "dlqbatch",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
    max_examples=examples(100),
)
hypothesis.settings.load_profile("dlqbatch")

UNIT = Path(__file__).parent / "unit"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """`-m quick` chooses the unit tests that need neither time nor programs, and those that are marked themselves."""
    for item in items:
        if item.path.is_relative_to(UNIT) and not {"slow", "promtool"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker("quick")
    yield
    items[:] = spread(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.fixture(autouse=True)
def started_programs_end() -> Iterator[None]:
    yield
    program = sys.modules.get("program")
    if program is not None:
        program.end_all()


@pytest.fixture(autouse=True)
def logs_go_nowhere_after_a_test() -> Iterator[None]:
    """A test that runs a command in this process sets up the logs; the next test in it has none again."""
    yield
    ours = [each for each in logging.root.handlers if type(each).__module__ == "dlqbatch.logs"]
    for handler in ours:
        logging.root.removeHandler(handler)
    if ours:
        for logger in ("dlqbatch", "pika"):
            logging.getLogger(logger).setLevel(logging.NOTSET)


@pytest.fixture
def work_folder() -> Iterator[Path]:
    with services.work_folder(volatile=True) as folder:
        yield folder


@pytest.fixture(scope="session")
def broker_addresses() -> Iterator[tuple[str, str]]:
    """The AMQP address without a virtual host, and the address of the HTTP API."""
    url, api = os.environ.get("DLQBATCH_TEST_BROKER_URL"), os.environ.get("DLQBATCH_TEST_MANAGEMENT_URL")
    if url and api:
        yield url.rpartition("/")[0], api
        return
    with services.work_folder(volatile=True) as folder:
        try:
            node = RabbitNode(folder / "rabbitmq").start()
        except ServiceError as error:
            pytest.fail(str(error), pytrace=False)
        with node:
            yield node.url.rpartition("/")[0], node.management_url


@pytest.fixture(scope="session")
def broker43_addresses() -> Iterator[tuple[str, str]]:
    """The same of RabbitMQ 4.3."""
    url, api = os.environ.get("DLQBATCH_TEST_BROKER43_URL"), os.environ.get("DLQBATCH_TEST_MANAGEMENT43_URL")
    if url and api:
        yield url.rpartition("/")[0], api
        return
    with services.work_folder(volatile=True) as folder:
        try:
            node = services.node_of_43(folder / "rabbitmq43").start()
        except ServiceError as error:
            pytest.fail(str(error), pytrace=False)
        with node:
            yield node.url.rpartition("/")[0], node.management_url


@pytest.fixture
def broker_release(request: pytest.FixtureRequest) -> str:
    """Which RabbitMQ the test's broker is of: "installed", or "4.3" where `on_every_broker` says so."""
    return str(request.getfixturevalue("on_every_broker")) if "on_every_broker" in request.fixturenames else "installed"


@pytest.fixture(params=["installed", "4.3"])
def on_every_broker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def management(request: pytest.FixtureRequest, broker_release: str) -> Iterator[Management]:
    # Only the server that the test uses is started.
    _, api = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    with _vhost(api) as client:
        yield client


@pytest.fixture
def broker_url(request: pytest.FixtureRequest, broker_release: str, management: Management) -> str:
    server, _ = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    return f"{server}/{management.vhost}"


@pytest.fixture
def second_broker_url(broker_addresses: tuple[str, str]) -> Iterator[str]:
    """Another virtual host of the installed broker."""
    with _vhost(broker_addresses[1]) as client:
        yield f"{broker_addresses[0]}/{client.vhost}"


@pytest.fixture
def management43(broker43_addresses: tuple[str, str]) -> Iterator[Management]:
    with _vhost(broker43_addresses[1]) as client:
        yield client


@pytest.fixture
def broker43_url(broker43_addresses: tuple[str, str], management43: Management) -> str:
    return f"{broker43_addresses[0]}/{management43.vhost}"


@contextlib.contextmanager
def _vhost(api: str) -> Iterator[Management]:
    client = Management(api, vhost=f"test-{secrets.token_hex(6)}")
    client.make_vhost()
    try:
        yield client
    finally:
        client.drop_vhost()


@pytest.fixture(scope="session")
def database_server() -> Iterator[str]:
    """The address of the maintenance database, as psycopg spells it."""
    with _database_server() as url:
        yield url
        if ready_store := sys.modules.get("ready_store"):
            ready_store.drop_template(url)


@contextlib.contextmanager
def _database_server() -> Iterator[str]:
    url = os.environ.get("DLQBATCH_TEST_DATABASE_URL")
    if url:
        yield url.replace("+psycopg", "")
        return
    with services.work_folder(volatile=True) as folder:
        try:
            cluster = PostgresCluster(folder / "postgres").start()
        except ServiceError as error:
            pytest.fail(str(error), pytrace=False)
        with cluster:
            yield cluster.url.replace("+psycopg", "")


@pytest.fixture
def database_url(database_server: str) -> Iterator[str]:
    from ready_store import make_empty  # noqa: PLC0415  (it loads the store)

    name = f"test_{secrets.token_hex(6)}"
    make_empty(database_server, name)
    with psycopg.connect(database_server, autocommit=True) as connection:
        yield database_server.replace("postgresql://", "postgresql+psycopg://").rpartition("/")[0] + "/" + name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'dlqbatch.sqlite3'}"


@pytest.fixture(scope="session")
def aws_server() -> Iterator[str]:
    """The address of a server that answers as AWS does, over real HTTP."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  (it loads half of AWS)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws_variables(aws_server: str) -> dict[str, str]:
    """An empty account of its own on that server, as the variables that lead every AWS library there."""
    with urlopen(Request(f"{aws_server}/moto-api/reset", method="POST"), timeout=60):
        pass
    return {
        "AWS_ENDPOINT_URL": aws_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@pytest.fixture
def aws(aws_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The same variables, set for this process."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    return aws_variables
